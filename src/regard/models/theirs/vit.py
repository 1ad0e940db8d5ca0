"""ViT."""

from __future__ import annotations

from torch import Tensor

from regard.models.config import Config, Head, Patches, part
from regard.models.theirs.common import LAYER, Json, activation, require
from regard.models.weights import WeightMap, dense, norm, row


def first_of_table(cls: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Their class token has a position, ours has none: the two are one vector."""
    return cls[0, 0] + table[0, 0], table[0, 1:]


VIT = WeightMap(
    prefix="vit.",
    rows=(
        row(
            "embeddings.cls_token embeddings.position_embeddings", "trunk.embed.cls trunk.embed.position.table", first_of_table
        ),
        *dense("embeddings.patch_embeddings.projection", "trunk.embed.project"),
        *dense("layers.{i}.attention.q_proj", f"{LAYER}.mixer.q"),
        *dense("layers.{i}.attention.k_proj", f"{LAYER}.mixer.k"),
        *dense("layers.{i}.attention.v_proj", f"{LAYER}.mixer.v"),
        *dense("layers.{i}.attention.o_proj", f"{LAYER}.mixer.out"),
        *norm("layers.{i}.layernorm_before", f"{LAYER}.around_mixer.norm"),
        *norm("layers.{i}.layernorm_after", f"{LAYER}.around_ffn.norm"),
        *dense("layers.{i}.mlp.fc1", f"{LAYER}.ffn.up"),
        *dense("layers.{i}.mlp.fc2", f"{LAYER}.ffn.down"),
        *norm("layernorm", "trunk.norm"),
        *dense("classifier", "head.last"),
    ),
    renamed=(  # files from before transformers 5
        ("encoder.layer.", "layers."), (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."), (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."), (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ),
)  # fmt: skip


def vit_config(their: Json, head: Head | None) -> Config:
    """Their config.json as ours."""
    require(their, qkv_bias=True)
    size = their["image_size"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return Config(
        kind="encoder", head=head, dim=their["hidden_size"], heads=their["num_attention_heads"],
        input=Patches(height=height, width=width, patch=their["patch_size"], channels=their.get("num_channels", 3)),
        layers=their["num_hidden_layers"], mixer=[part("vanilla", bias=True)],
        ffn=[part("mlp", hidden=their["intermediate_size"], activation=activation(their.get("hidden_act", "gelu")))],
        norm=part("layer", eps=their.get("layer_norm_eps", 1e-12)), dropout=their.get("hidden_dropout_prob", 0.0),
    )  # fmt: skip
