"""Tables: the words that a configuration may use for norms, residuals, feed-forward layers and positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import nearest
from regard.ffn import MLP, FeedForward
from regard.mixer import Mixer
from regard.models.config import Part
from regard.norm import LayerNorm, Norm
from regard.residual import PostNorm, PreNorm, Residual


class Nowhere(nn.Module):
    """No positions: a set, or a mixer that knows them itself."""

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        return x


class Learned(nn.Module):
    """x_i + p_i with a learned table p (length d) (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, dim) * 0.02)

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        end = at + x.shape[1]
        if end > len(self.table):
            raise ValueError(f"the sequence is {end} tokens long now, and there are learned positions for {len(self.table)}")
        return x + self.table[at:end]


class Sinusoid(nn.Module):
    """x_i + [sin(i ω_0), cos(i ω_0), sin(i ω_1), ...], ω_j = base^(-2j/d) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        return x + waves(torch.arange(at, at + x.shape[1], device=x.device), x.shape[2], self.base).to(x.dtype)


class Sinusoid2D(nn.Module):
    """Half of the width tells the row and half the column, each as `Sinusoid` does, of an image so many `columns` wide."""

    def __init__(self, dim: int, columns: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"half of the width tells the row and half the column, so dim must be even, not {dim}")
        self.columns, self.base = columns, base

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        places, half = torch.arange(at, at + x.shape[1], device=x.device), x.shape[2] // 2
        axes = (places // self.columns, places % self.columns)
        return x + torch.cat([waves(axis, half, self.base) for axis in axes], -1).to(x.dtype)


def waves(at: Tensor, dim: int, base: float) -> Tensor:
    """(n) -> (n dim): sines and cosines by turns; float64, since positions times frequencies lose digits."""
    rates = torch.exp(torch.arange(0, dim, 2, device=at.device, dtype=torch.float64) * (-math.log(base) / dim))
    angles = at.double()[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[:, :dim]


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by way of tanh, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": tanh_gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def mlp(dim: int, *, hidden: int | None = None, activation: str = "gelu", bias: bool = True) -> FeedForward:
    """`MLP`, with the activation by name."""
    return MLP(dim, hidden, activation=activation_of(activation), bias=bias)


NORMS: dict[str, Callable[..., Norm]] = {"layer": LayerNorm}
RESIDUALS: dict[str, Callable[..., Residual]] = {"pre": PreNorm, "post": PostNorm}
FFNS: dict[str, Callable[..., FeedForward]] = {"mlp": mlp}
POSITIONS: dict[str, Callable[..., nn.Module]] = {
    "none": Nowhere, "learned": Learned, "sinusoid": Sinusoid, "sinusoid_2d": Sinusoid2D,
}  # fmt: skip
RELATIVE: dict[str, Callable[..., Mixer]] = {}  # (mixer, **arguments) -> mixer: positions that live within a mixer


def make(what: str, table: Mapping[str, Callable[..., Any]], part: Part, /, *fixed: Any, **given: Any) -> Any:
    """Build the part of a table; names and arguments that do not exist raise with the nearest that do."""
    if part.name not in table:
        raise ValueError(f"no {what} {part.name!r}: {nearest(part.name, table)}")
    known = [name for name in list(inspect.signature(table[part.name]).parameters)[len(fixed) :] if name not in given]
    for name in part.arguments:
        if name not in known:
            hint = nearest(name, known) if known else "it takes none"
            raise ValueError(f"the {what} {part.name!r} takes no argument {name!r}: {hint}")
    return table[part.name](*fixed, **given, **part.arguments)


def make_residual(part: Part, layers: int, norm: Callable[[int], Norm]) -> Callable[[int], Residual]:
    """Width -> what stands around a sub-layer, in a stack of so many layers."""
    return partial(make, "residual", RESIDUALS, part, norm=norm)


def place_within(part: Part, mixer: Mixer, length: int | None) -> Mixer:
    """The mixer with positions inside it, where the part names such a kind; else as it is."""
    return make("position", RELATIVE, part, mixer) if part.name in RELATIVE else mixer


def make_position(part: Part, **sizes: int | None) -> nn.Module:
    """What embeddings learn of positions: a part of `POSITIONS`, told the sizes that it takes; nothing, where mixers know them.

    sizes   dim; length, None: any; and for images rows and columns, None elsewhere
    """
    if part.name in RELATIVE:
        return Nowhere()
    takes = inspect.signature(POSITIONS[part.name]).parameters if part.name in POSITIONS else ()
    told = {name: size for name, size in sizes.items() if name in takes and name not in part.arguments}
    missing = [name for name, size in told.items() if size is None]
    if missing:
        hint = "give the configuration one" if missing == ["length"] else "they are for images"
        raise ValueError(f"positions of kind {part.name!r} need {' and '.join(missing)}: {hint}")
    return make("position", {**RELATIVE, **POSITIONS}, part, **told)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
