"""BigBird."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Json,
    read_attention,
    require,
    self_attention_cache,
)
from regard.hf.families.bert import (
    CLS_IGNORED,
    attention_rules,
    encoder_config,
    encoder_rules,
    head_rules,
    require_plain_encoder,
)
from regard.hf.modules import SwappedAttention
from regard.hf.padding_masks import padding_mask
from regard.hf.weights import WeightMap, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, TokenInput, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a BigBird, as transformers evaluates it.

    In evaluation transformers draws no random blocks. It takes the first block in their place, so
    that this block counts 1 + num_random_blocks times.
    """
    require_plain_encoder(config)
    require(config, use_bias=True)
    if config.get("attention_type", "block_sparse") == "original_full":
        mixer = module_spec("vanilla", bias=True)
    else:
        mixer = module_spec(
            "bigbird_hf",
            block=config.get("block_size", 64),
            first_block_repeats=config.get("num_random_blocks", 3),
        )
    tokens = TokenInput(
        vocab_size=config["vocab_size"],
        type_vocab_size=config.get("type_vocab_size", 2),
        norm=True,
        scale_embeddings=bool(config.get("rescale_embeddings", False)),
    )
    return encoder_config(config, head, mixer, input=tokens)


WEIGHTS = WeightMap(
    prefix="bert.",
    rules=(
        *encoder_rules(*attention_rules()),
        *head_rules("pooler"),
        *weight_bias_rules("classifier.dense", "head.hidden"),
        *weight_bias_rules("classifier.out_proj", "head.out"),
    ),
    ignored=CLS_IGNORED,
)
CHECKPOINTS = {"big_bird": CheckpointFamily(convert_config, lambda config: WEIGHTS)}


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Weights of the inner module, which BigBird itself exchanges when inputs are short."""
    heads, causal = module.self.num_attention_heads, bool(module.config.is_decoder)
    length = module.config.max_position_embeddings
    return read_attention(module.self, "query key value", heads, causal=causal, length=length)


def attention_forward(
    self: SwappedAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    to_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Two attention types have different masks; the norm behind attention is inside."""
    mask = attention_mask if to_mask is None else to_mask > 0
    mask = padding_mask(mask, hidden_states.shape[1], causal=self.mixer.causal)
    y = self.run(hidden_states, mask, cache=self_attention_cache(past_key_values))
    return self.kept["output"](y, hidden_states), None


ADAPTERS = {
    "BigBirdAttention": AttentionAdapter(
        attention_weights,
        attention_forward,
        kept_modules=("output",),
        kept_methods=("set_attention_type",),
    )
}
