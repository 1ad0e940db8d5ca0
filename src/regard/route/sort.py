"""A learned order of blocks, softened so that gradients pass: every position takes a mixture of blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import check_int, check_positive


class BlockSort(nn.Module):
    """Summaries of blocks (b s d) -> S (b h s s): how much of block j stands at position i after sorting.

    S = Sinkhorn((R + noise) / temperature), R_i = relu(W₂ relu(W₁ x_i + b₁) + b₂), for each head (Tay et al. 2020,
    arXiv 2002.11296).  Gumbel noise is drawn while training only, by `seed` and the number of draws so far.

    blocks   the most blocks there may be: R_i has an entry for each
    causal   only earlier blocks come to a position
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
        """real (b s): which blocks have any token; the others neither move nor are moved."""
        s = summaries.shape[1]
        logits = (
            self.down(self.up(summaries).relu())
            .relu()
            .unflatten(-1, (self.heads, -1))[..., :s]
            .transpose(1, 2)
        )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.training:
            logits = logits + self._noise(logits)
        keep = (real[:, None, :, None] & real[:, None, None, :]).expand(-1, self.heads, -1, -1)
        keep = keep.tril(-1) if self.causal else keep
        return sinkhorn(logits / self.temperature, keep, self.iterations, causal=self.causal)

    def _noise(self, logits: Tensor) -> Tensor:
        """-log(-log u), of a generator of its own, so that no other random number changes."""
        generator = torch.Generator().manual_seed(self.seed + int(self.drawn))
        self.drawn += 1
        u = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(
            1e-12, 1 - 1e-12
        )
        return -(-u.log()).log().to(logits)


def sinkhorn(logits: Tensor, keep: Tensor, iterations: int, *, causal: bool = False) -> Tensor:
    """(... s s) -> about doubly stochastic: rows, then columns are divided by their sums, over and over, in log space.

    causal   the sum of a column runs over the rows so far only, so that no row depends on a later one
    """
    low = (
        torch.finfo(logits.dtype).min / 4
    )  # stands for what is not kept: finite, or the gradient would not be
    for _ in range(iterations):
        logits = _less(logits, keep, logits.masked_fill(~keep, low).logsumexp(-1, keepdim=True))
        columns = logits.masked_fill(~keep, low)
        logits = _less(
            logits,
            keep,
            columns.logcumsumexp(-2) if causal else columns.logsumexp(-2, keepdim=True),
        )
    return logits.masked_fill(~keep, -torch.inf).exp()


def _less(logits: Tensor, keep: Tensor, sums: Tensor) -> Tensor:
    """Divided by the sums, where it is kept."""
    return torch.where(keep, logits - sums, logits)
