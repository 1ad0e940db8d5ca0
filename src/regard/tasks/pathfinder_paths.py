"""Dashed paths that wind through a square and never come near each other.

Plain Python on plain numbers: a dash is checked against the few that are near it, and calls into numpy would cost more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from regard.tasks.example_source import random_stream

CANDIDATES = 10  # places tried for a dash
BACK = 2  # a path that is stuck takes back up to so many dashes
PATIENCE = 4  # dashes laid for each that is wanted, before a path is given up
STARTS = 8  # times that a path that distracts is begun, before it is left out
TRIES = 300  # times that all is begun again
CLEAR = 1.1  # gaps between dashes that do not follow each other, at least
DENSE = 0.5  # the points that stand for a dash are no further apart than so many gaps

Path = np.ndarray  # dashes (k 4): y0 x0 y1 x1
Points = list[tuple[float, float]]  # y x


class PathGeometry(NamedTuple):
    """Lengths in pixels.

    dash, gap   a path is a chain of links of dash + gap; the dash is the middle of its link
    apart       from the first link of one long path to that of the other
    radius      of a dot
    thick       a line
    straight    links turn by an angle a with weight cos²(straight · a), up to where that is 0
    """

    dash: float
    gap: float
    apart: float
    radius: float
    thick: float
    straight: float


class PathScene(NamedTuple):
    """All paths, the two long ones first; two dots (2 2), y x; and 1 if they are on the same path."""

    paths: list[Path]
    dots: np.ndarray
    label: int


def draw_scene(
    random: np.random.Generator, side: int, geometry: PathGeometry, lengths: Sequence[int]
) -> PathScene:
    """Paths of so many dashes, of which the first two have the dots; those after them are left out where there is no room."""
    label, draws = int(random.integers(2)), random_stream(random)
    for _ in range(TRIES):
        field = _Field(draws, side, geometry)
        pair = field.pair(lengths[0])
        if pair is None:
            continue
        first, last = pair[0].dashes[0][0], pair[0 if label else 1].dashes[-1][-1]
        if math.dist(first, last) > 2 * geometry.radius + 1:  # dots that touch would be one
            others = [snake for length in lengths[2:] if (snake := field.one(length)) is not None]
            return PathScene(
                [snake.path() for snake in (*pair, *others)], np.array((first, last)), label
            )
    raise ValueError(
        f"two paths of {lengths[0]} dashes do not fit into {side} × {side} pixels: ask for shorter ones"
    )


class _Snake:
    """A path that grows: the beginning of each link, its angle, and the points of its dash."""

    def __init__(self) -> None:
        self.joints: Points = []
        self.angles: list[float] = []
        self.dashes: list[Points] = []

    def __len__(self) -> int:
        return len(self.dashes)

    def path(self) -> Path:
        """The dashes."""
        return np.array([(*points[0], *points[-1]) for points in self.dashes])


class _Field:
    """The square, and the points of the dashes in it so far, in buckets as wide as dashes must be apart."""

    def __init__(self, draws: Iterator[float], side: int, geometry: PathGeometry) -> None:
        self.draws, self.side, self.geometry = draws, side, geometry
        self.link, self.turns = geometry.dash + geometry.gap, _turns(geometry.straight)
        steps = math.ceil(geometry.dash / (DENSE * geometry.gap))
        self.along = [geometry.gap / 2 + geometry.dash * step / steps for step in range(steps + 1)]
        self.near = (CLEAR * geometry.gap) ** 2 + (
            geometry.dash / steps / 2
        ) ** 2  # so that it holds between the points too
        self.edge, self.far_edge = geometry.radius, side - geometry.radius
        self.wide = math.sqrt(self.near)
        self.across = int(side / self.wide) + 3
        self.buckets: list[list[tuple[float, float, int]]] = [[] for _ in range(self.across**2)]

    # ------------------------------------------------------------------------------------------ paths
    def pair(self, dashes: int) -> tuple[_Snake, _Snake] | None:
        """Two long paths that grow in turns, the second from near the first one's beginning; None: they got stuck."""
        one, two = _Snake(), _Snake()
        if not self._begin(one):
            return None
        if not any(
            self._lay(two, self._near(one.joints[0]), self._any_angle()) for _ in range(CANDIDATES)
        ):
            return None
        for _ in range(PATIENCE * dashes):
            for snake in (one, two):
                if len(snake) < dashes:
                    self._extend(snake)
            if len(one) == len(two) == dashes:
                return one, two
        return None

    def one(self, dashes: int) -> _Snake | None:
        """One path more, from anywhere."""
        for _ in range(STARTS):
            snake = _Snake()
            if not self._begin(snake):
                continue
            for _ in range(PATIENCE * dashes):
                if len(snake) == dashes:
                    return snake
                self._extend(snake)
            self._cut(snake, 0)
        return None

    def _begin(self, snake: _Snake) -> bool:
        """The first dash, anywhere."""
        places = (
            (self.side * next(self.draws), self.side * next(self.draws)) for _ in range(CANDIDATES)
        )
        return any(self._lay(snake, place, self._any_angle()) for place in places)

    def _extend(self, snake: _Snake) -> None:
        """One dash more; or, if there is no room for it, some fewer."""
        (y, x), angle = snake.joints[-1], snake.angles[-1]
        joint = (y + self.link * math.sin(angle), x + self.link * math.cos(angle))
        turns = (self.turns[int(len(self.turns) * next(self.draws))] for _ in range(CANDIDATES))
        if not any(self._lay(snake, joint, angle + turn) for turn in turns):
            self._cut(snake, max(1, len(snake) - 1 - int(BACK * next(self.draws))))

    def _any_angle(self) -> float:
        return math.tau * next(self.draws)

    def _near(self, place: tuple[float, float]) -> tuple[float, float]:
        angle, apart = self._any_angle(), self.geometry.apart
        return place[0] + apart * math.sin(angle), place[1] + apart * math.cos(angle)

    # ------------------------------------------------------------------------------------------ dashes
    def _lay(self, snake: _Snake, joint: tuple[float, float], angle: float) -> bool:
        """Add a link from a joint at an angle, if its dash has room."""
        up, right, (y, x) = math.sin(angle), math.cos(angle), joint
        last = id(snake.dashes[-1]) if snake.dashes else 0
        points: Points = []
        for far in reversed(self.along):  # its end is what is most often in the way
            point = (y + far * up, x + far * right)
            if not self._free(*point, last):
                return False
            points.append(point)
        points.reverse()
        for y, x in points:
            self.buckets[self._bucket(y, x)].append((y, x, id(points)))
        snake.joints.append(joint)
        snake.angles.append(angle)
        snake.dashes.append(points)
        return True

    def _cut(self, snake: _Snake, dashes: int) -> None:
        """Take back all but so many."""
        for points in snake.dashes[dashes:]:
            for y, x in points:
                self.buckets[self._bucket(y, x)].remove((y, x, id(points)))
        del snake.joints[dashes:], snake.angles[dashes:], snake.dashes[dashes:]

    def _bucket(self, y: float, x: float) -> int:
        return (int(y / self.wide) + 1) * self.across + int(x / self.wide) + 1

    def _free(self, y: float, x: float, last: int) -> bool:
        """A dot here would be inside the square, and no dash is near but the last one of the same path."""
        if not (self.edge <= y <= self.far_edge and self.edge <= x <= self.far_edge):
            return False
        middle = self._bucket(y, x)
        for row in (middle - self.across, middle, middle + self.across):
            for bucket in self.buckets[row - 1 : row + 2]:
                for other_y, other_x, dash in bucket:
                    if dash != last and (other_y - y) ** 2 + (other_x - x) ** 2 < self.near:
                        return False
        return True


@lru_cache
def _turns(straight: float) -> list[float]:
    """Angles to draw from evenly, so that they have the weights of `PathGeometry.straight`."""
    widest = math.pi / 2 / straight
    fine = np.linspace(-widest, widest, 20_001)
    share = np.cumsum(np.cos(straight * fine) ** 2)
    return list(np.interp((np.arange(4096) + 0.5) / 4096, share / share[-1], fine).tolist())
