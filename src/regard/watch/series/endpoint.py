"""The series of an endpoint: a row of numbers, and a number of errors, for each window of time."""

from __future__ import annotations

import math
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.series.columns import Result, count_bits, hash_bit
from regard.watch.series.errors import ErrorShare
from regard.watch.series.model import SeriesModel

ENDPOINT_COLUMNS = (
    "events",
    "mean bytes",  # here and below, of the events that did not fail
    "mean time",
    "longest time",
    "entities",
)
ENDPOINT_WINDOWS = (60.0, 300.0, 900.0, 3_600.0)  # seconds
EVENTS_IN_WINDOW = 5.0
FEWEST_WINDOWS = 48
LEAST_SPREAD = 0.1  # of a logarithm: 10 % more or less is no news
LONGEST_PAUSE = 12  # windows without an event that are rows; after more, the series starts anew
MOST_CLOSED = 16  # closed windows that are remembered, for explanations
UPDATE_AFTER = 64  # rows that the model learns at once


class Deviation(NamedTuple):
    """A column of a window that is unusual."""

    column: str
    observed: float
    expected: float
    deviation: float  # in standard deviations


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
        self.entities |= hash_bit(event.entity)
        if result.failed:
            return
        self.size += result.size
        if not math.isnan(result.seconds):
            self.timed += 1
            self.seconds += result.seconds
            self.longest = max(self.longest, result.seconds)

    def row(self) -> list[float]:
        """The columns, which are logarithms; NaN where no event says anything."""
        succeeded = self.events - self.errors
        size = math.log1p(self.size / succeeded) if succeeded else math.nan
        mean = longest = entities = math.nan
        if self.timed:
            mean, longest = _log(self.seconds / self.timed), _log(self.longest)
        if self.events:
            entities = math.log1p(count_bits(self.entities))
        return [math.log1p(self.events), size, mean, longest, entities]


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
        self.errors = ErrorShare()
        self.rows: list[list[float]] = []  # closed, and not yet learned
        self.times: list[float] = []
        self.counts: list[tuple[int, int]] = []  # errors and events of them
        self.open: OpenWindow | None = None
        self.closed: dict[int, ClosedWindow] = {}  # the last ones, by number
        self.charged: dict[int, str] = {}  # number -> source of the event that pays for it

    def copy(self) -> EndpointSeries:
        """A series that goes on from here without a trace; the model is shared."""
        other = EndpointSeries(self.seconds)
        other.model, other.errors, other.open = self.model, self.errors, copy(self.open)
        other.closed, other.charged = dict(self.closed), dict(self.charged)
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
        if self.model is not None and window.number not in self.closed:
            self.closed[window.number] = self._score(self.model, window)
            if len(self.closed) > MOST_CLOSED:
                del self.closed[next(iter(self.closed))]
        if not learns:
            return
        self.rows.append(window.row())
        self.times.append(window.number * self.seconds)
        self.counts.append((window.errors, window.events))
        if len(self.rows) < UPDATE_AFTER:
            return
        if self.model is None:
            self.fit()
        else:
            self.model.update(self.rows, self.times)
            self.errors.update(self.counts)
            self.rows, self.times, self.counts = [], [], []

    def _score(self, model: SeriesModel, window: OpenWindow) -> ClosedWindow:
        row = window.row()
        scores = model.score([row], [window.number * self.seconds])
        columns = zip(
            ENDPOINT_COLUMNS, row, scores.expected[-1], scores.deviations[-1], strict=True
        )
        deviations = [
            Deviation(name, _unlog(name, x), _unlog(name, usual), abs(float(deviation)))
            for name, x, usual, deviation in columns
            if not math.isnan(x)
        ]
        error_bits = self.errors.bits(window.errors, window.events)
        if window.events:
            share = window.errors / window.events
            deviation = math.sqrt(2 * math.log(2) * error_bits)
            deviations.append(Deviation("share of errors", share, self.errors.mean, deviation))
        return ClosedWindow(float(scores.bits[-1]) + error_bits, deviations)

    def fit(self) -> None:
        """Learn from the windows so far, if they are enough."""
        if len(self.rows) < FEWEST_WINDOWS:
            return
        noise = np.full(len(ENDPOINT_COLUMNS), LEAST_SPREAD)
        for name in ("events", "entities"):
            column = ENDPOINT_COLUMNS.index(name)
            noise[column] = max(_count_noise([row[column] for row in self.rows]), LEAST_SPREAD)
        self.model = SeriesModel(lags=1, noise=noise)
        self.model.fit(self.rows, self.times)
        self.errors.fit(self.counts)
        self.rows, self.times, self.counts = [], [], []

    def charge(self, event: Event) -> ClosedWindow | None:
        """The closed window that an event pays for: the first event after a window does, and again
        when it is scored again. After a pause that is the most unusual of several windows."""
        number = int(event.time // self.seconds)
        windows = []
        for closed in range(number - LONGEST_PAUSE - 1, number):
            window = self.closed.get(closed)
            if window is None:
                continue
            if self.charged.setdefault(closed, event.source) == event.source:
                windows.append(window)
        return max(windows, key=lambda each: each.bits, default=None)

    def remember(self, other: EndpointSeries) -> None:
        """Keep what a copy knows of closed windows."""
        self.closed = other.closed
        self.charged = dict(list(other.charged.items())[-MOST_CLOSED:])

    def to_json(self) -> dict[str, Any]:
        """All but the arrays. Closed windows, which explain, are not in it."""
        return {
            "seconds": self.seconds,
            "model": None if self.model is None else self.model.to_json(),
            "errors": {"sums": self.errors.sums.tolist(), "memory": self.errors.memory},
            "charged": list(self.charged.items()),
            "open": None
            if self.open is None
            else vars(self.open) | {"entities": f"{self.open.entities:x}"},
        }

    def tensors(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """The model's arrays, and the windows that it has not learned."""
        arrays = {
            f"{prefix}.rows": np.array(self.rows).reshape(-1, len(ENDPOINT_COLUMNS)),
            f"{prefix}.times": np.array(self.times, dtype=np.float64),
            f"{prefix}.counts": np.array(self.counts, dtype=np.int64).reshape(-1, 2),
        }
        return arrays if self.model is None else arrays | self.model.tensors(prefix)

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], prefix: str
    ) -> EndpointSeries:
        series = cls(content["seconds"])
        if content["model"] is not None:
            series.model = SeriesModel.from_json(content["model"], tensors, prefix)
        series.errors.sums = np.array(content["errors"]["sums"])
        series.errors.memory = content["errors"]["memory"]
        series.charged = dict(content["charged"])
        series.rows = tensors[f"{prefix}.rows"].tolist()
        series.times = tensors[f"{prefix}.times"].tolist()
        series.counts = [(k, n) for k, n in tensors[f"{prefix}.counts"].tolist()]
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


def _count_noise(logs: list[float]) -> float:
    """Standard deviation of ln(1 + x), if x is a Poisson variable with such values as means:
    √x / (1 + x), squared and averaged."""
    counts = np.expm1(np.array(logs)[~np.isnan(logs)])
    return float(np.sqrt((counts / (1 + counts) ** 2).mean())) if len(counts) else 0.0


def _log(x: float) -> float:
    """Logarithm of a time, which has an unknown unit: ln(x), at least ln(10⁻⁶)."""
    return math.log(max(x, 1e-6))


def _unlog(name: str, x: float) -> float:
    """The value of a column."""
    return float(np.exp(x)) if name.endswith("time") else float(np.expm1(x))
