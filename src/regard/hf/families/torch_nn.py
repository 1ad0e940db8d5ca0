"""`nn.MultiheadAttention`, and so `nn.TransformerEncoderLayer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    LinearWeights,
    linear_weights,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import check_causal_mask


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Fused projections of queries, keys and values."""
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise Unsupported(
            "nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not supported."
        )
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        LinearWeights(w, b) for w, b in zip(module.in_proj_weight.chunk(3), biases, strict=True)
    )
    (out,) = linear_weights(module.out_proj)
    return AttentionWeights(module.embed_dim, module.num_heads, q, k, v, out, causal=None)


def attention_forward(
    self: SwappedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `nn.MultiheadAttention.forward`, with the map (b, n, m) or (b, h, n, m)."""
    if key is not value:
        raise Unsupported(
            "Keys and values from two sequences are not supported: a mixer reads one."
        )

    def batch_first(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    x, context = batch_first(query), None if key is query else batch_first(key)
    check_causal_mask(attn_mask, x.shape[1], causal=self.mixer.causal, is_causal=is_causal)
    mask = key_padding_mask
    if mask is not None:  # torch's is True, or -inf, at padding
        mask = (mask == 0 if mask.is_floating_point() else ~mask).view(x.shape[0], -1)
    y = self.run(x, mask, context=context)
    weights = (
        self.mixer.attention_map(x, context, mask=mask)
        if need_weights and self.mixer.can.maps
        else None
    )
    weights = weights.mean(1) if weights is not None and average_attn_weights else weights
    if query.dim() == 2:
        return y.squeeze(0), None if weights is None else weights.squeeze(0)
    return y if self.batch_first else y.transpose(0, 1), weights


ADAPTERS = {"MultiheadAttention": AttentionAdapter(attention_weights, attention_forward)}
