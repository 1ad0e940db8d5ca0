"""How active an entity is in its current minute and hour, beside its own past and that of all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.series.columns import (
    Result,
    bitmap_from_json,
    bitmap_to_json,
    count_bits,
    hash_bit,
)

Floats = npt.NDArray[np.float64]

WINDOWS = {"minute": 60.0, "hour": 3_600.0}  # seconds
COLUMNS = ("events", "errors", "bytes", "endpoints")  # and distinct values of each path of ids
OWN_WINDOWS = 5.0  # windows of its own past that weigh as much as the past of all entities
MOST_OWN_WINDOWS = 100.0  # the past is forgotten at this rate
LEAST_SPREAD = 0.25  # of the logarithm: 28 % more or less is no news
LARGEST_Z = 50.0


class EntityWindow:
    """Sums over the current window of an entity, and mean and variance of those before.

    Columns are ln(1 + x) of the events, errors, bytes and distinct endpoints in the window, and of
    the distinct values of each path of ids.

    Args:
        seconds: Length of the window.
        id_paths: Number of paths of ids.
    """

    __slots__ = ("endpoints", "ids", "means", "number", "past", "seconds", "sums", "variances")

    def __init__(self, seconds: float, id_paths: int) -> None:
        self.seconds = seconds
        self.number: int | None = None
        self.sums = [0.0, 0.0, 0.0]  # events, errors, bytes
        self.endpoints = 0
        self.ids = [0] * id_paths
        columns = len(COLUMNS) + id_paths
        self.past, self.means, self.variances = 0.0, [0.0] * columns, [0.0] * columns

    def add(self, time: float, endpoint: str, result: Result) -> list[float] | None:
        """Count an event. If it is the first of a new window, the columns of the old one."""
        number = int(time // self.seconds)
        closed = None
        # An event that is a little late belongs to the current window; after one from the future,
        # time starts anew.
        if self.number is None or number > self.number or number < self.number - 1:
            if self.number is not None and number > self.number:
                closed = self.columns()
                self._remember(closed)
            self.number, self.sums = number, [0.0, 0.0, 0.0]
            self.endpoints, self.ids = 0, [0] * len(self.ids)
        self.sums[0] += 1
        self.sums[1] += result.failed
        self.sums[2] += result.size
        self.endpoints |= hash_bit(endpoint)
        self.ids = [known | new for known, new in zip(self.ids, result.ids, strict=True)]
        return closed

    def columns(self) -> list[float]:
        """The columns so far."""
        distinct = [count_bits(bitmap) for bitmap in (self.endpoints, *self.ids)]
        return [math.log1p(x) for x in (*self.sums, *distinct)]

    def _remember(self, columns: list[float]) -> None:
        self.past = min(self.past + 1, MOST_OWN_WINDOWS)
        share = 1 / self.past
        for j, x in enumerate(columns):
            step = x - self.means[j]
            self.means[j] += share * step
            self.variances[j] = (1 - share) * (self.variances[j] + share * step * step)

    def usual(self, means: list[float], variances: list[float]) -> list[tuple[float, float]]:
        """Mean and standard deviation of each column: of the entity's own past, and of that of all
        entities as long as its own is short."""
        own = self.past / (self.past + OWN_WINDOWS)
        found = []
        for j in range(len(means)):
            distance = self.means[j] - means[j]
            mean = means[j] + own * distance
            variance = own * self.variances[j] + (1 - own) * variances[j]
            variance += own * (1 - own) * distance * distance
            found.append((mean, max(math.sqrt(variance), LEAST_SPREAD)))
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "sums": self.sums,
            "endpoints": bitmap_to_json(self.endpoints),
            "ids": [bitmap_to_json(each) for each in self.ids],
            "past": self.past,
            "means": self.means,
            "variances": self.variances,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], seconds: float) -> EntityWindow:
        window = cls(seconds, len(content["ids"]))
        window.number, window.sums = content["number"], list(content["sums"])
        window.endpoints = bitmap_from_json(content["endpoints"])
        window.ids = [bitmap_from_json(each) for each in content["ids"]]
        window.past = content["past"]
        window.means, window.variances = list(content["means"]), list(content["variances"])
        return window


class PastWindows:
    """Mean and variance of the columns over the closed windows of all entities. They start as if
    there had been one window of mean 0 and variance 1."""

    def __init__(self, columns: int) -> None:
        self.count = 1.0
        self.means, self.variances = np.zeros(columns), np.ones(columns)

    def add(self, closed: list[list[float]], *, most: float = math.inf) -> None:
        """Add windows; with `most`, older ones count less and less."""
        if not closed:
            return
        rows = np.array(closed)
        total = min(self.count + len(rows), max(most, len(rows)))
        share = len(rows) / total
        shift = rows.mean(axis=0) - self.means
        within = (1 - share) * self.variances + share * rows.var(axis=0)
        self.variances = within + share * (1 - share) * shift**2
        self.means = self.means + share * shift
        self.count = total
