"""From a pattern to work: which tiles to compute, as few regular calls as possible, and never an n x m mask.

The sequence is cut into tiles.  `Pattern.block` says which pairs of tiles are empty, partial or full; partial ones are
evaluated exactly and their masks kept once each.  What remains is a table of tile numbers, in which repetition is looked
for: a `Run` is many calls alike, at a constant step, and needs no copy (a band is one run, global keys are one run); a
`Group` gathers the tiles that follow no rule (random blocks, the edges of a band).

A stepped band or a set of summary keys is dense in another order of the tokens.  Such terms become a `Part` with an order
of its own, in which they are laid out like any band.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.pattern import And, Band, Blocks2D, Full, KeyPhase, Nothing, Or, Pattern, tile_table, tiled

SIZES = (32, 64, 128)  # tiles that are tried
MOST_TILES = 1 << 20  # in one table; finer tiles than that are not tried
TILES_AT_ONCE = 512
WIDE = 8  # an interval of so many tiles is worth a call of its own
FEW = 16  # and so are the last intervals, if no more than this are left
TALL = 256  # the most queries in a call of a run, where rows agree
PATCH = 8  # an image is cut into patches of at least so many rows and columns
LEAST_WIDTH = 16  # narrower images are left in raster order
TERMS = 32  # an expression with more alternatives than this is not taken apart

# Costs beside that of one score, for one head of width 64, as measured (see benchmarks/layout.md):
GATHER, MERGE, FOLD, CALL = 35, 25, 30, 4000


@dataclass(frozen=True)
class Run:
    """`count` calls alike.  Call i: queries q0 + i*step, s of them, and keys k0 + i*step, t of them."""

    count: int
    step: int
    q0: int
    s: int
    k0: int
    t: int
    mask: Tensor | None  # (s t), added to the scores: 0 or -inf; None: all are seen
    blind: bool = False  # some of the queries see nothing here
    fresh: bool = False  # no run before it has touched these queries


@dataclass(frozen=True)
class Group:
    """Query tiles (g), each with its own key tiles (g w); `keep` (g w) numbers their masks, 0: none, 1: all."""

    q: Tensor
    k: Tensor
    keep: Tensor | None
    fresh: bool = False


@dataclass(frozen=True)
class Part:
    """Runs and groups over the tokens in some order; None: as they come."""

    n: int
    m: int
    size: int
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    masks: Tensor  # (u size size), by number; 0 is empty, 1 is full
    q_order: Tensor | None = None
    k_order: Tensor | None = None

    def nbytes(self) -> int:
        tensors = [self.masks, self.q_order, self.k_order, *(r.mask for r in self.runs)]
        tensors += [x for g in self.groups for x in (g.q, g.k, g.keep)]
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    def scores(self) -> int:
        return sum(r.count * r.s * r.t for r in self.runs) + sum(g.k.numel() * self.size**2 for g in self.groups)

    def work(self, backward: bool) -> float:
        """In units of one forward score.  The backward pass costs 2.5 of them and adds up the keys' gradients."""
        gathered = sum((g.q.numel() + 2 * g.k.numel()) * self.size for g in self.groups)
        merged = sum(r.count * r.s for r in self.runs if not r.fresh) + sum(g.q.numel() * self.size for g in self.groups)
        moved = gathered + (0 if self.q_order is None else 2 * self.n + 2 * self.m)
        folded = sum(r.count * r.t for r in self.runs) if backward else 0
        return (2.5 if backward else 1) * self.scores() + GATHER * moved + MERGE * merged + FOLD * folded

    def calls(self) -> int:
        """A group does about as much beside the kernel as four runs."""
        return len(self.runs) + 4 * len(self.groups)

    def cost(self, backward: bool) -> float:
        return self.work(backward) + CALL * self.calls()


@dataclass(frozen=True)
class Layout:
    """All the work of one pattern on n queries and m keys: every seen pair stands in exactly one call."""

    parts: tuple[Part, ...]

    def scores(self) -> int:
        """How many scores are computed, for each head: at least the number of seen pairs."""
        return sum(part.scores() for part in self.parts)

    def calls(self) -> int:
        return sum(part.calls() for part in self.parts)

    def work(self, backward: bool = False) -> float:
        return sum(part.work(backward) for part in self.parts)

    def cost(self, backward: bool = False) -> float:
        return sum(part.cost(backward) for part in self.parts)

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


