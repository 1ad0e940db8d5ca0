"""Rotary position embeddings: rotate queries and keys, so that dot products depend on relative
positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.device import widest_dtype
from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.position.frequencies import BASE, rotation_angles, row_and_column, token_positions

LAYOUTS = ("halves", "pairs")


class RotaryEmbedding(nn.Module, ABC):
    """Base class for rotary embeddings. Subclasses implement `angles`.

    Args:
        base: Base of the frequencies.
        fraction: Fraction of the head width that is rotated, from the first channel on.
        layout: "halves": channel r is rotated with channel r + w/2 of the w rotated channels
            (GPT-NeoX, Llama). "pairs": channel 2r with channel 2r + 1 (RoFormer, GPT-J).
    """

    multiple: int  # the rotated width must be a multiple of this

    def __init__(self, base: float, fraction: float, layout: str) -> None:
        super().__init__()
        check_positive("base", base)
        check_choice("layout", layout, LAYOUTS)
        check_positive("fraction", fraction)
        if fraction > 1:
            raise ValueError(f"fraction must be at most 1, not {fraction}")
        self.base, self.fraction, self.layout = base, fraction, layout

    @abstractmethod
    def angles(self, positions: Tensor, width: int) -> Tensor:
        """positions (n) or (b n) -> rotation angle of each pair of channels (... n width/2)."""

    def rotary_dim(self, width: int) -> int:
        """Number of rotated channels of a head of this width. Raises if it is not a valid
        number."""
        rotated = int(self.fraction * width)
        if rotated < self.multiple or rotated % self.multiple:
            raise Unsupported(
                f"{rotated} of {width} channels of a head would be rotated, which must be a "
                f"multiple of {self.multiple}. Use another head width or another fraction."
            )
        return rotated

    def forward(
        self, q: Tensor, k: Tensor, q_start: int | Tensor = 0, k_start: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries (b h n e) from position q_start on, and keys (b h m e) from k_start on:
        ints, or tensors (b) if the examples stand at different positions."""
        return self._rotate(q, q_start), self._rotate(k, k_start)

    def _rotate(self, x: Tensor, start: int | Tensor) -> Tensor:
        return self.rotate_at(x, token_positions(start, x.shape[2], x.device))

    def rotate_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads x (b h n e) at the given positions, (n) or (b n)."""
        angle = self.angles(positions, self.rotary_dim(x.shape[-1]))
        angle = angle[:, None] if angle.dim() == 3 else angle  # (b 1 n r)
        return rotate(x, angle, pairs=self.layout == "pairs")

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"base={self.base}, fraction={self.fraction}, layout={self.layout!r}"


class Rope(RotaryEmbedding):
    """Rotary embedding: pair r at position p is rotated by p · base^(−2r/w)
    (Su et al. 2021, arXiv 2104.09864).

    Args:
        base: Base of the frequencies.
        fraction: Fraction of the head width that is rotated.
        layout: See `RotaryEmbedding`.
        linear: Positions are divided by this factor, so that a longer sequence has the angles seen
            in training (position interpolation: Chen et al. 2023, arXiv 2306.15595).
        ntk: The base is multiplied by ntk^(w / (w − 2)): the slowest pair rotates slower by this
            factor, the fastest as before (NTK-aware scaling).
    """

    multiple = 2

    def __init__(
        self,
        *,
        base: float = BASE,
        fraction: float = 1.0,
        layout: str = "halves",
        linear: float = 1.0,
        ntk: float = 1.0,
    ) -> None:
        super().__init__(base, fraction, layout)
        check_positive("linear", linear)
        check_positive("ntk", ntk)
        self.linear, self.ntk = linear, ntk

    def angles(self, positions: Tensor, width: int) -> Tensor:
        """See `RotaryEmbedding.angles`."""
        scale = (
            self.ntk ** (width / (width - 2)) if width > 2 else 1.0
        )  # one pair has no slower one
        scaled = positions.to(widest_dtype(positions.device)) / self.linear
        return rotation_angles(scaled, width, self.base * scale)


class Rope2D(RotaryEmbedding):
    """Axial rotary embedding for images in raster order (Heo et al. 2024, arXiv 2403.13298).

    Half of the pairs are rotated by the row, half by the column.

    Args:
        columns: Width of the image.
        base: Base of the frequencies.
        fraction: Fraction of the head width that is rotated.
        layout: See `RotaryEmbedding`.
    """

    multiple = 4

    def __init__(
        self,
        columns: int,
        *,
        base: float = BASE,
        fraction: float = 1.0,
        layout: str = "halves",
    ) -> None:
        super().__init__(base, fraction, layout)
        check_int(1, columns=columns)
        self.columns = columns

    def angles(self, positions: Tensor, width: int) -> Tensor:
        """See `RotaryEmbedding.angles`."""
        axes = row_and_column(positions, self.columns)
        return torch.cat([rotation_angles(axis, width // 2, self.base) for axis in axes], -1)


def rotate(x: Tensor, angle: Tensor, *, pairs: bool) -> Tensor:
    """Rotate the first 2r channels of x (... n e) by angle (n r), or anything that broadcasts.

    With `pairs` neighbouring channels are rotated together, otherwise channel i with channel i + r.
    """
    r = angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    x, rest = x[..., : 2 * r], x[..., 2 * r :]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :r], x[..., r:])
    rotated = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(rotated, -1).flatten(-2) if pairs else torch.cat(rotated, -1)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y
