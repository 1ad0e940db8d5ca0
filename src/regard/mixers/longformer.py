"""Longformer: a sliding window, and global tokens with their own projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.mixer import Can, Mixer, MultiHead, State
from regard.pattern import GlobalMaskKeys, GlobalMaskQueries, Pattern


class Longformer(Mixer):
    """Beltagy et al. 2020, arXiv 2004.05150.

    Tokens attend to a window and to the global tokens. Global tokens attend to all tokens, with a
    second set of query, key and value projections. The output projection is shared.

    Args:
        dim: Model width.
        heads: Number of heads.
        local: Pattern of the window, possibly different for each head.
        bias: Add a bias to the projections.
        causal: Attend to earlier tokens only; there are no global tokens then.
    """

    runs_joined_states = True

    def __init__(
        self, dim: int, heads: int, local: Pattern, *, bias: bool = False, causal: bool = False
    ) -> None:
        near = SoftmaxAttention(local if causal else local | GlobalMaskKeys())
        can = near.can & Can("global_attention_mask")
        if causal:
            reason = "as in the paper, the causal form has a window only"
            can = Can(global_attention_mask=reason) & can
        super().__init__(dim, can=can, causal=causal, length=near.length)
        self.local = MultiHead(dim, heads, near, bias=bias, causal=causal)
        self.global_heads = None
        if not causal:
            everything = SoftmaxAttention(GlobalMaskQueries())
            self.global_heads = MultiHead(dim, heads, everything, bias=bias)
            self.global_heads.out = nn.Identity()

    def initial_state(self) -> State:
        """Empty KV cache of the window."""
        return self.local.initial_state()

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        global_attention_mask = _drop_masked(global_attention_mask, mask)
        y, state = self.local.mix_heads(x, context, mask, state, global_attention_mask, attn_mask)
        if global_attention_mask is not None and self.global_heads is not None:
            z, _ = self.global_heads.mix_heads(
                x, context, mask, None, global_attention_mask, attn_mask
            )
            y = torch.where(global_attention_mask[..., None], z, y)
        return self.local.out(y), state

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map; the rows of global tokens come from their own projections."""
        global_attention_mask = _drop_masked(global_attention_mask, mask)
        near = self.local.weights(x, context, mask, global_attention_mask, attn_mask)
        if global_attention_mask is None or self.global_heads is None:
            return near
        far = self.global_heads.weights(x, context, mask, global_attention_mask, attn_mask)
        return torch.where(global_attention_mask[:, None, :, None], far, near)


def _drop_masked(global_attention_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Masked tokens are not global."""
    if global_attention_mask is None or mask is None:
        return global_attention_mask
    return global_attention_mask & mask
