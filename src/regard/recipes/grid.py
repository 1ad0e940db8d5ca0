"""Sparse patterns on images: tokens are the cells of a grid, in raster order by default."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from regard.attentions import SoftmaxAttention
from regard.errors import check_choice, check_int
from regard.mixer import Attention, Mixer
from regard.mixers import AxialPasses
from regard.pattern import Axial, Band, Blocks, Blocks2D, Chunks, Neighbourhood
from regard.position.bias import WindowBias
from regard.registry import recipe


def _rows_and_columns(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """One number stands for both."""
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{name} must be two numbers, rows and columns, not {value!r}")
    return pair[0], pair[1]


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over i's block of l_q and the l_m tokens before it",
    example_kwargs={"block": 4, "memory": 3},
)
def image_local_1d(
    heads: int, head_dim: int, *, block: int = 256, memory: int = 256, causal: bool = False
) -> Attention:
    """Image Transformer, 1D local attention: blocks of queries that see themselves and the tokens
    around them.

    Args:
        block: Tokens of a query block, in raster order.
        memory: Tokens before the block that it sees, and as many behind it if not causal.
    """
    check_int(1, block=block)
    check_int(0, memory=memory)
    pattern = Blocks(block, memory, 0 if causal else memory)
    return SoftmaxAttention(pattern)


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over the memory block of i's query block",
    example_kwargs={"width": 6, "block": (2, 3), "memory": (2, 1)},
)
def image_local_2d(
    heads: int,
    head_dim: int,
    *,
    width: int,
    block: tuple[int, int] = (8, 8),
    memory: tuple[int, int] = (8, 8),
    order: str = "raster",
    causal: bool = False,
) -> Attention:
    """Image Transformer, 2D local attention: query blocks on a grid, each with a memory block
    around it.

    Args:
        width: Columns of the image.
        block: Rows and columns of a query block.
        memory: Margin of the memory block: rows above (and below, if not causal), and columns on
            each side.
        order: "raster": tokens are in raster order. "block": block by block, as the paper generates
            them; `regard.block_order` gives the permutation.
    """
    for name, pair in (("block", block), ("memory", memory)):
        if isinstance(pair, int):
            raise ValueError(f"{name} must be two numbers, rows and columns, not {pair!r}")
    check_choice("order", order, ("raster", "block"))
    rows, cols = _rows_and_columns("block", block)
    above, beside = _rows_and_columns("memory", memory)
    pattern = Blocks2D(
        width,
        rows,
        cols,
        up=above,
        left=beside,
        right=beside,
        down=0 if causal else above,
        by_block=order == "block",
    )
    return SoftmaxAttention(pattern)


@recipe(
    "Ho et al. 2019",
    arxiv="1912.12180",
    family="sparse",
    formula="softmax over i's row ∪ i's column",
    example_kwargs={"width": 5},
)
def axial(heads: int, head_dim: int, *, width: int, form: str = "union") -> Attention:
    """Axial attention: each token attends to its row and its column.

    Args:
        width: Columns of the image.
        form: "union": row and column in one softmax. "row" or "column": one of them, to alternate
            over layers. `axial_passes` attends along both, one after the other.
    """
    patterns = {"union": Axial(width), "row": Chunks(width), "column": Band(step=width)}
    check_choice("form", form, patterns)
    return SoftmaxAttention(patterns[form])


@recipe(
    "Ho et al. 2019",
    arxiv="1912.12180",
    family="sparse",
    formula="softmax over i's row, then softmax over i's column",
    example_kwargs={"width": 5},
)
def axial_passes(dim: int, heads: int, *, width: int, causal: bool = False) -> Mixer:
    """Axial attention in two passes: along the rows, then along the columns, each with its own
    projections.

    Args:
        width: Columns of the image.
    """
    return AxialPasses(dim, heads, width, causal=causal)


@recipe(
    "Hassani et al. 2023",
    arxiv="2204.07143",
    family="sparse",
    formula="softmax of q·k, optionally + B, over the k keys nearest to i",
    example_kwargs={"length": 48, "size": 5},
)
def neighbourhood(
    heads: int,
    head_dim: int,
    *,
    length: int,
    size: int | tuple[int, int] = 7,
    width: int | None = None,
    position_bias: bool = False,
    causal: bool = False,
) -> Attention:
    """Neighbourhood attention: each token attends to the `size` nearest tokens; at the border the
    window shifts inward.

    Args:
        length: Length of the sequence; with `width`, cells of the grid, rounded up to whole rows.
        size: Size of the window in tokens (not on each side). With `width`, rows and columns, or
            one number for both.
        width: Columns of the grid. Default: a sequence.
        position_bias: Add the paper's learned relative position bias to the scores.
    """
    check_int(1, length=length)
    if width is None:
        if not isinstance(size, int):
            raise ValueError(f"size must be one number if there is no width, not {size!r}")
        grid_rows, width, rows, cols = 1, length, 1, size
    else:
        check_int(1, width=width)
        grid_rows = ceil(length / width)
        rows, cols = _rows_and_columns("size", size)
    pattern = Neighbourhood(grid_rows, width, rows, cols, causal)
    prior = WindowBias(heads, width, rows, cols) if position_bias else None
    return SoftmaxAttention(pattern, prior)


@recipe(
    "Liu et al. 2021",
    arxiv="2103.14030",
    family="sparse",
    formula="softmax of q·k + B over i's window, shifted in odd layers",
    example_kwargs={"width": 6, "window": 3, "layer": 1},
)
def swin(
    heads: int,
    head_dim: int,
    *,
    width: int,
    window: int | tuple[int, int] = 7,
    layer: int = 0,
    position_bias: bool = True,
) -> Attention:
    """Swin: the grid is cut into windows, and each token attends to its own; odd layers shift them
    by half a window.

    Args:
        width: Columns of the image.
        window: Rows and columns of a window, or one number for both.
        layer: Layer number. Odd layers are shifted.
        position_bias: Add a learned relative position bias to the scores.
    """
    check_int(0, layer=layer)
    rows, cols = _rows_and_columns("window", window)
    check_int(1, rows=rows, cols=cols)
    shifted = layer % 2
    pattern = Blocks2D(
        width,
        rows,
        cols,
        cut_rows=(rows - rows // 2) % rows * shifted,
        cut_cols=(cols - cols // 2) % cols * shifted,
    )
    prior = WindowBias(heads, width, rows, cols) if position_bias else None
    return SoftmaxAttention(pattern, prior)
