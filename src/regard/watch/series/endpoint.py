"""The series of an endpoint: a row of numbers for each window of time."""

from __future__ import annotations

import math
from copy import copy
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
MOST_CLOSED = 16  # closed windows that are remembered, for explanations
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


class ClosedWindow(NamedTuple):
    """How unusual a closed window was."""

    bits: float
    deviations: list[Deviation]


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
        self.closed: dict[int, ClosedWindow] = {}  # the last ones, by number

    def copy(self) -> EndpointSeries:
        """A series that goes on from here without a trace; the model is shared."""
        other = EndpointSeries(self.seconds)
        other.model, other.recent, other.closed = self.model, self.recent, dict(self.closed)
        other.open = copy(self.open)
        return other

    def add(self, event: Event, result: Result, *, learns: bool = True) -> None:
        """Count an event; the windows before it are closed.

        Args:
            learns: Whether the model learns closed windows.
        """
        number = int(event.time // self.seconds)
        # An event that is a little late belongs to the open window; after one from the future, time
        # starts anew.
        if self.open is None or number < self.open.number - LONGEST_PAUSE:
            self.open = OpenWindow(number)
        if number > self.open.number:
            self._close(self.open, learns)
            pause = number - self.open.number - 1
            for missing in range(min(pause, LONGEST_PAUSE)):
                self._close(OpenWindow(self.open.number + 1 + missing), learns)
            self.open = OpenWindow(number)
        self.open.add(event, result)

    def _close(self, window: OpenWindow, learns: bool) -> None:
        row, time = window.row(), window.number * self.seconds
        self.recent = [*self.recent[1 - LAGS :], (row, time)]
        if self.model is not None and window.number not in self.closed:
            self.closed[window.number] = self._score(self.model, row)
            if len(self.closed) > MOST_CLOSED:
                del self.closed[next(iter(self.closed))]
        if not learns:
            return
        self.rows.append(row)
        self.times.append(time)
        if len(self.rows) < UPDATE_AFTER:
            return
        if self.model is None:
            self.fit()
        else:
            self.model.update(self.rows, self.times)
            self.rows, self.times = [], []

    def _score(self, model: SeriesModel, row: list[float]) -> ClosedWindow:
        """Score the last of the recent rows."""
        rows, times = zip(*self.recent, strict=True)
        scores = model.score(rows, times)
        columns = zip(
            ENDPOINT_COLUMNS, row, scores.expected[-1], scores.deviations[-1], strict=True
        )
        deviations = [
            Deviation(name, _unlog(name, x), _unlog(name, usual), float(deviation))
            for name, x, usual, deviation in columns
            if not math.isnan(x)
        ]
        return ClosedWindow(float(scores.bits[-1]), deviations)

    def fit(self) -> None:
        """Learn from the windows so far, if they are enough."""
        if len(self.rows) < FEWEST_WINDOWS:
            return
        self.model = SeriesModel(LAGS)
        self.model.fit(self.rows, self.times)
        self.rows, self.times = [], []

    def remember(self, closed: dict[int, ClosedWindow]) -> None:
        """Keep windows that a copy closed, for explanations."""
        for number, window in closed.items():
            self.closed.setdefault(number, window)
        for number in sorted(self.closed)[:-MOST_CLOSED]:
            del self.closed[number]

    def window_before(self, time: float) -> ClosedWindow | None:
        """The window before that of `time`, if it was closed lately."""
        return self.closed.get(int(time // self.seconds) - 1)

    def to_json(self) -> dict[str, Any]:
        """All but the arrays. Closed windows, which explain, are not in it."""
        return {
            "seconds": self.seconds,
            "model": None if self.model is None else self.model.to_json(),
            "open": None
            if self.open is None
            else vars(self.open) | {"entities": f"{self.open.entities:x}"},
        }

    def tensors(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """The model's arrays, the rows that it has not learned, and the last rows."""
        rows = [*zip(self.rows, self.times, strict=True), *self.recent]
        arrays = {
            f"{prefix}.rows": np.array([row for row, _ in rows]).reshape(-1, len(ENDPOINT_COLUMNS)),
            f"{prefix}.times": np.array([time for _, time in rows], dtype=np.float64),
            f"{prefix}.pending": np.array([len(self.rows)]),
        }
        return arrays if self.model is None else arrays | self.model.tensors(prefix)

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], prefix: str
    ) -> EndpointSeries:
        series = cls(content["seconds"])
        if content["model"] is not None:
            series.model = SeriesModel.from_json(content["model"], tensors, prefix)
        rows, times = tensors[f"{prefix}.rows"].tolist(), tensors[f"{prefix}.times"].tolist()
        pending = int(tensors[f"{prefix}.pending"][0])
        series.rows, series.times = rows[:pending], times[:pending]
        series.recent = list(zip(rows[pending:], times[pending:], strict=True))
        if content["open"] is not None:
            series.open = OpenWindow(content["open"]["number"])
            entities = int(content["open"]["entities"], 16)
            vars(series.open).update(content["open"] | {"entities": entities})
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
