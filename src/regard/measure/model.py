"""Models for cost estimates: built without data, with matching inputs and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from regard.errors import format_validation_error
from regard.models import Model, ModelConfig, build, module_spec
from regard.models.config import (
    FeatureInput,
    LMHeadConfig,
    MaskedLMHeadConfig,
    PatchInput,
    TokenInput,
    VectorInput,
    VideoInput,
)
from regard.models.losses import cross_entropy_loss
from regard.registry import Recipe


def simple_config(
    recipe: Recipe,
    options: Mapping[str, Any],
    *,
    dim: int = 512,
    layers: int = 6,
    vocab_size: int = 32_000,
    hidden: int | None = None,
) -> ModelConfig:
    """A language model with one recipe in every layer: embedding, pre-norm blocks, and an untied
    head.

    Args:
        recipe: Recipe of the mixers.
        options: Arguments of the recipe, without `dim`. With causal=True the model is a decoder.
        dim: Model width.
        layers: Number of blocks.
        vocab_size: Vocabulary size.
        hidden: Width of the feed-forward layers. Default: 4 * dim.
    """
    options = dict(options)
    causal = options.pop("causal", False)
    try:
        return ModelConfig(
            kind="decoder" if causal else "encoder",
            input=TokenInput(vocab_size=vocab_size),
            head=LMHeadConfig(tie_weights=False),
            dim=dim,
            heads=options.get("heads", 1),
            layers=layers,
            mixer=[module_spec(recipe.name, **options)],
            position=module_spec("none"),
            ffn=[module_spec("mlp") if hidden is None else module_spec("mlp", hidden=hidden)],
        )
    except ValidationError as error:
        raise ValueError(format_validation_error(error)) from None


def build_on_meta(config: ModelConfig) -> Model:
    """Build a model on the meta device, where it takes no memory."""
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:
        raise ValueError(
            f"The model has a tensor larger than torch can describe: {error}"
        ) from error


class ModelSizes(NamedTuple):
    """Sizes over the whole batch that memory and communication depend on.

    Args:
        hidden: Numbers in the hidden states between two layers.
        outputs: Numbers that the model returns, such as logits.
        layers: Number of layers, of encoder and decoder together.
    """

    hidden: int
    outputs: int
    layers: int


def model_sizes(model: Model, length: int, batch: int) -> ModelSizes:
    """Sizes of a model that was built from a configuration."""
    config = config_of(model)
    layers = config.layers
    if config.kind == "seq2seq":
        layers += (config.encoder or config).layers
    if isinstance(config.head, LMHeadConfig | MaskedLMHeadConfig) and config.tokens is not None:
        outputs = length * config.tokens.vocab_size
    else:
        with torch.device("meta"):
            shallow = build(config.replace(layers=len(config.mixer)))
            outputs = shallow(*example_batch(config, length, 1)).numel()
    return ModelSizes(batch * length * config.dim, batch * outputs, layers)


def config_of(model: Model) -> ModelConfig:
    """The configuration of a model; ValueError if it was not built from one."""
    if model.config is None:
        raise ValueError(
            "The model has no configuration to read its sizes from: build it from one."
        )
    return model.config


def example_batch(config: ModelConfig, length: int, batch: int) -> tuple[Tensor, ...]:
    """Inputs of the right shape, all zeros."""
    if isinstance(config.input, PatchInput):
        image = config.input
        first = torch.zeros(batch, image.channels, image.height, image.width)
    elif isinstance(config.input, VideoInput):
        video = config.input
        size = (video.frames, video.channels, video.height, video.width)
        first = torch.zeros(batch, *size)
    elif isinstance(config.input, VectorInput):
        first = torch.zeros(batch, length, config.input.width)
    elif isinstance(config.input, FeatureInput):
        first = torch.zeros(batch, config.input.features_per_token, length, dtype=torch.long)
    else:
        first = torch.zeros(batch, length, dtype=torch.long)
    if config.kind != "seq2seq":
        return (first,)
    return first, torch.zeros(batch, length, dtype=torch.long)


def training_loss(model: Model, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy for language models, else the mean square of the output."""
    if isinstance(config_of(model).head, LMHeadConfig | MaskedLMHeadConfig):
        return cross_entropy_loss(model(*batch), batch[-1])  # nothing else holds the logits
    return model(*batch).square().mean()
