"""Longformer: a window for all, and marked tokens that see all, with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.mixer import Can, Mixer, MultiHead, State
from regard.pattern import MarkedKeys, MarkedQueries, Pattern


class Longformer(Mixer):
    """Beltagy et al. 2020, arXiv 2004.05150: y_i = window attention of token i, which also sees the marked tokens;
    where i is marked, full attention with a second set of query, key and value projections instead.  The output projection
    is one for both.

    local    the pattern of the others: a band, dilated perhaps, perhaps different for each head
    bias     whether the projections have one
    """

    def __init__(self, dim: int, heads: int, local: Pattern, *, bias: bool = False, causal: bool = False) -> None:
        near = SoftmaxAttention(local if causal else local | MarkedKeys())
        can = Can(marks="the causal form has a window only, as in the paper") & near.can if causal else near.can
        super().__init__(dim, can=can, causal=causal, length=near.length)
        self.local = MultiHead(dim, heads, near, bias=bias, causal=causal)
        self.everywhere = None if causal else MultiHead(dim, heads, SoftmaxAttention(MarkedQueries()), bias=bias)
        if self.everywhere is not None:
            self.everywhere.out = nn.Identity()

    def start(self) -> State:
        """The cache of the window."""
        return self.local.start()

    def mix(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, state: State, marks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        marks = _real(marks, mask)
        y, state = self.local.mix_heads(x, memory, mask, state, marks)
        if marks is not None and self.everywhere is not None:
            z, _ = self.everywhere.mix_heads(x, memory, mask, None, marks)
            y = torch.where(marks[..., None], z, y)
        return self.local.out(y), state

    def weights(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, marks: Tensor | None = None) -> Tensor:
        """The map of the window; for marked tokens, that of their own attention."""
        marks = _real(marks, mask)
        near = self.local.weights(x, memory, mask, marks=marks)
        if marks is None or self.everywhere is None:
            return near
        far = self.everywhere.weights(x, memory, mask, marks=marks)
        return torch.where(marks[:, None, :, None], far, near)


def _real(marks: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A left-out token is nobody's global."""
    return marks if marks is None or mask is None else marks & mask
