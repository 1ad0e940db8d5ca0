"""How many pairs of a query and a key a pattern allows, at any length: never with an n x m mask.

Rectangles that are empty or full are counted whole; the others are cut in four, down to small tiles, which are counted pair by
pair.  Where too many are partial, as for strides, a sample of them stands for all.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from regard.pattern import MAX_POSITION, Band, Causal, Full, Pattern

TILE = 64
MOST = 1 << 17  # partial rectangles that are followed at once
AT_ONCE = 512  # tiles that are counted in one go
SAMPLE = 1 << 22  # pairs that are looked at where a sample must do


@lru_cache(1024)
def count_pairs(pattern: Pattern, n: int, m: int, heads: int) -> int:
    """Pairs (query, key) that may look at each other, over all heads, no token being marked."""
    plain = pattern.resolve_global_mask(False, False)
    if not plain.heads:
        return heads * _of_one(plain, n, m)
    return sum(times * _of_one(part, n, m) for part, times in Counter(plain.parts).items())


def _of_one(pattern: Pattern, n: int, m: int) -> int:
    if not n or not m:
        return 0
    if pattern == Full():
        return n * m
    if isinstance(pattern, Band) and n == m:
        return _band(pattern, n)
    return _by_quarters(pattern, n, m)


def _band(band: Band, n: int) -> int:
    """Each side is Σ_i min(⌊i / step⌋, reach) over the queries, counted from the end that it looks to."""
    return n + sum(
        _side(n, band.step, n if side is None else side) for side in (band.left, band.right)
    )


def _side(n: int, step: int, reach: int) -> int:
    """⌊i / step⌋ is each of 0, 1, 2 ... for `step` queries, the last for fewer."""
    whole, rest = divmod(n, step)
    full = min(whole, reach + 1)  # runs of queries that reach as far as the end allows
    return step * full * (full - 1) // 2 + step * (whole - full) * reach + rest * min(whole, reach)


def _by_quarters(pattern: Pattern, n: int, m: int) -> int:
    size = TILE << max(0, (-(-max(n, m) // TILE) - 1).bit_length())
    corners, total = torch.zeros(1, 2, dtype=torch.long), 0
    while True:
        q0, k0 = corners.unbind(1)
        q1, k1 = (q0 + size).clamp(max=n) - 1, (k0 + size).clamp(max=m) - 1
        some, every = pattern.block(q0, q1, k0, k1)
        total += int(((q1 - q0 + 1) * (k1 - k0 + 1))[every].sum())
        corners = corners[some & ~every]
        if size == TILE or len(corners) > MOST:
            break
        size //= 2
        corners = (
            corners[:, None] + size * torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        ).flatten(0, 1)
        corners = corners[(corners[:, 0] < n) & (corners[:, 1] < m)]
    if len(corners) > MOST:
        return total + _sampled(pattern, corners, size, n, m)
    return total + sum(_exact(pattern, part, size, n, m) for part in corners.split(AT_ONCE))


def _exact(pattern: Pattern, corners: Tensor, size: int, n: int, m: int) -> int:
    at = torch.arange(size)
    q, k = (corner[:, None] + at for corner in corners.unbind(1))
    keep = pattern.allows(q[:, :, None], k[:, None, :]) & (q < n)[:, :, None] & (k < m)[:, None, :]
    return int(keep.sum())


def _sampled(pattern: Pattern, corners: Tensor, size: int, n: int, m: int) -> int:
    """A random query of each of some rectangles, with all keys of the rectangle."""
    make = torch.Generator().manual_seed(0)
    many = min(len(corners), max(1, SAMPLE // size))
    drawn = corners[torch.randperm(len(corners), generator=make)[:many]]
    seen = 0
    for part in drawn.split(max(1, AT_ONCE * TILE * TILE // size)):
        q = part[:, 0] + torch.randint(size, (len(part),), generator=make)
        k = part[:, 1, None] + torch.arange(size)
        seen += int((pattern.allows(q[:, None], k) & (q < n)[:, None] & (k < m)).sum())
    return round(seen / many * size * len(corners))


@lru_cache(1024)
def count_live_keys(pattern: Pattern, n: int) -> int:
    """How many of n keys a later query may still see, in some head: what a stream must keep."""
    at = torch.arange(n)
    past = (pattern & Causal()).resolve_global_mask(False, False)
    some, _ = past.block(torch.tensor(n), torch.tensor(MAX_POSITION), at, at)
    return int((some.any(0) if past.heads else some).sum())
