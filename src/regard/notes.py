"""What a mixer has to say beside its output: costs that belong into the loss, and facts to watch.

    with regard.noted() as notes:
        y = mixer(x)
    loss = task_loss(y) + notes.cost()

Any part may `tell`, however deep it stands; whoever opened `noted` last hears it.  Where nobody listens, nothing is
computed.
"""

from __future__ import annotations

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


_listeners: list[Notes] = []


@contextmanager
def noted() -> Iterator[Notes]:
    """Listen to what mixers tell while they run."""
    notes = Notes()
    _listeners.append(notes)
    try:
        yield notes
    finally:
        _listeners.remove(notes)


def tell(name: str, value: Callable[[], Tensor], *, is_cost: bool = False) -> None:
    """Say something to whoever listens; `value` is called only if somebody does.

    A cost is a scalar with gradients, weighted already; a fact is detached.
    """
    if _listeners:
        found = value()
        _listeners[-1].entries.append(Note(name, found if is_cost else found.detach(), is_cost))
