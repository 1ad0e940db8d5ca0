"""Llama, Mistral and Qwen2: grouped-query attention with rotary embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    read_attention,
    self_attention_cache,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import padding_mask
from regard.position.rotary import Rope


def rotary_embedding(config: Any) -> Rope:
    """The rotary embedding of a configuration: the default kind, or interpolated positions."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported(
            f"Rotary embeddings with {rope} are not supported, only rope_type 'default' and "
            "'linear' over the whole head: set an attention name instead."
        )
    return Rope(base=rope["rope_theta"], linear=rope["factor"] if kind == "linear" else 1.0)


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Several query heads share a key and value head; positions are rotary."""
    config = module.config
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if window is not None:
        raise Unsupported(
            f"The layer attends within a window of {window} tokens: set an attention name, which "
            'keeps the window: model.set_attn_implementation("regard:local?window=256").'
        )
    return read_attention(
        module,
        "q_proj k_proj v_proj o_proj",
        config.num_attention_heads,
        causal=True,
        scale=module.scaling,
        kv_heads=config.num_key_value_heads,
        rotary=rotary_embedding(config),
    )


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output; `SwappedAttention.run` collects attention maps.

    Positions count from the first token of the row. Rotary attention depends on their differences
    only, so left padding does not matter.
    """
    mask = padding_mask(attention_mask, hidden_states.shape[1], causal=True)
    return self.run(hidden_states, mask, cache=self_attention_cache(past_key_values)), None


_ADAPTER = AttentionAdapter(attention_weights, attention_forward)
ADAPTERS = {
    "LlamaAttention": _ADAPTER,
    "MistralAttention": _ADAPTER,
    "Qwen2Attention": _ADAPTER,
}
