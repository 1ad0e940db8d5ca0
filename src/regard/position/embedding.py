"""Positions that go in with the tokens: an embedding of the place, beside that of the token.

Shapes: embed(x, at), x (b n d), the first of them at position `at` -> (b n d)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int, check_positive
from regard.position.frequencies import (
    BASE,
    inverse_frequencies,
    row_and_column,
    sinusoidal_encoding,
)

SPREAD = 0.02  # of learned embeddings before training


class PositionEmbedding(nn.Module, ABC):
    """See the module's docstring.  A subclass writes `put`.

    length   how many positions it knows, None: any number
    """

    def __init__(self, dim: int, length: int | None = None) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.dim, self.length = dim, length

    @abstractmethod
    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """Tokens x (b n d) at places (n) -> (b n d)."""

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        """x (b n d) -> (b n d); `at` is the position of the first token."""
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x must be of shape (b n {self.dim}), not {tuple(x.shape)}")
        return self.put(x, _places(at, x.shape[1], self.length, x.device))


class NoPosition(PositionEmbedding):
    """No positions: x as it is."""

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        return x


class SinusoidalEmbedding(PositionEmbedding):
    """x + P, P[p, 2r] = sin(p / base^(2r/d)), P[p, 2r+1] = cos(p / base^(2r/d)) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, base: float = BASE) -> None:
        super().__init__(dim)
        check_positive("base", base)
        self.base = base

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        return x + sinusoidal_encoding(places, self.dim, self.base).to(x.dtype)


class SinusoidalEmbedding2D(PositionEmbedding):
    """x + (P[row], P[column]), each a sinusoid of half the width, of an image so many `columns` wide in raster order
    (Parmar et al. 2018, arXiv 1802.05751)."""

    def __init__(self, dim: int, columns: int, *, base: float = BASE) -> None:
        super().__init__(dim)
        check_int(1, columns=columns)
        check_positive("base", base)
        self.columns, self.base, self.each = columns, base, _half(dim)

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        both = (
            sinusoidal_encoding(axis, self.each, self.base)
            for axis in row_and_column(places, self.columns)
        )
        return x + torch.cat(tuple(both), -1).to(x.dtype)


