"""Looks for repetition in a table of tiles, so that few calls do all the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard.layout.calls import CALL, GatherGroup, TileRun

WIDE = 8  # an interval of so many tiles is worth a call of its own
FEW = 16  # and so are the last intervals, if no more than this are left
TALL = 256  # the most queries in a call of a run, where rows agree


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


def _bounds(segments: list[_Segment]) -> tuple[int, int, int, int]:
    """The smallest rectangle around them."""
    return (
        min(s.r0 for s in segments),
        max(s.r1 for s in segments),
        min(s.c0 for s in segments),
        max(s.c1 for s in segments),
    )


def _area(segments: list[_Segment]) -> int:
    r0, r1, c0, c1 = _bounds(segments)
    return (r1 - r0) * (c1 - c0)


def _stretches(
    family: list[_Segment], gap: Callable[[_Segment, _Segment], int]
) -> Iterator[list[_Segment]]:
    """Segments from top to bottom, cut wherever the gap between neighbours changes."""
    family = sorted(family, key=lambda s: s.r0)
    start = 0
    while start < len(family):
        stop = start + 1
        while stop < len(family) and gap(*family[stop - 1 : stop + 1]) == gap(
            *family[start : start + 2]
        ):
            stop += 1
        yield family[start:stop]
        start = stop


@dataclass
class Finder:
    """Looks for repetition in a table of tile numbers."""

    ids: NDArray[np.int32]
    masks: NDArray[np.bool_]
    size: int
    n: int
    m: int
    runs: list[TileRun] = field(default_factory=list)

    def find(self) -> tuple[tuple[TileRun, ...], tuple[GatherGroup, ...]]:
        intervals = list(self.intervals())
        rules = self.regular(intervals)
        rest = self.take([piece for s in intervals for piece in self.peeled(s, rules)])
        wide = [s for s in rest if s.c1 - s.c0 >= WIDE]
        rest = [s for s in rest if s.c1 - s.c0 < WIDE]
        rest += self.take([piece for s in wide for piece in self.by_fullness(s)])
        few = len(rest) <= FEW
        self.runs += [
            self.box(box) for box in self.boxes([s for s in rest if few or s.c1 - s.c0 >= WIDE])
        ]
        self.runs.sort(key=lambda run: -run.count * run.s * run.t)
        return self.freshened(
            list(self.groups([s for s in rest if not few and s.c1 - s.c0 < WIDE]))
        )

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
        rules = [
            _Rule(c0, c1 - c0, None, None)
            for (c0, c1), many in down.items()
            if many >= self.enough()
        ]
        rules += [
            _Rule(at, cols, rows, ids)
            for (rows, cols, ids, at), many in along.items()
            if many >= self.enough()
        ]
        return sorted(rules, key=lambda rule: -rule.cols)

    def peeled(self, s: _Segment, rules: list[_Rule]) -> list[_Segment]:
        """Cut what follows a rule out of an interval that something beside it has made longer."""
        for rule in rules:
            a = rule.at if rule.rows is None else s.r0 + rule.at
            b = a + rule.cols
            if a < s.c0 or s.c1 < b:
                continue
            piece = self.segment(s.r0, s.r1, a, b)
            if (
                self.full(piece)
                if rule.rows is None
                else (s.r1 - s.r0, piece.ids) == (rule.rows, rule.ids)
            ):
                rest = [self.segment(s.r0, s.r1, x, y) for x, y in ((s.c0, a), (b, s.c1)) if x < y]
                return [piece, *(more for other in rest for more in self.peeled(other, rules))]
        return [s]

    def by_fullness(self, s: _Segment) -> list[_Segment]:
        """Cut between full and partial tiles."""
        full = (self.ids[s.r0 : s.r1, s.c0 : s.c1] == 1).all(0)
        cuts = [s.c0, *(np.flatnonzero(np.diff(full)) + s.c0 + 1).tolist(), s.c1]
        return [self.segment(s.r0, s.r1, x, y) for x, y in pairwise(cuts)]

    def take(self, segments: list[_Segment]) -> list[_Segment]:
        """Make runs of what repeats without a gap, and return the rest."""
        along, down = defaultdict(list), defaultdict(list)
        for s in segments:
            short = (
                s.r1 * self.size > self.n
            )  # the end of the sequence cuts it: fewer queries than its likes
            along[s.r1 - s.r0, s.c1 - s.c0, s.ids, s.c0 - s.r0, short].append(s)
            if self.full(s):
                down[s.c0, s.c1].append(s)
        done: set[_Segment] = set()
        for family in down.values():
            for stack in _stretches(family, lambda one, other: other.r0 - one.r1):
                if len(stack) >= self.enough() and stack[0].r1 == stack[1].r0:
                    self.runs.append(self.run([replace(stack[0], r1=stack[-1].r1)]))
                    done.update(stack)
        for family in along.values():
            for alike in _stretches(
                [s for s in family if s not in done], lambda one, other: other.r0 - one.r0
            ):
                if len(alike) >= 3:
                    self.runs.append(self.run(alike))
                    done.update(alike)
        return [s for s in segments if s not in done]

    def run(self, alike: list[_Segment]) -> TileRun:
        first = alike[0]
        step = alike[1].r0 - first.r0 if len(alike) > 1 else 0
        return self.calls(
            len(alike), step, first.r0, first.c0, self.ids[first.r0 : first.r1, first.c0 : first.c1]
        )

    def boxes(self, segments: list[_Segment]) -> list[list[_Segment]]:
        """Neighbours share a call as long as the empty tiles between them cost less than another call."""
        boxes: list[list[_Segment]] = []
        for s in sorted(segments, key=lambda s: (s.r0, s.c0)):
            if boxes:
                grown = _area([*boxes[-1], s]) - _area(boxes[-1]) - _area([s])
                if grown * self.size**2 <= CALL:
                    boxes[-1].append(s)
                    continue
            boxes.append([s])
        return boxes

    def box(self, segments: list[_Segment]) -> TileRun:
        """One call for all of them; what lies between is left out."""
        r0, r1, c0, c1 = _bounds(segments)
        ids = np.zeros((r1 - r0, c1 - c0), dtype=np.int32)
        for s in segments:
            ids[s.r0 - r0 : s.r1 - r0, s.c0 - c0 : s.c1 - c0] = self.ids[s.r0 : s.r1, s.c0 : s.c1]
        return self.calls(1, 0, r0, c0, ids)

    def calls(self, count: int, step: int, r0: int, c0: int, ids: NDArray[np.int32]) -> TileRun:
        """`count` calls alike, `step` rows and columns apart, on tiles from (r0, c0) with these numbers."""
        size, (rows, cols) = self.size, ids.shape
        q0, k0, step = r0 * size, c0 * size, step * size
        s, t = min(rows * size, self.n - q0), min(cols * size, self.m - k0)
        if (ids == 1).all():
            return TileRun(count, step, q0, s, k0, t, None)
        keep = self.masks[ids].transpose(0, 2, 1, 3).reshape(rows * size, -1)[:s, :t]
        used = np.flatnonzero(keep.any(0))
        a, b = used[0].item(), used[-1].item() + 1
        keep = keep[:, a:b]
        mask = (
            None
            if keep.all()
            else torch.from_numpy(np.where(keep, np.float32(0), np.float32(-np.inf)))
        )
        return TileRun(count, step, q0, s, k0 + a, b - a, mask, blind=not keep.any(1).all())

    def groups(self, segments: list[_Segment]) -> Iterator[GatherGroup]:
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
            yield GatherGroup(q, cols.clamp(min=0), None if (keep == 1).all() else keep)

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

    def freshened(
        self, groups: list[GatherGroup]
    ) -> tuple[tuple[TileRun, ...], tuple[GatherGroup, ...]]:
        """Mark the calls whose queries no earlier call has touched: they need no merging."""
        touched = np.zeros(len(self.ids) * self.size, dtype=bool)
        runs = []
        for run in self.runs:
            at = (np.arange(run.count)[:, None] * run.step + run.q0 + np.arange(run.s)).ravel()
            runs.append(replace(run, fresh=not touched[at].any()))
            touched[at] = True
        marked = []
        rows: NDArray[np.bool_] = np.asarray(touched.reshape(-1, self.size).any(1))
        for group in groups:
            at = group.q.numpy()
            marked.append(replace(group, fresh=not rows[at].any()))
            rows[at] = True
        return tuple(runs), tuple(marked)
