"""Leaves for images: the tokens are the cells of a grid, in raster order unless it is said otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import check_int
from regard.pattern.algebra import Block, Leaf, Pattern, tile_extent
from regard.pattern.leaves import Band, Chunks

Box = tuple[Tensor, Tensor, Tensor, Tensor]  # first and last row, first and last column
MOST = 1 << 60  # cells: products of sizes beyond it would not fit


@dataclass(frozen=True, repr=False)
class Blocks2D(Leaf):
    """On an image of `width` columns: query blocks of `rows` x `cols` cells, each of which sees its own block, extended
    `up`, `left`, `right` and `down` by so many cells (Image Transformer's memory block).

    cut_rows   the topmost blocks lack so many rows, and `cut_cols` the leftmost so many columns (Swin's shifted windows)
    by_block   the tokens come block by block, and in raster order within a block; see `block_order`
    """

    width: int
    rows: int
    cols: int
    up: int = 0
    left: int = 0
    right: int = 0
    down: int = 0
    cut_rows: int = 0
    cut_cols: int = 0
    by_block: bool = False

    def __post_init__(self) -> None:
        self._check(width=1, rows=1, cols=1, up=0, left=0, right=0, down=0, cut_rows=0, cut_cols=0)
        if self.cut_rows >= self.rows or self.cut_cols >= self.cols:
            raise ValueError(
                f"Blocks2D: cut_rows and cut_cols must leave something of a block, and do not in {self!r}"
            )
        if not isinstance(self.by_block, bool):
            raise ValueError(f"Blocks2D: by_block must be True or False, not {self.by_block!r}")
        if self.by_block and (self.cut_rows or self.cut_cols):
            raise ValueError("Blocks2D: by_block counts whole blocks, so none may be cut")

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        (y, x), (v, u) = self._corner(*self._cell(q)), self._cell(k)
        inside_y = (v >= y - self.up) & (v < y + self.rows + self.down)
        return inside_y & (u >= x - self.left) & (u < x + self.cols + self.right)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self._boxes(self._box(q0, q1), self._box(k0, k1))

    def patches(self, q: Tensor, k: Tensor) -> Block:
        """(some, every), each (r c), for tiles q (r s) and k (c t) that hold patches of the image; -1 = no cell."""
        y0, y1, x0, x1 = (side[:, None] for side in self._around(q))
        return self._boxes((y0, y1, x0, x1), self._around(k))

    def _cell(self, at: Tensor) -> Block:
        """Row and column of a position."""
        if not self.by_block:
            return at // self.width, at % self.width
        band, block = (
            min(self.rows * self.width, MOST),
            min(self.rows * self.cols, MOST),
        )  # tokens of each
        x = at % band // block * self.cols
        inside, cols = at % band % block, (self.width - x).clamp(1, self.cols)
        return at // band * self.rows + inside // cols, x + inside % cols

    def _corner(self, y: Tensor, x: Tensor) -> Block:
        """The first row and column of the block of a cell; above and left of the image where the block is cut."""
        row, col = (y + self.cut_rows) // self.rows, (x + self.cut_cols) // self.cols
        return row * self.rows - self.cut_rows, col * self.cols - self.cut_cols

    def _boxes(self, q: Box, k: Box) -> Block:
        """Whether query cells in rows y0..y1, columns x0..x1 see key cells in rows v0..v1, columns u0..u1."""
        (y0, y1, x0, x1), (v0, v1, u0, u1) = q, k
        (y0, x0), (y1, x1) = self._corner(y0, x0), self._corner(y1, x1)
        below, after = self.rows + self.down, self.cols + self.right
        some = (v1 >= y0 - self.up) & (v0 < y1 + below) & (u1 >= x0 - self.left) & (u0 < x1 + after)
        every = (
            (v0 >= y1 - self.up) & (v1 < y0 + below) & (u0 >= x1 - self.left) & (u1 < x0 + after)
        )
        return some, every

    def _around(self, cells: Tensor) -> Box:
        y0, y1 = tile_extent(torch.where(cells < 0, -1, cells // self.width))
        x0, x1 = tile_extent(torch.where(cells < 0, -1, cells % self.width))
        return y0, y1, x0, x1

    def _box(self, first: Tensor, last: Tensor) -> Box:
        """Rows y0..y1 and columns x0..x1 around the positions first..last."""
        if not self.by_block:
            return _raster_box(self.width, first, last)
        (y0, x0), (y1, x1) = self._cell(first), self._cell(last)
        (top, left), (bottom, right) = self._corner(y0, x0), self._corner(y1, x1)
        band = top == bottom
        block = band & (left == right)
        row = block & (y0 == y1)
        left, right = (
            torch.where(band, left, 0),
            torch.where(band, right + self.cols - 1, self.width - 1),
        )
        return (
            torch.where(block, y0, top),
            torch.where(block, y1, bottom + self.rows - 1),
            torch.where(row, x0, left),
            torch.where(row, x1, right),
        )


def _raster_box(width: int, first: Tensor, last: Tensor) -> Box:
    """Rows y0..y1 and columns x0..x1 around the positions first..last of a raster."""
    y0, y1 = first // width, last // width
    return (
        y0,
        y1,
        torch.where(y0 == y1, first % width, 0),
        torch.where(y0 == y1, last % width, width - 1),
    )


def block_order(height: int, width: int, block: tuple[int, int]) -> Tensor:
    """(height * width): the raster positions of the cells in the order in which they come block by block.

    `x[:, order]` puts an image in raster order into block order, and `y[:, order.argsort()]` takes it back.  The height is
    a multiple of the blocks' rows.
    """
    check_int(1, height=height, width=width, rows=block[0], cols=block[1])
    if height % block[0]:
        raise ValueError(
            f"height must be a multiple of the blocks' rows, and {height} is not of {block[0]}: fill the image up"
        )
    y, x = Blocks2D(width, *block, by_block=True)._cell(torch.arange(height * width))
    return y * width + x


@dataclass(frozen=True, repr=False)
class Neighbourhood(Leaf):
    """On a grid of `rows` x `width` cells: the `kernel_rows` x `kernel_cols` cells around the query.  At the border they are shifted
    inward, so that every query sees as many (neighbourhood attention, Hassani et al. 2023, arXiv 2204.07143).

    past   the cell itself and those above and left of it only; then none is shifted

    A sequence is a grid of one row.  Cells past the last one count as the last one.
    """

    rows: int
    width: int
    kernel_rows: int
    kernel_cols: int
    causal: bool = False

    def __post_init__(self) -> None:
        self._check(rows=1, width=1, kernel_rows=1, kernel_cols=1)
        if self.rows * self.width > MOST:
            raise ValueError(
                f"Neighbourhood: {self.rows} x {self.width} are more cells than can be counted"
            )
        if not isinstance(self.causal, bool):
            raise ValueError(f"Neighbourhood: causal must be True or False, not {self.causal!r}")
        object.__setattr__(self, "_length", self.rows * self.width)

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return self._block(q, q, k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        last = self.rows * self.width - 1
        y0, y1, x0, x1 = _raster_box(self.width, q0.clamp(max=last), q1.clamp(max=last))
        v0, v1, u0, u1 = _raster_box(self.width, k0.clamp(max=last), k1.clamp(max=last))
        (top, low), (left, right) = (
            self._first(y0, y1, self.kernel_rows, self.rows),
            self._first(x0, x1, self.kernel_cols, self.width),
        )
        some = (
            (v1 >= top)
            & (v0 < low + self.kernel_rows)
            & (u1 >= left)
            & (u0 < right + self.kernel_cols)
        )
        every = (
            (v0 >= low)
            & (v1 < top + self.kernel_rows)
            & (u0 >= right)
            & (u1 < left + self.kernel_cols)
        )
        return some, every

    def _first(self, one: Tensor, other: Tensor, size: int, extent: int) -> Block:
        """Along an axis, the first cell that the first and the last query see: it never moves back from one to the next."""
        if self.causal:
            return one - size + 1, other - size + 1
        return tuple((at - size // 2).clamp(0, max(extent - size, 0)) for at in (one, other))  # type: ignore[return-value]


def Near2D(width: int, rows: int, cols: int) -> Blocks2D:
    """On an image of `width` columns in raster order: keys at most `rows` above or below and `cols` to either side."""
    return Blocks2D(width, 1, 1, up=rows, left=cols, right=cols, down=rows)


def Axial(width: int) -> Pattern:
    """On an image of `width` columns in raster order: the query's row and its column."""
    return Chunks(width) | Band(step=width)
