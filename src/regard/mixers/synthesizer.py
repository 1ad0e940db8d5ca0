"""Synthesizers: attention logits predicted from single tokens, or learned (arXiv 2005.00743)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil, isqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_stream_length
from regard.mixer import Can, Mixer, State, check_batch, check_heads, merge_heads, split_heads
from regard.numerics import at_least_float32, attention_mask, masked_softmax

OWN = "its logits are for the positions of one sequence"


class SynthesizerLogits(nn.Module, ABC):
    """Base class of attention logits.

    `forward` takes tokens x (b n d), the keys of all m tokens so far and the position of the first
    token of x, and returns logits (b h n m) or (1 h n m).
    """

    length: int | None = None  # maximum length, or None

    def keys(self, x: Tensor) -> Tensor:
        """What later tokens need of x, (b h n w); by default nothing, w = 0."""
        return x.new_empty(x.shape[0], 1, x.shape[1], 0)

    @abstractmethod
    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor: ...


class DenseLogits(SynthesizerLogits):
    """F(x_i) = W₂ relu(W₁ x_i + b₁) + b₂: each token predicts its logits for all positions."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.up, self.down = nn.Linear(dim, dim), PerHeadLinear(heads, dim // heads, length)

    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor:
        """(b n d) -> (b h n m)."""
        return self.down(split_heads(self.up(x).relu(), self.down.heads), keys.shape[2])


