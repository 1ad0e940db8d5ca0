"""Routers of mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import at_least_float32, disable_autocast


class Router(nn.Module):
    """Scores W (x ⊙ u) + ε ⊙ softplus(W_noise x), at least in float32: (b, n, d) -> (b, n, E).

    Args:
        jitter: In training, u is uniform in [1 − jitter, 1 + jitter] (Fedus et al. 2021,
            arXiv 2101.03961). 0: u = 1.
        noisy: In training, ε is standard normal, with a learned W_noise (Shazeer et al. 2017,
            arXiv 1701.06538). False: ε = 0.
        seed: Seed of the noise, which has its own generator; the number of draws is saved with the
            parameters. Do not use noise under activation checkpointing, where the second forward
            pass would draw again and route differently.
    """

    num_draws: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        jitter: float = 0.0,
        noisy: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_int(1, dim=dim, num_experts=num_experts)
        check_int(0, seed=seed)
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < 1:
            raise ValueError(f"jitter must be a number >= 0 and < 1, not {jitter!r}")
        self.dim, self.num_experts, self.jitter, self.seed = dim, num_experts, jitter, seed
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)
        self.noise = nn.Parameter(torch.zeros(num_experts, dim)) if noisy else None
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Scores (b, n, E) of tokens (b, n, d)."""
        x = at_least_float32(x)
        with disable_autocast(x):
            if not self.training:
                return F.linear(x, self.weight.to(x.dtype))
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * int(self.num_draws))
            self.num_draws += 1
            jittered = x
            if self.jitter:
                u = torch.rand(x.shape, generator=generator).to(x)
                jittered = x * (1 + self.jitter * (2 * u - 1))
            scores = F.linear(jittered, self.weight.to(x.dtype))
            if self.noise is None:
                return scores
            noise = torch.randn(scores.shape, generator=generator).to(scores)
            return scores + noise * F.softplus(F.linear(x, self.noise.to(x.dtype)))

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, jitter={self.jitter}, "
            f"noisy={self.noise is not None}"
        )
