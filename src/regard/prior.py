"""What is known about the scores before any token is seen: an addend that depends on positions.

A prior is called with positions that broadcast against each other, and with the queries and keys that stand there:

    prior(q_pos, k_pos, q, k)     q_pos (... s 1), k_pos (... 1 t), q (b h ... s e), k (b h ... t e)

and returns what is added to the scores: (h ... s t), or (b h ... s t) where it depends on the tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_positive


class Prior(nn.Module, ABC):
    """An addend to the scores; see the module's docstring."""

    heads: int | None = None  # how many it tells apart, None: any number
    relative: bool = (
        False  # whether it depends on q_pos - k_pos alone: then it costs little, for it repeats
    )
    uses_qk: bool = False  # whether it looks at the queries and keys
    length: int | None = None  # how many positions it knows, None: any number
    num_terms: int = 1  # of how many like terms the scores are the sum, this one included: each is over sqrt(terms e)

    @abstractmethod
    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor: ...


class ALiBi(Prior):
    """-slope * distance, with slopes 2^(-8 i / h) for head i = 1..h (Press et al. 2022, arXiv 2108.12409)."""

    relative = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int(1, heads=heads)
        self.heads = heads
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        gap = (q_pos - k_pos).abs()
        return -gap * self.slopes.to(q.dtype).view(-1, *[1] * gap.dim())


class Gaussian(Prior):
    """−(j − i)² / (2 σ_h²): nearness as a prior.  Each head has its own σ; learned, unless `learn` is False."""

    relative = True

    def __init__(self, heads: int, sigma: float, *, learn: bool = True) -> None:
        super().__init__()
        check_int(1, heads=heads)
        check_positive("sigma", sigma)
        self.heads = heads
        self.log_sigma = nn.Parameter(torch.full((heads,), float(sigma)).log(), requires_grad=learn)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module's docstring."""
        wide = torch.promote_types(
            q.dtype, torch.float32
        )  # squares of distances leave float16 behind
        gap = (q_pos - k_pos).to(wide)
        return -(gap**2) / (2 * self.log_sigma.to(wide).exp().view(-1, *[1] * gap.dim()) ** 2)


class RepeatedKeys(Prior):
    """log times, for keys before `end` and queries from `end` to `last_row`: as if those keys stood there so many times."""

    def __init__(self, end: int, times: int, last: int) -> None:
        super().__init__()
        check_int(1, end=end, times=times, last=last)
        self.end, self.times, self.last = end, times, last

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See the module's docstring."""
        again = (k_pos < self.end) & (q_pos >= self.end) & (q_pos < self.last)
        return again.to(q.dtype)[None] * math.log(self.times)


class ConditionalPrior(Prior):
    """M(z) = ⊕_n (A_n γ(z) + β(z)): blocks (s s) along the diagonal, which a task modulates; zero elsewhere
    (Pilault et al. 2021, arXiv 2009.09139).

    blocks  A (N s s), learned; γ and β are linear in z (b p) and give s numbers each, one for each column of a block
    """

    def __init__(self, length: int, blocks: int, width: int) -> None:
        super().__init__()
        size = -(-length // blocks)
        self.blocks = nn.Parameter(torch.randn(-(-length // size), size, size) / size**0.5)
        self.gain, self.shift = nn.Linear(width, size), nn.Linear(width, size)
        nn.init.ones_(self.gain.bias)

    def of(self, z: Tensor) -> Prior:
        """The prior for examples with these task vectors, (b p)."""
        return _Modulated(
            self.blocks * self.gain(z)[:, None, None, :] + self.shift(z)[:, None, None, :]
        )

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Without a task: the prior of the zero vector."""
        return self.of(self.gain.weight.new_zeros(1, self.gain.in_features))(q_pos, k_pos, q, k)


class _Modulated(Prior):
    """Blocks (b N s s) along the diagonal."""

    def __init__(self, blocks: Tensor) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        size = self.blocks.shape[-1]
        here, there = q_pos // size, k_pos // size
        values = self.blocks[:, here, q_pos % size, k_pos % size]  # (b ... s t)
        return torch.where(here == there, values, 0).to(q.dtype).unsqueeze(1)