class FactorisedDenseLogits(SynthesizerLogits):
    """logits[r + c a] = A_r B_c with A, B = two rows of a and of b numbers, both from
    relu(W₁ x_i + b₁), a b >= length.
    """

    def __init__(
        self, dim: int, heads: int, length: int, factors: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.length = length
        first, second = (
            _root_factors(length) if factors is None else _check_factors(factors, length)
        )
        self.up = nn.Linear(dim, dim)
        self.first, self.second = (
            PerHeadLinear(heads, dim // heads, size) for size in (first, second)
        )

    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor:
        """(b n d) -> (b h n m): A tiled times B repeated."""
        inner = split_heads(self.up(x).relu(), self.first.heads)
        tiled, repeated = self.first(inner), self.second(inner)
        return (repeated[..., :, None] * tiled[..., None, :]).flatten(-2)[..., : keys.shape[2]]


class RandomLogits(SynthesizerLogits):
    """A table R (h length length), drawn with `seed`, learned or fixed, for any tokens."""

    def __init__(self, heads: int, length: int, *, learned: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.length = length
        table = torch.randn(heads, length, length, generator=_generator(seed))
        if learned:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor:
        """(1 h n m)."""
        return self.table[None, :, start : start + x.shape[1], : keys.shape[2]].to(x.dtype)


class FactorisedRandomLogits(SynthesizerLogits):
    """R = R₁ R₂ᵀ with learned R₁ and R₂ (h length rank), drawn with `seed`."""

    def __init__(self, heads: int, length: int, rank: int, *, seed: int = 0) -> None:
        super().__init__()
        self.length = length
        drawn = torch.randn(2, heads, length, rank, generator=_generator(seed))
        self.left, self.right = (nn.Parameter(table) for table in drawn / rank**0.25)

    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor:
        """(1 h n m)."""
        return (self.left[:, start : start + x.shape[1]] @ self.right[:, : keys.shape[2]].mT)[None]


class DotProductLogits(SynthesizerLogits):
    """q_i · k_j / √e, the scores of Vaswani et al. 2017."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def keys(self, x: Tensor) -> Tensor:
        """(b h n e)."""
        return split_heads(self.k(x), self.heads)

    def forward(self, x: Tensor, keys: Tensor, start: int) -> Tensor:
        """(b h n m)."""
        q = at_least_float32(split_heads(self.q(x), self.heads))  # scores overflow in float16
        return q @ at_least_float32(keys).mT / keys.shape[-1] ** 0.5


class SynthesizerState(NamedTuple):
    """Values (b h m e), or None before the first token, and keys of each part."""

    values: Tensor | None
    keys: tuple[Tensor, ...]


class Synthesizer(Mixer):
    """out = W⁰ softmax(Σ_p α_p logits_p) V, with learned α = softmax(shares) over the parts."""

    def __init__(
        self, dim: int, heads: int, parts: Sequence[SynthesizerLogits], *, causal: bool = False
    ) -> None:
        check_heads(dim, heads)
        lengths = [part.length for part in parts if part.length is not None]
        can = Can(cross=OWN)
        if lengths:
            can = can & Can(length=f"its logits were built for {min(lengths)} positions")
        super().__init__(dim, can=can, causal=causal, length=min(lengths, default=None))
        self.heads, self.parts = heads, nn.ModuleList(parts)
        self.shares = nn.Parameter(torch.zeros(len(parts))) if len(parts) > 1 else None
        self.v, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def initial_state(self) -> SynthesizerState:
        """State before the first token."""
        return SynthesizerState(None, ())

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        seen = self._extend_state(x, state)
        assert seen.values is not None
        y = self._map(x, seen.keys, mask, attn_mask) @ seen.values
        return self.out(merge_heads(y)), None if state is None else seen

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention weights, (b h n n)."""
        maps = self._map(x, self._extend_state(x, None).keys, mask, attn_mask)
        return maps.expand(x.shape[0], -1, -1, -1)

    def _extend_state(self, x: Tensor, state: SynthesizerState | None) -> SynthesizerState:
        values = split_heads(self.v(x), self.heads)
        keys = tuple(part.keys(x) for part in self._logits())
        if state is None or state.values is None:
            return SynthesizerState(values, keys)
        check_batch(state.values, values)
        check_stream_length(self.length, state.values.shape[2] + x.shape[1])
        keys = tuple(torch.cat(pair, 2) for pair in zip(state.keys, keys, strict=True))
        return SynthesizerState(torch.cat((state.values, values), 2), keys)

    def _map(
        self,
        x: Tensor,
        keys: tuple[Tensor, ...],
        mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> Tensor:
        n, m = x.shape[1], keys[0].shape[2]
        logits = [part(x, k, m - n) for part, k in zip(self._logits(), keys, strict=True)]
        scores = logits[0]
        if self.shares is not None:
            shares = self.shares.softmax(0)
            scores = sum(a * s for a, s in zip(shares, logits, strict=True))
        keep = attention_mask(
            n, m, causal=self.causal, mask=mask, device=x.device, attn_mask=attn_mask
        )
        return masked_softmax(scores, keep).to(x.dtype)

    def _logits(self) -> list[SynthesizerLogits]:
        return list(self.parts)  # type: ignore[arg-type]


class PerHeadLinear(nn.Module):
    """A linear layer for each head: (b h n e) -> (b h n out)."""

    def __init__(self, heads: int, width: int, out: int) -> None:
        super().__init__()
        self.heads = heads
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(heads, out, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, out).uniform_(-bound, bound))

    def forward(self, x: Tensor, most: int | None = None) -> Tensor:
        return x @ self.weight[:, :most].mT + self.bias[:, None, :most]


def _generator(seed: int) -> torch.Generator:
    check_int(0, seed=seed)
    return torch.Generator().manual_seed(seed)


def _root_factors(length: int) -> tuple[int, int]:
    """Two numbers near the root of the length, whose product is at least the length."""
    first = isqrt(length - 1) + 1
    return first, ceil(length / first)


def _check_factors(factors: tuple[int, int], length: int) -> tuple[int, int]:
    if not isinstance(factors, Sequence) or len(factors) != 2:
        raise ValueError(f"factors must be two whole numbers, not {factors!r}")
    for factor in factors:
        check_int(1, factors=factor)
    if factors[0] * factors[1] < length:
        raise ValueError(
            f"the product of factors must be at least length={length}, "
            f"not {factors[0]} x {factors[1]}"
        )
    return factors[0], factors[1]
