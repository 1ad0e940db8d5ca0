"""Which expert a token asks: scores in float32 at least, with noise while training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import at_least_float32, disable_autocast


class Router(nn.Module):
    """x (b n d) -> scores (b n experts), H(x) = W (x ⊙ u) + ε ⊙ softplus(W_noise x), at least in float32.

    jitter   u is uniform in [1 − jitter, 1 + jitter] while training (Fedus et al. 2021, arXiv 2101.03961); 0: u = 1
    noisy    ε is normal while training (Shazeer et al. 2017, arXiv 1701.06538), and W_noise is learned; False: ε = 0
    seed     of the noise, which has a generator of its own.  How often it drew is saved with the parameters.  A call that
             is computed again, as by activation checkpointing, would draw anew and route otherwise: go without noise there
    """

    drawn: Tensor

    def __init__(
        self, dim: int, count: int, *, jitter: float = 0.0, noisy: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        check_int(1, dim=dim, experts=count)
        check_int(0, seed=seed)
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < 1:
            raise ValueError(f"jitter must be a number from 0 to below 1, not {jitter!r}")
        self.dim, self.count, self.jitter, self.seed = dim, count, jitter, seed
        self.weight = nn.Parameter(torch.randn(count, dim) * dim**-0.5)
        self.noise = nn.Parameter(torch.zeros(count, dim)) if noisy else None
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n experts)."""
        x = at_least_float32(x)
        with disable_autocast(x):  # it would take the precision away again
            if not self.training:
                return F.linear(x, self.weight.to(x.dtype))
            make = torch.Generator().manual_seed(self.seed + 1_000_003 * int(self.drawn))
            self.drawn += 1
            return self._noised(x, make)

    def _noised(self, x: Tensor, make: torch.Generator) -> Tensor:
        bent = x
        if self.jitter:
            u = torch.rand(x.shape, generator=make).to(x)
            bent = x * (1 + self.jitter * (2 * u - 1))
        scores = F.linear(bent, self.weight.to(x.dtype))
        if self.noise is None:
            return scores
        drawn = torch.randn(scores.shape, generator=make).to(scores)
        return scores + drawn * F.softplus(F.linear(x, self.noise.to(x.dtype)))

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dim={self.dim}, experts={self.count}, jitter={self.jitter}, noisy={self.noise is not None}"
