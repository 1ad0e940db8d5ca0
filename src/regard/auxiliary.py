"""Auxiliary outputs of modules: losses to add to the training loss, and statistics to log.

    with regard.collect_aux() as aux:
        y = mixer(x)
    loss = task_loss(y) + aux.loss()

Any module may call `record_aux`, however deeply nested. The innermost open `collect_aux` of the
thread receives the value. Without one, nothing is computed. A layer under activation checkpointing
runs again during the backward pass, when nothing is collected, so it has to collect inside and
return the values as outputs.
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
    """A recorded value.

    Attributes:
        name: Such as "span".
        value: The value; a scalar if it is a loss.
        is_loss: Whether to add it to the training loss.
    """

    name: str
    value: Tensor
    is_loss: bool


@dataclass(eq=False)
class AuxOutputs:
    """Recorded values, in order."""

    entries: list[AuxEntry] = field(default_factory=list)

    def loss(self) -> Tensor:
        """Sum of all losses, a scalar with gradients. Zero if there are none."""
        return sum((entry.value for entry in self.entries if entry.is_loss), torch.zeros(()))

    def all(self, name: str) -> list[Tensor]:
        """Values recorded under a name, in order."""
        return [entry.value for entry in self.entries if entry.name == name]

    def names(self) -> list[str]:
        """Recorded names, without repetition."""
        return list(dict.fromkeys(entry.name for entry in self.entries))


class _Collectors(threading.local):
    """Open `collect_aux` contexts of the current thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[AuxOutputs] = []


_collectors = _Collectors()


@contextmanager
def collect_aux() -> Iterator[AuxOutputs]:
    """Collect the auxiliary outputs of the modules that run inside the context."""
    aux = AuxOutputs()
    _collectors.stack.append(aux)
    try:
        yield aux
    finally:
        _collectors.stack.remove(aux)


def is_collecting() -> bool:
    """Whether a `collect_aux` context is open in this thread."""
    return bool(_collectors.stack)


def record_aux(name: str, value: Callable[[], Tensor], *, is_loss: bool = False) -> None:
    """Record an auxiliary output.

    Args:
        name: Name to record it under.
        value: Computes the value. Called only if a `collect_aux` context is open.
        is_loss: Whether it is a loss: a weighted scalar with gradients. Other values are detached.
    """
    if _collectors.stack:
        result = value()
        entry = AuxEntry(name, result if is_loss else result.detach(), is_loss)
        _collectors.stack[-1].entries.append(entry)
