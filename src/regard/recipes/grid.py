"""Sparse by position, on images: tokens are the cells of a grid, in raster order unless it is said otherwise.

To draw every pattern of the family:

    python -m regard.recipes.grid
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from regard.attentions import SoftmaxAttention
from regard.errors import check_choice, check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import AxialPasses
from regard.pattern import Axial, Band, Blocks, Blocks2D, Chunks, Neighbourhood, Pattern
from regard.position.relative import WindowBias
from regard.prior import Prior
from regard.registry import recipe


def _sparse(
    dim: int, heads: int, pattern: Pattern, causal: bool, prior: Prior | None = None
) -> Mixer:
    return MultiHead(dim, heads, SoftmaxAttention(pattern, prior), causal=causal)


def _pair(**given: int | Sequence[int]) -> tuple[int, int]:
    """Rows and columns; one number is both."""
    ((name, value),) = given.items()
    both = (value, value) if isinstance(value, int) else value
    if not isinstance(both, Sequence) or len(both) != 2:
        raise ValueError(f"{name} must be two numbers, rows and columns, not {value!r}")
    return both[0], both[1]


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over i's block of l_q and the l_m tokens before it",
    example_kwargs={"block": 4, "memory": 3},
)
def image_local_1d(
    dim: int, heads: int, *, block: int = 256, memory: int = 256, causal: bool = False
) -> Mixer:
    """Image Transformer in one dimension: query blocks of `block` tokens in raster order, each of which sees itself and
    `memory` tokens before it; not causal, as many behind it as well."""
    check_int(1, block=block)
    check_int(0, memory=memory)
    return _sparse(dim, heads, Blocks(block, memory, 0 if causal else memory), causal)


@recipe(
    "Parmar et al. 2018",
    arxiv="1802.05751",
    family="sparse",
    formula="softmax over the memory block of i's query block",
    example_kwargs={"width": 6, "block": (2, 3), "memory": (2, 1)},
)
def image_local_2d(
    dim: int,
    heads: int,
    *,
    width: int,
    block: tuple[int, int] = (8, 8),
    memory: tuple[int, int] = (8, 8),
    order: str = "raster",
    causal: bool = False,
) -> Mixer:
    """Image Transformer in two dimensions: query blocks on a grid, each with a memory block around it.

    Tokens are pixels, `width` to a row.  The memory is the query block, extended by memory[0] rows above and memory[1]
    columns to either side; not causal, by as many rows below as well.

    order   "raster": pixels come row by row; "block": block by block, and row by row within a block, as the paper
            generates them.  `regard.block_order` tells how to put an image into that order.
    """
    for name, pair in (("block", block), ("memory", memory)):
        if isinstance(pair, int):
            raise ValueError(f"{name} must be two numbers, rows and columns, not {pair!r}")
    check_choice("order", order, ("raster", "block"))
    (rows, cols), (up, aside) = _pair(block=block), _pair(memory=memory)
    down = 0 if causal else up
    pattern = Blocks2D(
        width, rows, cols, up=up, left=aside, right=aside, down=down, by_block=order == "block"
    )
    return _sparse(dim, heads, pattern, causal)


@recipe(
    "Ho et al. 2019",
    arxiv="1912.12180",
    family="sparse",
    formula="softmax over i's row ∪ i's column",
    example_kwargs={"width": 5},
)
def axial(dim: int, heads: int, *, width: int, form: str = "union", causal: bool = False) -> Mixer:
    """Rows and columns: on a grid in raster order, `width` to a row, each token sees its row and its column.

    form   "union": both in one softmax; "two": attention along rows, then along columns, each with projections of its own;
           "row" or "column": one of them, for layers that take turns
    """
    patterns = {"union": Axial(width), "row": Chunks(width), "column": Band(step=width)}
    check_choice("form", form, (*patterns, "two"))
    return (
        AxialPasses(dim, heads, width, causal=causal)
        if form == "two"
        else _sparse(dim, heads, patterns[form], causal)
    )


@recipe(
    "Hassani et al. 2023",
    arxiv="2204.07143",
    family="sparse",
    formula="softmax over the k keys nearest to i",
    example_kwargs={"length": 48, "size": 5},
)
def neighbourhood(
    dim: int,
    heads: int,
    *,
    length: int,
    size: int | tuple[int, int] = 7,
    width: int | None = None,
    causal: bool = False,
) -> Mixer:
    """Neighbourhood attention: each token sees the `size` tokens around it; at the ends the window is shifted inward, so
    that each sees as many.  Causal, it sees itself and those before it.

    length   of the sequence; with `width`, the cells of a grid of so many columns, rounded up to whole rows
    size     with `width`, rows and columns of the window, or one number for both
    """
    check_int(1, length=length)
    if width is None:
        if not isinstance(size, int):
            raise ValueError(f"size must be one number where there is no width, not {size!r}")
        return _sparse(dim, heads, Neighbourhood(1, length, 1, size, causal), causal)
    check_int(1, width=width)
    return _sparse(
        dim, heads, Neighbourhood(ceil(length / width), width, *_pair(size=size), causal), causal
    )


@recipe(
    "Liu et al. 2021",
    arxiv="2103.14030",
    family="sparse",
    formula="softmax of q·k + B over i's window, shifted in odd layers",
    example_kwargs={"width": 6, "window": 3, "layer": 1},
)
def swin(
    dim: int,
    heads: int,
    *,
    width: int,
    window: int | tuple[int, int] = 7,
    layer: int = 0,
    bias: bool = True,
    causal: bool = False,
) -> Mixer:
    """Swin windows: the grid is cut into windows, and each token sees its own; in every other layer the windows stand half
    a window further down and right.

    Tokens are in raster order, `width` to a row.

    window   its rows and columns, or one number for both
    layer    odd: shifted
    bias     whether scores get a learned number for each offset within a window, as in the paper
    """
    check_int(0, layer=layer)
    check_heads(dim, heads)
    rows, cols = _pair(window=window)
    check_int(1, rows=rows, cols=cols)
    cut = (rows - rows // 2) % rows * (layer % 2), (cols - cols // 2) % cols * (layer % 2)
    pattern = Blocks2D(width, rows, cols, cut_rows=cut[0], cut_cols=cut[1])
    return _sparse(
        dim, heads, pattern, causal, WindowBias(heads, width, rows, cols) if bias else None
    )


if __name__ == "__main__":
    from regard.show import draw_family

    draw_family("C")
