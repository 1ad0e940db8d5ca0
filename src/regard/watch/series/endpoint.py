"""The series of an endpoint: a row of numbers for each window of time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.series.columns import Result, count_bits, hash_bit
from regard.watch.series.model import SeriesModel

ENDPOINT_COLUMNS = (
    "events",
    "share of errors",
    "mean bytes",
    "mean time",
    "longest time",
    "entities",
)
ENDPOINT_WINDOWS = (60.0, 300.0, 900.0, 3_600.0)  # seconds
EVENTS_IN_WINDOW = 5.0
FEWEST_WINDOWS = 48
LAGS = 3  # windows that are looked at together
LONGEST_PAUSE = 12  # windows without an event that are rows; after more, the series starts anew
UPDATE_AFTER = 64  # rows that the model learns at once


class Deviation(NamedTuple):
    """A column of a window that is unusual."""

    column: str
    observed: float
    expected: float
    deviation: float


class OpenWindow:
    """Sums over the window of an endpoint that is not over."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.events = self.errors = self.timed = 0
        self.size = self.seconds = self.longest = 0.0
        self.entities = 0

    def add(self, event: Event, result: Result) -> None:
        """Count an event."""
        self.events += 1
        self.errors += result.failed
        self.size += result.size
        self.entities |= hash_bit(event.entity)
        if not math.isnan(result.seconds):
            self.timed += 1
            self.seconds += result.seconds
            self.longest = max(self.longest, result.seconds)

    def row(self) -> list[float]:
        """The columns: logarithms, but for the share of errors; NaN where there is no event."""
        if not self.events:
            return [0.0, *[math.nan] * 5]
        times = [math.nan, math.nan]
        if self.timed:
            times = [_log(self.seconds / self.timed), _log(self.longest)]
        return [
            math.log1p(self.events),
            self.errors / self.events,
            math.log1p(self.size / self.events),
            *times,
            math.log1p(count_bits(self.entities)),
        ]


class EndpointSeries:
    """Windows of an endpoint, scored when they close.

    Args:
        seconds: Length of a window.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.model: SeriesModel | None = None
        self.rows: list[list[float]] = []  # closed, and not yet learned
        self.times: list[float] = []
        self.recent: list[tuple[list[float], float]] = []  # the last rows and their times
        self.open: OpenWindow | None = None
        self.latest_number = -1
        self.latest_bits = 0.0
        self.latest: list[Deviation] = []

    def add(self, event: Event, result: Result) -> None:
        """Count an event; the windows before it are closed."""
        number = int(event.time // self.seconds)
        if self.open is None:
            self.open = OpenWindow(number)
        if number > self.open.number:  # a clock that went back opens no window
            self._close(self.open)
            pause = number - self.open.number - 1
            for missing in range(min(pause, LONGEST_PAUSE)):
                self._close(OpenWindow(self.open.number + 1 + missing))
            self.open = OpenWindow(number)
        self.open.add(event, result)

    def _close(self, window: OpenWindow) -> None:
        row, time = window.row(), window.number * self.seconds
        self.recent = [*self.recent[1 - LAGS :], (row, time)]
        if self.model is not None:
            rows, times = zip(*self.recent, strict=True)
            scores = self.model.score(rows, times)
            self.latest_number, self.latest_bits = window.number, float(scores.bits[-1])
            self.latest = [
                Deviation(name, _unlog(name, x), _unlog(name, usual), float(deviation))
                for name, x, usual, deviation in zip(
                    ENDPOINT_COLUMNS, row, scores.expected[-1], scores.deviations[-1], strict=True
                )
                if not math.isnan(x)
            ]
        self.rows.append(row)
        self.times.append(time)
        if len(self.rows) < UPDATE_AFTER:
            return
        if self.model is None:
            self.fit()
        else:
            self.model.update(self.rows, self.times)
            self.rows, self.times = [], []

    def fit(self) -> None:
        """Learn from the windows so far, if they are enough."""
        if len(self.rows) < FEWEST_WINDOWS:
            return
        self.model = SeriesModel(LAGS)
        self.model.fit(self.rows, self.times)
        self.rows, self.times = [], []

    def bits_at(self, time: float) -> float:
        """Bits of the last closed window, if it is the one before the window of `time`."""
        return self.latest_bits if self._is_recent(time) else 0.0

    def largest_deviations(self, time: float) -> list[Deviation]:
        """The two most unusual columns of that window."""
        if not self._is_recent(time):
            return []
        return sorted(self.latest, key=lambda each: -abs(each.deviation))[:2]

    def _is_recent(self, time: float) -> bool:
        return self.latest_number >= 0 and int(time // self.seconds) - self.latest_number in (0, 1)

    def to_json(self) -> dict[str, Any]:
        """What was learned. The open window is not in it: after a restart it begins again."""
        return {
            "seconds": self.seconds,
            "model": None if self.model is None else self.model.to_json(),
        }

    def tensors(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        return {} if self.model is None else self.model.tensors(prefix)

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], prefix: str
    ) -> EndpointSeries:
        series = cls(content["seconds"])
        if content["model"] is not None:
            series.model = SeriesModel.from_json(content["model"], tensors, prefix)
        return series


def choose_window(events: int, span: float) -> float | None:
    """The shortest window in which an endpoint has enough events, or None if no window has them or
    there are too few windows to learn from.

    Args:
        events: Events of the endpoint.
        span: Seconds from the first event of all to the last.
    """
    for seconds in ENDPOINT_WINDOWS:
        windows = span / seconds
        if windows < FEWEST_WINDOWS:
            return None
        if events / windows >= EVENTS_IN_WINDOW:
            return seconds
    return None


def _log(x: float) -> float:
    """Logarithm of a time, which has an unknown unit: ln(x), at least ln(10⁻⁶)."""
    return math.log(max(x, 1e-6))


def _unlog(name: str, x: float) -> float:
    """The value of a column."""
    if name == "share of errors":
        return float(x)
    return float(np.exp(x)) if name.endswith("time") else float(np.expm1(x))
