"""Count the (query, key) pairs that a pattern allows, at any length, without an n x m mask.

Rectangles that are empty or full are counted whole. Others are cut in four, down to small tiles,
which are counted pair by pair. If too many are left, as for strided patterns, a random sample
estimates the count.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from regard.pattern import Band, Full, Pattern

TILE = 64
MAX_RECTANGLES = 1 << 17  # partial rectangles that are cut further
TILES_AT_ONCE = 512
SAMPLE_PAIRS = 1 << 22


@lru_cache(1024)
def count_pairs(pattern: Pattern, n: int, m: int, heads: int) -> int:
    """Allowed pairs of n queries and m keys, summed over heads.

    No token is in a global attention mask.
    """
    pattern = pattern.resolve_global_mask(False, False)
    if not pattern.heads:
        return heads * _count_one_head(pattern, n, m)
    return sum(
        times * _count_one_head(part, n, m) for part, times in Counter(pattern.parts).items()
    )


def _count_one_head(pattern: Pattern, n: int, m: int) -> int:
    if not n or not m:
        return 0
    if pattern == Full():
        return n * m
    if isinstance(pattern, Band) and n == m:
        sides = (n if side is None else side for side in (pattern.left, pattern.right))
        return n + sum(_count_band_side(n, pattern.step, side) for side in sides)

    size = TILE << max(0, (-(-max(n, m) // TILE) - 1).bit_length())
    corners, total = torch.zeros(1, 2, dtype=torch.long), 0
    while True:
        q0, k0 = corners.unbind(1)
        q1, k1 = (q0 + size).clamp(max=n) - 1, (k0 + size).clamp(max=m) - 1
        some, every = pattern.block(q0, q1, k0, k1)
        total += int(((q1 - q0 + 1) * (k1 - k0 + 1))[every].sum())
        corners = corners[some & ~every]
        if size == TILE or len(corners) > MAX_RECTANGLES:
            break
        size //= 2
        quarters = size * torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        corners = (corners[:, None] + quarters).flatten(0, 1)
        corners = corners[(corners[:, 0] < n) & (corners[:, 1] < m)]
    if len(corners) > MAX_RECTANGLES:
        return total + _estimate(pattern, corners, size, n, m)
    for part in corners.split(TILES_AT_ONCE):
        q, k = (corner[:, None] + torch.arange(size) for corner in part.unbind(1))
        inside = (q < n)[:, :, None] & (k < m)[:, None, :]
        total += int((pattern.allows(q[:, :, None], k[:, None, :]) & inside).sum())
    return total


def _count_band_side(n: int, step: int, reach: int) -> int:
    """Σ_i min(⌊i / step⌋, reach) for i < n. Each quotient but the last occurs `step` times."""
    whole, rest = divmod(n, step)
    full = min(whole, reach + 1)  # quotients up to the reach
    return step * full * (full - 1) // 2 + step * (whole - full) * reach + rest * min(whole, reach)


def _estimate(pattern: Pattern, corners: Tensor, size: int, n: int, m: int) -> int:
    """Estimate the pairs in partial rectangles from one query in each of a random sample."""
    generator = torch.Generator().manual_seed(0)
    count = min(len(corners), max(1, SAMPLE_PAIRS // size))
    sample = corners[torch.randperm(len(corners), generator=generator)[:count]]
    pairs = 0
    for part in sample.split(max(1, TILES_AT_ONCE * TILE * TILE // size)):
        q = part[:, 0] + torch.randint(size, (len(part),), generator=generator)
        k = part[:, 1, None] + torch.arange(size)
        pairs += int((pattern.allows(q[:, None], k) & (q < n)[:, None] & (k < m)).sum())
    return round(pairs / count * size * len(corners))
