"""Every position scheme by name, for configurations."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from regard.errors import did_you_mean
from regard.position.bias import DistanceBias, ShawBias, T5Bias, TransformerXLBias, TUPEBias
from regard.position.embedding import (
    ComplexEmbedding,
    FourierEmbedding,
    FourierEmbedding2D,
    LearnedEmbedding,
    LearnedEmbedding2D,
    NoPosition,
    SinusoidalEmbedding,
    SinusoidalEmbedding2D,
)
from regard.position.rotary import Rope, Rope2D
from regard.prior import ALiBi

POSITIONAL_ENCODINGS: dict[str, type[nn.Module]] = {
    "none": NoPosition,
    "sinusoid": SinusoidalEmbedding,
    "sinusoid_2d": SinusoidalEmbedding2D,
    "learned": LearnedEmbedding,
    "learned_2d": LearnedEmbedding2D,
    "fourier": FourierEmbedding,
    "fourier_2d": FourierEmbedding2D,
    "complex": ComplexEmbedding,
    "rope": Rope,
    "rope_2d": Rope2D,
    "alibi": ALiBi,
    "distance": DistanceBias,
    "t5": T5Bias,
    "shaw": ShawBias,
    "xl": TransformerXLBias,
    "tupe": TUPEBias,
}
SIZES = ("dim", "heads", "width", "causal")


def positional_encoding_class(name: str) -> type[nn.Module]:
    """The class of that name; a wrong one raises with the nearest that exists."""
    if name not in POSITIONAL_ENCODINGS:
        raise ValueError(
            f"no position scheme {name!r}: {did_you_mean(str(name), POSITIONAL_ENCODINGS)}"
        )
    return POSITIONAL_ENCODINGS[name]


def create_positional_encoding(
    name: str,
    /,
    *,
    dim: int | None = None,
    heads: int | None = None,
    width: int | None = None,
    causal: bool = False,
    **options: Any,
) -> nn.Module:
    """A scheme for a model of these sizes, of which it takes those that it needs; `options` are its own.

    width    of the queries and keys of a head, dim / heads unless given
    """
    kind = positional_encoding_class(name)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise TypeError(
                f"{name} takes no argument {option!r}: {did_you_mean(option, set(parameters) - set(SIZES))}"
            )
    if width is None and dim is not None and heads:
        width = dim // heads
    sizes = {"dim": dim, "heads": heads, "width": width, "causal": causal}
    given = {
        size: value for size, value in sizes.items() if size in parameters and value is not None
    } | options
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}")
    return kind(**given)
