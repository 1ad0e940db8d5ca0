"""Running a module a second time with the random numbers and buffers of the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states


class RngState(NamedTuple):
    """States of the random number generators of the CPU and of other devices in use."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def current(cls, x: Tensor) -> RngState:
        """Current states, for computations on x."""
        return cls(torch.get_rng_state(), *get_device_states(x))

    def equals(self, other: RngState) -> bool:
        """Whether nothing was drawn between the two."""
        mine, theirs = [self.cpu, *self.states], [other.cpu, *other.states]
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class ReplayState(NamedTuple):
    """What a call changed: the state of the generators before it (None: it drew nothing), and the
    buffers that it changed, as they were."""

    rng: RngState | None
    buffers: dict[str, Tensor]


class ReplayRecorder:
    """Records generators and buffers before a call; `changes` returns what the call changed."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x, self.rng = module, x, RngState.current(x)
        self.buffers: dict[str, Tensor] = {}
        if module.training:
            self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def changes(self) -> ReplayState:
        """State to `replay` the call with."""
        now = dict(self.module.named_buffers())
        changed = {
            name: old for name, old in self.buffers.items() if not torch.equal(old, now[name])
        }
        unchanged_rng = self.rng.equals(RngState.current(self.x))
        return ReplayState(None if unchanged_rng else self.rng, changed)


@contextmanager
def replay(module: nn.Module, before: ReplayState) -> Iterator[None]:
    """Restore generators and buffers to their state before a call, and undo that at exit."""
    buffers = _swap_buffers(module, {name: old.clone() for name, old in before.buffers.items()})
    rng = before.rng
    try:
        devices = [] if rng is None else rng.devices
        with torch.random.fork_rng(devices=devices, enabled=rng is not None):
            if rng is not None:
                torch.set_rng_state(rng.cpu)
                set_device_states(rng.devices, rng.states)
            yield
    finally:
        _swap_buffers(module, buffers)


def _swap_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set buffers of a module and return the old ones, not overwritten: a graph may need them."""
    old = {}
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        old[name] = module.get_buffer(name)
        setattr(module.get_submodule(path), last, buffer)
    return old