class Cache:
    """The least recently used values go first once their bytes exceed `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    def get(self, key: Hashable) -> object | None:
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def put(self, key: Hashable, value: object, nbytes: int) -> None:
        self.entries[key] = value, nbytes
        self.used += nbytes
        while self.used > self.limit and len(self.entries) > 1:
            self.used -= self.entries.popitem(last=False)[1][1]


_layouts = Cache(256 << 20)


def layout(
    pattern: Pattern, n: int, m: int, *, q_at: int = 0, k_at: int = 0, size: int | None = None, backward: bool = False
) -> Layout:
    """The work of `pattern` on queries q_at..q_at+n-1 and keys k_at..k_at+m-1, for all heads alike; cached by value.

    `size` fixes the tile; else the cheapest is taken, for the forward or for the backward pass.
    """
    key = (pattern, n, m, q_at, k_at, size, backward)
    found = _layouts.get(key)
    if found is None:
        found = _build(pattern, n, m, q_at, k_at, size, backward)
        _layouts.put(key, found, found.nbytes() + 1024)
    assert isinstance(found, Layout)
    return found


def _build(pattern: Pattern, n: int, m: int, q_at: int, k_at: int, size: int | None, backward: bool) -> Layout:
    parts: list[Part] = []
    for lattice, term in lattices(pattern):
        order = _orders(lattice, n, m, q_at, k_at)
        sizes = (size,) if size else _sizes(n, m)
        choices = (_part(term, lattice, *order, s, q_at, k_at) for s in sizes)
        parts.append(min(choices, key=lambda part: part.cost(backward)))
    return Layout(tuple(parts))


def _sizes(n: int, m: int) -> tuple[int, ...]:
    """The tiles worth trying: all of them, but one only where tables are large."""
    fine = tuple(s for s in SIZES if -(-n // s) * -(-m // s) <= MOST_TILES) or SIZES[-1:]
    return fine[:1] if n * m > MOST_TILES * SIZES[0] ** 2 else fine


# ---------------------------------------------------------------------------------------------- lattices
Lattice = int | KeyPhase | Blocks2D | None  # a step that queries and keys share; keys at some phase; an image; none


def lattices(pattern: Pattern) -> list[tuple[Lattice, Pattern]]:
    """The pattern as disjoint terms, each with the lattice on which it is dense."""
    if not any(_lattice(leaf) for leaf in pattern.leaves()):
        return [(None, pattern)]
    terms = list(_terms(pattern))
    if len(terms) > TERMS:
        return [(None, pattern)]
    by_lattice: dict[Lattice, Pattern] = {None: Nothing()}
    for term in terms:
        lattice = _lattice(term)
        by_lattice[lattice] = by_lattice.get(lattice, Nothing()) | term
    before, result = Nothing(), []
    for lattice, term in by_lattice.items():
        if term != Nothing():
            result.append((lattice, term & ~before))
        before = before | term
    return result


def _terms(pattern: Pattern) -> Iterator[Pattern]:
    """Alternatives whose union it is: `&` distributed over `|`."""
    if isinstance(pattern, Or):
        for part in pattern.parts:
            yield from _terms(part)
    elif isinstance(pattern, And):
        for choice in product(*(tuple(_terms(part)) for part in pattern.parts)):
            term: Pattern = Full()
            for factor in choice:
                term = term & factor
            yield term
    else:
        yield pattern


def _lattice(term: Pattern) -> Lattice:
    factors = term.parts if isinstance(term, And) else (term,)
    steps = [f.step for f in factors if isinstance(f, Band) and f.step > 1]
    if steps:
        return lcm(*steps)
    phases = (f for f in factors if isinstance(f, KeyPhase) and 2 * f.start >= f.period > 1)
    images = (f for f in factors if isinstance(f, Blocks2D) and f.width > LEAST_WIDTH)
    return next(phases, None) or next(images, None)


def _on_lattice(term: Pattern, lattice: Lattice) -> Pattern:
    """The same truth for pairs on the lattice, in leaves whose blocks are tight there."""

    def relax(leaf: Pattern) -> Pattern:
        if isinstance(lattice, int) and isinstance(leaf, Band) and lattice % leaf.step == 0:
            return Band(*(None if side is None else side * leaf.step for side in (leaf.left, leaf.right)))
        return Full() if leaf == lattice else leaf

    return term if lattice is None else term.replace(relax)


def _orders(lattice: Lattice, n: int, m: int, q_at: int, k_at: int) -> tuple[Tensor, Tensor]:
    """The queries and the keys of a lattice, in the order in which it is dense."""
    q, k = torch.arange(n), torch.arange(m)
    if isinstance(lattice, int):
        return torch.argsort((q + q_at) % lattice, stable=True), torch.argsort((k + k_at) % lattice, stable=True)
    if isinstance(lattice, Blocks2D):
        return _by_patch(lattice, q + q_at), _by_patch(lattice, k + k_at)
    if lattice is not None:
        k = k[(k + k_at) % lattice.period >= lattice.start]
    return q, k


def _by_patch(image: Blocks2D, x: Tensor) -> Tensor:
    """Cells of one patch after each other: patches are query blocks, or several of them where those are small."""
    rows, cols = (size * -(-PATCH // size) for size in (image.rows, image.cols))
    across = -(-image.width // cols)
    patch = x // image.width // rows * across + x % image.width // cols
    return torch.argsort(patch, stable=True)


# ---------------------------------------------------------------------------------------------- tiles
def _part(
    term: Pattern, lattice: Lattice, q_order: Tensor, k_order: Tensor, size: int, q_at: int, k_at: int
) -> Part:
    q_tiles, k_tiles = (_in_tiles(order, size, at) for order, at in ((q_order, q_at), (k_order, k_at)))
    some, every = tile_table(_on_lattice(term, lattice), q_tiles, k_tiles)
    if isinstance(lattice, int):
        mine, whole = _same_phase(q_tiles, k_tiles, lattice)
        some, every = some & mine, every & whole
    if isinstance(lattice, Blocks2D):
        mine, whole = lattice.patches(q_tiles, k_tiles)
        some, every = some & mine, every & whole
    ids, masks = number_tiles(term, q_tiles, k_tiles, some, every)
    n, m = len(q_order), len(k_order)
    finder = _Finder(ids.numpy(), masks.numpy(), size, n, m)
    runs, groups = finder.find()
    return Part(
        n, m, size, runs, groups, masks,
        q_order if isinstance(lattice, int | Blocks2D) else None,
        None if lattice is None else k_order,
    )  # fmt: skip


def _in_tiles(order: Tensor, size: int, at: int) -> Tensor:
    slots = tiled(len(order), size)
    return torch.where(slots < 0, -1, order[slots] + at) if len(order) else slots


def _same_phase(q: Tensor, k: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """(some, every) for "query and key agree modulo step", by tiles."""
    (q0, q1), (k0, k1) = (_extent(x, step) for x in (q, k))
    some = (q0[:, None] <= k1) & (k0 <= q1[:, None])
    return some, (q0 == q1)[:, None] & (k0 == k1) & (q0[:, None] == k0)


def _extent(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    phase = x % step
    return torch.where(x < 0, step, phase).amin(1), torch.where(x < 0, -1, phase).amax(1)


def number_tiles(
    pattern: Pattern, q: Tensor, k: Tensor, some: Tensor, every: Tensor, *, ragged: bool = False
) -> tuple[Tensor, Tensor]:
    """A table (r c) of mask numbers, exact (0: nothing is seen, 1: all is), and the masks (u s t), each once.

    Tiles that the end of the sequence cuts short count as full only if `ragged`.
    """
    whole = (q >= 0).all(1)[:, None] & (k >= 0).all(1)
    ids = (every if ragged else every & whole).int()
    shape = (q.shape[1], k.shape[1])
    known = {np.packbits(np.full(shape, fill)).tobytes(): number for number, fill in enumerate((False, True))}
    for at in (some & (ids == 0)).nonzero().split(TILES_AT_ONCE):
        rows, cols = q[at[:, 0]], k[at[:, 1]]
        keep = pattern.allowed(rows[:, :, None], cols[:, None, :])
        real = (rows >= 0)[:, :, None] & (cols >= 0)[:, None, :]
        keep = (keep & real) | ~real if ragged else keep & real
        packed = np.packbits(keep.flatten(1).numpy(), axis=1)
        numbers = [known.setdefault(row.tobytes(), len(known)) for row in packed]
        ids[at[:, 0], at[:, 1]] = torch.tensor(numbers, dtype=torch.int32)
    bits = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    masks = np.unpackbits(bits, axis=1, count=shape[0] * shape[1]).view(bool)
    return ids, torch.from_numpy(masks).unflatten(1, shape)


# ---------------------------------------------------------------------------------------------- regularity
@dataclass(frozen=True)
class _Segment:
    """Rows r0..r1-1 x columns c0..c1-1 of the table, with the numbers that stand there."""

    r0: int
    r1: int
    c0: int
    c1: int
    ids: bytes


class _Rule(NamedTuple):
    """So many columns, at an offset from the row and with these numbers; or, for any rows, at a column and full."""

    at: int
    cols: int
    rows: int | None
    ids: bytes | None


def _stretches(family: list[_Segment], gap: Callable[[_Segment, _Segment], int]) -> Iterator[list[_Segment]]:
    """Segments from top to bottom, cut wherever the gap between neighbours changes."""
    family = sorted(family, key=lambda s: s.r0)
    start = 0
    while start < len(family):
        stop = start + 1
        while stop < len(family) and gap(*family[stop - 1 : stop + 1]) == gap(*family[start : start + 2]):
            stop += 1
        yield family[start:stop]
        start = stop


@dataclass
class _Finder:
    """Looks for repetition in a table of tile numbers."""

    ids: NDArray[np.int32]
    masks: NDArray[np.bool_]
    size: int
    n: int
    m: int
    runs: list[Run] = field(default_factory=list)

    def find(self) -> tuple[tuple[Run, ...], tuple[Group, ...]]:
        intervals = list(self.intervals())
        rules = self.regular(intervals)
        rest = self.take([piece for s in intervals for piece in self.peeled(s, rules)])
        wide = [s for s in rest if s.c1 - s.c0 >= WIDE]
        rest = [s for s in rest if s.c1 - s.c0 < WIDE]
        rest += self.take([piece for s in wide for piece in self.by_fullness(s)])
        few = len(rest) <= FEW
        self.runs += [self.run([s]) for s in rest if few or s.c1 - s.c0 >= WIDE]
        self.runs.sort(key=lambda run: -run.count * run.s * run.t)
        return self.freshened(list(self.groups([s for s in rest if not few and s.c1 - s.c0 < WIDE])))

    def enough(self) -> int:
        """So many alike make a rule."""
        return max(3, len(self.ids) // 32)

    def full(self, s: _Segment) -> bool:
        return bool((self.ids[s.r0 : s.r1, s.c0 : s.c1] == 1).all())

    def segment(self, r0: int, r1: int, c0: int, c1: int) -> _Segment:
        return _Segment(r0, r1, c0, c1, self.ids[r0:r1, c0:c1].tobytes())

    def intervals(self) -> Iterator[_Segment]:
        """For each row, or rows that agree, the stretches of columns that are not empty."""
        seen = self.ids > 0
        r0 = 0
        while r0 < len(seen):
            r1 = r0 + 1
            while r1 < len(seen) and (r1 - r0) * self.size < TALL and (seen[r1] == seen[r0]).all():
                r1 += 1
            edges = np.flatnonzero(np.diff(np.concatenate(([0], seen[r0].view(np.int8), [0]))))
            for c0, c1 in edges.reshape(-1, 2).tolist():
                yield self.segment(r0, r1, c0, c1)
            r0 = r1

    def regular(self, segments: list[_Segment]) -> list[_Rule]:
        """What repeats: along a diagonal, or, where all is full, down a column."""
        along = Counter((s.r1 - s.r0, s.c1 - s.c0, s.ids, s.c0 - s.r0) for s in segments)
        down = Counter((s.c0, s.c1) for s in segments if self.full(s))
        rules = [_Rule(c0, c1 - c0, None, None) for (c0, c1), many in down.items() if many >= self.enough()]
        rules += [_Rule(at, cols, rows, ids) for (rows, cols, ids, at), many in along.items() if many >= self.enough()]
        return sorted(rules, key=lambda rule: -rule.cols)

    def peeled(self, s: _Segment, rules: list[_Rule]) -> list[_Segment]:
        """Cut what follows a rule out of an interval that something beside it has made longer."""
        for rule in rules:
            a = rule.at if rule.rows is None else s.r0 + rule.at
            b = a + rule.cols
            if a < s.c0 or s.c1 < b:
                continue
            piece = self.segment(s.r0, s.r1, a, b)
            if self.full(piece) if rule.rows is None else (s.r1 - s.r0, piece.ids) == (rule.rows, rule.ids):
                rest = [self.segment(s.r0, s.r1, x, y) for x, y in ((s.c0, a), (b, s.c1)) if x < y]
                return [piece, *(more for other in rest for more in self.peeled(other, rules))]
        return [s]

    def by_fullness(self, s: _Segment) -> list[_Segment]:
        """Cut between full and partial tiles."""
        full = (self.ids[s.r0 : s.r1, s.c0 : s.c1] == 1).all(0)
        cuts = [s.c0, *(np.flatnonzero(np.diff(full)) + s.c0 + 1).tolist(), s.c1]
        return [self.segment(s.r0, s.r1, x, y) for x, y in zip(cuts, cuts[1:], strict=False)]

    def take(self, segments: list[_Segment]) -> list[_Segment]:
        """Make runs of what repeats without a gap, and return the rest."""
        along, down = defaultdict(list), defaultdict(list)
        for s in segments:
            along[s.r1 - s.r0, s.c1 - s.c0, s.ids, s.c0 - s.r0].append(s)
            if self.full(s):
                down[s.c0, s.c1].append(s)
        done: set[_Segment] = set()
        for family in down.values():
            for stack in _stretches(family, lambda one, other: other.r0 - one.r1):
                if len(stack) >= self.enough() and stack[0].r1 == stack[1].r0:
                    self.runs.append(self.run([replace(stack[0], r1=stack[-1].r1)]))
                    done.update(stack)
        for family in along.values():
            for alike in _stretches([s for s in family if s not in done], lambda one, other: other.r0 - one.r0):
                if len(alike) >= 3:
                    self.runs.append(self.run(alike))
                    done.update(alike)
        return [s for s in segments if s not in done]

    def run(self, alike: list[_Segment]) -> Run:
        first, size = alike[0], self.size
        step = (alike[1].r0 - first.r0) * size if len(alike) > 1 else 0
        q0, k0 = first.r0 * size, first.c0 * size
        s, t = min(first.r1 * size, self.n) - q0, min(first.c1 * size, self.m) - k0
        ids = self.ids[first.r0 : first.r1, first.c0 : first.c1]
        if (ids == 1).all():
            return Run(len(alike), step, q0, s, k0, t, None)
        keep = self.masks[ids].transpose(0, 2, 1, 3).reshape(ids.shape[0] * size, -1)[:s, :t]
        used = np.flatnonzero(keep.any(0))
        a, b = used[0].item(), used[-1].item() + 1
        keep = keep[:, a:b]
        mask = None if keep.all() else torch.from_numpy(np.where(keep, np.float32(0), np.float32(-np.inf)))
        return Run(len(alike), step, q0, s, k0 + a, b - a, mask, blind=not keep.any(1).all())

    def groups(self, segments: list[_Segment]) -> Iterator[Group]:
        """Tiles without a rule, by row; rows with about as many tiles share a call."""
        by_row: dict[int, list[int]] = defaultdict(list)
        for s in segments:
            for row in range(s.r0, s.r1):
                by_row[row] += [c for c in range(s.c0, s.c1) if self.ids[row, c]]
        for rows in self.buckets(by_row):
            width = max(len(by_row[row]) for row in rows)
            cols = torch.tensor([by_row[r] + [-1] * (width - len(by_row[r])) for r in rows])
            q = torch.tensor(rows)
            keep = torch.where(cols < 0, 0, torch.from_numpy(self.ids)[q[:, None], cols])
            yield Group(q, cols.clamp(min=0), None if (keep == 1).all() else keep)

    def buckets(self, by_row: dict[int, list[int]]) -> list[list[int]]:
        """Rows that share a call: narrower ones join as long as filling them up costs less than another call."""
        buckets: list[list[int]] = []
        width = spare = 0
        for row in sorted(by_row, key=lambda row: -len(by_row[row])):
            spare -= (width - len(by_row[row])) * self.size**2
            if not buckets or spare < 0:
                buckets.append([])
                width, spare = len(by_row[row]), 4 * CALL
            buckets[-1].append(row)
        return buckets

    def freshened(self, groups: list[Group]) -> tuple[tuple[Run, ...], tuple[Group, ...]]:
        """Mark the calls whose queries no earlier call has touched: they need no merging."""
        touched = np.zeros(len(self.ids) * self.size, dtype=bool)
        runs = []
        for run in self.runs:
            at = (np.arange(run.count)[:, None] * run.step + run.q0 + np.arange(run.s)).ravel()
            runs.append(replace(run, fresh=not touched[at].any()))
            touched[at] = True
        marked = []
        rows = touched.reshape(-1, self.size).any(1)
        for group in groups:
            at = group.q.numpy()
            marked.append(replace(group, fresh=not rows[at].any()))
            rows[at] = True
        return tuple(runs), tuple(marked)
