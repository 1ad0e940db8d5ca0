"""Running a layer a second time, so that it does what it did the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states


class RngState(NamedTuple):
    """The states of the random number generators of the CPU and of the other devices in use."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def of(cls, x: Tensor) -> RngState:
        """As they are now, for work on x."""
        return cls(torch.get_rng_state(), *get_device_states(x))

    def same(self, other: RngState) -> bool:
        """Nothing was drawn between the two."""
        mine, theirs = [self.cpu, *self.states], [other.cpu, *other.states]
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class ReplayState(NamedTuple):
    """What a call used up: the dice that it threw (None: none), and the buffers that it changed, as they were."""

    dice: RngState | None
    buffers: dict[str, Tensor]


class ReplayRecorder:
    """Stands beside a call and remembers what it used up: nothing, for a call without randomness or counters."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x, self.dice = module, x, RngState.of(x)
        self.buffers = (
            {name: buffer.clone() for name, buffer in module.named_buffers()}
            if module.training
            else {}
        )

    def result(self) -> ReplayState:
        """To be asked after the call."""
        now = dict(self.module.named_buffers())
        changed = {
            name: old for name, old in self.buffers.items() if not torch.equal(old, now[name])
        }
        return ReplayState(None if self.dice.same(RngState.of(self.x)) else self.dice, changed)


@contextmanager
def replay(module: nn.Module, before: ReplayState) -> Iterator[None]:
    """Inside, random numbers and buffers are as they were before the call; afterwards as if it had not been made again."""
    own = _put(module, {name: old.clone() for name, old in before.buffers.items()})
    dice = before.dice
    try:
        with torch.random.fork_rng(
            devices=[] if dice is None else dice.devices, enabled=dice is not None
        ):
            if dice is not None:
                torch.set_rng_state(dice.cpu)
                set_device_states(dice.devices, dice.states)
            yield
    finally:
        _put(module, own)


def _put(module: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the module other buffers, and return those that it had: a graph may still need them, so none is overwritten."""
    had = {}
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        had[name] = module.get_buffer(name)
        setattr(module.get_submodule(path), last, buffer)
    return had
