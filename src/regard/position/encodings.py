"""Positional encodings by name, for configurations."""

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
MODEL_SIZES = {"dim", "heads", "width", "causal"}


def positional_encoding_class(name: str) -> type[nn.Module]:
    """The class of that name."""
    if name not in POSITIONAL_ENCODINGS:
        hint = did_you_mean(str(name), POSITIONAL_ENCODINGS)
        raise ValueError(f"No positional encoding {name!r}: {hint}")
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
    """Create a positional encoding for a model of these sizes.

    Args:
        name: Name in `POSITIONAL_ENCODINGS`.
        dim: Model width.
        heads: Number of heads.
        width: Width of the queries and keys of a head. Defaults to dim / heads.
        causal: Whether the model is causal.
        **options: Further arguments of the class.
    """
    kind = positional_encoding_class(name)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            hint = did_you_mean(option, set(parameters) - MODEL_SIZES)
            raise TypeError(f"{name} takes no argument {option!r}: {hint}")
    if width is None and dim is not None and heads:
        width = dim // heads
    sizes = {"dim": dim, "heads": heads, "width": width, "causal": causal}
    arguments = {key: size for key, size in sizes.items() if key in parameters and size is not None}
    arguments |= options
    required = [p.name for p in parameters.values() if p.default is p.empty]
    missing = [key for key in required if key not in arguments]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}")
    return kind(**arguments)
