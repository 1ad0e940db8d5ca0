"""Priors: what changes the attention scores besides queries and keys.

A prior is called with positions that broadcast against each other, and with the queries and keys at
those positions:

    prior(q_pos, k_pos, q, k)     q_pos (... s 1), k_pos (... 1 t), q (b h ... s e), k (b h ... t e)

It returns what is added to the scores: (h ... s t), or (b h ... s t) if it depends on the tokens. k
may have fewer heads than q, a divisor (grouped-query attention): neighbouring heads of q share one.
Priors are combined with `+`: `ALiBi(8) + Sinks(8)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_positive
from regard.numerics import at_least_float32


class Prior(nn.Module, ABC):
    """Base class for biases of the scores. See the module docstring.

    Attributes:
        heads: Number of heads it was built for, or None for any number.
        relative: Whether it depends on q_pos - k_pos alone, so that values can be reused.
        compares_positions: Whether it depends on positions at all. Such a prior does not fit
            cross-attention.
        uses_qk: Whether it depends on the queries and keys other than by their scores, so that a
            rotary embedding would change it.
        length: Number of positions it was built for, or None for any number.
        num_terms: Number of terms of the score, including this one. Each is divided by √(num_terms
            e).
    """

    heads: int | None = None
    relative: bool = False
    compares_positions: bool = True
    uses_qk: bool = False
    length: int | None = None
    num_terms: int = 1

    @abstractmethod
    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor: ...

    def for_scale(self, scale: float) -> Prior | None:
        """The bias for scores scale · q kᵀ, or None if nothing is added to the scores."""
        return self

    def sink_logits(self) -> Tensor | None:
        """Logits (h) that join the denominator of the softmax, or None."""
        return None

    def __add__(self, other: Prior) -> PriorSum:
        return PriorSum(self, other)


class PriorSum(Prior):
    """The sum of several priors, written `a + b`."""

    def __init__(self, *priors: Prior) -> None:
        super().__init__()
        for prior in priors:
            if not isinstance(prior, Prior):
                raise TypeError(f"a prior is added to a prior, not to {type(prior).__name__}")
        parts = [p for prior in priors for p in (prior if isinstance(prior, PriorSum) else [prior])]
        if sum(isinstance(prior, SoftCap) for prior in parts) > 1:
            raise ValueError("scores are capped once: a sum of priors may have one SoftCap")
        heads = {prior.heads for prior in parts if prior.heads is not None}
        if len(heads) > 1:
            raise ValueError(f"the priors are for different numbers of heads: {sorted(heads)}")
        lengths = [prior.length for prior in parts if prior.length is not None]
        self.parts = nn.ModuleList(parts)
        self.heads = next(iter(heads), None)
        self.length = min(lengths, default=None)
        self.relative = all(prior.relative for prior in parts)
        self.compares_positions = any(prior.compares_positions for prior in parts)
        self.uses_qk = any(prior.uses_qk for prior in parts)
        self.num_terms = 1 + sum(prior.num_terms - 1 for prior in parts)

    def __iter__(self) -> Iterator[Prior]:
        yield from self.parts  # type: ignore[misc]

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module docstring."""
        return sum((prior(q_pos, k_pos, q, k) for prior in self), q.new_zeros(()))

    def for_scale(self, scale: float) -> Prior | None:
        """See `Prior.for_scale`."""
        found = [prior.for_scale(scale) for prior in self]
        parts = [prior for prior in found if prior is not None]
        return PriorSum(*parts) if len(parts) > 1 else next(iter(parts), None)

    def sink_logits(self) -> Tensor | None:
        """See `Prior.sink_logits`. Several sinks of a head act as one."""
        found = [prior.sink_logits() for prior in self]
        logits = [x for x in found if x is not None]
        return torch.stack(logits).logsumexp(0) if len(logits) > 1 else next(iter(logits), None)


class SoftCap(Prior):
    """Caps the scores: s becomes cap · tanh(s / cap), with s = scale · q kᵀ
    (Gemma 2: Gemma Team 2024, arXiv 2408.00118).

    What other priors add is added to the capped scores.

    Args:
        cap: Largest absolute score.
        scale: Factor of the scores. `regard.attend` replaces it by its own. Default: 1/√e.
    """

    compares_positions = False

    def __init__(self, cap: float, *, scale: float | None = None) -> None:
        super().__init__()
        check_positive("cap", cap)
        self.cap, self.scale = float(cap), scale

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The difference of the capped scores and the scores."""
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        grouped = q.unflatten(1, (k.shape[1], -1))  # query heads that share a key head
        scores = at_least_float32(grouped) * scale @ at_least_float32(k)[:, :, None].mT
        scores = scores.flatten(1, 2)
        return self.cap * torch.tanh(scores / self.cap) - scores

    def for_scale(self, scale: float) -> Prior:
        """See `Prior.for_scale`."""
        return self if scale == self.scale else SoftCap(self.cap, scale=scale)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"cap={self.cap}"


class Sinks(Prior):
    """A learned logit z_h for each head that joins the softmax and has no value
    (gpt-oss: OpenAI 2025, arXiv 2508.10925):

        weight_ij = exp(s_ij) / (exp(z_h) + Σ_j exp(s_ij))

    so that a head can attend to nothing. With z = 0 it is the "off by one" softmax.

    Args:
        heads: Number of heads.
        start: Initial logit.
    """

    relative = True
    compares_positions = False

    def __init__(self, heads: int, *, start: float = 0.0) -> None:
        super().__init__()
        check_int(1, heads=heads)
        self.heads = heads
        self.logits = nn.Parameter(torch.full((heads,), float(start)))

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Zero: sinks change the denominator, see `sink_logits`."""
        return torch.zeros((1, *[1] * q_pos.dim()), dtype=q.dtype, device=q.device)

    def for_scale(self, scale: float) -> None:
        """See `Prior.for_scale`."""
        return None

    def sink_logits(self) -> Tensor:
        """See `Prior.sink_logits`."""
        return self.logits


