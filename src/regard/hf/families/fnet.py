"""FNet."""

from __future__ import annotations

from regard.hf.families.base import EMBED, CheckpointFamily, Json, require
from regard.hf.families.bert import CLS_IGNORED, encoder_config, encoder_rules, head_rules
from regard.hf.weights import WeightMap, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, TokenInput, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of an FNet."""
    require(config, use_tpu_fourier_optimizations=False)
    tokens = TokenInput(
        vocab_size=config["vocab_size"],
        type_vocab_size=config.get("type_vocab_size", 4),
        norm=True,
        embedding_dim=config["hidden_size"],
    )
    return encoder_config(
        {"num_attention_heads": 1, **config}, head, module_spec("fnet"), input=tokens
    )


WEIGHTS = WeightMap(
    prefix="fnet.",
    rules=(
        *encoder_rules(mixer_norm="fourier.output"),
        *weight_bias_rules("embeddings.projection", f"{EMBED}.project"),
        *head_rules(),
    ),
    ignored=CLS_IGNORED,
)
CHECKPOINTS = {"fnet": CheckpointFamily(convert_config, lambda config: WEIGHTS)}
