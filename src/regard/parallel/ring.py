"""Ring attention: softmax attention with the keys of one other process at a time.

In step i, every process sends the keys that rank + i sees, and receives those that it sees itself
from rank - i. While it attends to one piece, the next is in transit. Results are merged by their
log-sum-exp, as in `regard.backends.tiled_flash`. The keys are not kept for the backward pass but
sent again, and the gradient of each piece is returned while the next is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.attentions.kv_cache import KVCacheAttention
from regard.backends.tiled_flash import (
    PartialAttention,
    accumulator_dtype,
    backward_part,
    forward_part,
    reorder_queries,
)
from regard.errors import Unsupported
from regard.layout import Layout, build_layout
from regard.parallel.communication import Message, ShardedCall, post_message
from regard.parallel.exchange_plan import ExchangePlan


def supports_ring(attention: KVCacheAttention, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether partial results can be merged: plain softmax with a known log-sum-exp."""
    is_plain = type(attention) is SoftmaxAttention and attention.prior is None
    same_width = k.shape[3] == v.shape[3] == q.shape[3]
    return is_plain and attention.backend in ("auto", "sparse") and q.is_cpu and same_width


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ExchangePlan,
    call: ShardedCall,
    *,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """Local q (b, h, n, e), k and v (b, h', n, e) -> (b, h, n, e).

    Args:
        mask: (b, m), of all keys in `plan.positions`.
    """
    masks = None if mask is None else mask.split([len(keys.positions) for keys in plan.held], 1)
    return _RingAttention.apply(q, k, v, _Ring(plan, call, scale, masks))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------------- transfers
