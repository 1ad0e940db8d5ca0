"""A causal mixer that streams: each process goes on from the state that the one before it came to, and hands on its own.

Within one layer the processes work one after the other.  In a stack each is one layer behind the process before it, as in a
wave: L layers on W processes take the time of L + W − 1 slices, and not of L · W.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.feature import FeatureMap
from regard.mixer import Mixer, State
from regard.parallel.communication import OptionalProcessGroup, ShardedCall, count, reaching
from regard.state import leaves, map_tensors


def by_relay(mixer: Mixer, x: Tensor, mask: Tensor | None, meeting: ShardedCall) -> Tensor:
    """x (b n d), of the tokens here -> (b n d).  Masks are refused before."""
    if mixer.training:  # once for the whole sequence: a stream does not
        for part in mixer.modules():
            if isinstance(part, FeatureMap):
                part.advance()
    state = mixer.initial_state() if meeting.rank == 0 else _taken(meeting, x.device)
    linked = [t for t in leaves(state) if isinstance(t, Tensor) and t.requires_grad]
    y, state = mixer.stream(x, state) if x.shape[1] else (x, state)
    if meeting.rank + 1 < meeting.world:
        y = _given(y, state, meeting)
    return reaching(y, *linked)


def _taken(meeting: ShardedCall, device: torch.device) -> State:
    """The state of the process before this one; its gradients will go back there."""
    link = _Link(meeting, meeting.rank - 1)
    told: list[Any] = [None]
    dist.recv_object_list(told, link.other, link.group, device)
    got = [link.receive(t, device) for t in leaves(told[0]) if isinstance(t, Tensor)]
    graph = iter(_Taken.apply(link, *(t for t in got if t.requires_grad)) or ())  # type: ignore[no-untyped-call]
    tensors = iter([next(graph) if t.requires_grad else t for t in got])
    return map_tensors(lambda t: next(tensors), told[0])


def _given(y: Tensor, state: State, meeting: ShardedCall) -> Tensor:
    """Hand the state on; y (b n d) comes back with a graph that waits for the state's gradients."""
    link = _Link(meeting, meeting.rank + 1)
    outline = map_tensors(
        lambda t: torch.empty_like(t, device="meta", requires_grad=t.requires_grad), state
    )
    dist.send_object_list([outline], link.other, link.group, y.device)
    tensors = [t for t in leaves(state) if isinstance(t, Tensor)]
    for t in tensors:
        link.send(t)
    learning = [t for t in tensors if t.requires_grad]
    return _Given.apply(link, y, *learning) if learning else y  # type: ignore[no-untyped-call]


class _Link:
    """The way to one other process."""

    def __init__(self, meeting: ShardedCall, rank: int) -> None:
        self.group: OptionalProcessGroup = meeting.group
        self.other = rank if meeting.group is None else dist.get_global_rank(meeting.group, rank)

    def send(self, t: Tensor) -> None:
        """To the other process."""
        dist.send(t.detach().contiguous(), self.other, self.group)
        count(t.nbytes, 0)

    def receive(self, like: Tensor, device: torch.device) -> Tensor:
        """From the other process: a tensor like that one."""
        t = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.recv(t, self.other, self.group)
        count(0, t.nbytes)
        return t.requires_grad_(like.requires_grad)


class _Taken(torch.autograd.Function):
    """What was received, as it is; going back, its gradients are sent to where it came from."""

    @staticmethod
    def forward(ctx: Any, link: _Link, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        for grad in grads:
            ctx.link.send(grad)
        return None, *(None for _ in grads)


class _Given(torch.autograd.Function):
    """y, as it is; going back, the gradients of what was sent come from where it went to."""

    @staticmethod
    def forward(ctx: Any, link: _Link, y: Tensor, *sent: Tensor) -> Tensor:
        ctx.link, ctx.like = (
            link,
            [torch.empty_like(t, device="meta", requires_grad=False) for t in sent],
        )
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, *(ctx.link.receive(like, grad.device) for like in ctx.like)
