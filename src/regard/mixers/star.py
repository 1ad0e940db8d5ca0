"""Star-Transformer: tokens in a ring around one relay, updated in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.errors import check_int
from regard.mixer import Can, Mixer, State, check_heads
from regard.numerics import at_least_float32, cumulative_max
from regard.pattern import MAX_POSITION

HUB = "the relay reads every token"


class Star(Mixer):
    """Star-Transformer (Guo et al. 2019, arXiv 1902.09113).

    With h⁰ = x and s⁰ = the mean of x, for `cycles` rounds:

        h_i ← norm(relu(MultiAtt(h_i, [h_{i−1}; h_i; h_{i+1}; x_i; s])))    satellites, in a ring
        s ← norm(relu(MultiAtt(s, [s; h_1 .. h_n])))                        relay

    The output is h. Masked tokens are not part of the ring. The relay is recorded as the auxiliary
    output "relay"; its last update is skipped, because no token would read it.

    Args:
        dim: Model width.
        heads: Number of heads.
        cycles: Number of rounds.
        shared: Use one set of parameters for all rounds.
        causal: Not supported.
    """

    def __init__(
        self, dim: int, heads: int, *, cycles: int = 2, shared: bool = False, causal: bool = False
    ) -> None:
        check_heads(dim, heads)
        check_int(1, cycles=cycles)
        can = Can(
            causal=HUB,
            stream=HUB,
            cross="the ring connects the tokens of one sequence",
            maps="it is not linear in its tokens, because of the relu in every round",
            attn_mask="tokens reach each other by the relay node, which sees all of them",
        )
        super().__init__(dim, can=can, causal=causal)
        self.cycles = cycles
        self.satellites = nn.ModuleList(
            StarNode(dim, heads) for _ in range(1 if shared else cycles)
        )
        self.relays = nn.ModuleList(
            StarNode(dim, heads) for _ in range(min(cycles - 1, 1) if shared else cycles - 1)
        )

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        ring = _ring(x, mask)
        count = x.shape[1] if mask is None else mask.sum(1).clamp(min=1)[:, None, None]
        h, s = x, (at_least_float32(x).sum(1, keepdim=True) / count).to(x.dtype)
        everyone = None if mask is None else F.pad(mask, (1, 0), value=True)[:, None]
        for cycle in range(self.cycles):
            h = self.satellites[cycle % len(self.satellites)](
                h, partial(_satellite_context, h, x, s, ring)
            )
            if cycle < self.cycles - 1:
                s = self.relays[cycle % len(self.relays)](
                    s, partial(_relay_context, s, h), everyone
                )
        record_aux("relay", lambda: s[:, 0])
        return h, None


class StarNode(nn.Module):
    """norm(relu(MultiAtt(node, context))): node (b n d), context (b n m d) -> (b n d)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, node: Tensor, context: Callable[[nn.Module], Tensor], keep: Tensor | None = None
    ) -> Tensor:
        """`context(f)` is f of every token in the context, (b n m d)."""
        k, v = context(self.k), context(self.v)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (self.q(node)[:, :, None], k, v))
        # (b n m h): too few keys or queries for a matrix product
        scores = (at_least_float32(q) * k).sum(-1) * q.shape[-1] ** -0.5
        if keep is not None:
            scores = scores.masked_fill(~keep[..., None], -torch.inf)
        seen = (scores.softmax(2).to(v.dtype)[..., None] * v).sum(2).flatten(2)
        return self.norm(F.relu(self.out(seen)))


def _ring(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Indices of the previous and the next unmasked token, (b n) each."""
    b, n, _ = x.shape
    at = torch.arange(n, device=x.device).expand(b, n)
    real = at if mask is None else torch.where(mask, at, -1)
    before = F.pad(cumulative_max(real), (1, 0), value=-1)[:, :-1]
    before = torch.where(before < 0, real.amax(1, keepdim=True), before)
    real = at if mask is None else torch.where(mask, at, MAX_POSITION)
    behind = F.pad(-cumulative_max(-real.flip(1)).flip(1), (0, 1), value=MAX_POSITION)[:, 1:]
    behind = torch.where(behind == MAX_POSITION, real.amin(1, keepdim=True), behind)
    return before.clamp(min=0), torch.minimum(behind, at[:, -1:])  # if all tokens are masked


def _satellite_context(
    h: Tensor, x: Tensor, s: Tensor, ring: tuple[Tensor, Tensor], f: nn.Module
) -> Tensor:
    """f of the five nodes that each satellite attends to, (b n 5 d)."""
    h, x, s = f(h), f(x), f(s)
    example = torch.arange(h.shape[0], device=h.device)[:, None]
    before, behind = (h[example, at] for at in ring)
    return torch.stack((before, h, behind, x, s.expand_as(h)), 2)


def _relay_context(s: Tensor, h: Tensor, f: nn.Module) -> Tensor:
    """f of the nodes that the relay attends to, (b 1 n+1 d)."""
    return f(torch.cat((s, h), 1))[:, None]
