"""Longformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import (
    LAYER,
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Json,
    linear_weights,
    read_attention,
    require,
)
from regard.hf.families.bert import attention_rules, encoder_config, encoder_rules
from regard.hf.families.roberta import HEAD_RULES, LM_IGNORED, drop_rows, first_position
from regard.hf.modules import SwappedAttention
from regard.hf.weights import WeightMap, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a Longformer. Its window counts both sides, `window` one."""
    require(config, position_embedding_type="absolute")
    window, layers = config["attention_window"], config["num_hidden_layers"]
    windows = [window] * layers if isinstance(window, int) else list(window)
    if len(windows) != layers or any(size % 2 for size in windows):
        raise Unsupported(
            f"attention_window={window!r} is not supported: it must be an even number, or one for "
            f"each of {layers} layers."
        )
    mixers = [module_spec("longformer", window=size // 2, bias=True) for size in windows]
    length = config["max_position_embeddings"] - first_position(config)
    return encoder_config(
        config, head, mixers[:1] if len(set(windows)) == 1 else mixers, length=length
    )


def weight_map(config: Json) -> WeightMap:
    """Two sets of projections: of the window, and of tokens with global attention."""
    source, target = "encoder.layer.{i}.attention.self", f"{LAYER}.mixer.global_heads"
    rules = encoder_rules(
        *attention_rules(f"{LAYER}.mixer.local"),
        *weight_bias_rules(f"{source}.query_global", f"{target}.q"),
        *weight_bias_rules(f"{source}.key_global", f"{target}.k"),
        *weight_bias_rules(f"{source}.value_global", f"{target}.v"),
        position=drop_rows(first_position(config)),
    )
    return WeightMap(prefix="longformer.", rules=(*rules, *HEAD_RULES), ignored=LM_IGNORED)


CHECKPOINTS = {"longformer": CheckpointFamily(convert_config, weight_map)}


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """As BERT, with separate projections of tokens with global attention."""
    q, k, v = linear_weights(module.query_global, module.key_global, module.value_global)
    return read_attention(module, "query key value", module.num_heads, global_qkv=(q, k, v))


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Any = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Pass tokens with global attention on to mixers that support a global attention mask."""
    if output_attentions:
        raise Unsupported(
            "Attention maps of a swapped Longformer are not supported: its own maps have the shape "
            "of its window."
        )
    mask = None if is_index_masked is None or not bool(is_index_masked.any()) else ~is_index_masked
    global_mask = is_index_global_attn if is_global_attn else None
    return (self.run(hidden_states, mask, global_attention_mask=global_mask),)


ADAPTERS = {"LongformerSelfAttention": AttentionAdapter(attention_weights, attention_forward)}
