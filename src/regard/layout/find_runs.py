"""Finds repetition in a table of tiles, so that few kernel calls do all the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard.layout.calls import CALL_COST, GROUP_CALLS, GatherGroup, TileRun

MIN_WIDE = 8  # an interval of this many tiles gets its own call
FEW_INTERVALS = 16  # if no more intervals than this are left over, each gets its own call
MAX_QUERIES = 256  # in one call of a run


@dataclass(frozen=True)
class _Segment:
    """Rows r0..r1-1 and columns c0..c1-1 of the table, with the mask ids there."""

    r0: int
    r1: int
    c0: int
    c1: int
    ids: bytes

    @property
    def cols(self) -> int:
        return self.c1 - self.c0

    def along_diagonal(self) -> tuple[int, int, bytes, int]:
        """Segments with the same value repeat along a diagonal."""
        return self.r1 - self.r0, self.cols, self.ids, self.c0 - self.r0


class _Rule(NamedTuple):
    """A repeated segment: either at a fixed offset from the row with the same ids, or at a fixed
    column and full.
    """

    offset: int
    cols: int
    rows: int | None  # None: at column `offset`, for any rows
    ids: bytes | None


def _bounding_box(segments: list[_Segment]) -> tuple[int, int, int, int]:
    """r0, r1, c0, c1 of the smallest rectangle around all segments."""
    return (
        min(s.r0 for s in segments),
        max(s.r1 for s in segments),
        min(s.c0 for s in segments),
        max(s.c1 for s in segments),
    )


def _area(segments: list[_Segment]) -> int:
    r0, r1, c0, c1 = _bounding_box(segments)
    return (r1 - r0) * (c1 - c0)


def _evenly_spaced(
    segments: list[_Segment], gap: Callable[[_Segment, _Segment], int]
) -> Iterator[list[_Segment]]:
    """Segments from top to bottom, cut wherever the gap between neighbours changes."""
    segments = sorted(segments, key=lambda s: s.r0)
    start = 0
    while start < len(segments):
        stop = start + 1
        while stop < len(segments) and gap(*segments[stop - 1 : stop + 1]) == gap(
            *segments[start : start + 2]
        ):
            stop += 1
        yield segments[start:stop]
        start = stop


@dataclass
class RunFinder:
    """Finds runs and groups in a table of mask ids.

    Args:
        ids: Mask ids (rows cols); 0 is empty, 1 is full.
        masks: The masks (u size size).
        size: Tile size.
        n, m: Number of queries and keys.
    """

    ids: NDArray[np.int32]
    masks: NDArray[np.bool_]
    size: int
    n: int
    m: int
    runs: list[TileRun] = field(default_factory=list)

    def find(self) -> tuple[tuple[TileRun, ...], tuple[GatherGroup, ...]]:
        """Runs and groups that cover every visible pair exactly once."""
        self.min_repeats = max(3, len(self.ids) // 32)
        intervals = list(self.intervals())
        rules = self.find_rules(intervals)
        rest = self.extract_runs([piece for s in intervals for piece in self.peel(s, rules)])
        wide = [s for s in rest if s.cols >= MIN_WIDE]
        rest = [s for s in rest if s.cols < MIN_WIDE]
        rest += self.extract_runs([piece for s in wide for piece in self.split_full(s)])
        few = len(rest) <= FEW_INTERVALS
        own_call = [s for s in rest if few or s.cols >= MIN_WIDE]
        self.runs += [self.box_call(box) for box in self.group_boxes(own_call)]
        self.runs.sort(key=lambda run: -run.count * run.s * run.t)
        groups = self.gather_groups([s for s in rest if not few and s.cols < MIN_WIDE])
        return self.mark_first_visits(list(groups))

    def is_full(self, s: _Segment) -> bool:
        return bool((self.ids[s.r0 : s.r1, s.c0 : s.c1] == 1).all())

    def segment(self, r0: int, r1: int, c0: int, c1: int) -> _Segment:
        return _Segment(r0, r1, c0, c1, self.ids[r0:r1, c0:c1].tobytes())

    def intervals(self) -> Iterator[_Segment]:
        """The maximal intervals of non-empty columns of each row, or of rows that agree."""
        visible = self.ids > 0
        r0 = 0
        while r0 < len(visible):
            r1 = r0 + 1
            while (
                r1 < len(visible)
                and (r1 - r0) * self.size < MAX_QUERIES
                and (visible[r1] == visible[r0]).all()
            ):
                r1 += 1
            edges = np.flatnonzero(np.diff(np.concatenate(([0], visible[r0].view(np.int8), [0]))))
            for c0, c1 in edges.reshape(-1, 2).tolist():
                yield self.segment(r0, r1, c0, c1)
            r0 = r1

    def find_rules(self, segments: list[_Segment]) -> list[_Rule]:
        """What repeats along a diagonal or, if full, down a column; widest first."""
        along = Counter(s.along_diagonal() for s in segments)
        down = Counter((s.c0, s.c1) for s in segments if self.is_full(s))
        rules = [
            _Rule(c0, c1 - c0, None, None)
            for (c0, c1), count in down.items()
            if count >= self.min_repeats
        ]
        rules += [
            _Rule(offset, cols, rows, ids)
            for (rows, cols, ids, offset), count in along.items()
            if count >= self.min_repeats
        ]
        return sorted(rules, key=lambda rule: -rule.cols)

    def peel(self, s: _Segment, rules: list[_Rule]) -> list[_Segment]:
        """Cut pieces that follow a rule out of a longer interval."""
        for rule in rules:
            a = rule.offset if rule.rows is None else s.r0 + rule.offset
            b = a + rule.cols
            if a < s.c0 or s.c1 < b:
                continue
            piece = self.segment(s.r0, s.r1, a, b)
            if rule.rows is None:
                follows = self.is_full(piece)
            else:
                follows = (s.r1 - s.r0, piece.ids) == (rule.rows, rule.ids)
            if follows:
                sides = [self.segment(s.r0, s.r1, x, y) for x, y in ((s.c0, a), (b, s.c1)) if x < y]
                return [piece, *(other for side in sides for other in self.peel(side, rules))]
        return [s]

    def split_full(self, s: _Segment) -> list[_Segment]:
        """Cut between full and partial tiles."""
        full = (self.ids[s.r0 : s.r1, s.c0 : s.c1] == 1).all(0)
        cuts = [s.c0, *(np.flatnonzero(np.diff(full)) + s.c0 + 1).tolist(), s.c1]
        return [self.segment(s.r0, s.r1, x, y) for x, y in pairwise(cuts)]

    def extract_runs(self, segments: list[_Segment]) -> list[_Segment]:
        """Turn evenly spaced repetitions into runs; return the remaining segments."""
        along, down = defaultdict(list), defaultdict(list)
        for s in segments:
            is_short = s.r1 * self.size > self.n  # the end of the sequence cuts off some queries
            along[*s.along_diagonal(), is_short].append(s)
            if self.is_full(s):
                down[s.c0, s.c1].append(s)
        done: set[_Segment] = set()
        for same in down.values():
            for stack in _evenly_spaced(same, lambda one, other: other.r0 - one.r1):
                if len(stack) >= self.min_repeats and stack[0].r1 == stack[1].r0:
                    self.runs.append(self.run([replace(stack[0], r1=stack[-1].r1)]))
                    done.update(stack)
        for same in along.values():
            rest = [s for s in same if s not in done]
            for equal in _evenly_spaced(rest, lambda one, other: other.r0 - one.r0):
                if len(equal) >= 3:
                    self.runs.append(self.run(equal))
                    done.update(equal)
        return [s for s in segments if s not in done]

    def run(self, equal: list[_Segment]) -> TileRun:
        """One run for evenly spaced equal segments."""
        first = equal[0]
        step = equal[1].r0 - first.r0 if len(equal) > 1 else 0
        ids = self.ids[first.r0 : first.r1, first.c0 : first.c1]
        return self.calls(len(equal), step, first.r0, first.c0, ids)

    def group_boxes(self, segments: list[_Segment]) -> list[list[_Segment]]:
        """Neighbours share a call if the empty tiles between them cost less than another call."""
        boxes: list[list[_Segment]] = []
        for s in sorted(segments, key=lambda s: (s.r0, s.c0)):
            if boxes:
                wasted = _area([*boxes[-1], s]) - _area(boxes[-1]) - _area([s])
                if wasted * self.size**2 <= CALL_COST:
                    boxes[-1].append(s)
                    continue
            boxes.append([s])
        return boxes

    def box_call(self, segments: list[_Segment]) -> TileRun:
        """One call for several segments; tiles between them are masked."""
        r0, r1, c0, c1 = _bounding_box(segments)
        ids = np.zeros((r1 - r0, c1 - c0), dtype=np.int32)
        for s in segments:
            ids[s.r0 - r0 : s.r1 - r0, s.c0 - c0 : s.c1 - c0] = self.ids[s.r0 : s.r1, s.c0 : s.c1]
        return self.calls(1, 0, r0, c0, ids)

    def calls(self, count: int, step: int, r0: int, c0: int, ids: NDArray[np.int32]) -> TileRun:
        """`count` equal calls, `step` rows and columns apart, on tiles from (r0, c0) with these
        mask ids.
        """
        size, (rows, cols) = self.size, ids.shape
        q0, k0, step = r0 * size, c0 * size, step * size
        s, t = min(rows * size, self.n - q0), min(cols * size, self.m - k0)
        if (ids == 1).all():
            return TileRun(count, step, q0, s, k0, t, None)
        keep = self.masks[ids].transpose(0, 2, 1, 3).reshape(rows * size, -1)[:s, :t]
        used = np.flatnonzero(keep.any(0))
        a, b = used[0].item(), used[-1].item() + 1
        keep = keep[:, a:b]
        mask = None
        if not keep.all():
            mask = torch.from_numpy(np.where(keep, np.float32(0), np.float32(-np.inf)))
        has_empty_rows = not keep.any(1).all()
        return TileRun(count, step, q0, s, k0 + a, b - a, mask, has_empty_rows=has_empty_rows)

    def gather_groups(self, segments: list[_Segment]) -> Iterator[GatherGroup]:
        """Irregular tiles by row; rows with about the same number of tiles share a call."""
        by_row: dict[int, list[int]] = defaultdict(list)
        for s in segments:
            for row in range(s.r0, s.r1):
                by_row[row] += [c for c in range(s.c0, s.c1) if self.ids[row, c]]
        for rows in self.group_rows(by_row):
            width = max(len(by_row[row]) for row in rows)
            cols = torch.tensor([by_row[r] + [-1] * (width - len(by_row[r])) for r in rows])
            q = torch.tensor(rows)
            mask_ids = torch.where(cols < 0, 0, torch.from_numpy(self.ids)[q[:, None], cols])
            yield GatherGroup(q, cols.clamp(min=0), None if (mask_ids == 1).all() else mask_ids)

    def group_rows(self, by_row: dict[int, list[int]]) -> list[list[int]]:
        """Rows that share a call: narrower rows join as long as padding them costs less than
        another call.
        """
        groups: list[list[int]] = []
        width = spare = 0
        for row in sorted(by_row, key=lambda row: -len(by_row[row])):
            spare -= (width - len(by_row[row])) * self.size**2
            if not groups or spare < 0:
                groups.append([])
                width, spare = len(by_row[row]), GROUP_CALLS * CALL_COST
            groups[-1].append(row)
        return groups

    def mark_first_visits(
        self, groups: list[GatherGroup]
    ) -> tuple[tuple[TileRun, ...], tuple[GatherGroup, ...]]:
        """Mark the calls whose queries are in no earlier call: their results need no merging."""
        visited = np.zeros(len(self.ids) * self.size, dtype=bool)
        runs = []
        for run in self.runs:
            at = (np.arange(run.count)[:, None] * run.step + run.q0 + np.arange(run.s)).ravel()
            runs.append(replace(run, is_first=not visited[at].any()))
            visited[at] = True
        visited_tiles: NDArray[np.bool_] = np.asarray(visited.reshape(-1, self.size).any(1))
        for i, group in enumerate(groups):
            at = group.q.numpy()
            groups[i] = replace(group, is_first=not visited_tiles[at].any())
            visited_tiles[at] = True
        return tuple(runs), tuple(groups)
