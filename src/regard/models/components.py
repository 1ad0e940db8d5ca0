"""Builds norms, residuals, feed-forward layers and positional encodings from their specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from regard.errors import Unsupported, did_you_mean
from regard.mixer import Mixer
from regard.mixers.positional import with_position
from regard.models.spec import ModuleSpec
from regard.norm import Norm
from regard.position import POSITIONAL_ENCODINGS, NoPosition, PositionEmbedding, RotaryEmbedding
from regard.prior import Prior
from regard.residual import RESIDUALS, DeepNormScales, Residual, layer_scale_init_value

# Positional encodings added to the token embeddings ...
POSITIONS = {
    name: kind for name, kind in POSITIONAL_ENCODINGS.items() if issubclass(kind, PositionEmbedding)
}
# ... and those inside a mixer.
RELATIVE = {
    name: kind
    for name, kind in POSITIONAL_ENCODINGS.items()
    if issubclass(kind, RotaryEmbedding | Prior)
}


def build_module(
    what: str,
    table: Mapping[str, Callable[..., Any]],
    spec: ModuleSpec,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Build the module of a spec like `bind_module`; errors of its constructor name the module."""
    factory = bind_module(what, table, spec, *args, **kwargs)
    try:
        return factory()
    except Unsupported:
        raise
    except (ArithmeticError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"cannot build the {what} {spec.name!r} from its arguments: "
            f"{str(error).splitlines()[0]}"
        ) from error


def bind_module(
    what: str,
    table: Mapping[str, Callable[..., Any]],
    spec: ModuleSpec,
    /,
    *args: Any,
    **kwargs: Any,
) -> Callable[[], Any]:
    """Look up a spec in a table of factories and bind its arguments, after `args` and `kwargs`.

    Unknown names and arguments, and missing ones, raise with the nearest valid choice.
    """
    if spec.name not in table:
        raise ValueError(f"no {what} {spec.name!r}: {did_you_mean(spec.name, table)}")
    factory = table[spec.name]
    parameters = dict(list(inspect.signature(factory).parameters.items())[len(args) :])
    known = [name for name in parameters if name not in kwargs]
    for name in spec.arguments:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it takes none"
            raise ValueError(f"the {what} {spec.name!r} has no argument {name!r}: {hint}")
    missing = [
        name
        for name in known
        if name not in spec.arguments and parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        raise ValueError(f"the {what} {spec.name!r} needs {', '.join(missing)}")
    return partial(factory, *args, **kwargs, **spec.arguments)


def residual_factory(
    spec: ModuleSpec, layers: int, scales: DeepNormScales, norm: Callable[[int], Norm]
) -> Callable[[int], Residual]:
    """Factory (width -> residual) for `layers` layers, with depth-dependent scales."""
    parameters = (
        inspect.signature(RESIDUALS[spec.name]).parameters if spec.name in RESIDUALS else {}
    )
    kwargs: dict[str, object] = {}
    if "norm" in parameters:
        kwargs["norm"] = norm
    for name, value in (
        ("init_value", layer_scale_init_value(layers)),
        ("alpha", scales.alpha),
    ):
        if name in parameters and name not in spec.arguments:
            kwargs[name] = value
    return partial(build_module, "residual", RESIDUALS, spec, **kwargs)


def add_relative_position(
    spec: ModuleSpec, mixer: Mixer, *, length: int | None, columns: int | None
) -> Mixer:
    """Add a positional encoding that acts inside the mixer; other encodings leave it unchanged.

    Args:
        length: Maximum sequence length, None: any.
        columns: Columns of an image grid, else None.
    """
    if spec.name not in RELATIVE:
        return mixer
    parameters = inspect.signature(RELATIVE[spec.name]).parameters
    sizes = {"length": length, "columns": columns}
    known = {name: n for name, n in sizes.items() if name in parameters and n is not None}
    if "columns" in parameters and "columns" not in {**known, **spec.arguments}:
        raise ValueError(f"position {spec.name!r} needs columns: it is for images")
    return with_position(mixer, spec.name, **{**known, **spec.arguments})


def build_position(
    spec: ModuleSpec,
    *,
    dim: int,
    length: int | None,
    rows: int | None = None,
    columns: int | None = None,
) -> nn.Module:
    """Build a positional encoding of the token embeddings; `NoPosition` if it acts inside mixers.

    Args:
        length: Maximum sequence length, None: any.
        rows: Rows of an image grid, else None; `columns` likewise.
    """
    if spec.name in RELATIVE:
        return NoPosition(dim)
    if spec.name in POSITIONAL_ENCODINGS and spec.name not in POSITIONS:
        raise Unsupported(
            f"{spec.name!r} replaces the token embeddings and cannot be used in a configuration: "
            "see docs/models.md"
        )
    parameters = (
        inspect.signature(POSITIONS[spec.name]).parameters if spec.name in POSITIONS else {}
    )
    sizes = {"dim": dim, "length": length, "rows": rows, "columns": columns}
    needed = {
        name: sizes[name]
        for name, parameter in parameters.items()
        if name in sizes
        and parameter.default is inspect.Parameter.empty
        and name not in spec.arguments
    }
    missing = [name for name, size in needed.items() if size is None]
    if missing:
        hint = "set it in the configuration" if missing == ["length"] else "it is for images"
        raise ValueError(f"position {spec.name!r} needs {' and '.join(missing)}: {hint}")
    return build_module("position", {**RELATIVE, **POSITIONS}, spec, **needed)
