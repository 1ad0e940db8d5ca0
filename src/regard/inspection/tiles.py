"""Tiles of a page: rectangles of maps with 8 bits for each cell."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.inspection.data import TileData
from regard.inspection.influence import Influence
from regard.inspection.operators import HeadOperator

MAX_CELLS = 512  # of one side of a tile
PAGE_BYTES = 3_000_000  # of the tiles of a page, before base64
FINE = 128  # tokens of a side of the tiles that a page has beside the whole of a long map


def encode_tile(weights: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> TileData:
    """A tile of mean weights (h, rows, columns) over queries and keys (from, to)."""
    weights = weights.detach().float().abs()
    finite = torch.nan_to_num(weights, nan=0.0, posinf=0.0)
    scale = finite.flatten(1).amax(1)
    levels = finite / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None, None] * 255
    content = levels.round().to(torch.uint8).contiguous().numpy().tobytes()
    return {
        "q": queries,
        "k": keys,
        "rows": weights.shape[1],
        "columns": weights.shape[2],
        "scale": [float(f"{s:.6g}") for s in scale.tolist()],
        "weights": base64.b64encode(content).decode(),
    }


def compute_tile(
    operator: HeadOperator | Influence,
    queries: tuple[int, int],
    keys: tuple[int, int],
    rows: int,
    columns: int,
) -> TileData:
    """A rectangle of a map in at most `rows` x `columns` cells."""
    for name, (start, end), size in (
        ("queries", queries, operator.queries),
        ("keys", keys, operator.keys),
    ):
        if not 0 <= start < end <= size:
            raise ValueError(f"{name} must be within 0 to {size:,}, not {start:,} to {end:,}.")
    if not 1 <= min(rows, columns) <= max(rows, columns) <= MAX_CELLS:
        raise ValueError(
            f"A tile has 1 to {MAX_CELLS} cells on each side, not {rows:,} x {columns:,}."
        )
    shape = min(rows, queries[1] - queries[0]), min(columns, keys[1] - keys[0])
    return encode_tile(operator.pool_map(slice(*queries), slice(*keys), shape), queries, keys)


def page_cells(maps: list[HeadOperator | Influence], budget: int = PAGE_BYTES) -> int:
    """Cells on a side of the first tile of each map, so that all of them fit into a page."""
    heads = sum(each.heads for each in maps)
    longest = max((max(each.queries, each.keys) for each in maps), default=1)
    fitting = int(math.sqrt(budget / max(1, heads)))
    limit = 64 if any(isinstance(each, Influence) for each in maps) else 256
    return max(8, min(longest, fitting, limit if longest > MAX_CELLS else MAX_CELLS))


def fine_rectangles(
    operator: HeadOperator | Influence, cells: int, budget: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Squares of single pairs along the diagonal of a long map, as many as fit: its start, its end,
    and between. None of an influence, whose single rows cost a call for each channel."""
    n, m = operator.queries, operator.keys
    if max(n, m) <= cells or min(n, m) <= FINE or isinstance(operator, Influence):
        return
    count = min(budget // (operator.heads * FINE * FINE), n // FINE)
    for place in range(count):
        share = place / max(1, count - 1)
        q, k = round(share * (n - FINE)), round(share * (m - FINE))
        yield (q, q + FINE), (k, k + FINE)
