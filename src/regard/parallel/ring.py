"""Softmax attention with the keys of one other process at a time, in a ring: no process ever holds the keys of all.

In step i every process sends to the one i after it what that one sees of its keys, and gets what it sees itself from the one
i before it.  While a piece is attended to, the next is under way.  Results merge by their log-sum-exp, as those of the calls of
a layout do (`regard.backends.tiled_flash`).  In the backward pass the keys go round again, for they were not kept, and the gradient of
each piece goes home while the next is worked on.
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
from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.backends.tiled_flash import (
    PartialAttention,
    accumulator_dtype,
    backward_part,
    forward_part,
    reorder_queries,
)
from regard.errors import Unsupported
from regard.layout import Layout, build_layout
from regard.parallel.communication import Message, ShardedCall, post
from regard.parallel.exchange_plan import ExchangePlan
from regard.pattern import Pattern


def goes_round(inner: KVCacheAttention, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether partial results can be merged: plain softmax, on the executor that tells the log-sum-exp."""
    plain = (
        type(inner) is SoftmaxAttention
        and inner.prior is None
        and inner.backend in ("auto", "sparse")
    )
    return plain and q.device.type == "cpu" and k.shape[3] == v.shape[3] == q.shape[3]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: ExchangePlan,
    meeting: ShardedCall,
    *,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """q (b h n e), k and v (b h' n e), all of the tokens here -> (b h n e); mask (b m) is that of the keys in `module_cost.at`."""
    masks = None if mask is None else mask.split([len(piece.at) for piece in work.pieces], 1)
    out: Tensor = _Ring.apply(q, k, v, _Trip(work, meeting, scale, masks))  # type: ignore[no-untyped-call]
    return out