class LearnedEmbedding(PositionEmbedding):
    """x + T[p], with a table T (length d) (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, dim: int, length: int) -> None:
        check_int(1, length=length)
        super().__init__(dim, length)
        self.table = nn.Parameter(torch.randn(length, dim) * SPREAD)

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        return x + self.table[places].to(x.dtype)


class LearnedEmbedding2D(PositionEmbedding):
    """x + (R[row], C[column]): a table for the rows and one for the columns of an image in raster order, each of half the
    width (Carion et al. 2020, arXiv 2005.12872)."""

    def __init__(self, dim: int, rows: int, columns: int) -> None:
        check_int(1, rows=rows, columns=columns)
        super().__init__(dim, rows * columns)
        half = _half(dim)
        self.rows, self.columns = (
            nn.Parameter(torch.randn(size, half) * SPREAD) for size in (rows, columns)
        )

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        row, column = row_and_column(places, len(self.columns))
        return x + torch.cat((self.rows[row], self.columns[column]), -1).to(x.dtype)


class FourierEmbedding(PositionEmbedding):
    """W [x, t, sin(π f_k t), cos(π f_k t)] + b, t = 2 p / (length − 1) − 1, with `bands` frequencies f_k from 1 to
    resolution / 2, evenly apart (Jaegle et al. 2021, arXiv 2103.03206).

    resolution   the paper's maximum resolution: `length` unless given
    """

    def __init__(
        self, dim: int, length: int, *, bands: int = 16, resolution: int | None = None
    ) -> None:
        check_int(1, length=length, bands=bands)
        super().__init__(dim, length)
        resolution = length if resolution is None else resolution
        check_int(1, resolution=resolution)
        self.bands, self.resolution = bands, resolution
        self.out = nn.Linear(dim + 1 + 2 * bands, dim)

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        assert self.length is not None
        return _projected(
            self.out, x, fourier_features([(places, self.length, self.resolution)], self.bands)
        )


class FourierEmbedding2D(PositionEmbedding):
    """The same with the rows and the columns of an image in raster order: 2 (1 + 2 bands) numbers beside each token.

    resolution   for rows and columns: their numbers unless given
    """

    def __init__(
        self,
        dim: int,
        rows: int,
        columns: int,
        *,
        bands: int = 16,
        resolution: tuple[int, int] | None = None,
    ) -> None:
        check_int(1, rows=rows, columns=columns, bands=bands)
        super().__init__(dim, rows * columns)
        self.sizes, self.bands = (rows, columns), bands
        self.resolution = self.sizes if resolution is None else resolution
        check_int(1, **{f"resolution[{axis}]": self.resolution[axis] for axis in (0, 1)})
        self.out = nn.Linear(dim + 2 * (1 + 2 * bands), dim)

    def put(self, x: Tensor, places: Tensor) -> Tensor:
        """See `Embed.put`."""
        axes = zip(row_and_column(places, self.sizes[1]), self.sizes, self.resolution, strict=True)
        return _projected(self.out, x, fourier_features(list(axes), self.bands))


class ComplexEmbedding(nn.Module):
    """Words and their order in one: the word j at place p is r_j · exp(i (ω_j p + θ_j)), with an amplitude, a frequency and a
    phase for each word and each of d/2 complex numbers (Wang et al. 2020, arXiv 1912.12333).

    It takes the numbers of words in place of their embeddings.  The paper's networks are complex; here the real parts and then
    the imaginary parts make the width d of tokens that are real.
    """

    def __init__(self, dim: int, words: int) -> None:
        super().__init__()
        check_int(1, dim=dim, words=words)
        half = _half(dim)
        self.dim = dim
        self.amplitude = nn.Parameter(torch.randn(words, half))
        self.frequency = nn.Parameter(
            inverse_frequencies(dim).float().repeat(words, 1)
        )  # at first those of the sinusoid, for all words
        self.phase = nn.Parameter(torch.zeros(words, half))

    def forward(self, words: Tensor, at: int = 0) -> Tensor:
        """words (b n), whole numbers -> (b n d); `at` is the position of the first."""
        if words.dim() != 2 or words.dtype != torch.long:
            raise ValueError(
                f"words must be their numbers, (b n) of int64, not {tuple(words.shape)} {words.dtype}"
            )
        places = _places(at, words.shape[1], None, words.device).to(self.frequency.dtype)[:, None]
        size, rate, start = (
            F.embedding(words, table) for table in (self.amplitude, self.frequency, self.phase)
        )
        angle = rate * places + start
        return torch.cat((size * angle.cos(), size * angle.sin()), -1)


def fourier_features(axes: list[tuple[Tensor, int, int]], bands: int) -> Tensor:
    """For each axis its places (n), how many there are, and its resolution -> (n axes (1 + 2 bands)): all t, then all sines,
    then all cosines."""
    t = [2 * at.to(torch.float64) / max(size - 1, 1) - 1 for at, size, _ in axes]
    waves = []
    for at, (_, _, most) in zip(t, axes, strict=True):
        waves.append(
            math.pi
            * at[:, None]
            * torch.linspace(1, most / 2, bands, dtype=torch.float64, device=at.device)
        )
    angle = torch.cat(waves, -1)
    return torch.cat((torch.stack(t, -1), angle.sin(), angle.cos()), -1)


def _projected(out: nn.Linear, x: Tensor, beside: Tensor) -> Tensor:
    """x (b n d) and what stands beside each token, (n f), through one layer."""
    both: Tensor = out(torch.cat((x, beside.to(x.dtype).expand(x.shape[0], -1, -1)), -1))
    return both


def _places(at: int, n: int, length: int | None, device: torch.device) -> Tensor:
    """at .. at + n − 1, which must be below the length."""
    check_int(0, at=at)
    if length is not None and at + n > length:
        raise ValueError(
            f"the tokens reach position {at + n - 1}, and there are embeddings for {length}, from 0 on"
        )
    return torch.arange(at, at + n, device=device)


def _half(dim: int) -> int:
    """Half of the width."""
    check_int(1, dim=dim)
    if dim % 2:
        raise ValueError(f"two parts share the width, so dim must be even, not {dim}")
    return dim // 2