class ALiBi(Prior):
    """-slope * distance, with slopes 2^(-8 i / h) for head i = 1..h
    (Press et al. 2022, arXiv 2108.12409).

    If h is no power of two, the slopes are those of the authors' code: all slopes of p heads, p
    being the largest power of two below h, then the first, third, fifth, ... of 2p heads.
    """

    relative = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int(1, heads=heads)
        self.heads = heads
        power = 1 << (heads.bit_length() - 1)  # the largest power of two up to heads
        exponents = [8 * i / power for i in range(1, power + 1)]
        exponents += [4 * i / power for i in range(1, 2 * (heads - power), 2)]
        self.register_buffer("slopes", 2.0 ** -torch.tensor(exponents))

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module docstring."""
        distance = (q_pos - k_pos).abs()
        return -distance * self.slopes.to(q.dtype).view(-1, *[1] * distance.dim())


class Gaussian(Prior):
    """−(j − i)² / (2 σ_h²), with one σ for each head, learned unless `learn` is False."""

    relative = True

    def __init__(self, heads: int, sigma: float, *, learn: bool = True) -> None:
        super().__init__()
        check_int(1, heads=heads)
        check_positive("sigma", sigma)
        self.heads = heads
        log_sigma = torch.full((heads,), float(sigma)).log()
        self.log_sigma = nn.Parameter(log_sigma, requires_grad=learn)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module docstring."""
        dtype = torch.promote_types(q.dtype, torch.float32)  # squared distances overflow float16
        distance = (q_pos - k_pos).to(dtype)
        sigma = self.log_sigma.to(dtype).exp().view(-1, *[1] * distance.dim())
        return -(distance**2) / (2 * sigma**2)


class RepeatedKeys(Prior):
    """log(times) for keys before `end` and queries from `end` to `last`: as if those keys were
    repeated."""

    def __init__(self, end: int, times: int, last: int) -> None:
        super().__init__()
        check_int(1, end=end, times=times, last=last)
        self.end, self.times, self.last = end, times, last

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module docstring."""
        repeated = (k_pos < self.end) & (q_pos >= self.end) & (q_pos < self.last)
        return repeated.to(q.dtype)[None] * math.log(self.times)


class ConditionalPrior(Prior):
    """M(z) = ⊕_n (A_n γ(z) + β(z)): diagonal blocks (s s) conditioned on a task vector z, zero
    elsewhere (Pilault et al. 2021, arXiv 2009.09139).

    A (N s s) is learned. γ and β are linear in z (b p), with one value for each column of a block.

    Args:
        length: Sequence length.
        blocks: Number of blocks.
        width: Width p of a task vector.
    """

    def __init__(self, length: int, blocks: int, width: int) -> None:
        super().__init__()
        size = -(-length // blocks)
        self.blocks = nn.Parameter(torch.randn(-(-length // size), size, size) / size**0.5)
        self.gain, self.shift = nn.Linear(width, size), nn.Linear(width, size)
        nn.init.ones_(self.gain.bias)

    def for_task(self, z: Tensor) -> Prior:
        """The prior for examples with these task vectors (b p)."""
        gain, shift = (layer(z)[:, None, None, :] for layer in (self.gain, self.shift))
        return _DiagonalBlocks(self.blocks * gain + shift)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The prior of the zero task vector."""
        z = self.gain.weight.new_zeros(1, self.gain.in_features)
        return self.for_task(z)(q_pos, k_pos, q, k)


class _DiagonalBlocks(Prior):
    """Blocks (b N s s) along the diagonal."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        size = self.blocks.shape[-1]
        row, column = q_pos // size, k_pos // size
        values = self.blocks[:, row, q_pos % size, k_pos % size]  # (b ... s t)
        return torch.where(row == column, values, 0).to(q.dtype).unsqueeze(1)


class RestartedPrior(Prior):
    """A prior whose positions restart at 0 in each of several packed segments.

    Args:
        prior: The prior of one sequence.
        lengths: Length of each segment.
    """

    def __init__(self, prior: Prior, lengths: Sequence[int]) -> None:
        super().__init__()
        if prior.length is not None and max(lengths) > prior.length:
            raise ValueError(
                f"the prior supports {prior.length} positions, but a segment has {max(lengths)}"
            )
        self.prior, self.heads, self.num_terms = prior, prior.heads, prior.num_terms
        self.uses_qk, self.lengths = prior.uses_qk, tuple(lengths)
        sizes = torch.tensor(self.lengths, device="cpu")
        self.starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # of each position

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module docstring. Pairs of two segments are hidden by the pattern."""
        starts = self.starts.to(q_pos.device)
        q_pos, k_pos = q_pos - starts[q_pos], k_pos - starts[k_pos]
        return self.prior(q_pos, k_pos, q, k)

    def for_scale(self, scale: float) -> Prior | None:
        """See `Prior.for_scale`."""
        prior = self.prior.for_scale(scale)
        if prior is None or prior is self.prior:
            return None if prior is None else self
        return RestartedPrior(prior, self.lengths)

    def sink_logits(self) -> Tensor | None:
        """See `Prior.sink_logits`."""
        return self.prior.sink_logits()


def restart_prior(prior: Prior | None, lengths: Sequence[int]) -> Prior | None:
    """The prior for packed segments: itself, if positions do not matter or only their
    differences do, else with positions that restart at 0 in each segment.
    """
    if prior is None or not prior.compares_positions or prior.relative:
        return prior
    return RestartedPrior(prior, lengths)
