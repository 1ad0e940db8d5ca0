"""Tables: the words that a configuration may use for norms, residuals, feed-forward layers and positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.common import check_stream_length
from regard.errors import nearest
from regard.ffn import MLP, FeedForward
from regard.mixer import Mixer
from regard.models.config import Part
from regard.norm import LayerNorm, Norm
from regard.residual import PostNorm, PreNorm, Residual


class Where(NamedTuple):
    """What a position is told: the width, the longest sequence, and for images rows and columns (and what stands before)."""

    dim: int
    length: int | None
    grid: tuple[int, int] | None = None
    before: int = 0


class Nowhere(nn.Module):
    """No positions: a set, or a mixer that knows them itself."""

    def __init__(self, where: Where) -> None:
        super().__init__()

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        return x


class Learned(nn.Module):
    """x_i + p_i with p (length d) learned (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, where: Where) -> None:
        super().__init__()
        if where.length is None:
            raise ValueError("learned positions need to know the longest sequence: give length, or position 'sinusoid'")
        self.weight = nn.Parameter(torch.randn(where.length, where.dim) * 0.02)

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        check_stream_length(len(self.weight), at + x.shape[1])
        return x + self.weight[at : at + x.shape[1]]


class Sinusoid(nn.Module):
    """x_i + [sin(i ω_0), cos(i ω_0), sin(i ω_1), ...], ω_j = base^(-2j/d) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, where: Where, *, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        return x + waves(torch.arange(at, at + x.shape[1], device=x.device), x.shape[2], self.base).to(x.dtype)


class Sinusoid2D(nn.Module):
    """Half of the width tells the row, half the column, each as `Sinusoid` does; what stands before the grid gets none."""

    table: Tensor

    def __init__(self, where: Where, *, base: float = 10000.0) -> None:
        super().__init__()
        if where.grid is None or where.dim % 2:
            raise ValueError(f"2D positions are for images of an even width: dim is {where.dim}, the grid {where.grid}")
        rows, columns = (waves(torch.arange(n), where.dim // 2, base) for n in where.grid)
        both = [rows[:, None].expand(-1, len(columns), -1), columns[None].expand(len(rows), -1, -1)]
        self.register_buffer("table", F.pad(torch.cat(both, -1).flatten(0, 1), (0, 0, where.before, 0)), persistent=False)

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """(b n d), the first of which stands at `at` -> (b n d)."""
        check_stream_length(len(self.table), at + x.shape[1])
        return x + self.table[at : at + x.shape[1]].to(x.dtype)


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


def make(what: str, table: Mapping[str, Callable[..., Any]], part: Part, *fixed: Any, **given: Any) -> Any:
    """Build the part of a table; names and arguments that do not exist raise with the nearest that do."""
    if part.name not in table:
        raise ValueError(f"no {what} {part.name!r}: {nearest(part.name, table)}")
    known = [name for name in list(inspect.signature(table[part.name]).parameters)[len(fixed) :] if name not in given]
    for name in part.arguments:
        if name not in known:
            hint = nearest(name, known) if known else "it takes none"
            raise ValueError(f"the {what} {part.name!r} takes no argument {name!r}: {hint}")
    return table[part.name](*fixed, **given, **part.arguments)


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
