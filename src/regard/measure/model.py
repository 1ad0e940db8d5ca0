"""The models that `regard cost` speaks of: any configuration, or one that a recipe and a few sizes make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from regard.models import Config, Model, build, part
from regard.models.config import Language, Masked, Patches, Tokens, Vectors
from regard.models.loss import choice_loss
from regard.models.save import said
from regard.registry import Recipe


def plain(
    recipe: Recipe,
    options: Mapping[str, Any],
    *,
    dim: int = 512,
    layers: int = 6,
    vocab: int = 32_000,
    hidden: int | None = None,
) -> Config:
    """An embedding, blocks of one mixer and an MLP with norms before, and a head over the vocabulary with weights of its own.

    options   arguments of the recipe; the model tells it the width, and `causal` makes a decoder
    hidden    width inside the feed-forward layers, four times `dim` unless given
    """
    given = {name: value for name, value in options.items() if name != "causal"}
    mixer = part(recipe.name, **given)
    try:
        return Config(
            kind="decoder" if options.get("causal") else "encoder", input=Tokens(vocab=vocab), head=Language(tie=False),
            dim=dim, heads=options.get("heads", 1), layers=layers, mixer=[mixer], position=part("none"),
            ffn=[part("mlp") if hidden is None else part("mlp", hidden=hidden)],
        )  # fmt: skip
    except ValidationError as error:
        raise ValueError(said(error)) from None


def on_meta(config: Config) -> Model:
    """The model without numbers: whatever its size, it takes no memory."""
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:  # a tensor of more bytes than can be counted
        raise ValueError(f"a tensor of it would be larger than torch can describe: {error}") from error


def config_of(model: Model) -> Config:
    """The configuration that a model was built from; one that was built by hand has none, and raises."""
    if model.config is None:
        raise ValueError("the model has no configuration, from which its sizes are read: build it from one")
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


def outputs(config: Config, length: int) -> int:
    """Numbers that come out of an example."""
    head = config.head
    if isinstance(head, Language | Masked) and config.tokens is not None:
        return length * config.tokens.vocab
    with torch.device("meta"):
        small = build(config.but(layers=len(config.mixer)))
        return small(*inputs(config, length, 1)).numel()


def inputs(config: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    """A batch that the model can be called with: zeros, for costs do not depend on what is read."""
    given = config.input
    if isinstance(given, Patches):
        first = torch.zeros(batch, given.channels, given.height, given.width)
    elif isinstance(given, Vectors):
        first = torch.zeros(batch, length, given.width)
    else:
        first = torch.zeros(batch, length, dtype=torch.long)
    second = (torch.zeros(batch, length, dtype=torch.long),) if config.kind == "seq2seq" else ()
    return (first, *second)


def loss(model: Model, given: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of logits, or the mean square of what else comes out.  Logits are let go as soon as they were read."""
    if isinstance(config_of(model).head, Language | Masked):
        return choice_loss(model(*given), given[-1])
    return model(*given).square().mean()
