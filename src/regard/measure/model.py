"""The models that `regard cost` speaks of: any configuration, or one that a recipe and a few sizes make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from regard.models import Model, ModelConfig, build, module_spec
from regard.models.config import (
    LMHeadConfig,
    MaskedLMHeadConfig,
    PatchInput,
    TokenInput,
    VectorInput,
)
from regard.models.losses import cross_entropy_loss
from regard.models.serialization import format_validation_error
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
    """An embedding, blocks of one mixer and an MLP with norms before, and a head over the vocabulary with weights of its own.

    options   arguments of the recipe; the model tells it the width, and `causal` makes a decoder
    hidden    width inside the feed-forward layers, four times `dim` unless given
    """
    given = {name: value for name, value in options.items() if name != "causal"}
    mixer = module_spec(recipe.name, **given)
    try:
        return ModelConfig(
            kind="decoder" if options.get("causal") else "encoder",
            input=TokenInput(vocab_size=vocab_size),
            head=LMHeadConfig(tie_weights=False),
            dim=dim,
            heads=options.get("heads", 1),
            layers=layers,
            mixer=[mixer],
            position=module_spec("none"),
            ffn=[module_spec("mlp") if hidden is None else module_spec("mlp", hidden=hidden)],
        )
    except ValidationError as error:
        raise ValueError(format_validation_error(error)) from None


def build_on_meta(config: ModelConfig) -> Model:
    """The model without numbers: whatever its size, it takes no memory."""
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:  # a tensor of more bytes than can be counted
        raise ValueError(
            f"a tensor of it would be larger than torch can describe: {error}"
        ) from error


def config_of(model: Model) -> ModelConfig:
    """The configuration that a model was built from; one that was built by hand has none, and raises."""
    if model.config is None:
        raise ValueError(
            "the model has no configuration, from which its sizes are read: build it from one"
        )
    return model.config


class Outline(NamedTuple):
    """Sizes of a model that its memory and its traffic depend on.

    stream   numbers of the tokens between two layers, over the whole batch
    logits   numbers that come out, over the whole batch
    layers   of both sides, where there are two
    """

    stream: int
    logits: int
    layers: int


def outline(model: Model, length: int, batch: int) -> Outline:
    """See `Outline`."""
    config = config_of(model)
    layers = config.layers + (config.encoder or config).layers * (config.kind == "seq2seq")
    return Outline(batch * length * config.dim, batch * outputs(config, length), layers)


def outputs(config: ModelConfig, length: int) -> int:
    """Numbers that come out of an example."""
    head = config.head
    if isinstance(head, LMHeadConfig | MaskedLMHeadConfig) and config.tokens is not None:
        return length * config.tokens.vocab_size
    with torch.device("meta"):
        small = build(config.replace(layers=len(config.mixer)))
        return small(*example_batch(config, length, 1)).numel()


def example_batch(config: ModelConfig, length: int, batch: int) -> tuple[Tensor, ...]:
    """A batch that the model can be called with: zeros, for costs do not depend on what is read."""
    given = config.input
    if isinstance(given, PatchInput):
        first = torch.zeros(batch, given.channels, given.height, given.width)
    elif isinstance(given, VectorInput):
        first = torch.zeros(batch, length, given.width)
    else:
        first = torch.zeros(batch, length, dtype=torch.long)
    second = (torch.zeros(batch, length, dtype=torch.long),) if config.kind == "seq2seq" else ()
    return (first, *second)


def training_loss(model: Model, given: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of logits, or the mean square of what else comes out.  Logits are let go as soon as they were read."""
    if isinstance(config_of(model).head, LMHeadConfig | MaskedLMHeadConfig):
        return cross_entropy_loss(model(*given), given[-1])
    return model(*given).square().mean()
