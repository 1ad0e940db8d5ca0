"""Longformer: a window for all, and marked tokens that see all, with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.mixer import Can, Mixer, MultiHead, State
from regard.pattern import GlobalMaskKeys, GlobalMaskQueries, Pattern


class Longformer(Mixer):
    """Beltagy et al. 2020, arXiv 2004.05150: y_i = window attention of token i, which also sees the marked tokens;
    where i is marked, full attention with a second set of query, key and value projections instead.  The output projection
    is one for both.

    local    the pattern of the others: a band, dilated perhaps, perhaps different for each head
    bias     whether the projections have one
    """

    def __init__(
        self, dim: int, heads: int, local: Pattern, *, bias: bool = False, causal: bool = False
    ) -> None:
        near = SoftmaxAttention(local if causal else local | GlobalMaskKeys())
        can = (
            Can(global_attention_mask="the causal form has a window only, as in the paper")
            & near.can
            if causal
            else near.can
        )
        super().__init__(dim, can=can, causal=causal, length=near.length)
        self.local = MultiHead(dim, heads, near, bias=bias, causal=causal)
        self.global_heads = (
            None
            if causal
            else MultiHead(dim, heads, SoftmaxAttention(GlobalMaskQueries()), bias=bias)
        )
        if self.global_heads is not None:
            self.global_heads.out = nn.Identity()

    def initial_state(self) -> State:
        """The cache of the window."""
        return self.local.initial_state()

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        global_attention_mask = _real(global_attention_mask, mask)
        y, state = self.local.mix_heads(x, context, mask, state, global_attention_mask)
        if global_attention_mask is not None and self.global_heads is not None:
            z, _ = self.global_heads.mix_heads(x, context, mask, None, global_attention_mask)
            y = torch.where(global_attention_mask[..., None], z, y)
        return self.local.out(y), state

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The map of the window; for marked tokens, that of their own attention."""
        global_attention_mask = _real(global_attention_mask, mask)
        near = self.local.weights(x, context, mask, global_attention_mask=global_attention_mask)
        if global_attention_mask is None or self.global_heads is None:
            return near
        far = self.global_heads.weights(
            x, context, mask, global_attention_mask=global_attention_mask
        )
        return torch.where(global_attention_mask[:, None, :, None], far, near)


def _real(global_attention_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A left-out token is nobody's global."""
    return (
        global_attention_mask
        if global_attention_mask is None or mask is None
        else global_attention_mask & mask
    )
