"""Random dashed paths that wind through a square and keep a distance from each other.

Plain Python: each dash is compared with few others, for which numpy calls would be slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from regard.tasks.example_source import random_stream

CANDIDATES = 10  # directions tried for a dash
MAX_BACKTRACK = 2  # dashes removed from a path that is stuck
STEPS_PER_DASH = 4  # attempts per dash before a path is given up
DISTRACTOR_STARTS = 8  # attempts before a distractor is left out
MAX_TRIES = 300  # attempts for the two long paths
CLEARANCE = 1.1  # minimum distance between dashes that are not successive, in gaps
POINT_SPACING = 0.5  # maximum distance between the points that represent a dash, in gaps

Point = tuple[float, float]  # y x


class PathGeometry(NamedTuple):
    """Lengths in pixels.

    Attributes:
        dash: Length of a dash. A path is a chain of links: half a gap, a dash, half a gap.
        gap: Distance between successive dashes.
        separation: Distance between the first links of the two long paths.
        radius: Radius of a dot.
        thickness: Width of a line.
        straightness: A link turns by an angle a with weight cos²(straightness * a).
    """

    dash: float
    gap: float
    separation: float
    radius: float
    thickness: float
    straightness: float


class PathScene(NamedTuple):
    """Dashes (k, 4), y0 x0 y1 x1, of each path, long ones first; dots (2, 2), y x; the label."""

    paths: list[np.ndarray]
    dots: np.ndarray
    label: int


def draw_scene(
    rng: np.random.Generator, side: int, geometry: PathGeometry, lengths: Sequence[int]
) -> PathScene:
    """Draw paths with the given numbers of dashes; the first two get the dots.

    Distractors that do not fit are left out.
    """
    label, draws = int(rng.integers(2)), random_stream(rng)
    for _ in range(MAX_TRIES):
        canvas = _Canvas(draws, side, geometry)
        pair = canvas.draw_pair(lengths[0])
        if pair is None:
            continue
        start, end = pair[0].dashes[0][0], pair[0 if label else 1].dashes[-1][-1]
        if math.dist(start, end) > 2 * geometry.radius + 1:  # the dots must not touch
            others = [canvas.draw_single(length) for length in lengths[2:]]
            paths = [
                np.array([(*points[0], *points[-1]) for points in path.dashes])
                for path in (*pair, *others)
                if path is not None
            ]
            return PathScene(paths, np.array((start, end)), label)
    raise ValueError(
        f"Two paths of {lengths[0]} dashes do not fit into {side} × {side} pixels: "
        "decrease contour."
    )


class _Path:
    """A growing path: the start and the angle of each link, and the points of its dash."""

    def __init__(self) -> None:
        self.starts: list[Point] = []
        self.angles: list[float] = []
        self.dashes: list[list[Point]] = []

    def __len__(self) -> int:
        return len(self.dashes)


class _Canvas:
    """The square with the points of all dashes, in a grid of cells as wide as the clearance."""

    def __init__(self, draws: Iterator[float], side: int, geometry: PathGeometry) -> None:
        self.draws, self.side, self.geometry = draws, side, geometry
        self.link = geometry.dash + geometry.gap
        self.turns = _turn_quantiles(geometry.straightness)
        steps = math.ceil(geometry.dash / (POINT_SPACING * geometry.gap))
        spacing = geometry.dash / steps
        self.point_offsets = [geometry.gap / 2 + spacing * step for step in range(steps + 1)]
        # the clearance also holds between the points
        self.min_squared = (CLEARANCE * geometry.gap) ** 2 + (spacing / 2) ** 2
        self.low, self.high = geometry.radius, side - geometry.radius
        self.cell_size = math.sqrt(self.min_squared)
        self.columns = int(side / self.cell_size) + 3
        self.cells: list[list[tuple[float, float, int]]] = [[] for _ in range(self.columns**2)]

    # ------------------------------------------------------------------------------------- paths
    def draw_pair(self, dashes: int) -> tuple[_Path, _Path] | None:
        """Two long paths that start near each other and grow alternately; None if stuck."""
        one, two = _Path(), _Path()
        if not self._start(one):
            return None
        y, x = one.starts[0]
        distance = self.geometry.separation
        for _ in range(CANDIDATES):
            angle = math.tau * next(self.draws)
            start = y + distance * math.sin(angle), x + distance * math.cos(angle)
            if self._add_link(two, start, math.tau * next(self.draws)):
                break
        else:
            return None
        for _ in range(STEPS_PER_DASH * dashes):
            for path in (one, two):
                if len(path) < dashes:
                    self._extend(path)
            if len(one) == len(two) == dashes:
                return one, two
        return None

    def draw_single(self, dashes: int) -> _Path | None:
        """One more path, from anywhere; None if there is no room."""
        for _ in range(DISTRACTOR_STARTS):
            path = _Path()
            if not self._start(path):
                continue
            for _ in range(STEPS_PER_DASH * dashes):
                if len(path) == dashes:
                    return path
                self._extend(path)
            self._truncate(path, 0)
        return None

    def _start(self, path: _Path) -> bool:
        """Place the first link anywhere."""
        for _ in range(CANDIDATES):
            start = self.side * next(self.draws), self.side * next(self.draws)
            if self._add_link(path, start, math.tau * next(self.draws)):
                return True
        return False

    def _extend(self, path: _Path) -> None:
        """Add a link, or remove some if there is no room."""
        (y, x), angle = path.starts[-1], path.angles[-1]
        start = y + self.link * math.sin(angle), x + self.link * math.cos(angle)
        for _ in range(CANDIDATES):
            turn = self.turns[int(len(self.turns) * next(self.draws))]
            if self._add_link(path, start, angle + turn):
                return
        self._truncate(path, max(1, len(path) - 1 - int(MAX_BACKTRACK * next(self.draws))))

    # ------------------------------------------------------------------------------------- links
    def _add_link(self, path: _Path, start: Point, angle: float) -> bool:
        """Add a link if there is room for its dash."""
        dy, dx, (y, x) = math.sin(angle), math.cos(angle), start
        previous = id(path.dashes[-1]) if path.dashes else 0
        points: list[Point] = []
        for offset in reversed(self.point_offsets):  # the end is most often in the way
            point = (y + offset * dy, x + offset * dx)
            if not self._is_free(*point, previous):
                return False
            points.append(point)
        points.reverse()
        for y, x in points:
            self.cells[self._cell(y, x)].append((y, x, id(points)))
        path.starts.append(start)
        path.angles.append(angle)
        path.dashes.append(points)
        return True

    def _truncate(self, path: _Path, dashes: int) -> None:
        """Remove all but the first links."""
        for points in path.dashes[dashes:]:
            for y, x in points:
                self.cells[self._cell(y, x)].remove((y, x, id(points)))
        del path.starts[dashes:], path.angles[dashes:], path.dashes[dashes:]

    def _cell(self, y: float, x: float) -> int:
        return (int(y / self.cell_size) + 1) * self.columns + int(x / self.cell_size) + 1

    def _is_free(self, y: float, x: float, previous: int) -> bool:
        """Whether a dot fits here, and no dash is near except the previous one of the path."""
        if not (self.low <= y <= self.high and self.low <= x <= self.high):
            return False
        center = self._cell(y, x)
        for row in (center - self.columns, center, center + self.columns):
            for cell in self.cells[row - 1 : row + 2]:
                for other_y, other_x, dash in cell:
                    squared = (other_y - y) ** 2 + (other_x - x) ** 2
                    if dash != previous and squared < self.min_squared:
                        return False
        return True


@lru_cache
def _turn_quantiles(straightness: float) -> list[float]:
    """Angles whose uniform distribution has the weights of `PathGeometry.straightness`."""
    widest = math.pi / 2 / straightness
    angles = np.linspace(-widest, widest, 20_001)
    cumulative = np.cumsum(np.cos(straightness * angles) ** 2)
    quantiles = (np.arange(4096) + 0.5) / 4096
    return list(np.interp(quantiles, cumulative / cumulative[-1], angles).tolist())
