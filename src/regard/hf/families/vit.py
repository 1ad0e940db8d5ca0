"""ViT."""

from __future__ import annotations

from torch import Tensor

from regard.hf.families.base import LAYER, Json, activation, require
from regard.hf.weights import WeightMap, linear_rules, norm_rules, rule
from regard.models.config import HeadConfig, ModelConfig, PatchInput, module_spec


def first_of_table(cls: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Their class token has a position, ours has none: the two are one vector."""
    return cls[0, 0] + table[0, 0], table[0, 1:]


VIT = WeightMap(
    prefix="vit.",
    rows=(
        rule(
            "embeddings.cls_token embeddings.position_embeddings",
            "trunk.embed.cls trunk.embed.position.table",
            first_of_table,
        ),
        *linear_rules("embeddings.patch_embeddings.projection", "trunk.embed.project"),
        *linear_rules("layers.{i}.attention.q_proj", f"{LAYER}.mixer.q"),
        *linear_rules("layers.{i}.attention.k_proj", f"{LAYER}.mixer.k"),
        *linear_rules("layers.{i}.attention.v_proj", f"{LAYER}.mixer.v"),
        *linear_rules("layers.{i}.attention.o_proj", f"{LAYER}.mixer.out"),
        *norm_rules("layers.{i}.layernorm_before", f"{LAYER}.around_mixer.norm"),
        *norm_rules("layers.{i}.layernorm_after", f"{LAYER}.around_ffn.norm"),
        *linear_rules("layers.{i}.mlp.fc1", f"{LAYER}.ffn.up"),
        *linear_rules("layers.{i}.mlp.fc2", f"{LAYER}.ffn.down"),
        *norm_rules("layernorm", "trunk.norm"),
        *linear_rules("classifier", "head.last"),
    ),
    renamed=(  # files from before transformers 5
        ("encoder.layer.", "layers."),
        (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."),
        (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."),
        (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ),
)


def vit_config(their: Json, head: HeadConfig | None) -> ModelConfig:
    """Their config.json as ours."""
    require(their, qkv_bias=True)
    size = their["image_size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return ModelConfig(
        kind="encoder",
        head=head,
        dim=their["hidden_size"],
        heads=their["num_attention_heads"],
        input=PatchInput(
            height=height,
            width=width,
            patch=their["patch_size"],
            channels=their.get("num_channels", 3),
        ),
        layers=their["num_hidden_layers"],
        mixer=[module_spec("vanilla", bias=True)],
        ffn=[
            module_spec(
                "mlp",
                hidden=their["intermediate_size"],
                activation=activation(their.get("hidden_act", "gelu")),
            )
        ],
        norm=module_spec("layer", eps=their.get("layer_norm_eps", 1e-12)),
        dropout=their.get("hidden_dropout_prob", 0.0),
    )
