"""Gated recurrences: each token decides how much of the state to keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.feature import RandomFourierFeatures
from regard.mixer import State, merge_heads, split_heads
from regard.mixers.recurrence import Recurrence, RecurrenceInputs, RecurrenceState
from regard.numerics import at_least_float32
from regard.update import decay, diagonal_decay

MIN_MASS = 1e-6  # lower bound of the total weight that entered the state


class GatedLinear(Recurrence):
    """Gated linear attention (Yang et al. 2024, arXiv 2312.06635), section 4.4.

    S_i = diag(α_i) S_{i−1} + k_i v_iᵀ and head_i = S_iᵀ q_i, with α_i = σ(W² W¹ x_i + b)^(1/16);
    out = W⁰ (swish(W^r x + b^r) ∘ LayerNorm(head)).

    Args:
        dim: Model width.
        heads: Number of heads.
        key: Width of keys and queries in each head. Default: half the width of the values.
        rank: Rank of the gate's projection.
        causal: Must be True.
        chunk: Tokens processed at once.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key: int | None = None,
        rank: int = 16,
        causal: bool = True,
        chunk: int = 64,
    ) -> None:
        super().__init__(dim, heads, diagonal_decay, causal=causal, chunk=chunk)
        key = max(1, dim // heads // 2) if key is None else key
        check_int(1, key=key, rank=rank)
        self.q, self.k = (nn.Linear(dim, heads * key, bias=False) for _ in range(2))
        self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.forget = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, heads * key))
        self.gate = nn.Linear(dim, dim)
        self.norm = nn.GroupNorm(heads, dim)

    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """Queries, keys, values and log α."""
        q, k, v = (split_heads(f(x), self.heads) for f in (self.q, self.k, self.v))
        log_alpha = F.logsigmoid(at_least_float32(self.forget(x))) / 16
        return RecurrenceInputs(q, k, v, split_heads(log_alpha, self.heads)), None

    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate and project."""
        y = self.norm(merge_heads(y).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.out(F.silu(self.gate(x)) * y)


class GatedRandomFeatures(Recurrence):
    """Random feature attention with a gate (Peng et al. 2021, arXiv 2103.02143), section 3.2.

    S_i = g_i S_{i−1} + (1 − g_i) phi(k_i) v_iᵀ and z_i = g_i z_{i−1} + (1 − g_i) phi(k_i), with
    g_i = σ(w·x_i + b) in each head; out = W⁰ S_iᵀ phi(q_i) / z_i·phi(q_i).

    Args:
        dim: Model width.
        heads: Number of heads.
        features: Random projections; each gives a sine and a cosine.
        seed: Seed of the features.
        redraw: Draw new features every `redraw` training calls. Default: never.
        causal: Must be True.
        chunk: Tokens processed at once.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: int = 64,
        seed: int = 0,
        redraw: int | None = None,
        causal: bool = True,
        chunk: int = 64,
    ) -> None:
        super().__init__(
            dim,
            heads,
            decay,
            causal=causal,
            chunk=chunk,
            min_denominator=RandomFourierFeatures.min_denominator,
        )
        self.feature = RandomFourierFeatures(
            dim // heads, features, heads, seed=seed, redraw=redraw
        )
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate = nn.Linear(dim, heads)

    def initial_state(self) -> RecurrenceState:
        """State before the first token; () rather than None, so streams never redraw features."""
        return RecurrenceState((), None)

    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """Features of queries and keys, values, log g and 1 − g."""
        if self.training and past is None:
            self.feature.advance()
        q, k, v = (split_heads(f(x), self.heads) for f in (self.q, self.k, self.v))
        gate = at_least_float32(self.gate(x))
        log_g, weight = (t.transpose(1, 2) for t in (F.logsigmoid(gate), F.sigmoid(-gate)))
        phi_q, _ = self.feature(at_least_float32(q), 0, True)
        phi_k, _ = self.feature(at_least_float32(k), 0, False)
        log_product = log_g.cumsum(2)  # of all gates so far
        if past:
            log_product = past[0] + log_product
        mass = (-torch.expm1(log_product)).clamp(min=MIN_MASS)
        return RecurrenceInputs(phi_q, phi_k, v, log_g, weight, mass), (log_product[..., -1:],)

    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Project."""
        return self.out(merge_heads(y))
