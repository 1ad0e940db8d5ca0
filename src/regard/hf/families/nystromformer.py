"""Nyströmformer."""

from __future__ import annotations

from regard.errors import Unsupported
from regard.hf.families.base import LAYER, CheckpointFamily, Json
from regard.hf.families.bert import (
    CLS_IGNORED,
    attention_rules,
    encoder_config,
    encoder_rules,
    head_rules,
)
from regard.hf.families.roberta import drop_rows
from regard.hf.weights import WeightMap, rule, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a Nyströmformer."""
    landmarks = config["num_landmarks"]
    if landmarks == config.get("segment_means_seq_len"):
        raise Unsupported(
            "num_landmarks equal to segment_means_seq_len is not supported: the attention of this "
            "model is dense."
        )
    mixer = module_spec(
        "nystrom", landmarks=landmarks, kernel=config.get("conv_kernel_size"), bias=True
    )
    return encoder_config(config, head, mixer)


WEIGHTS = WeightMap(
    prefix="nystromformer.",
    rules=(
        *encoder_rules(*attention_rules(), position=drop_rows(2)),
        rule("encoder.layer.{i}.attention.self.conv.weight", f"{LAYER}.mixer.inner.conv.weight"),
        *head_rules("classifier.dense", "classifier.out_proj"),
        *weight_bias_rules("classifier", "head.out"),
    ),
    ignored=CLS_IGNORED,
)
CHECKPOINTS = {"nystromformer": CheckpointFamily(convert_config, lambda config: WEIGHTS)}
