"""Random patterns for hypothesis, and a second opinion on each: the rule of every leaf, written
again in numpy."""

import operator
import os

import numpy as np
import torch
from hypothesis import HealthCheck, settings, strategies as st

from regard.layout import Layout, LayoutPart
from regard.pattern import (
    And,
    Axial,
    Band,
    Blocks,
    Blocks2D,
    BlockTable,
    Causal,
    Chunks,
    Full,
    Global,
    KeyPhase,
    Keys,
    Near2D,
    Neighbourhood,
    Not,
    Nothing,
    Or,
    Pattern,
    PerHead,
    Queries,
    RandomBlocks,
    Restarted,
    Segments,
)

SEARCH = int(
    os.environ.get("REGARD_SEARCH", "0")
)  # 0: the same examples each time; x: x times as many, new ones


def examples(count: int) -> settings:
    """At least `count` examples a test, with no deadline."""
    return settings(
        max_examples=count * max(SEARCH, 1),
        derandomize=not SEARCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ------------------------------------------------------------------------------ random expressions
few = st.integers(0, 3)
reach = st.none() | st.integers(0, 20)
step = st.integers(2, 9) | st.sampled_from([17, 64, 300, 1 << 20])  # 300 and more: beyond the end
size = st.integers(1, 12) | st.sampled_from([16, 24, 32, 64, 128, 500])
width = st.integers(1, 24) | st.sampled_from(
    [32, 40, 300]
)  # images from 17 columns on are laid out by patches
cell = st.integers(1, 5) | st.sampled_from([8, 16, 20])
plan = st.integers(1, 9).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, rows - 1), max_size=3), min_size=rows, max_size=rows
    )
)
cuts = cell.flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))
segments = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(tuple)
span = st.tuples(st.integers(0, 150), st.integers(0, 40)).map(lambda at: (at[0], at[0] + at[1]))

leaves: st.SearchStrategy[Pattern] = st.one_of(
    st.builds(Band, reach, reach, st.just(1)),
    st.builds(Band, reach, reach, step),
    st.builds(Causal),
    span.map(lambda at: Keys(*at)),
    span.map(lambda at: Queries(*at)),
    st.builds(Chunks, size, few, few),
    size.flatmap(lambda period: st.builds(KeyPhase, st.just(period), st.integers(0, period - 1))),
    st.builds(RandomBlocks, size, few, st.integers(1, 24), few, st.booleans()),
    st.builds(Blocks2D, width, cell, cell, few, few, few, few),
    st.builds(
        lambda w, rows, cols: Blocks2D(w, rows[0], cols[0], cut_rows=rows[1], cut_cols=cols[1]),
        width,
        cuts,
        cuts,
    ),
    st.builds(
        Blocks2D, width, cell, cell, few, few, few, few, st.just(0), st.just(0), st.just(True)
    ),
    st.builds(Near2D, width, few, few),
    st.builds(Neighbourhood, cell, width, cell, cell, st.booleans()),
    st.builds(Neighbourhood, st.just(1), st.integers(1, 200), st.just(1), size, st.booleans()),
    st.builds(Blocks, size, few | size, few | size),
    st.builds(BlockTable, size, plan),
    st.builds(Axial, width),
    st.builds(Global, few),
    st.builds(Full),
    st.builds(Nothing),
    st.builds(Segments, segments),
    st.builds(
        Restarted, st.builds(Chunks, size, few, few) | span.map(lambda at: Keys(*at)), segments
    ),
    st.builds(Restarted, st.builds(Blocks2D, width, cell, cell, few, few, few, few), segments),
)


