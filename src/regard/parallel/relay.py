"""Causal mixers that stream: each process continues from the state of the previous one.

Within a layer, the processes work one after the other. In a stack, each process is one layer behind
the previous one, as in a pipeline: L layers on W processes take the time of L + W - 1 slices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.feature import FeatureMap
from regard.mixer import Mixer, State
from regard.parallel.communication import ShardedCall, add_traffic, depend_on
from regard.state import leaves, map_tensors


def relay_state(mixer: Mixer, x: Tensor, mask: Tensor | None, call: ShardedCall) -> Tensor:
    """Local tokens x (b, n, d) -> (b, n, d). Masks are not supported."""
    if mixer.training:
        for module in mixer.modules():
            if isinstance(module, FeatureMap):
                module.advance()  # once for the whole sequence; `stream` does not
    state = mixer.initial_state() if call.rank == 0 else _receive_state(call, x.device)
    received = [t for t in _tensors(state) if t.requires_grad]
    y, state = mixer.stream(x, state) if x.shape[1] else (x, state)
    if call.rank + 1 < call.world_size:
        y = _send_state(y, state, call)
    return depend_on(y, *received)


def _tensors(state: State) -> list[Tensor]:
    return [leaf for leaf in leaves(state) if isinstance(leaf, Tensor)]


def _receive_state(call: ShardedCall, device: torch.device) -> State:
    """The state of the previous process; its gradients are sent back there."""
    link = _Link(call, call.rank - 1)
    outline: list[Any] = [None]
    dist.recv_object_list(outline, link.rank, link.group, device)
    received = [link.receive(t, device) for t in _tensors(outline[0])]
    with_grad = [t for t in received if t.requires_grad]
    attached = iter(_SendGradients.apply(link, *with_grad) or ())  # type: ignore[no-untyped-call]
    tensors = iter([next(attached) if t.requires_grad else t for t in received])
    return map_tensors(lambda t: next(tensors), outline[0])


def _send_state(y: Tensor, state: State, call: ShardedCall) -> Tensor:
    """Send the state to the next process; returns y, whose backward pass receives its gradients."""
    link = _Link(call, call.rank + 1)
    outline = map_tensors(
        lambda t: torch.empty_like(t, device="meta", requires_grad=t.requires_grad), state
    )
    dist.send_object_list([outline], link.rank, link.group, y.device)
    tensors = _tensors(state)
    for t in tensors:
        link.send(t)
    with_grad = [t for t in tensors if t.requires_grad]
    return _ReceiveGradients.apply(link, y, *with_grad) if with_grad else y  # type: ignore[no-untyped-call]


class _Link:
    """The connection to one other process."""

    def __init__(self, call: ShardedCall, rank: int) -> None:
        self.group = call.group
        self.rank = rank if call.group is None else dist.get_global_rank(call.group, rank)

    def send(self, t: Tensor) -> None:
        """Send a tensor."""
        dist.send(t.detach().contiguous(), self.rank, self.group)
        add_traffic(t.nbytes, 0)

    def receive(self, like: Tensor, device: torch.device) -> Tensor:
        """Receive a tensor with the shape and dtype of another."""
        t = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.recv(t, self.rank, self.group)
        add_traffic(0, t.nbytes)
        return t.requires_grad_(like.requires_grad)


class _SendGradients(torch.autograd.Function):
    """Identity on received tensors; the backward pass sends their gradients to the sender."""

    @staticmethod
    def forward(ctx: Any, link: _Link, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        for grad in grads:
            ctx.link.send(grad)
        return None, *(None for _ in grads)


class _ReceiveGradients(torch.autograd.Function):
    """Identity on y; the backward pass receives the gradients of the tensors that were sent."""

    @staticmethod
    def forward(ctx: Any, link: _Link, y: Tensor, *sent: Tensor) -> Tensor:
        ctx.link = link
        ctx.like = [torch.empty_like(t, device="meta", requires_grad=False) for t in sent]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, *(ctx.link.receive(like, grad.device) for like in ctx.like)
