"""ViT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.hf.families.base import (
    EMBED,
    FFN_NORM,
    LAYER,
    MIXER_NORM,
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Json,
    convert_activation,
    read_attention,
    require,
)
from regard.hf.families.bert import attention_forward
from regard.hf.weights import WeightMap, rule, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, PatchInput, module_spec


def height_and_width(size: Any) -> tuple[int, int]:
    """Sizes in a configuration are a number or a pair."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a ViT."""
    require(config, qkv_bias=True)
    height, width = height_and_width(config["image_size"])
    channels = config.get("num_channels", 3)
    activation = convert_activation(config.get("hidden_act", "gelu"))
    return ModelConfig(
        kind="encoder",
        head=head,
        dim=config["hidden_size"],
        heads=config["num_attention_heads"],
        input=PatchInput(
            height=height, width=width, patch_size=config["patch_size"], channels=channels
        ),
        layers=config["num_hidden_layers"],
        mixer=[module_spec("vanilla", bias=True)],
        ffn=[module_spec("mlp", hidden=config["intermediate_size"], activation=activation)],
        norm=module_spec("layer", eps=config.get("layer_norm_eps", 1e-12)),
        dropout=config.get("hidden_dropout_prob", 0.0),
    )


def add_class_position(cls_token: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Add the position of the class token to it, since ours has no position."""
    return cls_token[0, 0] + table[0, 0], table[0, 1:]


WEIGHTS = WeightMap(
    prefix="vit.",
    rules=(
        rule(
            "embeddings.cls_token embeddings.position_embeddings",
            f"{EMBED}.class_token {EMBED}.position.table",
            add_class_position,
        ),
        *weight_bias_rules("embeddings.patch_embeddings.projection", f"{EMBED}.project"),
        *weight_bias_rules("layers.{i}.attention.q_proj", f"{LAYER}.mixer.q"),
        *weight_bias_rules("layers.{i}.attention.k_proj", f"{LAYER}.mixer.k"),
        *weight_bias_rules("layers.{i}.attention.v_proj", f"{LAYER}.mixer.v"),
        *weight_bias_rules("layers.{i}.attention.o_proj", f"{LAYER}.mixer.out"),
        *weight_bias_rules("layers.{i}.layernorm_before", MIXER_NORM),
        *weight_bias_rules("layers.{i}.layernorm_after", FFN_NORM),
        *weight_bias_rules("layers.{i}.mlp.fc1", f"{LAYER}.ffn.up"),
        *weight_bias_rules("layers.{i}.mlp.fc2", f"{LAYER}.ffn.down"),
        *weight_bias_rules("layernorm", "backbone.norm"),
        *weight_bias_rules("classifier", "head.out"),
    ),
    renames=(  # files written before transformers 5
        ("encoder.layer.", "layers."),
        (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."),
        (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."),
        (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ),
)
CHECKPOINTS = {"vit": CheckpointFamily(convert_config, lambda config: WEIGHTS)}


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """All four projections; patches are never padded."""
    (height, width), (patch_height, patch_width) = (
        height_and_width(size) for size in (module.config.image_size, module.config.patch_size)
    )
    length = (height // patch_height) * (width // patch_width) + 1  # patches and the class token
    projections, heads = "q_proj k_proj v_proj o_proj", module.num_attention_heads
    return read_attention(module, projections, heads, length=length, pads=False)


ADAPTERS = {"ViTAttention": AttentionAdapter(attention_weights, attention_forward)}
