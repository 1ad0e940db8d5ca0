"""Numbers that describe a head by its map: how broad, how far, how low in rank, and which token it
looks at. Each is computed for the map of the input, and again with its tokens shuffled (`chance`),
which shows what the head does whatever the tokens are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspection.influence import Influence
from regard.inspection.operators import HeadOperator

MAX_DENSE = 512  # tokens up to which all rows are read; of longer maps a sample
SAMPLED_ROWS = 128
CONSECUTIVE = 16  # rows of a sample that are read together

NAMES = {
    "entropy": "mean entropy of a row, in bits: 0 looks at one token",
    "distance": "mean distance from query to key; of images in patches, as in ViT",
    "effective rank": "exp of the entropy of the singular values (Roy & Vetterli 2007)",
    "first": "share of attention on the first token",
    "previous": "share on the token before",
    "same": "share on the token itself",
    "next": "share on the token after",
    "same word": "share on other occurrences of the same token",
}


class MapRows(NamedTuple):
    """Rows of the maps of a layer.

    Attributes:
        queries: Queries of the rows (r).
        weights: (h, r, m), not negative, each row divided by its sum.
        complete: Whether all rows are there.
    """

    queries: Tensor
    weights: Tensor
    complete: bool


def map_rows(operator: HeadOperator | Influence) -> MapRows:
    """All rows of a map, or a sample of a long one."""
    n, m = operator.queries, operator.keys
    if max(n, m) <= MAX_DENSE:
        return MapRows(torch.arange(n), normalize(operator.dense()), True)
    if isinstance(operator, Influence):  # no single rows of an estimate
        return MapRows(torch.zeros(0, dtype=torch.long), torch.zeros(1, 0, m), False)
    runs = max(1, min(SAMPLED_ROWS, n) // CONSECUTIVE)
    starts = [round(i * (n - CONSECUTIVE) / max(1, runs - 1)) for i in range(runs)]
    chunks = [slice(max(0, start), min(n, start + CONSECUTIVE)) for start in starts]
    index = torch.cat([torch.arange(n)[chunk] for chunk in chunks])
    return MapRows(
        index, normalize(torch.cat([operator.rows(chunk) for chunk in chunks], 1)), False
    )


def normalize(weights: Tensor) -> Tensor:
    """|weights| with rows that sum to one; rows of zeros stay."""
    weights = weights.float().abs()
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def head_metrics(
    rows: MapRows,
    *,
    same_sequence: bool,
    grid: tuple[int, int] | None = None,
    first_patch: int = 0,
    ids: Tensor | None = None,
) -> dict[str, list[float | None]]:
    """Numbers of each head, by name; see `NAMES`.

    Args:
        rows: Rows of the maps.
        same_sequence: Whether queries and keys are the same tokens.
        grid: Rows and columns of patches, which are the tokens from `first_patch` on.
        first_patch: Number of the first patch.
        ids: Ids of the keys (m), to find the same token elsewhere.
    """
    weights, index = rows.weights, rows.queries
    _, count, m = weights.shape
    numbers: dict[str, Tensor] = {}
    if count:
        entropy = -(weights * weights.clamp(min=1e-30).log2()).sum(-1)
        numbers["entropy"] = entropy.mean(1)
    if count and same_sequence:
        keys = torch.arange(m)
        numbers["distance"] = mean_distance(rows, grid, first_patch)
        numbers["first"] = weights[..., 0].mean(1)
        for name, offset in (("previous", -1), ("same", 0), ("next", 1)):
            wanted = index + offset
            inside = (wanted >= 0) & (wanted < m)
            numbers[name] = weights[:, inside, wanted[inside]].mean(1)  # NaN if none is inside
        if ids is not None:
            other = (ids[index][:, None] == ids[None]) & (index[:, None] != keys[None])
            repeated = other.any(1)
            if repeated.any():
                numbers["same word"] = (weights * other)[:, repeated].sum(-1).mean(1)
    metrics = {name: finite_numbers(values) for name, values in numbers.items()}
    if rows.complete and min(count, m) > 1:
        metrics["effective rank"] = finite_numbers(effective_rank(singular_values(rows)))
    return metrics


def finite_numbers(values: Tensor) -> list[float | None]:
    """Numbers rounded for a page, None for NaN and infinity."""
    return [round(v, 5) if math.isfinite(v) else None for v in values.tolist()]


def mean_distance(rows: MapRows, grid: tuple[int, int] | None, first_patch: int) -> Tensor:
    """Mean distance between query and key, weighted by attention (h). In an image it is that of
    patches in two dimensions (Dosovitskiy et al. 2021, figure 7), and other tokens are left out."""
    weights, index = rows.weights, rows.queries
    positions = torch.arange(weights.shape[2], dtype=torch.float32)[:, None]
    if grid is not None:
        last = first_patch + grid[0] * grid[1]
        patches = torch.arange(grid[0] * grid[1])
        positions = torch.stack((patches // grid[1], patches % grid[1]), 1).float()
        is_patch = (index >= first_patch) & (index < last)
        index = index[is_patch] - first_patch
        weights = normalize(weights[:, is_patch, first_patch:last])
    distance = torch.cdist(positions[index], positions)
    return (weights * distance).sum(-1).mean(1)


def singular_values(rows: MapRows) -> Tensor:
    """Singular values of whole maps, (h, min(n, m)), the largest first."""
    return torch.linalg.svdvals(rows.weights.double())


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of singular values (h, k), divided by their sum: (h)."""
    shares = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    return (-(shares * shares.clamp(min=1e-30).log()).sum(-1)).exp()


def cumulative_spectrum(values: Tensor, points: int = 64) -> list[list[float]]:
    """Share of the sum of singular values (h, k) in the first ones, at most `points` of them, as in
    figure 1 of Linformer (Wang et al. 2020, arXiv 2006.04768)."""
    shares = values.cumsum(-1) / values.sum(-1, keepdim=True).clamp(min=1e-30)
    count = shares.shape[-1]
    places = torch.arange(1, min(points, count) + 1) * count // min(points, count) - 1
    return [[round(x, 4) for x in row] for row in shares[:, places].tolist()]


def induction_scores(weights: Tensor, length: int) -> dict[str, Tensor]:
    """Of the second half of repeated tokens: attention to the token after the earlier occurrence
    ("induction", Olsson et al. 2022, arXiv 2209.11895) and to that occurrence ("duplicate").

    Args:
        weights: Normalized maps (h, n, n), where the last 2 * length tokens are the repeated ones.
        length: Length of a half.
    """
    n = weights.shape[1]
    queries = torch.arange(n - length, n)
    return {
        "induction": weights[:, queries, queries - length + 1].mean(1),
        "duplicate": weights[:, queries, queries - length].mean(1),
    }
