"""Tables: the words that a configuration may use for norms, residuals, feed-forward layers and positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from regard.deep_init import deepnorm_init
from regard.errors import Unsupported, did_you_mean
from regard.ffn import FEED_FORWARDS as FFNS, get_activation as activation_of
from regard.mixer import Mixer
from regard.mixers.positional import with_position
from regard.models.config import ModuleSpec
from regard.norm import NORMS, Norm
from regard.position import POSITIONAL_ENCODINGS, NoPosition, PositionEmbedding, RotaryEmbedding
from regard.prior import Prior
from regard.residual import RESIDUALS, DeepNormScales, Residual, layer_scale_init_value

__all__ = [
    "FFNS",
    "NORMS",
    "POSITIONS",
    "RELATIVE",
    "RESIDUALS",
    "activation_of",
    "add_relative_position",
    "bind_module",
    "build_module",
    "build_position",
    "init_residual_weights",
    "residual_factory",
]

POSITIONS = {
    name: kind for name, kind in POSITIONAL_ENCODINGS.items() if issubclass(kind, PositionEmbedding)
}  # go in with the tokens
RELATIVE = {
    name: kind
    for name, kind in POSITIONAL_ENCODINGS.items()
    if issubclass(kind, RotaryEmbedding | Prior)
}  # live within a mixer


def build_module(
    what: str,
    table: Mapping[str, Callable[..., Any]],
    part: ModuleSpec,
    /,
    *fixed: Any,
    **given: Any,
) -> Any:
    """Build the part of a table; see `bind_module`.  Raw errors, as lists in place of words make them, name the part."""
    maker = bind_module(what, table, part, *fixed, **given)
    try:
        return maker()
    except Unsupported:
        raise
    except (ArithmeticError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"the {what} {part.name!r} cannot be made of its arguments: {str(error).splitlines()[0]}"
        ) from error


def bind_module(
    what: str,
    table: Mapping[str, Callable[..., Any]],
    part: ModuleSpec,
    /,
    *fixed: Any,
    **given: Any,
) -> Callable[[], Any]:
    """What makes the part of a table; names and arguments that do not exist, or are missing, raise with the nearest that do."""
    if part.name not in table:
        raise ValueError(f"no {what} {part.name!r}: {did_you_mean(part.name, table)}")
    takes = dict(list(inspect.signature(table[part.name]).parameters.items())[len(fixed) :])
    known = [name for name in takes if name not in given]
    for name in part.arguments:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it takes none"
            raise ValueError(f"the {what} {part.name!r} takes no argument {name!r}: {hint}")
    missing = [
        n for n in known if n not in part.arguments and takes[n].default is inspect.Parameter.empty
    ]
    if missing:
        raise ValueError(f"the {what} {part.name!r} needs {', '.join(missing)}")
    return partial(table[part.name], *fixed, **given, **part.arguments)


def residual_factory(
    part: ModuleSpec, layers: int, scales: DeepNormScales, norm: Callable[[int], Norm]
) -> Callable[[int], Residual]:
    """Width -> what stands around a sub-layer, in a stack of so many layers: it is told of its depth what it takes."""
    told = {"norm": norm, "start": layer_scale_init_value(layers), "alpha": scales.alpha}
    takes = inspect.signature(RESIDUALS[part.name]).parameters if part.name in RESIDUALS else {}
    given = {
        name: value
        for name, value in told.items()
        if name in takes and (name == "norm" or name not in part.arguments)
    }
    return partial(build_module, "residual", RESIDUALS, part, **given)


STARTS: Mapping[str, Callable[[nn.Module, DeepNormScales], None]] = {
    "deepnorm": lambda stack, scales: deepnorm_init(stack, scales.beta),
}


def init_residual_weights(part: ModuleSpec, stack: nn.Module, scales: DeepNormScales) -> None:
    """Draw the weights of a stack as its residual wants them, where it wants anything."""
    if part.name in STARTS:
        STARTS[part.name](stack, scales)


def add_relative_position(part: ModuleSpec, mixer: Mixer, **sizes: int | None) -> Mixer:
    """The mixer with positions inside it, where the part names such a kind, told the sizes that it takes; else as it is.

    sizes   length, None: any; and for images columns, None elsewhere
    """
    if part.name not in RELATIVE:
        return mixer
    takes = inspect.signature(RELATIVE[part.name]).parameters
    told = {name: size for name, size in sizes.items() if name in takes and size is not None}
    return with_position(mixer, part.name, **{**told, **part.arguments})


def build_position(part: ModuleSpec, **sizes: int | None) -> nn.Module:
    """What embeddings learn of positions: a part of `POSITIONS`, told the sizes that it needs; nothing, where mixers know them.

    sizes   dim; length, None: any; and for images rows and columns, None elsewhere
    """
    if part.name in POSITIONAL_ENCODINGS and part.name not in {**RELATIVE, **POSITIONS}:
        raise Unsupported(
            f"{part.name!r} takes the place of the token embeddings, so no configuration has it: see docs/models.md"
        )
    if part.name in RELATIVE and sizes["dim"] is not None:
        return NoPosition(sizes["dim"])
    takes = inspect.signature(POSITIONS[part.name]).parameters if part.name in POSITIONS else {}
    needs = [
        name for name, parameter in takes.items() if parameter.default is inspect.Parameter.empty
    ]
    told = {
        name: size for name, size in sizes.items() if name in needs and name not in part.arguments
    }
    missing = [name for name, size in told.items() if size is None]
    if missing:
        hint = "give the configuration one" if missing == ["length"] else "they are for images"
        raise ValueError(f"positions of kind {part.name!r} need {' and '.join(missing)}: {hint}")
    return build_module("position", {**RELATIVE, **POSITIONS}, part, **told)