# ---------------------------------------------------------------------------------------------- the way round
class _Step(NamedTuple):
    """Keys and values (b h' m e) of process `whence`, and what is to come home from process `to`."""

    whence: int
    to: int
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Trip:
    """What a pass needs to know."""

    work: ExchangePlan
    meeting: ShardedCall
    scale: float
    masks: Sequence[Tensor] | None  # (b m) for each piece

    def steps(self, k: Tensor, v: Tensor) -> Iterator[_Step]:
        """The own keys, then those of the others, one after the other; each is dropped before the next but one is asked for."""
        rank, world = self.meeting.rank, self.meeting.world
        own = torch.cat((k, v), -1).flatten(1, 2) if world > 1 else k
        coming = self._ask(1, own) if world > 1 else None
        yield _Step(rank, rank, k, v)
        for i in range(1, world):
            assert coming is not None
            whence, rows = (rank - i) % world, coming.wait()
            coming = self._ask(i + 1, own) if i + 1 < world else None
            held = self.work.pieces[whence].placed(rows)
            del rows
            yield _Step(whence, (rank + i) % world, *held.split((k.shape[3], v.shape[3]), -1))
            del held

    def _ask(self, i: int, own: Tensor) -> Message:
        """own (b h'n 2e), keys beside values, of which some or all go to the process i after this one."""
        to, whence = (
            (self.meeting.rank + i) % self.meeting.world,
            (self.meeting.rank - i) % self.meeting.world,
        )
        rows = (
            own if self.work.sent[to] == own.shape[1] else own.index_select(1, self.work.give[to])
        )
        empty = own.new_empty(own.shape[0], self.work.got[whence], own.shape[2])
        return post(rows, to, empty, whence, self.meeting, 2 * i)

    def home(self, i: int, step: _Step, dk: Tensor, dv: Tensor) -> Message:
        """Send the gradients of a piece to where it came from, and ask for those of what was sent in the same step."""
        rows = self.work.pieces[step.whence].taken(torch.cat((dk, dv), -1))
        empty = rows.new_empty(rows.shape[0], self.work.sent[step.to], rows.shape[2])
        return post(rows, step.whence, empty, step.to, self.meeting, 2 * i + 1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trip: _Trip) -> Tensor:
        shares = _shares(q, trip)
        for step in trip.steps(k, v):
            for share in shares:
                share.look(step, trip)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        for share in shares:
            share.write(out, share.total.out)
            share.write(lse, share.total.lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.trip = trip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unsupported("attention on slices has no second derivative")
        q, k, v, out, lse = ctx.saved_tensors
        trip: _Trip = ctx.trip
        lse = lse.masked_fill(
            lse == -torch.inf, torch.inf
        )  # a query that sees nothing has no weight anywhere
        shares = _shares(q, trip)
        dk, dv = (x.new_zeros(x.shape) for x in (k, v))
        late: tuple[int, Message] | None = None
        for i, step in enumerate(trip.steps(k, v)):
            found = (
                (dk, dv)
                if i == 0
                else (step.k.new_zeros(step.k.shape), step.v.new_zeros(step.v.shape))
            )
            for share in shares:
                share.back(step, trip, (grad, out, lse), *found)
            if i:
                _arrived(late, trip.work, dk, dv)
                late = step.to, trip.home(i, step, *found)
            del found, step
        _arrived(late, trip.work, dk, dv)
        dq = q.new_empty(q.shape)
        for share in shares:
            share.write(dq, share.dq)
        return dq, dk, dv, None


def _arrived(late: tuple[int, Message] | None, work: ExchangePlan, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients that another process sent home."""
    if late is None:
        return
    to, message = late
    rows = message.wait()
    for total, part in zip((dk, dv), rows.split((dk.shape[3], dv.shape[3]), -1), strict=True):
        total.view(total.shape[0], -1, total.shape[3]).index_add_(1, work.give[to], part)


# ---------------------------------------------------------------------------------------------- what is computed
class _Share:
    """Examples and heads that share calls: q (x n e), what they saw so far, and the gradients of q."""

    def __init__(self, q: Tensor, examples: slice, heads: list[int], head: int) -> None:
        self.examples, self.heads, self.head = examples, heads, head
        self.all_heads, self.q = q.shape[1], self.read(q)

    @cached_property
    def total(self) -> PartialAttention:
        """What was seen so far."""
        return PartialAttention(self.q)

    @cached_property
    def dq(self) -> Tensor:
        """The gradients of q so far, wide enough to be added up."""
        return torch.zeros(self.q.shape, dtype=accumulator_dtype(self.q.dtype))

    def read(self, x: Tensor) -> Tensor:
        """x (b h ...) -> (x ...), the part of this share."""
        mine = x[self.examples]
        return (mine if len(self.heads) == x.shape[1] else mine[:, self.heads]).flatten(0, 1)

    def write(self, x: Tensor, part: Tensor) -> None:
        """Put a part back into x (b h ...)."""
        x[self.examples, self.heads] = part.unflatten(0, (-1, len(self.heads))).to(x.dtype)

    def look(self, step: _Step, trip: _Trip) -> None:
        """Attend to a piece, and merge."""
        if not self.q.shape[1] or not step.k.shape[2]:
            return
        k, v = (self.read(self._every(x)) for x in (step.k, step.v))
        for part in self._layout(step, trip, backward=False).parts:
            mine = PartialAttention(reorder_queries(part, self.q))
            forward_part(mine, part, self.q, k, v, trip.scale, self._bias(step, trip), ())
            self.total.add(mine, part)

    def back(
        self, step: _Step, trip: _Trip, given: tuple[Tensor, Tensor, Tensor], dk: Tensor, dv: Tensor
    ) -> None:
        """Add the gradients of a piece to dk and dv (b h' m e), and to those of q; given grad, out and lse of all."""
        if not self.q.shape[1] or not step.k.shape[2]:
            return
        k, v = (self.read(self._every(x)) for x in (step.k, step.v))
        grad, out, lse = map(self.read, given)
        every = len(self.heads) == dk.shape[1] and len(grad) == dk.shape[0] * dk.shape[1]
        alone = every and dk.dtype == self.dq.dtype  # then nothing has to be added up afterwards
        grads = [
            self.dq,
            *(
                x.flatten(0, 1) if alone else torch.zeros(k.shape, dtype=self.dq.dtype)
                for x in (dk, dv)
            ),
        ]
        for part in self._layout(step, trip, backward=True).parts:
            backward_part(
                grads,
                part,
                (grad, self.q, k, v, out, lse),
                trip.scale,
                self._bias(step, trip),
                (),
                (),
            )
        if alone:
            return
        at = torch.tensor(self.heads) // (
            self.all_heads // dk.shape[1]
        )  # neighbours share a head of keys
        for total, found in zip((dk, dv), grads[1:], strict=True):
            total[self.examples].index_add_(
                1, at, found.unflatten(0, (-1, len(self.heads))).to(total.dtype)
            )

    def _every(self, x: Tensor) -> Tensor:
        """(b h' m e) -> (b h m e): neighbours share a head of keys."""
        return (
            x
            if x.shape[1] == self.all_heads
            else x.repeat_interleave(self.all_heads // x.shape[1], 1)
        )

    def _layout(self, step: _Step, trip: _Trip, *, backward: bool) -> Layout:
        place: CallPositions = trip.work.places[step.whence]
        pattern: Pattern = place.pattern.parts[self.head] if place.pattern.heads else place.pattern
        assert isinstance(place.k_positions, int)
        n, m = self.q.shape[1], step.k.shape[2]
        return build_layout(
            pattern, n, m, q_start=place.q_start, k_start=place.k_positions, backward=backward
        )

    def _bias(self, step: _Step, trip: _Trip) -> Tensor | None:
        """0 or -inf for each key (m), for padding; a share is then of one example."""
        if trip.masks is None:
            return None
        kept = trip.masks[step.whence][self.examples][0]
        return torch.zeros(kept.shape, dtype=self.q.dtype).masked_fill_(~kept, -torch.inf)


def _shares(q: Tensor, trip: _Trip) -> list[_Share]:
    """Heads with one pattern share calls; so do examples, unless some have padding."""
    b, h = q.shape[:2]
    pattern, alike = trip.work.pattern, defaultdict(list)
    for head in range(h):
        alike[pattern.parts[head] if pattern.heads else pattern].append(head)
    examples = [slice(0, b)] if trip.masks is None else [slice(i, i + 1) for i in range(b)]
    return [_Share(q, some, heads, heads[0]) for some in examples for heads in alike.values()]
