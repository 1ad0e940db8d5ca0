"""DistilBERT."""

from __future__ import annotations

from typing import Any

from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    linear_weights,
    max_positions,
)
from regard.hf.families.bert import attention_forward


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """All four projections."""
    q, k, v, out = linear_weights(module.q_lin, module.k_lin, module.v_lin, module.out_lin)
    return AttentionWeights(module.dim, module.n_heads, q, k, v, out, length=max_positions(module))


ADAPTERS = {"DistilBertSelfAttention": AttentionAdapter(attention_weights, attention_forward)}
