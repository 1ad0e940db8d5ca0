"""From scores to weights: (b h n m) scores and who may look at whom, `write_record`, which broadcasts to it -> (b h n m).

A row that sees nothing has no weight anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.numerics import masked_softmax

# Scores this near, beside the largest, are equal; in half precision neighbours would be taken for equal.
ROUNDING = {torch.float64: 2.0**-47, torch.float32: 2.0**-18}


class ScoreNormalizer(nn.Module, ABC):
    """See the module's docstring."""

    @abstractmethod
    def forward(self, scores: Tensor, keep: Tensor) -> Tensor: ...


class Softmax(ScoreNormalizer):
    """exp(s_ij) / Σ_j exp(s_ij), over what is kept."""

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        """See the module's docstring."""
        return masked_softmax(scores, keep)


class TopK(ScoreNormalizer):
    """Softmax over the k largest scores of each row, and over what equals the k-th of them
    (Zhao et al. 2019, arXiv 1912.11637)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        check_int(1, k=k)
        self.k = k
        self.softmax = Softmax()

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        """See the module's docstring."""
        if self.k >= scores.shape[-1]:
            return self.softmax(scores, keep)
        seen = scores.detach().masked_fill(~keep, -torch.inf)
        best = seen.topk(self.k, -1).values
        least = best[..., -1:]
        if seen.dtype in ROUNDING:  # equal tokens must not part by their last digit
            least = least - ROUNDING[seen.dtype] * torch.maximum(best[..., :1].abs(), least.abs())
        return self.softmax(scores, keep & (seen >= least))
