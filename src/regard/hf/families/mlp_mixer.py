"""MLP-Mixer with the tensor names of timm. Sizes are read from the tensors."""

from __future__ import annotations

import math

from regard.errors import Unsupported
from regard.hf.families.base import EMBED, FFN_NORM, LAYER, MIXER_NORM, Tensors, count_blocks
from regard.hf.weights import WeightMap, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, PatchInput, module_spec

WEIGHTS = WeightMap(
    rules=(
        *weight_bias_rules("stem.proj", f"{EMBED}.project"),
        *weight_bias_rules("blocks.{i}.norm1", MIXER_NORM),
        *weight_bias_rules("blocks.{i}.mlp_tokens.fc1", f"{LAYER}.mixer.up"),
        *weight_bias_rules("blocks.{i}.mlp_tokens.fc2", f"{LAYER}.mixer.down"),
        *weight_bias_rules("blocks.{i}.norm2", FFN_NORM),
        *weight_bias_rules("blocks.{i}.mlp_channels.fc1", f"{LAYER}.ffn.up"),
        *weight_bias_rules("blocks.{i}.mlp_channels.fc2", f"{LAYER}.ffn.down"),
        *weight_bias_rules("norm", "backbone.norm"),
        *weight_bias_rules("head", "head.out"),
    )
)


def convert(
    tensors: Tensors, head: HeadConfig | None, image_size: int = 224
) -> tuple[ModelConfig, WeightMap]:
    """Configuration and weight map of a `mixer_*` model.

    The head of timm is a `SequenceClassificationHeadConfig` with pooling="mean". The weights
    determine the image size.
    """
    dim, channels, patch, _ = tensors["stem.proj.weight"].shape
    hidden, patches = tensors["blocks.0.mlp_tokens.fc1.weight"].shape
    side = math.isqrt(patches)
    if side * side != patches:
        raise Unsupported(f"{patches} patches are not supported: images must be square.")
    config = ModelConfig(
        kind="encoder",
        input=PatchInput(
            height=side * patch,
            width=side * patch,
            patch_size=patch,
            channels=channels,
            class_token=False,
        ),
        head=head,
        dim=dim,
        heads=1,
        layers=count_blocks(tensors, "blocks"),
        mixer=[module_spec("mlp_mixer", hidden=hidden)],
        position=module_spec("none"),
        ffn=[module_spec("mlp", hidden=tensors["blocks.0.mlp_channels.fc1.weight"].shape[0])],
        norm=module_spec("layer", eps=1e-6),
    )
    return config, WEIGHTS
