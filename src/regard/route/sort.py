"""Differentiable sorting of blocks: every position gets a mixture of blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_positive


class BlockSort(nn.Module):
    """Block summaries (b s d) -> S (b h s s): how much of block j is at position i after sorting
    (Tay et al. 2020, arXiv 2002.11296).

        S = Sinkhorn((R + noise) / temperature),  R_i = relu(W₂ relu(W₁ x_i + b₁) + b₂)

    Gumbel noise is added in training mode only, from `seed` and the number of draws so far.

    Args:
        dim: Model width d.
        heads: Number of heads.
        blocks: Maximum number of blocks.
        iterations: Iterations of Sinkhorn balancing.
        temperature: Temperature of S.
        seed: Seed of the noise.
        causal: Whether only earlier blocks are sorted to a position.
    """

    drawn: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        blocks: int,
        iterations: int = 5,
        temperature: float = 0.75,
        seed: int = 0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_int(1, dim=dim, heads=heads, blocks=blocks)
        check_int(0, iterations=iterations, seed=seed)
        check_positive("temperature", temperature)
        self.heads, self.blocks, self.iterations, self.causal = heads, blocks, iterations, causal
        self.temperature, self.seed = float(temperature), seed
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, heads * blocks)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))

    def forward(self, summaries: Tensor, real: Tensor) -> Tensor:
        """S for block summaries (b s d). Blocks that are not `real` (b s) are not sorted."""
        logits = self.down(self.up(summaries).relu()).relu().unflatten(-1, (self.heads, -1))
        logits = logits[..., : summaries.shape[1]].transpose(1, 2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.training:
            logits = logits + self._gumbel_noise(logits)
        keep = (real[:, None, :, None] & real[:, None, None, :]).expand(-1, self.heads, -1, -1)
        keep = keep.tril(-1) if self.causal else keep
        return sinkhorn(logits / self.temperature, keep, self.iterations, causal=self.causal)

    def _gumbel_noise(self, logits: Tensor) -> Tensor:
        """-log(-log u), from its own generator, so that it changes no other random numbers."""
        generator = torch.Generator().manual_seed(self.seed + int(self.drawn))
        self.drawn += 1
        u = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
        return -(-u.clamp(1e-12, 1 - 1e-12).log()).log().to(logits)


def sinkhorn(logits: Tensor, keep: Tensor, iterations: int, *, causal: bool = False) -> Tensor:
    """Sinkhorn balancing in log space: (... s s) -> approximately doubly stochastic.

    Divides rows, then columns by their sums, repeatedly. If causal, the sum of a column runs over
    the rows so far, so that no row depends on a later one.
    """
    low = torch.finfo(logits.dtype).min / 4  # finite, so that gradients are finite

    def subtract(sums: Tensor) -> Tensor:
        return torch.where(keep, logits - sums, logits)

    for _ in range(iterations):
        logits = subtract(logits.masked_fill(~keep, low).logsumexp(-1, keepdim=True))
        columns = logits.masked_fill(~keep, low)
        logits = subtract(
            columns.logcumsumexp(-2) if causal else columns.logsumexp(-2, keepdim=True)
        )
    return logits.masked_fill(~keep, -torch.inf).exp()
