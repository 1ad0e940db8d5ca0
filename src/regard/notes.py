"""What a mixer has to say beside its output: costs that belong into the loss, and facts to watch.

    with regard.noted() as notes:
        y = mixer(x)
    loss = task_loss(y) + notes.cost()

Any part may `tell`, however deep it stands; whoever in the thread opened `noted` last hears it.  Where nobody listens,
nothing is computed: so a layer under activation checkpointing, which runs again when nobody listens, must be listened to
within, and its notes returned as outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Note(NamedTuple):
    """One thing that was told: a name such as "span", a value, and whether it is to be added to the loss."""

    name: str
    value: Tensor
    is_cost: bool


@dataclass(eq=False)
class Notes:
    """All that was told, in order."""

    entries: list[Note] = field(default_factory=list)

    def cost(self) -> Tensor:
        """The sum of all costs, a scalar with gradients; zero where there is none."""
        return sum((note.value for note in self.entries if note.is_cost), torch.zeros(()))

    def all(self, name: str) -> list[Tensor]:
        """The values of one name, in the order in which they were told: layer by layer."""
        return [note.value for note in self.entries if note.name == name]

    def names(self) -> list[str]:
        """What was told about, each once."""
        return list(dict.fromkeys(note.name for note in self.entries))


class _Local(threading.local):
    """Each thread has its own listeners."""

    def __init__(self) -> None:
        self.listeners: list[Notes] = []


_here = _Local()


@contextmanager
def noted() -> Iterator[Notes]:
    """Listen to what mixers tell while they run."""
    notes = Notes()
    _here.listeners.append(notes)
    try:
        yield notes
    finally:
        _here.listeners.remove(notes)


def heard() -> bool:
    """Whether anybody in this thread listens: for layers that must know before they run, such as those that run again."""
    return bool(_here.listeners)


def tell(name: str, value: Callable[[], Tensor], *, is_cost: bool = False) -> None:
    """Say something to whoever listens; `value` is called only if somebody does.

    A cost is a scalar with gradients, weighted already; a fact is detached.
    """
    if _here.listeners:
        found = value()
        _here.listeners[-1].entries.append(Note(name, found if is_cost else found.detach(), is_cost))
