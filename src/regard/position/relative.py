"""Priors by relative position that are learned: a table for the windows of an image, and labels for kinds of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import check_int
from regard.prior import Prior

SPREAD = 0.02  # of the learned numbers before training


class WindowBias(Prior):
    """B[y_i − y_j, x_i − x_j] for each head, for cells of one window of `rows` x `cols` on an image of `width` columns in
    raster order (Liu et al. 2021, arXiv 2103.14030): a table of (2 rows − 1) x (2 cols − 1) for each head."""

    def __init__(self, heads: int, width: int, rows: int, cols: int) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width, rows=rows, cols=cols)
        self.heads, self.width = heads, width
        self.table = nn.Parameter(torch.randn(heads, 2 * rows - 1, 2 * cols - 1) * SPREAD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rows, cols = self.table.shape[1:]
        y = (q_pos // self.width - k_pos // self.width + rows // 2).clamp(
            0, rows - 1
        )  # cells of two windows never meet
        x = (q_pos % self.width - k_pos % self.width + cols // 2).clamp(0, cols - 1)
        return self.table[:, y, x]


class RelativeLabels(Prior):
    """q_i · a_l(i,j) / √e, with a vector a for each label of a pair and each head (Shaw et al. 2018, arXiv 1803.02155; for
    global and long tokens: Ainslie et al. 2020, arXiv 2004.08483).

    The first `globals` tokens are of one kind, the others of another.  Pairs of a kind are labelled by k − q, clipped to
    −clip .. clip; pairs of two kinds by one label.  With `segment`, long tokens belong to the global ones, `segment` of them
    to each in order, and there are two such labels: they belong together, or not.
    """

    uses_qk = True

    def __init__(
        self, heads: int, width: int, *, globals: int, clip: int, segment: int | None = None
    ) -> None:
        super().__init__()
        check_int(1, heads=heads, width=width)
        check_int(0, globals=globals, clip=clip)
        if segment is not None:
            check_int(1, segment=segment)
        self.heads, self.globals, self.clip, self.segment = heads, globals, clip, segment
        labels = 2 * clip + 1 + (1 if segment is None else 2)
        self.vectors = nn.Parameter(torch.randn(heads, labels, width) * SPREAD)

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        each = torch.einsum("bh...e,hle->bh...l", q, self.vectors) * self.vectors.shape[-1] ** -0.5
        return each.gather(-1, self.label(q_pos, k_pos).expand(*each.shape[:-1], -1))

    def label(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The number of the label of each pair."""
        near = (k_pos - q_pos).clamp(-self.clip, self.clip) + self.clip
        across = torch.full_like(near, 2 * self.clip + 1)
        if self.segment is not None:
            first, last = torch.minimum(q_pos, k_pos), torch.maximum(q_pos, k_pos)
            across = across + ((last - self.globals) // self.segment != first)
        return torch.where((q_pos < self.globals) == (k_pos < self.globals), near, across)
