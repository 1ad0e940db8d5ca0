"""BP-Transformer: attention to a binary tree of spans, short nearby and long far away."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.mixer import Can, Mixer, State, check_batch, check_heads
from regard.mixers.bp_spans import SpanPlan, span_plan
from regard.numerics import at_least_float32

INITIAL_STD = 0.02  # of the labels
LEVELS = "the number of tree levels depends on the length"


class SpanLevel(NamedTuple):
    """Spans of 2^level tokens from number `first` on (b m d), and their unmasked tokens (b m)."""

    first: int
    nodes: Tensor
    real: Tensor


class BPTransformer(Mixer):
    """BP-Transformer (Ye et al. 2019, arXiv 1911.04070).

    Spans of 1, 2, 4, ... tokens are the nodes of a binary tree; a span is

        s = W_O · mean of W_V x over its tokens

    which is the paper's attention for a span with a zero state. Token i attends to itself and, on
    each level, to the next `near` spans on each side that the lower levels do not cover:

        out_i = W_O Σ_u softmax_u(q_i · (W_K u + a_label) / √e) W_V u,       u a token or a span

    a is a learned vector for each level, side and place within the level, the same for all heads;
    levels from `clip` on share it. If causal, spans end before the token.
    """

    def __init__(
        self, dim: int, heads: int, *, near: int = 4, clip: int = 10, causal: bool = False
    ) -> None:
        check_heads(dim, heads)
        check_int(1, near=near, clip=clip)
        passes = "spans are means of several tokens"
        can = Can(
            cross="the tree is built over one sequence",
            maps=passes,
            attn_mask="tokens reach distant ones by spans, each of which stands for many tokens",
            export=LEVELS,
        )
        super().__init__(dim, can=can, causal=causal)
        self.heads, self.near, self.clip = heads, near, clip
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        sides = 1 if causal else 2
        self.labels = nn.Parameter(
            torch.randn(1 + (clip + 1) * near * sides, dim // heads) * INITIAL_STD
        )

    def initial_state(self) -> State:
        """State before the first token."""
        return (0, ())

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d). The state holds the position and the last spans of each level."""
        start, held = (0, ()) if state is None else state
        if held:
            check_batch(held[0].nodes, x)
        levels = self._levels(x, mask, start, held)
        offsets = [
            sum(level.nodes.shape[1] for level in levels[:i]) - level.first
            for i, level in enumerate(levels)
        ]
        plan = span_plan(start, x.shape[1], self.near, self.clip, self.causal, tuple(offsets))
        y = self.out(self._attend(x, levels, plan))
        if state is None:
            return y, None
        last = 2 * self.near + 4  # no later token reaches further back on any level
        kept = [
            SpanLevel(f + max(m.shape[1] - last, 0), m[:, -last:], c[:, -last:])
            for f, m, c in levels
        ]
        if not held:  # a state must not be a view of the caller's tokens
            kept[0] = kept[0]._replace(nodes=kept[0].nodes.clone())
        return y, (start + x.shape[1], tuple(kept))

    def _levels(
        self, x: Tensor, mask: Tensor | None, start: int, held: tuple[SpanLevel, ...]
    ) -> list[SpanLevel]:
        """All visible spans: those of the state and the new ones.

        If causal, a span exists once its last token is there.
        """
        count = torch.ones(x.shape[:2], device=x.device) if mask is None else mask.float()
        levels = [_extend_level(held[0] if held else None, x, count)]
        total = start + x.shape[1]
        while total > 1:
            number, (first, nodes, count) = len(levels), levels[-1]
            had, total = start >> number, total // 2 if self.causal else (total + 1) // 2
            children = slice(2 * had - first, 2 * total - first)
            below, count = nodes[:, children], count[:, children]
            nodes, count = _parents(self.out(self.v(below)) if number == 1 else below, count)
            levels.append(_extend_level(held[number] if number < len(held) else None, nodes, count))
        return levels

    def _attend(self, x: Tensor, levels: list[SpanLevel], plan: SpanPlan) -> Tensor:
        """Attention of each token over its nodes, tile by tile: (b n d)."""
        nodes, place, labels = (t.to(x.device) for t in plan)
        states = torch.cat([level.nodes for level in levels], 1)
        real = torch.cat([level.real for level in levels], 1)
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1))
            for f, t in ((self.q, x), (self.k, states), (self.v, states))
        )
        size = place.shape[1]
        q = F.pad(q, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
        q = q.permute(0, 3, 1, 2, 4)  # (b h g s e)
        k, v = (t[:, nodes].permute(0, 3, 1, 2, 4) for t in (k, v))  # (b h g m e)
        keep = (place >= 0) & (real[:, nodes] > 0)[:, :, None]
        keep, seen = keep[:, None], keep.any(-1, keepdim=True)[:, None]
        index = place.clamp(min=0).long().expand(*q.shape[:2], -1, -1, -1)
        q, k = at_least_float32(q), at_least_float32(k)  # scores overflow in float16
        label_scores = (q @ self.labels[labels].T.to(q.dtype)).gather(-1, index)
        scores = (q @ k.transpose(-1, -2) + label_scores) * q.shape[-1] ** -0.5
        # Rows without keys stay finite here and become zero below.
        scores = scores.masked_fill(~keep, -torch.inf).masked_fill(~seen, 0)
        y = (scores.softmax(-1) * seen).to(v.dtype) @ v
        return y.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)[:, : x.shape[1]]


def _extend_level(held: SpanLevel | None, nodes: Tensor, count: Tensor) -> SpanLevel:
    if held is None:
        return SpanLevel(0, nodes, count)
    return SpanLevel(
        held.first, torch.cat((held.nodes, nodes), 1), torch.cat((held.real, count), 1)
    )


def _parents(nodes: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Merge pairs of nodes into their mean over unmasked tokens.

    An odd last node is its parent's only child.
    """
    odd = nodes.shape[1] % 2
    nodes = F.pad(nodes, (0, 0, 0, odd)).unflatten(1, (-1, 2))
    count = F.pad(count, (0, odd)).unflatten(1, (-1, 2))
    # 16-bit floats cannot count far.
    count = count.to(torch.promote_types(nodes.dtype, torch.float32))
    total = count.sum(2)
    share = (count / total.clamp(min=1)[..., None]).to(nodes.dtype)
    return (nodes * share[..., None]).sum(2), total
