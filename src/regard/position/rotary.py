"""Positions that turn: queries and keys are rotated by their places, and only the differences remain in their products.

Shapes: turn(q, k, q_at, k_at), q (b h n e), the first at position q_at, k (b h m e), the first at k_at -> both, turned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.position.frequencies import BASE, rotation_angles, row_and_column

LAYOUTS = ("halves", "pairs")


class RotaryEmbedding(nn.Module, ABC):
    """See the module's docstring.  A subclass writes `rotation_angles`.

    fraction   of the width of a head that is turned, its first numbers; the rest stays
    layout     "halves": number r turns with number r + w/2 of the w that are turned (GPT-NeoX, Llama);
               "pairs": number 2r turns with number 2r + 1 (RoFormer, GPT-J)
    """

    unit: int  # the turned width must be a multiple of this

    def __init__(self, base: float, fraction: float, layout: str) -> None:
        super().__init__()
        check_positive("base", base)
        check_choice("layout", layout, LAYOUTS)
        check_positive("fraction", fraction)
        if fraction > 1:
            raise ValueError(f"fraction must be at most 1, not {fraction}")
        self.base, self.fraction, self.layout = base, fraction, layout

    @abstractmethod
    def angles(self, places: Tensor, width: int) -> Tensor:
        """places (n) -> (n width/2): by how much each pair is turned."""

    def rotary_dim(self, width: int) -> int:
        """How many numbers of a head of this width are turned; raises where there is no such number."""
        found = int(self.fraction * width)
        if found < self.unit or found % self.unit:
            raise Unsupported(
                f"{found} of the {width} numbers of a head were to be turned, which must be a multiple of {self.unit}: "
                "take heads of another width, or another fraction"
            )
        return found

    def forward(
        self, q: Tensor, k: Tensor, q_start: int = 0, k_positions: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See the module's docstring."""
        return self._turn(q, q_start), self._turn(k, k_positions)

    def _turn(self, x: Tensor, at: int) -> Tensor:
        width = self.rotary_dim(x.shape[-1])
        angle = self.angles(torch.arange(at, at + x.shape[2], device=x.device), width)
        return rotate(x, angle, pairs=self.layout == "pairs")

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"base={self.base}, fraction={self.fraction}, layout={self.layout!r}"


class Rope(RotaryEmbedding):
    """Rotary embedding: pair r of the token at place p is turned by p · base^(−2r/w) (Su et al. 2021, arXiv 2104.09864).

    linear   places are divided by so much, so that a longer sequence meets the old angles (Chen et al. 2023, arXiv 2306.15595)
    ntk      the base grows by this factor to the power w / (w − 2): the slowest pair turns so many times slower, the fastest as
             before ("NTK-aware" scaling)
    """

    unit = 2

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

    def angles(self, places: Tensor, width: int) -> Tensor:
        """See `RotaryEmbedding.angles`."""
        growth = (
            self.ntk ** (width / (width - 2)) if width > 2 else 1.0
        )  # a single pair has no slower one
        return rotation_angles(places.to(torch.float64) / self.linear, width, self.base * growth)


class Rope2D(RotaryEmbedding):
    """Axial: half of the pairs turn by the row, and half by the column, of an image so many `columns` wide in raster order
    (Heo et al. 2024, arXiv 2403.13298)."""

    unit = 4

    def __init__(
        self, columns: int, *, base: float = BASE, fraction: float = 1.0, layout: str = "halves"
    ) -> None:
        super().__init__(base, fraction, layout)
        check_int(1, columns=columns)
        self.columns = columns

    def angles(self, places: Tensor, width: int) -> Tensor:
        """See `RotaryEmbedding.angles`."""
        return torch.cat(
            [
                rotation_angles(axis, width // 2, self.base)
                for axis in row_and_column(places, self.columns)
            ],
            -1,
        )


def rotate(x: Tensor, angle: Tensor, *, pairs: bool) -> Tensor:
    """x (... n e) with its first 2r numbers turned by angle (n r); as pairs side by side, or number i with number i + r."""
    r = angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    x, rest = x[..., : 2 * r], x[..., 2 * r :]
    one, two = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :r], x[..., r:])
    new = one * cos - two * sin, two * cos + one * sin
    both = torch.stack(new, -1).flatten(-2) if pairs else torch.cat(new, -1)
    return torch.cat((both, rest), -1) if rest.shape[-1] else both
