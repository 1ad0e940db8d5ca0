"""Leaves for images: tokens are the cells of a grid, in raster order unless stated otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import check_int
from regard.pattern.algebra import Block, Leaf, Pattern, tile_extent
from regard.pattern.leaves import Band, Chunks, window_block

Cells = tuple[Tensor, Tensor]  # rows and columns
Box = tuple[Tensor, Tensor, Tensor, Tensor]  # first and last row, first and last column
MAX_CELLS = 1 << 60  # products of larger sizes would overflow int64


@dataclass(frozen=True, repr=False)
class Blocks2D(Leaf):
    """Blocks of an image: each query sees its own block and some cells around the block (Image
    Transformer, Swin).

    Args:
        width: Columns of the image.
        rows, cols: Size of a block.
        up, left, right, down: How many cells beyond its block a query sees on each side.
        cut_rows, cut_cols: How many rows (columns) are missing from the topmost (leftmost) blocks:
            shifted windows.
        by_block: Tokens come block by block, and in raster order within a block; see `block_order`.
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
                "Blocks2D: cut_rows and cut_cols must be smaller than the block, "
                f"not as in {self!r}"
            )
        if not isinstance(self.by_block, bool):
            raise ValueError(f"Blocks2D: by_block must be True or False, not {self.by_block!r}")
        if self.by_block and (self.cut_rows or self.cut_cols):
            raise ValueError("Blocks2D: by_block=True does not support cut_rows and cut_cols")

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        (y, x), (v, u) = self._corner(*self._cell(q)), self._cell(k)
        inside_y = (v >= y - self.up) & (v < y + self.rows + self.down)
        return inside_y & (u >= x - self.left) & (u < x + self.cols + self.right)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        return self._box_block(self._bounding_box(q0, q1), self._bounding_box(k0, k1))

    def classify_patches(self, q: Tensor, k: Tensor) -> Block:
        """(some, every), each (r c), for tiles q (r s) and k (c t) that hold patches of the image;
        -1 = no cell.
        """

        def box(cells: Tensor) -> Box:
            y0, y1 = tile_extent(torch.where(cells < 0, -1, cells // self.width))
            x0, x1 = tile_extent(torch.where(cells < 0, -1, cells % self.width))
            return y0, y1, x0, x1

        y0, y1, x0, x1 = (side[:, None] for side in box(q))
        return self._box_block((y0, y1, x0, x1), box(k))

    def _cell(self, position: Tensor) -> Cells:
        if not self.by_block:
            return position // self.width, position % self.width
        band = min(self.rows * self.width, MAX_CELLS)  # tokens of a row of blocks
        block = min(self.rows * self.cols, MAX_CELLS)
        x = position % band // block * self.cols
        inside, cols = position % band % block, (self.width - x).clamp(1, self.cols)
        return position // band * self.rows + inside // cols, x + inside % cols

    def _corner(self, y: Tensor, x: Tensor) -> Cells:
        """The top left cell of the block around a cell; it is negative for blocks that are cut."""
        row, col = (y + self.cut_rows) // self.rows, (x + self.cut_cols) // self.cols
        return row * self.rows - self.cut_rows, col * self.cols - self.cut_cols

    def _box_block(self, q: Box, k: Box) -> Block:
        """(some, every) for query cells in rows y0..y1, columns x0..x1 and key cells in rows
        v0..v1, columns u0..u1.
        """
        (y0, y1, x0, x1), (v0, v1, u0, u1) = q, k
        (y0, x0), (y1, x1) = self._corner(y0, x0), self._corner(y1, x1)
        below, after = self.rows + self.down, self.cols + self.right
        some_rows, every_row = window_block(
            (y0 - self.up, y1 - self.up), (y0 + below, y1 + below), v0, v1
        )
        some_cols, every_col = window_block(
            (x0 - self.left, x1 - self.left), (x0 + after, x1 + after), u0, u1
        )
        return some_rows & some_cols, every_row & every_col

    def _bounding_box(self, first: Tensor, last: Tensor) -> Box:
        """Rows y0..y1 and columns x0..x1 around the positions first..last."""
        if not self.by_block:
            return _raster_box(self.width, first, last)
        (y0, x0), (y1, x1) = self._cell(first), self._cell(last)
        (top, left), (bottom, right) = self._corner(y0, x0), self._corner(y1, x1)
        same_band = top == bottom
        same_block = same_band & (left == right)
        same_row = same_block & (y0 == y1)
        left = torch.where(same_band, left, 0)
        right = torch.where(same_band, right + self.cols - 1, self.width - 1)
        return (
            torch.where(same_block, y0, top),
            torch.where(same_block, y1, bottom + self.rows - 1),
            torch.where(same_row, x0, left),
            torch.where(same_row, x1, right),
        )


def _raster_box(width: int, first: Tensor, last: Tensor) -> Box:
    """Rows y0..y1 and columns x0..x1 around the positions first..last in raster order."""
    y0, y1 = first // width, last // width
    x0 = torch.where(y0 == y1, first % width, 0)
    return y0, y1, x0, torch.where(y0 == y1, last % width, width - 1)


def block_order(height: int, width: int, block: tuple[int, int]) -> Tensor:
    """(height * width): the raster positions of the cells in block-by-block order.

    `x[:, order]` converts an image from raster to block order, `y[:, order.argsort()]` converts it
    back.

    Args:
        height: Rows of the image, a multiple of the rows of a block.
        width: Columns of the image.
        block: Rows and columns of a block.
    """
    check_int(1, height=height, width=width, rows=block[0], cols=block[1])
    if height % block[0]:
        raise ValueError(
            f"height must be a multiple of the {block[0]} rows of a block, not {height}: "
            "pad the image"
        )
    y, x = Blocks2D(width, *block, by_block=True)._cell(torch.arange(height * width))
    return y * width + x


@dataclass(frozen=True, repr=False)
class Neighbourhood(Leaf):
    """Neighbourhood attention: a window of cells around the query, shifted inward at the border of
    the grid.

    Every query sees equally many cells (Hassani et al. 2023, arXiv 2204.07143). A sequence is a
    grid with one row. Positions beyond the grid are treated as its last cell.

    Args:
        rows, width: Size of the grid.
        kernel_rows, kernel_cols: Size of the window.
        causal: The window ends at the query: cells above and to the left of it only, without
            shifting.
    """

    rows: int
    width: int
    kernel_rows: int
    kernel_cols: int
    causal: bool = False

    def __post_init__(self) -> None:
        self._check(rows=1, width=1, kernel_rows=1, kernel_cols=1)
        if self.rows * self.width > MAX_CELLS:
            raise ValueError(
                f"Neighbourhood: a grid of {self.rows} x {self.width} cells is too large"
            )
        if not isinstance(self.causal, bool):
            raise ValueError(f"Neighbourhood: causal must be True or False, not {self.causal!r}")
        object.__setattr__(self, "_length", self.rows * self.width)

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._block(q, q, k, k)[1]

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        last = self.rows * self.width - 1
        y0, y1, x0, x1 = _raster_box(self.width, q0.clamp(max=last), q1.clamp(max=last))
        v0, v1, u0, u1 = _raster_box(self.width, k0.clamp(max=last), k1.clamp(max=last))
        some_rows, every_row = self._axis_block(y0, y1, v0, v1, self.kernel_rows, self.rows)
        some_cols, every_col = self._axis_block(x0, x1, u0, u1, self.kernel_cols, self.width)
        return some_rows & some_cols, every_row & every_col

    def _axis_block(
        self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor, size: int, extent: int
    ) -> Block:
        if self.causal:
            start0, start1 = q0 - size + 1, q1 - size + 1
        else:
            start0, start1 = ((q - size // 2).clamp(0, max(extent - size, 0)) for q in (q0, q1))
        return window_block((start0, start1), (start0 + size, start1 + size), k0, k1)


def Near2D(width: int, rows: int, cols: int) -> Blocks2D:
    """On an image of `width` columns: keys at most `rows` above or below and `cols` to either side
    of the query.
    """
    return Blocks2D(width, 1, 1, up=rows, left=cols, right=cols, down=rows)


def Axial(width: int) -> Pattern:
    """On an image of `width` columns: the row and the column of the query."""
    return Chunks(width) | Band(step=width)
