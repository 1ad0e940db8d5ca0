"""DistilBERT."""

from __future__ import annotations

from typing import Any

from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    read_attention,
)
from regard.hf.families.bert import attention_forward


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """All four projections."""
    return read_attention(module, "q_lin k_lin v_lin out_lin", module.n_heads)


ADAPTERS = {"DistilBertSelfAttention": AttentionAdapter(attention_weights, attention_forward)}