def _deeper(inner: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    joined = st.builds(operator.or_, inner, inner) | st.builds(operator.and_, inner, inner)
    return joined | st.builds(operator.invert, inner)


patterns = st.recursive(leaves, _deeper, max_leaves=6) | st.recursive(
    leaves, _deeper, max_leaves=12
)  # all heads alike
heads = st.tuples(patterns, patterns).map(PerHead)
headed = heads | st.builds(operator.or_, heads, heads) | st.builds(operator.and_, leaves, heads)
any_patterns = patterns | patterns | headed


# ---------------------------------------------------------------------------------- what they mean
def _band(p: Band, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    left, right = (np.inf if side is None else side for side in (p.left, p.right))
    steps = (q - k) / p.step
    return (steps == np.round(steps)) & (steps <= left) & (-steps <= right)


def _generated(p: Blocks2D, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of tokens that come block by block: the blocks of the whole image, walked one
    by one."""
    cells = []
    for top in range(0, at.max() // p.width + p.rows + 1, p.rows):
        for first in range(0, p.width, p.cols):
            cells += [
                (y, x)
                for y in range(top, top + p.rows)
                for x in range(first, min(first + p.cols, p.width))
            ]
    return tuple(np.array(cells).T[:, at])


def _blocks(p: Blocks2D, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """How far the key stands outside of the query's block, on each of the four sides."""
    (y, x), (v, u) = (_generated(p, at) if p.by_block else np.divmod(at, p.width) for at in (q, k))
    top, first = y - (y + p.cut_rows) % p.rows, x - (x + p.cut_cols) % p.cols
    bottom, last = top + p.rows - 1, first + p.cols - 1
    return (
        (top - v <= p.up) & (v - bottom <= p.down) & (first - u <= p.left) & (u - last <= p.right)
    )


def _neighbours(p: Neighbourhood, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Along each axis: at most half a window away, or among the first or the last cells where the
    border is as near."""
    last = p.rows * p.width - 1
    cells = zip(*(np.divmod(np.minimum(at, last), p.width) for at in (q, k)), strict=True)
    seen = np.ones(q.shape, dtype=bool)
    for (at, key), size, extent in zip(
        cells, (p.kernel_rows, p.kernel_cols), (p.rows, p.width), strict=True
    ):
        gap, half = key - at, size // 2
        near = (-size < gap) & (gap <= 0) if p.causal else (-half <= gap) & (gap < size - half)
        if not p.causal:
            near = np.where(at < half, key < size, near)
            near = np.where(at + size - half > extent, key >= extent - size, near)
        seen &= near
    return seen


def _planned(p: BlockTable, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    pairs = {(i, j) for i, row in enumerate(p.table) for j in row}
    return np.vectorize(lambda i, j: (i, j) in pairs, otypes=[bool])(q // p.size, k // p.size)


def _drawn(p: RandomBlocks, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The draws themselves are read off the pattern, one token for each block; test_pattern.py
    looks at them."""
    corner = torch.arange(p.blocks) * p.size
    table = np.zeros((1000, 1000), dtype=bool)
    table[: p.blocks, : p.blocks] = p.allows(corner[:, None], corner).numpy()
    return table[q // p.size, k // p.size]


def _segments(p: Segments | Restarted, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The segment of each position and the position within it; -1 past the end."""
    cells = [(i, j) for i, length in enumerate(p.lengths) for j in range(length)]
    cells += [(-1, -1)] * max(0, at.max() + 1 - len(cells))
    return tuple(np.array(cells).T[:, at])


def _restarted(p: Restarted, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    (one, a), (other, b) = _segments(p, q), _segments(p, k)
    same = (one == other) & (one >= 0)
    return same & _rule(p.leaf, np.where(same, a, 0), np.where(same, b, 0))


RULES = {
    Full: lambda p, q, k: q == q,
    Band: _band,
    Keys: lambda p, q, k: np.isin(k, np.arange(p.lo, p.hi)),
    Queries: lambda p, q, k: np.isin(q, np.arange(p.lo, p.hi)),
    Chunks: lambda p, q, k: np.isin(k // p.size - q // p.size, np.arange(-p.back, p.ahead + 1)),
    KeyPhase: lambda p, q, k: np.isin(k % p.period, np.arange(p.start, p.period)),
    RandomBlocks: _drawn,
    BlockTable: _planned,
    Blocks: lambda p, q, k: (
        (k >= q - q % p.size - p.before) & (k < q - q % p.size + p.size + p.after)
    ),
    Neighbourhood: _neighbours,
    Blocks2D: _blocks,
    Segments: lambda p, q, k: (
        (_segments(p, q)[0] == _segments(p, k)[0]) & (_segments(p, q)[0] >= 0)
    ),
    Restarted: _restarted,
    Or: lambda p, q, k: np.any([_rule(part, q, k) for part in p.parts], 0),
    And: lambda p, q, k: np.all([_rule(part, q, k) for part in p.parts], 0),
    Not: lambda p, q, k: np.logical_not(_rule(p.parts[0], q, k)),
    PerHead: lambda p, q, k: np.stack([_rule(part, q, k) for part in p.parts]),
}


def _rule(pattern: Pattern, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return RULES[type(pattern)](pattern, q, k)


def truth(pattern: Pattern, n: int, m: int, q_start: int = 0, k_start: int = 0) -> torch.Tensor:
    """The mask (n m) of queries q_at.. and keys k_at.., or (h n m), by the rules above."""
    q, k = np.broadcast_arrays(
        np.arange(q_start, q_start + n)[:, None], np.arange(k_start, k_start + m)
    )
    return torch.from_numpy(_rule(pattern, q, k))


# ---------------------------------------------------------------------------- what a layout covers
def coverage(layout: Layout, n: int, m: int) -> torch.Tensor:
    """How often each pair of tokens (n m) is computed by the calls of a layout; fails if a call
    leaves the sequence."""
    count = torch.zeros(n, m, dtype=torch.long)
    for part in layout.parts:
        q_order = torch.arange(n) if part.q_order is None else part.q_order
        k_order = torch.arange(m) if part.k_order is None else part.k_order
        assert (part.n, part.m) == (len(q_order), len(k_order))
        for q, k, keep in _calls(part):
            rows, cols = keep.nonzero(as_tuple=True)  # what is kept must exist
            count.index_put_((q_order[q[rows]], k_order[k[cols]]), torch.tensor(1), accumulate=True)
    return count


def _calls(part: LayoutPart):
    """(query slots, key slots, what is kept) of each call."""
    for run in part.runs:
        keep = torch.ones(run.s, run.t, dtype=torch.bool) if run.mask is None else run.mask == 0
        for i in range(run.count):
            q, k = (
                run.q0 + i * run.step + torch.arange(run.s),
                run.k0 + i * run.step + torch.arange(run.t),
            )
            assert 0 <= q[0] <= q[-1] < part.n and 0 <= k[0] <= k[-1] < part.m, (
                f"{run} leaves the sequence"
            )
            assert run.has_empty_rows or keep.any(1).all(), (
                f"{run} hides that some queries see nothing"
            )
            yield q, k, keep
    slots = torch.arange(part.size)
    for group in part.groups:
        keeps = torch.ones_like(group.k) if group.mask_ids is None else group.mask_ids
        for i, row in enumerate(group.q):
            for col, number in zip(group.k[i], keeps[i], strict=True):
                yield row * part.size + slots, col * part.size + slots, part.masks[number]
