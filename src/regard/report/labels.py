"""Names beside the points of a plot, moved up or down until none lies on another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = (
    290,
    240,
)  # of the smallest plot, a phone's, in pixels: what fits there fits everywhere
LETTER, LINE, MARK, GAP = (
    6.3,
    13.0,
    6.0,
    9.0,
)  # a letter's width, a line's height, a mark's radius, between mark and name
STEPS = int(2 * HEIGHT / LINE)  # of half a line, by which a name is moved at most
LIMIT = 170.0  # longer names are cut by the plot


class Axis(NamedTuple):
    """What a plot shows in one direction: from low to high, `log` or not; `down`: the least is the best and stands above."""

    low: float
    high: float
    log: bool = False
    down: bool = False

    def share(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return 1 - share if self.down else share

    def at(self, share: float) -> float:
        """The value that stands there, of an axis that is not `log`."""
        return self.low + (1 - share if self.down else share) * (self.high - self.low)


def axis(values: Sequence[float], *, margin: float, log: bool = False, down: bool = False) -> Axis:
    """Around all values, with a margin on both sides."""
    low, high = min(values), max(values)
    if log:
        beyond = max(high / low, 1.1) ** margin
        return Axis(low / beyond, high * beyond, log, down)
    beyond = margin * max(high - low, 1e-3, 0.02 * abs(high))
    return Axis(low - beyond, high + beyond, log, down)


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether they share a pixel."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class Label(NamedTuple):
    """Where a name stands: `left` of its point or right, and at which height, from 0 to 1."""

    left: bool
    share: float


def place_labels(points: Sequence[tuple[float, float, str]]) -> list[Label]:
    """points (x, y, name), x and y from 0 to 1, from the left and from below -> where their names go."""
    taken = [_mark(x, y) for x, y, _ in points]
    found = []
    for x, y, name in points:
        others = [box for box in taken if box != _mark(x, y)]
        free = (
            at
            for at in _places(x, y, name)
            if not any(_name(x, at.share, name, at.left).meets(box) for box in others)
        )
        at = next(free, Label(x > 0.5, y))
        taken.append(_name(x, at.share, name, at.left))
        found.append(at)
    return found


def _places(x: float, y: float, name: str) -> Iterator[Label]:
    """Where a name may go, the nearest first: towards the middle of the plot, or to the other side where it fits there."""
    heights = (y + sign * step * 0.5 * LINE / HEIGHT for step in range(STEPS) for sign in (1, -1))
    sides = [x > 0.5]
    outer = _name(x, y, name, not sides[0])
    if outer.left > 0 and outer.right < WIDTH:
        sides.append(not sides[0])
    return (Label(left, height) for height in heights if 0.02 < height < 0.98 for left in sides)


def _mark(x: float, y: float) -> Box:
    across, down = x * WIDTH, (1 - y) * HEIGHT
    return Box(across - MARK, across + MARK, down - MARK, down + MARK)


def _name(x: float, y: float, name: str, left: bool) -> Box:
    wide, down = min(LETTER * len(name), LIMIT), (1 - y) * HEIGHT
    start = x * WIDTH + (-GAP - wide if left else GAP)
    return Box(start, start + wide, down - LINE / 2, down + LINE / 2)
