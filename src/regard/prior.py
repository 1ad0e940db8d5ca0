"""Priors: biases of the attention scores that depend on positions.

A prior is called with positions that broadcast against each other, and with the queries and keys at
those positions:

    prior(q_pos, k_pos, q, k)     q_pos (... s 1), k_pos (... 1 t), q (b h ... s e), k (b h ... t e)

It returns what is added to the scores: (h ... s t), or (b h ... s t) if it depends on the tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_positive


class Prior(nn.Module, ABC):
    """Base class for biases of the scores. See the module docstring.

    Attributes:
        heads: Number of heads it was built for, or None for any number.
        relative: Whether it depends on q_pos - k_pos alone, so that values can be reused.
        uses_qk: Whether it depends on the queries and keys.
        length: Number of positions it was built for, or None for any number.
        num_terms: Number of terms of the score, including this one. Each is divided by √(num_terms
            e).
    """

    heads: int | None = None
    relative: bool = False
    uses_qk: bool = False
    length: int | None = None
    num_terms: int = 1

    @abstractmethod
    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor: ...


class ALiBi(Prior):
    """-slope * distance, with slopes 2^(-8 i / h) for head i = 1..h
    (Press et al. 2022, arXiv 2108.12409)."""

    relative = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int(1, heads=heads)
        self.heads = heads
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

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
