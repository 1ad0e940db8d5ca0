"""MLP-Mixer and XCiT by the names of timm, whose config.json says little: sizes are read off the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families.base import LAYER
from regard.hf.weights import WeightMap, WeightRule, linear_rules, norm_rules, rule
from regard.models.config import HeadConfig, ModelConfig, PatchInput, module_spec

Tensors = Mapping[str, Tensor]


def depth(tensors: Tensors, stem: str) -> int:
    """How many layers there are of that name."""
    return 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith(f"{stem}."))


def side_of(length: int) -> int:
    """The side of a square of so many patches."""
    side = math.isqrt(length)
    if side * side != length:
        raise Unsupported(f"the image has {length} patches, which make no square")
    return side


# ---------------------------------------------------------------------------------------------- MLP-Mixer
MIXER = WeightMap(
    rows=(
        *linear_rules("stem.proj", "trunk.embed.project"),
        *norm_rules("blocks.{i}.norm1", f"{LAYER}.around_mixer.norm"),
        *linear_rules("blocks.{i}.mlp_tokens.fc1", f"{LAYER}.mixer.up"),
        *linear_rules("blocks.{i}.mlp_tokens.fc2", f"{LAYER}.mixer.down"),
        *norm_rules("blocks.{i}.norm2", f"{LAYER}.around_ffn.norm"),
        *linear_rules("blocks.{i}.mlp_channels.fc1", f"{LAYER}.ffn.up"),
        *linear_rules("blocks.{i}.mlp_channels.fc2", f"{LAYER}.ffn.down"),
        *norm_rules("norm", "trunk.norm"),
        *linear_rules("head", "head.last"),
    )
)


def mixer_config(tensors: Tensors, head: HeadConfig | None) -> ModelConfig:
    """The sizes of their tensors as a configuration; Classify(classes=..., pooling="mean") is their head."""
    dim, channels, patch, _ = tensors["stem.proj.weight"].shape
    hidden, length = tensors["blocks.0.mlp_tokens.fc1.weight"].shape
    side = side_of(length) * patch
    return ModelConfig(
        kind="encoder",
        input=PatchInput(height=side, width=side, patch=patch, channels=channels, cls=False),
        head=head,
        dim=dim,
        heads=1,
        layers=depth(tensors, "blocks"),
        mixer=[module_spec("mlp_mixer", hidden=hidden)],
        position=module_spec("none"),
        ffn=[module_spec("mlp", hidden=tensors["blocks.0.mlp_channels.fc1.weight"].shape[0])],
        norm=module_spec("layer", eps=1e-6),
    )


def mixer_map(tensors: Tensors) -> WeightMap:
    """See `MIXER`."""
    return MIXER


# ---------------------------------------------------------------------------------------------- XCiT
def xcit_config(tensors: Tensors, head: HeadConfig | None, image: int = 224) -> ModelConfig:
    """A layer of theirs is two of ours: channels attend in the first; the second has the neighbours, and feeds forward.

    image   the side of an image, which their tensors do not tell
    """
    steps = sorted(
        {int(name.split(".")[2]) for name in tensors if name.startswith("patch_embed.proj.")}
    )
    patch, (dim, channels) = (
        1 << len(steps),
        (len(tensors["norm.weight"]), tensors["patch_embed.proj.0.0.weight"].shape[1]),
    )
    columns, heads = image // patch, tensors["blocks.0.attn.temperature"].shape[0]
    hidden = tensors["blocks.0.mlp.fc1.weight"].shape[0]
    half = [
        module_spec("xcit_component", width=columns, component=component)
        for component in ("covariance", "patches")
    ]
    return ModelConfig(
        kind="encoder",
        dim=dim,
        heads=heads,
        layers=2 * depth(tensors, "blocks"),
        mixer=half,
        head=head,
        input=PatchInput(
            height=image,
            width=image,
            patch=patch,
            channels=channels,
            cls=False,
            stem="convolutions",
        ),
        ffn=[None, module_spec("mlp", hidden=hidden)],
        norm=module_spec("layer", eps=1e-6),
        stack=module_spec("class_last", last=depth(tensors, "cls_attn_blocks"), hidden=hidden),
    )


def xcit_map(tensors: Tensors, image: int = 224) -> WeightMap:
    """Three folds: their scale of each sub-layer goes into its last weights; their positions, a projection of waves, are
    computed for the size of the image; and queries, keys and values, one tensor, become three."""
    steps = sorted(
        {int(name.split(".")[2]) for name in tensors if name.startswith("patch_embed.proj.")}
    )
    rows: list[WeightRule] = [
        rule(
            "pos_embed.token_projection.weight pos_embed.token_projection.bias",
            "trunk.embed.position.table",
            waves(image // (1 << len(steps))),
        ),
        *norm_rules("norm", "trunk.norm"),
        *linear_rules("head", "head.last"),
        rule("cls_token", "trunk.stack.token", lambda token: token.flatten()),
    ]
    for step in steps:
        rows += stem_rows(step)
    for i in range(depth(tensors, "blocks")):
        rows += xcit_rows(
            f"blocks.{i}", f"trunk.stack.layers.{2 * i}", f"trunk.stack.layers.{2 * i + 1}"
        )
    for i in range(depth(tensors, "cls_attn_blocks")):
        rows += class_rows(f"cls_attn_blocks.{i}", f"trunk.stack.last.{i}")
    return WeightMap(rows=tuple(rows))


def stem_rows(step: int) -> list[WeightRule]:
    """A convolution and its batch norm."""
    theirs, ours = f"patch_embed.proj.{step}", f"trunk.embed.project.{step}"
    return [rule(f"{theirs}.0.weight", f"{ours}.0.weight"), *batch_norm(f"{theirs}.1", f"{ours}.1")]


def batch_norm(theirs: str, ours: str) -> list[WeightRule]:
    """All that a batch norm keeps."""
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [rule(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in kinds]


def xcit_rows(theirs: str, first: str, second: str) -> list[WeightRule]:
    """One layer of theirs, in two of ours."""
    mixer, local = f"{first}.mixer.part", f"{second}.mixer.part"
    split = (
        " ".join(f"{mixer}.{kind}.weight" for kind in "qkv"),
        " ".join(f"{mixer}.{kind}.bias" for kind in "qkv"),
    )
    return [
        *norm_rules(f"{theirs}.norm1", f"{first}.around_mixer.norm"),
        rule(f"{theirs}.attn.qkv.weight", split[0], lambda t: t.chunk(3)),
        rule(f"{theirs}.attn.qkv.bias", split[1], lambda t: t.chunk(3)),
        rule(f"{theirs}.attn.temperature", f"{mixer}.sharpness", lambda t: t.flatten()),
        *scaled(f"{theirs}.attn.proj", f"{theirs}.gamma1", f"{mixer}.out"),
        *norm_rules(f"{theirs}.norm3", f"{second}.around_mixer.norm"),
        *linear_rules(f"{theirs}.local_mp.conv1", f"{local}.first"),
        *batch_norm(f"{theirs}.local_mp.bn", f"{local}.norm.norm"),
        *scaled(f"{theirs}.local_mp.conv2", f"{theirs}.gamma3", f"{local}.second"),
        *norm_rules(f"{theirs}.norm2", f"{second}.around_ffn.norm"),
        *linear_rules(f"{theirs}.mlp.fc1", f"{second}.ffn.up"),
        *scaled(f"{theirs}.mlp.fc2", f"{theirs}.gamma2", f"{second}.ffn.down"),
    ]


def scaled(theirs: str, scale: str, ours: str) -> list[WeightRule]:
    """γ (W x + b) = (γ W) x + γ b, for weights whose first dimension is what comes out."""

    def times(t: Tensor, gamma: Tensor) -> Tensor:
        return t * gamma.view(-1, *[1] * (t.dim() - 1))

    return [
        rule(f"{theirs}.{kind} {scale}", f"{ours}.{kind}", times) for kind in ("weight", "bias")
    ]


def class_rows(theirs: str, ours: str) -> list[WeightRule]:
    """A layer in which the class token asks."""
    names = (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "out"))
    return [
        *norm_rules(f"{theirs}.norm1", f"{ours}.first"),
        *norm_rules(f"{theirs}.norm2", f"{ours}.second"),
        *(
            each
            for a, b in names
            for each in linear_rules(f"{theirs}.attn.{a}", f"{ours}.ask.attend.{b}")
        ),
        *linear_rules(f"{theirs}.mlp.fc1", f"{ours}.feed.up"),
        *linear_rules(f"{theirs}.mlp.fc2", f"{ours}.feed.down"),
        rule(f"{theirs}.gamma1", f"{ours}.attended"),
        rule(f"{theirs}.gamma2", f"{ours}.fed"),
    ]


def waves(
    side: int, hidden: int = 32, temperature: float = 10000.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Their positions for a square image: W [waves of the row; of the column] + b, with places from 0 to 2 π -> (side² d)."""

    def table(weight: Tensor, bias: Tensor) -> Tensor:
        place = torch.arange(1, side + 1, dtype=torch.float64) / (side + 1e-6) * 2 * math.pi
        rate = temperature ** (2 * (torch.arange(hidden) // 2).double() / hidden)
        angle = place[:, None] / rate
        wave = torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), 2).flatten(
            1
        )  # (side hidden)
        both = torch.cat(
            (wave[:, None].expand(-1, side, -1), wave[None].expand(side, -1, -1)), -1
        ).flatten(0, 1)
        return (both @ weight.flatten(1).double().T + bias.double()).to(weight.dtype)

    return table
