"""Position embeddings that are combined with the tokens before the first layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import widest_dtype
from regard.errors import check_int, check_positive
from regard.position.frequencies import (
    BASE,
    inverse_frequencies,
    row_and_column,
    sinusoidal_encoding,
    token_positions,
)

INIT_STD = 0.02


class PositionEmbedding(nn.Module, ABC):
    """Base class for position embeddings. Subclasses implement `embed`.

    Args:
        dim: Model width d.
        length: Number of positions, or None for any number.
    """

    def __init__(self, dim: int, length: int | None = None) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.dim, self.length = dim, length

    @abstractmethod
    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Tokens x (b n d) at positions (n) or (b n) -> (b n d)."""

    def forward(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """x (b n d) -> (b n d). `start` is the position of the first token, an int or (b)."""
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x must have shape (b, n, {self.dim}), not {tuple(x.shape)}")
        _check_start(start, x.shape[0])
        if self.length is not None:
            last = start
            if isinstance(start, Tensor):
                last = int(start.max()) if len(start) else 0
            if last + x.shape[1] > self.length:
                raise ValueError(
                    f"Input reaches position {last + x.shape[1] - 1} but the embedding was built "
                    f"for positions 0 to {self.length - 1}."
                )
        return self.embed(x, token_positions(start, x.shape[1], x.device))


class NoPosition(PositionEmbedding):
    """No positions: returns x."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        return x


class SinusoidalEmbedding(PositionEmbedding):
    """x + P, P[p, 2r] = sin(p / base^(2r/d)), P[p, 2r+1] = cos(p / base^(2r/d))
    (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, base: float = BASE) -> None:
        super().__init__(dim)
        check_positive("base", base)
        self.base = base

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        return x + sinusoidal_encoding(positions, self.dim, self.base).to(x.dtype)


class SinusoidalEmbedding2D(PositionEmbedding):
    """x + (P[row], P[column]), each a sinusoidal encoding of half the width, for an image of
    `columns` columns in raster order (Parmar et al. 2018, arXiv 1802.05751)."""

    def __init__(self, dim: int, columns: int, *, base: float = BASE) -> None:
        super().__init__(dim)
        check_int(1, columns=columns)
        check_positive("base", base)
        self.columns, self.base, self.half_dim = columns, base, _half(dim)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        axes = row_and_column(positions, self.columns)
        encoding = [sinusoidal_encoding(axis, self.half_dim, self.base) for axis in axes]
        return x + torch.cat(encoding, -1).to(x.dtype)


class LearnedEmbedding(PositionEmbedding):
    """x + T[p], with a learned table T (length d) (Gehring et al. 2017, arXiv 1705.03122)."""

    def __init__(self, dim: int, length: int) -> None:
        check_int(1, length=length)
        super().__init__(dim, length)
        self.table = nn.Parameter(torch.randn(length, dim) * INIT_STD)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        return x + self.table[positions].to(x.dtype)


class LearnedEmbedding2D(PositionEmbedding):
    """x + (R[row], C[column]), with learned tables of half the width for the rows and columns of an
    image in raster order (Carion et al. 2020, arXiv 2005.12872)."""

    def __init__(self, dim: int, rows: int, columns: int) -> None:
        check_int(1, rows=rows, columns=columns)
        super().__init__(dim, rows * columns)
        half = _half(dim)
        self.rows = nn.Parameter(torch.randn(rows, half) * INIT_STD)
        self.columns = nn.Parameter(torch.randn(columns, half) * INIT_STD)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        row, column = row_and_column(positions, len(self.columns))
        return x + torch.cat((self.rows[row], self.columns[column]), -1).to(x.dtype)


class FourierEmbedding(PositionEmbedding):
    """W [x, t, sin(π f_k t), cos(π f_k t)] + b, t = 2 p / (length − 1) − 1
    (Jaegle et al. 2021, arXiv 2103.03206).

    Args:
        dim: Model width d.
        length: Number of positions.
        bands: Number of frequencies f_k, evenly spaced from 1 to resolution / 2.
        resolution: Maximum resolution of the paper. Defaults to `length`.
    """

    length: int

    def __init__(
        self, dim: int, length: int, *, bands: int = 16, resolution: int | None = None
    ) -> None:
        check_int(1, length=length, bands=bands)
        super().__init__(dim, length)
        self.bands, self.resolution = bands, length if resolution is None else resolution
        check_int(1, resolution=self.resolution)
        self.out = nn.Linear(dim + 1 + 2 * bands, dim)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        features = fourier_features([(positions, self.length, self.resolution)], self.bands)
        return _concat_linear(self.out, x, features)


class FourierEmbedding2D(PositionEmbedding):
    """`FourierEmbedding` of the rows and columns of an image in raster order.

    Args:
        dim: Model width d.
        rows: Height of the image.
        columns: Width of the image.
        bands: Number of frequencies for each axis.
        resolution: Maximum resolution of rows and columns. Defaults to their numbers.
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

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `PositionEmbedding.embed`."""
        axes = row_and_column(positions, self.sizes[1])
        axes_and_sizes = list(zip(axes, self.sizes, self.resolution, strict=True))
        return _concat_linear(self.out, x, fourier_features(axes_and_sizes, self.bands))


class ComplexEmbedding(nn.Module):
    """Complex-valued word embedding: r_w · exp(i (ω_w p + θ_w)) for word w at position p, with an
    amplitude, a frequency and a phase for each word and channel
    (Wang et al. 2020, arXiv 1912.12333).

    Replaces the token embedding. The paper's networks are complex; here the d/2 real parts and the
    d/2 imaginary parts are concatenated.

    Args:
        dim: Model width d.
        words: Size of the vocabulary.
    """

    def __init__(self, dim: int, words: int) -> None:
        super().__init__()
        check_int(1, dim=dim, words=words)
        half = _half(dim)
        self.dim = dim
        self.amplitude = nn.Parameter(torch.randn(words, half))
        self.frequency = nn.Parameter(inverse_frequencies(dim).float().repeat(words, 1))
        self.phase = nn.Parameter(torch.zeros(words, half))

    def forward(self, words: Tensor, start: int | Tensor = 0) -> Tensor:
        """Word indices (b n) -> (b n d). `start` is the position of the first word, an int or
        (b)."""
        if words.dim() != 2 or words.dtype != torch.long:
            got = f"{tuple(words.shape)} {words.dtype}"
            raise ValueError(f"words must be an int64 tensor of indices (b, n), not {got}")
        _check_start(start, words.shape[0])
        positions = token_positions(start, words.shape[1], words.device)[..., None]
        amplitude = F.embedding(words, self.amplitude)
        frequency, phase = F.embedding(words, self.frequency), F.embedding(words, self.phase)
        angle = frequency * positions.to(frequency.dtype) + phase
        return torch.cat((amplitude * angle.cos(), amplitude * angle.sin()), -1)


def fourier_features(axes: list[tuple[Tensor, int, int]], bands: int) -> Tensor:
    """Fourier features of positions.

    Args:
        axes: For each axis its positions (n) or (b n), its size and its resolution.
        bands: Number of frequencies for each axis.

    Returns:
        (... n, axes · (1 + 2 bands)): all positions scaled to −1 .. 1, then all sines, then all
        cosines.
    """
    scaled, angles = [], []
    for positions, size, resolution in axes:
        t = 2 * positions.to(widest_dtype(positions.device)) / max(size - 1, 1) - 1
        frequencies = torch.linspace(1, resolution / 2, bands, dtype=t.dtype, device=t.device)
        scaled.append(t)
        angles.append(math.pi * t[..., None] * frequencies)
    angle = torch.cat(angles, -1)
    return torch.cat((torch.stack(scaled, -1), angle.sin(), angle.cos()), -1)


def _concat_linear(linear: nn.Linear, x: Tensor, features: Tensor) -> Tensor:
    """linear([x, features]) for tokens x (b n d) and features (n f) or (b n f)."""
    features = features.to(x.dtype).expand(x.shape[0], -1, -1)
    y: Tensor = linear(torch.cat((x, features), -1))
    return y


def _check_start(start: int | Tensor, batch_size: int) -> None:
    """Check that `start` is a position, or one position for each example."""
    if not isinstance(start, Tensor):
        check_int(0, start=start)
    elif start.dtype != torch.long or start.shape != (batch_size,):
        raise ValueError(
            f"start must be an integer or an int64 tensor of shape ({batch_size},), "
            f"not {tuple(start.shape)} {start.dtype}"
        )


def _half(dim: int) -> int:
    """Half of the width, which must be even."""
    check_int(1, dim=dim)
    if dim % 2:
        raise ValueError(f"dim must be even, since two parts share it, not {dim}")
    return dim // 2
