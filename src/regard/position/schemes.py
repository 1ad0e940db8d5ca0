"""Every position scheme by name, for configurations."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from regard.errors import nearest
from regard.position.bias import T5, TUPE, XL, Distance, Shaw
from regard.position.embed import Complex, Fourier, Fourier2D, Learned, Learned2D, Sinusoid, Sinusoid2D, Unplaced
from regard.position.turn import Rope, Rope2D
from regard.prior import ALiBi

SCHEMES: dict[str, type[nn.Module]] = {
    "none": Unplaced,
    "sinusoid": Sinusoid,
    "sinusoid_2d": Sinusoid2D,
    "learned": Learned,
    "learned_2d": Learned2D,
    "fourier": Fourier,
    "fourier_2d": Fourier2D,
    "complex": Complex,
    "rope": Rope,
    "rope_2d": Rope2D,
    "alibi": ALiBi,
    "distance": Distance,
    "t5": T5,
    "shaw": Shaw,
    "xl": XL,
    "tupe": TUPE,
}
SIZES = ("dim", "heads", "width", "causal")


def find_scheme(name: str) -> type[nn.Module]:
    """The class of that name; a wrong one raises with the nearest that exists."""
    if name not in SCHEMES:
        raise ValueError(f"no position scheme {name!r}: {nearest(str(name), SCHEMES)}")
    return SCHEMES[name]


def make_scheme(
    name: str, /, *, dim: int | None = None, heads: int | None = None, width: int | None = None, causal: bool = False,
    **options: Any,
) -> nn.Module:  # fmt: skip
    """A scheme for a model of these sizes, of which it takes those that it needs; `options` are its own.

    width    of the queries and keys of a head, dim / heads unless given
    """
    kind = find_scheme(name)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise TypeError(f"{name} takes no argument {option!r}: {nearest(option, set(parameters) - set(SIZES))}")
    if width is None and dim is not None and heads:
        width = dim // heads
    sizes = {"dim": dim, "heads": heads, "width": width, "causal": causal}
    given = {size: value for size, value in sizes.items() if size in parameters and value is not None} | options
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}")
    return kind(**given)