class _RingStep(NamedTuple):
    """Keys and values (b, h', m, e) of rank `source`; rank `target` received ours in this step."""

    source: int
    target: int
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Ring:
    """The transfers of a forward or backward pass."""

    plan: ExchangePlan
    call: ShardedCall
    scale: float
    masks: Sequence[Tensor] | None  # (b, m) for the keys of each rank

    def steps(self, k: Tensor, v: Tensor) -> Iterator[_RingStep]:
        """The own keys, then those of the other processes; at most two pieces exist at a time."""
        rank, world_size = self.call.rank, self.call.world_size
        own = torch.cat((k, v), -1).flatten(1, 2) if world_size > 1 else k
        pending = self._request(1, own) if world_size > 1 else None
        yield _RingStep(rank, rank, k, v)
        for i in range(1, world_size):
            assert pending is not None
            source, rows = (rank - i) % world_size, pending.wait()
            pending = self._request(i + 1, own) if i + 1 < world_size else None
            held = self.plan.held[source].scatter(rows)
            del rows
            keys, values = held.split((k.shape[3], v.shape[3]), -1)
            yield _RingStep(source, (rank + i) % world_size, keys, values)
            del held, keys, values

    def _request(self, i: int, own: Tensor) -> Message:
        """Send own keys and values (b, h'n, 2e) to rank + i, and receive from rank - i."""
        rank, world_size = self.call.rank, self.call.world_size
        target, source = (rank + i) % world_size, (rank - i) % world_size
        rows = own
        if self.plan.send_counts[target] != own.shape[1]:
            rows = own.index_select(1, self.plan.send[target])
        empty = own.new_empty(own.shape[0], self.plan.receive_counts[source], own.shape[2])
        return post_message(rows, target, empty, source, self.call, 2 * i)

    def return_gradients(self, i: int, step: _RingStep, dk: Tensor, dv: Tensor) -> Message:
        """Send gradients to the source of a step, and receive those of the keys that we sent."""
        rows = self.plan.held[step.source].gather(torch.cat((dk, dv), -1))
        empty = rows.new_empty(rows.shape[0], self.plan.send_counts[step.target], rows.shape[2])
        return post_message(rows, step.source, empty, step.target, self.call, 2 * i + 1)

    def add_gradients(self, target: int, message: Message, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that rank `target` returned."""
        parts = message.wait().split((dk.shape[3], dv.shape[3]), -1)
        for total, part in zip((dk, dv), parts, strict=True):
            rows = total.view(total.shape[0], -1, total.shape[3])
            rows.index_add_(1, self.plan.send[target], part)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        slices = _head_slices(q, ring)
        for step in ring.steps(k, v):
            for part in slices:
                part.attend(step, ring)
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for part in slices:
            part.write(out, part.total.out)
            part.write(lse, part.total.lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unsupported("Sequence-parallel attention has no second derivative.")
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # queries that see nothing: weight 0
        slices = _head_slices(q, ring)
        dk, dv = (x.new_zeros(x.shape) for x in (k, v))  # contiguous
        pending: tuple[int, Message] | None = None
        for i, step in enumerate(ring.steps(k, v)):
            grads = [dk, dv] if i == 0 else [x.new_zeros(x.shape) for x in (step.k, step.v)]
            for part in slices:
                part.backward(step, ring, (grad, out, lse), *grads)
            if i:
                if pending is not None:
                    ring.add_gradients(*pending, dk, dv)
                pending = step.target, ring.return_gradients(i, step, *grads)
            del grads, step
        if pending is not None:
            ring.add_gradients(*pending, dk, dv)
        dq = q.new_empty(q.shape)
        for part in slices:
            part.write(dq, part.dq)
        return dq, dk, dv, None


# -------------------------------------------------------------------------------------- computation
class _HeadSlice:
    """Examples and heads that share a pattern and a mask: q (x, n, e), its output and gradient."""

    def __init__(self, q: Tensor, examples: slice, heads: list[int]) -> None:
        self.examples, self.heads = examples, heads
        self.num_heads, self.q = q.shape[1], self.take(q)

    @cached_property
    def total(self) -> PartialAttention:
        """The merged result of all keys so far."""
        return PartialAttention(self.q)

    @cached_property
    def dq(self) -> Tensor:
        """The gradient of q so far, in the dtype of accumulation."""
        return torch.zeros(self.q.shape, dtype=accumulator_dtype(self.q.dtype))

    def take(self, x: Tensor) -> Tensor:
        """x (b, h, ...) -> (x, ...)."""
        x = x[self.examples]
        return (x if len(self.heads) == x.shape[1] else x[:, self.heads]).flatten(0, 1)

    def write(self, x: Tensor, part: Tensor) -> None:
        """The inverse of `take`: write a part into x (b, h, ...)."""
        x[self.examples, self.heads] = part.unflatten(0, (-1, len(self.heads))).to(x.dtype)

    def attend(self, step: _RingStep, ring: _Ring) -> None:
        """Attend to the keys of a step, and merge the result."""
        if not self.q.shape[1] or not step.k.shape[2]:
            return
        k, v = self._keys_and_values(step)
        for part in self._layout(step, ring, backward=False).parts:
            result = PartialAttention(reorder_queries(part, self.q))
            forward_part(result, part, self.q, k, v, ring.scale, self._bias(step, ring), ())
            self.total.add(result, part)

    def backward(
        self,
        step: _RingStep,
        ring: _Ring,
        saved: tuple[Tensor, Tensor, Tensor],
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Add the gradients of a step to dk and dv (b, h', m, e), and to dq.

        Args:
            saved: grad, out and lse of the whole call.
        """
        if not self.q.shape[1] or not step.k.shape[2]:
            return
        k, v = self._keys_and_values(step)
        grad, out, lse = map(self.take, saved)
        covers_all = len(self.heads) == dk.shape[1] and len(grad) == dk.shape[0] * dk.shape[1]
        in_place = covers_all and dk.dtype == self.dq.dtype
        if in_place:
            grads = [self.dq, dk.flatten(0, 1), dv.flatten(0, 1)]
        else:
            zeros = [torch.zeros(k.shape, dtype=self.dq.dtype) for _ in range(2)]
            grads = [self.dq, *zeros]
        tensors, bias = (grad, self.q, k, v, out, lse), self._bias(step, ring)
        for part in self._layout(step, ring, backward=True).parts:
            backward_part(grads, part, tensors, ring.scale, bias, (), ())
        if in_place:
            return
        key_heads = torch.tensor(self.heads) // (self.num_heads // dk.shape[1])
        for total, found in zip((dk, dv), grads[1:], strict=True):
            found = found.unflatten(0, (-1, len(self.heads))).to(total.dtype)
            total[self.examples].index_add_(1, key_heads, found)

    def _keys_and_values(self, step: _RingStep) -> list[Tensor]:
        """Keys and values of a step for these heads, (x, m, e); query heads share key heads."""
        groups = self.num_heads // step.k.shape[1]
        pair = (step.k, step.v)
        return [self.take(x if groups == 1 else x.repeat_interleave(groups, 1)) for x in pair]

    def _layout(self, step: _RingStep, ring: _Ring, *, backward: bool) -> Layout:
        positions = ring.plan.positions_by_rank[step.source]
        pattern = positions.pattern
        assert isinstance(positions.q_start, int)
        assert isinstance(positions.k_positions, int)
        return build_layout(
            pattern.parts[self.heads[0]] if pattern.heads else pattern,
            self.q.shape[1],
            step.k.shape[2],
            q_start=positions.q_start,
            k_start=positions.k_positions,
            backward=backward,
        )

    def _bias(self, step: _RingStep, ring: _Ring) -> Tensor | None:
        """0 or -inf for each key (m), for the padding of a single example."""
        if ring.masks is None:
            return None
        mask = ring.masks[step.source][self.examples][0]
        return torch.zeros(mask.shape, dtype=self.q.dtype).masked_fill_(~mask, -torch.inf)


def _head_slices(q: Tensor, ring: _Ring) -> list[_HeadSlice]:
    """Group heads by pattern; with masks, each example is separate."""
    b, h = q.shape[:2]
    pattern, by_pattern = ring.plan.pattern, defaultdict(list)
    for head in range(h):
        by_pattern[pattern.parts[head] if pattern.heads else pattern].append(head)
    examples = [slice(0, b)] if ring.masks is None else [slice(i, i + 1) for i in range(b)]
    return [_HeadSlice(q, some, heads) for some in examples for heads in by_pattern.values()]
