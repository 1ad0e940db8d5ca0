"""RoBERTa, XLM-RoBERTa and CamemBERT. Their attention is BERT's."""

from __future__ import annotations

from regard.hf.families.base import CheckpointFamily, Json
from regard.hf.families.bert import (
    IGNORED,
    attention_rules,
    encoder_config,
    encoder_rules,
    require_plain_encoder,
)
from regard.hf.weights import Transform, WeightMap, rule, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, module_spec

HEAD_RULES = (
    *weight_bias_rules("lm_head.dense", "head.transform"),
    *weight_bias_rules("lm_head.layer_norm", "head.norm"),
    rule("lm_head.decoder.weight", "head.lm_head.proj.weight"),
    rule("lm_head.bias", "head.lm_head.proj.bias"),
    *weight_bias_rules("classifier.dense", "head.hidden"),
    *weight_bias_rules("classifier.out_proj", "head.out"),
    *weight_bias_rules("classifier", "head.out"),  # of token classification
)
LM_IGNORED = (*IGNORED, "lm_head.decoder.bias")


def first_position(config: Json) -> int:
    """Positions start after the padding index."""
    return int(config.get("pad_token_id", 1)) + 1


def drop_rows(count: int) -> Transform:
    """Drop the first rows of a position table, which are never used."""
    return lambda table: table[count:]


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a RoBERTa."""
    require_plain_encoder(config)
    length = config["max_position_embeddings"] - first_position(config)
    return encoder_config(config, head, module_spec("vanilla", bias=True), length=length)


def weight_map(config: Json) -> WeightMap:
    """Weights of a RoBERTa."""
    rules = encoder_rules(*attention_rules(), position=drop_rows(first_position(config)))
    return WeightMap(prefix="roberta.", rules=(*rules, *HEAD_RULES), ignored=LM_IGNORED)


CHECKPOINTS = dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert"), CheckpointFamily(convert_config, weight_map)
)
