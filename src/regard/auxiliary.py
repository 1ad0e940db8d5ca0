"""What a mixer has to say beside its output: costs that belong into the loss, and facts to watch.

    with regard.collect_aux() as notes:
        y = mixer(x)
    loss = task_loss(y) + notes.cost()

Any part may `tell`, however deep it stands; whoever in the thread opened `collect_aux` last hears it.  Where nobody listens,
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


class AuxEntry(NamedTuple):
    """One thing that was told: a name such as "span", a value, and whether it is to be added to the loss."""

    name: str
    value: Tensor
    is_loss: bool


@dataclass(eq=False)
class AuxOutputs:
    """All that was told, in order."""

    entries: list[AuxEntry] = field(default_factory=list)

    def loss(self) -> Tensor:
        """The sum of all costs, a scalar with gradients; zero where there is none."""
        return sum((note.value for note in self.entries if note.is_loss), torch.zeros(()))

    def all(self, name: str) -> list[Tensor]:
        """The values of one name, in the order in which they were told: layer by layer."""
        return [note.value for note in self.entries if note.name == name]

    def names(self) -> list[str]:
        """What was told about, each once."""
        return list(dict.fromkeys(note.name for note in self.entries))


class _Local(threading.local):
    """Each thread has its own listeners."""

    def __init__(self) -> None:
        self.listeners: list[AuxOutputs] = []


_here = _Local()


@contextmanager
def collect_aux() -> Iterator[AuxOutputs]:
    """Listen to what mixers tell while they run."""
    notes = AuxOutputs()
    _here.listeners.append(notes)
    try:
        yield notes
    finally:
        _here.listeners.remove(notes)


def is_collecting() -> bool:
    """Whether anybody in this thread listens: for layers that must know before they run, such as those that run again."""
    return bool(_here.listeners)


def record_aux(name: str, value: Callable[[], Tensor], *, is_loss: bool = False) -> None:
    """Say something to whoever listens; `parse_literal` is called only if somebody does.

    A cost is a scalar with gradients, weighted already; a fact is detached.
    """
    if _here.listeners:
        found = value()
        _here.listeners[-1].entries.append(
            AuxEntry(name, found if is_loss else found.detach(), is_loss)
        )
