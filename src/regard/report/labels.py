"""Axes of a plot, and labels beside its points that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 290, 240  # pixels of the smallest plot, on a phone: what fits there fits everywhere
LETTER_WIDTH, LINE_HEIGHT, MARK_RADIUS, GAP = 6.3, 13.0, 6.0, 9.0  # GAP: between mark and label
MAX_STEPS = int(2 * HEIGHT / LINE_HEIGHT)  # half lines by which a label is moved at most
MAX_LABEL_WIDTH = 170.0  # longer labels are cut


class PlotAxis(NamedTuple):
    """The range of an axis; on a `reverse` axis low values are at the top."""

    low: float
    high: float
    log: bool = False
    reverse: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        fraction = (at - low) / (high - low)
        return 1 - fraction if self.reverse else fraction

    def value(self, fraction: float) -> float:
        """Return the value at a position of a linear axis."""
        return self.low + (1 - fraction if self.reverse else fraction) * (self.high - self.low)


def fit_axis(
    values: Sequence[float], *, margin: float, log: bool = False, reverse: bool = False
) -> PlotAxis:
    """Return an axis that shows all values with a margin on both sides."""
    low, high = min(values), max(values)
    if log:
        factor = max(high / low, 1.1) ** margin
        return PlotAxis(low / factor, high * factor, log, reverse)
    extra = margin * max(high - low, 1e-3, 0.02 * abs(high))
    return PlotAxis(low - extra, high + extra, log, reverse)


class PixelBox(NamedTuple):
    """A rectangle in pixels."""

    left: float
    right: float
    top: float
    bottom: float

    def overlaps(self, other: PixelBox) -> bool:
        """Whether two rectangles share a pixel."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class LabelPosition(NamedTuple):
    """Whether a label is `left` or right of its point, and its height from 0 to 1."""

    left: bool
    height: float


def place_labels(
    points: Sequence[tuple[float, float, str]], taken: Sequence[PixelBox] = ()
) -> list[LabelPosition]:
    """Place the labels of points (x, y, name); x and y from 0 to 1, origin at the lower left.

    Labels keep off the marks of the points and the boxes in `taken`.
    """
    marks = [mark_box(x, y) for x, y, _ in points]
    labels: list[PixelBox] = []
    positions = []
    for (x, y, name), mark in zip(points, marks, strict=True):
        occupied = [*(other for other in marks if other != mark), *taken, *labels]
        position = LabelPosition(x > 0.5, y)
        for candidate in _candidates(x, y, name):
            box = _label_box(x, candidate.height, name, candidate.left)
            if not any(box.overlaps(other) for other in occupied):
                position = candidate
                break
        labels.append(_label_box(x, position.height, name, position.left))
        positions.append(position)
    return positions


def level_label_box(y: float, name: str, *, left: bool, above: bool) -> PixelBox:
    """Return the box of a label at one end of a horizontal line at height y, from 0 to 1."""
    width, line = min(LETTER_WIDTH * len(name), MAX_LABEL_WIDTH), (1 - y) * HEIGHT
    top = line - LINE_HEIGHT if above else line
    start = 0.0 if left else WIDTH - width
    return PixelBox(start, start + width, top, top + LINE_HEIGHT)


def _candidates(x: float, y: float, name: str) -> Iterator[LabelPosition]:
    """Yield positions of a label, nearest first: towards the centre, then outwards if it fits."""
    sides = [x > 0.5]
    outer = _label_box(x, y, name, not sides[0])
    if outer.left > 0 and outer.right < WIDTH:
        sides.append(not sides[0])
    for step in range(MAX_STEPS):
        for sign in (1, -1):
            height = y + sign * step * 0.5 * LINE_HEIGHT / HEIGHT
            if 0.02 < height < 0.98:
                yield from (LabelPosition(left, height) for left in sides)


def mark_box(x: float, y: float) -> PixelBox:
    """Return the rectangle of the mark of a point at (x, y), from 0 to 1."""
    across, down = x * WIDTH, (1 - y) * HEIGHT
    return PixelBox(
        across - MARK_RADIUS, across + MARK_RADIUS, down - MARK_RADIUS, down + MARK_RADIUS
    )


def _label_box(x: float, y: float, name: str, left: bool) -> PixelBox:
    width, down = min(LETTER_WIDTH * len(name), MAX_LABEL_WIDTH), (1 - y) * HEIGHT
    start = x * WIDTH + (-GAP - width if left else GAP)
    return PixelBox(start, start + width, down - LINE_HEIGHT / 2, down + LINE_HEIGHT / 2)
