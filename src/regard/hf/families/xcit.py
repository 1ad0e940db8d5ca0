"""XCiT with the tensor names of timm. Sizes are read from the tensors.

A layer of timm becomes two layers: cross-covariance attention, then local patch interaction with
the feed-forward layer. The scale γ of each sub-layer is multiplied into its last weights, and
position embeddings are computed for the image size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.hf.families.base import EMBED, Tensors, count_blocks
from regard.hf.weights import WeightMap, WeightRule, rule, weight_bias_rules
from regard.models.config import HeadConfig, ModelConfig, PatchInput, module_spec


def convert(
    tensors: Tensors, head: HeadConfig | None, image_size: int = 224
) -> tuple[ModelConfig, WeightMap]:
    """Configuration and weight map of an `xcit_*` model.

    Args:
        image_size: Side of the image, which the tensors do not determine.
    """
    steps = sorted(
        {int(name.split(".")[2]) for name in tensors if name.startswith("patch_embed.proj.")}
    )
    patch, channels = 1 << len(steps), tensors["patch_embed.proj.0.0.weight"].shape[1]
    side = image_size // patch
    layers, class_layers = count_blocks(tensors, "blocks"), count_blocks(tensors, "cls_attn_blocks")
    hidden = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    config = ModelConfig(
        kind="encoder",
        dim=len(tensors["norm.weight"]),
        heads=tensors["blocks.0.attn.temperature"].shape[0],
        layers=2 * layers,
        mixer=[
            module_spec("xcit_component", width=side, component=component)
            for component in ("covariance", "patches")
        ],
        head=head,
        input=PatchInput(
            height=image_size,
            width=image_size,
            patch_size=patch,
            channels=channels,
            class_token=False,
            stem="conv",
        ),
        ffn=[None, module_spec("mlp", hidden=hidden)],
        norm=module_spec("layer", eps=1e-6),
        stack=module_spec("class_attention", class_layers=class_layers, hidden=hidden),
    )
    projection = "pos_embed.token_projection"
    rules: list[WeightRule] = [
        rule(
            f"{projection}.weight {projection}.bias",
            f"{EMBED}.position.table",
            fourier_positions(side),
        ),
        *weight_bias_rules("norm", "backbone.norm"),
        *weight_bias_rules("head", "head.out"),
        rule("cls_token", "backbone.stack.class_token", torch.flatten),
    ]
    for step in steps:
        source, target = f"patch_embed.proj.{step}", f"{EMBED}.project.{step}"
        rules += [
            rule(f"{source}.0.weight", f"{target}.0.weight"),
            *batch_norm_rules(f"{source}.1", f"{target}.1"),
        ]
    for i in range(layers):
        rules += layer_rules(
            f"blocks.{i}", f"backbone.stack.layers.{2 * i}", f"backbone.stack.layers.{2 * i + 1}"
        )
    for i in range(class_layers):
        rules += class_layer_rules(f"cls_attn_blocks.{i}", f"backbone.stack.class_layers.{i}")
    return config, WeightMap(tuple(rules))


def layer_rules(source: str, first: str, second: str) -> list[WeightRule]:
    """One layer of timm as two layers."""
    mixer, local = f"{first}.mixer.component", f"{second}.mixer.component"
    split = [" ".join(f"{mixer}.{name}.{kind}" for name in "qkv") for kind in ("weight", "bias")]
    return [
        *weight_bias_rules(f"{source}.norm1", f"{first}.mixer_residual.norm"),
        rule(f"{source}.attn.qkv.weight", split[0], lambda tensor: tensor.chunk(3)),
        rule(f"{source}.attn.qkv.bias", split[1], lambda tensor: tensor.chunk(3)),
        rule(f"{source}.attn.temperature", f"{mixer}.sharpness", torch.flatten),
        *scaled_rules(f"{source}.attn.proj", f"{source}.gamma1", f"{mixer}.out"),
        *weight_bias_rules(f"{source}.norm3", f"{second}.mixer_residual.norm"),
        *weight_bias_rules(f"{source}.local_mp.conv1", f"{local}.first"),
        *batch_norm_rules(f"{source}.local_mp.bn", f"{local}.norm.norm"),
        *scaled_rules(f"{source}.local_mp.conv2", f"{source}.gamma3", f"{local}.second"),
        *weight_bias_rules(f"{source}.norm2", f"{second}.ffn_residual.norm"),
        *weight_bias_rules(f"{source}.mlp.fc1", f"{second}.ffn.up"),
        *scaled_rules(f"{source}.mlp.fc2", f"{source}.gamma2", f"{second}.ffn.down"),
    ]


def class_layer_rules(source: str, target: str) -> list[WeightRule]:
    """A layer in which only the class token attends."""
    projections = (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "out"))
    return [
        *weight_bias_rules(f"{source}.norm1", f"{target}.norm1"),
        *weight_bias_rules(f"{source}.norm2", f"{target}.norm2"),
        *(
            r
            for a, b in projections
            for r in weight_bias_rules(f"{source}.attn.{a}", f"{target}.attention.attend.{b}")
        ),
        *weight_bias_rules(f"{source}.mlp.fc1", f"{target}.ffn.up"),
        *weight_bias_rules(f"{source}.mlp.fc2", f"{target}.ffn.down"),
        rule(f"{source}.gamma1", f"{target}.gamma1"),
        rule(f"{source}.gamma2", f"{target}.gamma2"),
    ]


def batch_norm_rules(source: str, target: str) -> list[WeightRule]:
    """Parameters and statistics of a batch norm."""
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [rule(f"{source}.{kind}", f"{target}.{kind}") for kind in kinds]


def scaled_rules(source: str, scale: str, target: str) -> list[WeightRule]:
    """γ (W x + b) = (γ W) x + γ b; the first dimension of W is that of the output."""

    def multiply(tensor: Tensor, gamma: Tensor) -> Tensor:
        return tensor * gamma.view(-1, *[1] * (tensor.dim() - 1))

    return [
        rule(f"{source}.{kind} {scale}", f"{target}.{kind}", multiply)
        for kind in ("weight", "bias")
    ]


def fourier_positions(
    side: int, hidden: int = 32, temperature: float = 10000.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """The position table (side², d) of an image, a projection of Fourier features."""

    def table(weight: Tensor, bias: Tensor) -> Tensor:
        position = torch.arange(1, side + 1, dtype=torch.float64) / (side + 1e-6) * 2 * math.pi
        period = temperature ** (2 * (torch.arange(hidden) // 2).double() / hidden)
        angle = position[:, None] / period
        features = torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), 2).flatten(
            1
        )  # (side, hidden)
        rows, columns = features[:, None].expand(-1, side, -1), features[None].expand(side, -1, -1)
        both = torch.cat((rows, columns), -1).flatten(0, 1)
        return (both @ weight.flatten(1).double().T + bias.double()).to(weight.dtype)

    return table
