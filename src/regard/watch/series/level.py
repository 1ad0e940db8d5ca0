"""The level "series": how much, how fast and how well, per entity and per endpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Finding, Level, Surprise
from regard.watch.series.columns import Result, ResultReader
from regard.watch.series.endpoint import EndpointSeries, choose_window
from regard.watch.series.entity import (
    COLUMNS,
    LARGEST_Z,
    WINDOWS,
    EntityWindow,
    PastWindows,
)
from regard.watch.settings import WatchSettings

MOST_ENDPOINTS = 256
MOST_PAST_WINDOWS = 100_000.0
MOST_LEARNING = 50_000  # entities whose windows are kept while learning


class SeriesLevel(Level):
    """Surprise of the numbers of events, failures, bytes and distinct values in windows of time.

    Parts of an event:

    - for its entity, and for the current minute and the current hour: the events, errors, bytes,
      distinct endpoints, and distinct values of up to six paths of ids, so far. With the mean m
      and the standard deviation s of the logarithms of full windows, of this entity and, as long as
      there are few of them, of all: z = (ln(1 + x) − m) / s, and if it is positive the bits are
      z² / (2 ln 2), which bound −log2 of the normal tail. A window need not be over to be unusual;
    - for its endpoint, if it is the first event after a window: the bits of that window, by
      `SeriesModel` for the columns in `ENDPOINT_COLUMNS`, and by `ErrorShare` for its errors. A
      window is one finding about the endpoint, so other events have no such part. Windows are as
      long as needed for five events in them.

    Walking over object ids, scraping and guessing passwords are large numbers of distinct ids,
    bytes and errors; none of them is a rule here. What is an error, a size or an id is said by
    `ResultReader`.

    `score` goes on from the endpoint windows that `update` left, and leaves them as they are: what
    was not learned, such as alerted events, is not in the next batch's windows. It remembers which
    event a window was charged to, so that the same event has the same bits when scored again.

    The state of an entity is {"minute": ..., "hour": ...}.
    """

    name = "series"

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.reader = ResultReader()
        self.endpoints: dict[tuple[str, str], EndpointSeries] = {}
        self._learning: dict[tuple[str, str], dict[str, EntityWindow]] = {}
        self._forget()

    def _forget(self) -> None:
        columns = len(COLUMNS) + len(self.reader.id_paths)
        self.past = {name: PastWindows(columns) for name in WINDOWS}

    def fit(self, events: Sequence[Event]) -> None:
        self.reader.fit(events)
        self._forget()
        results = [self.reader.read(event) for event in events]
        self._add_windows(events, results)
        for name in WINDOWS:  # the last ones, which are not closed
            last = [windows[name].columns() for windows in self._learning.values()]
            self.past[name].add(last)
        self._learning = {}

        counts = Counter((event.tenant, event.endpoint) for event in events)
        span = events[-1].time - events[0].time if events else 0.0
        self.endpoints = {}
        for key, count in counts.most_common(MOST_ENDPOINTS):
            seconds = choose_window(count, span)
            if seconds is not None:
                self.endpoints[key] = EndpointSeries(seconds)
        for event, result in zip(events, results, strict=True):
            series = self.endpoints.get((event.tenant, event.endpoint))
            if series is not None:
                series.add(event, result)
        for series in self.endpoints.values():
            series.fit()

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        width = len(COLUMNS) + len(self.reader.id_paths)
        parts = len(WINDOWS) * width + 1
        bits = np.zeros((len(events), parts))
        present = np.ones((len(events), parts), np.bool_)
        present[:, -1] = False
        opened: dict[tuple[str, str], dict[str, EntityWindow]] = {}
        advanced: dict[tuple[str, str], EndpointSeries] = {}
        past = {
            name: (each.means.tolist(), each.variances.tolist()) for name, each in self.past.items()
        }
        for i, event in enumerate(events):
            result = self.reader.read(event)
            if event.entity:
                key = (event.tenant, event.entity)
                if key not in opened:
                    opened[key] = self._open(states.get(key))
                found: list[float] = []
                for name, current in opened[key].items():
                    current.add(event.time, event.endpoint, result)
                    usual = current.usual(*past[name])
                    for x, (mean, spread) in zip(current.columns(), usual, strict=True):
                        z = min(max((x - mean) / spread, 0.0), LARGEST_Z)
                        found.append(z * z / (2 * math.log(2)))
                bits[i, :-1] = found
            endpoint = (event.tenant, event.endpoint)
            if endpoint in self.endpoints:
                if endpoint not in advanced:
                    advanced[endpoint] = self.endpoints[endpoint].copy()
                advanced[endpoint].add(event, result, learns=False)
                window = advanced[endpoint].charge(event)
                if window is not None:
                    bits[i, -1], present[i, -1] = window.bits, True
        for key, windows in opened.items():
            states[key] = {name: window.to_json() for name, window in windows.items()}
        for endpoint, series in advanced.items():
            self.endpoints[endpoint].remember(series)
        return Surprise(
            np.concatenate([[0], np.cumsum(present.sum(axis=1))]),
            np.nonzero(present)[1].astype(np.int32),
            bits[present],
        )

    def _open(self, state: Any) -> dict[str, EntityWindow]:
        """The windows of an entity."""
        if state is None:
            return {n: EntityWindow(s, len(self.reader.id_paths)) for n, s in WINDOWS.items()}
        return {n: EntityWindow.from_json(state[n], s) for n, s in WINDOWS.items()}

    def update(self, events: Sequence[Event]) -> None:
        results = [self.reader.read(event) for event in events]
        self._add_windows(events, results)
        for event, result in zip(events, results, strict=True):
            series = self.endpoints.get((event.tenant, event.endpoint))
            if series is not None:
                series.add(event, result)

    def _add_windows(self, events: Sequence[Event], results: list[Result]) -> None:
        """Add the windows that events close to the past of all entities."""
        closed: dict[str, list[list[float]]] = {name: [] for name in WINDOWS}
        for event, result in zip(events, results, strict=True):
            if not event.entity:
                continue
            key = (event.tenant, event.entity)
            windows = self._learning.pop(key, None) or self._open(None)
            self._learning[key] = windows
            for name, window in windows.items():
                columns = window.add(event.time, event.endpoint, result)
                if columns is not None:
                    closed[name].append(columns)
            if len(self._learning) > MOST_LEARNING:
                del self._learning[next(iter(self._learning))]
        for name, rows in closed.items():
            self.past[name].add(rows, most=MOST_PAST_WINDOWS)

    def group_names(self) -> Sequence[str]:
        columns = [*COLUMNS, *(f"distinct {path}" for path in self.reader.id_paths)]
        names = [
            f"{column} in {period}" for period in ("a minute", "an hour") for column in columns
        ]
        return [*names, "window of the endpoint"]

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        name = self.group_names()[part]
        width = len(COLUMNS) + len(self.reader.id_paths)
        if part == len(WINDOWS) * width:
            return self._explain_endpoint(event)

        bits = float(self.score([event], {(event.tenant, event.entity): state}).bits[part])
        window_name = list(WINDOWS)[part // width]
        window = self._open(state)[window_name]
        window.add(event.time, event.endpoint, self.reader.read(event))
        past = self.past[window_name]
        mean, spread = window.usual(past.means.tolist(), past.variances.tolist())[part % width]
        observed = round(math.expm1(window.columns()[part % width]), 1)
        usual, high = math.expm1(mean), math.expm1(mean + 2 * spread)
        text = (
            f"{event.entity}: {observed:g} {name}; usual {usual:.3g}, rarely more than {high:.3g}"
        )
        return Finding(
            self.name, "series", name, observed, bits, 1.0, [(round(usual, 1), 0.5)], text
        )

    def _explain_endpoint(self, event: Event) -> Finding:
        """Explain the window that an event closed by its two most unusual columns."""
        series = self.endpoints.get((event.tenant, event.endpoint))
        closed = series.charge(event) if series is not None else None
        if series is None or closed is None:
            text = f"no window of {event.endpoint} was closed by this event"
            return Finding(self.name, "series", event.endpoint, None, 0.0, 1.0, [], text)
        deviations = sorted(closed.deviations, key=lambda each: -each.deviation)[:2]
        text = f"{event.endpoint} in the last {series.seconds / 60:.0f} min: " + ", ".join(
            f"{each.column} {each.observed:.3g} where {each.expected:.3g} is usual"
            for each in deviations
        )
        first = deviations[0]
        return Finding(
            self.name,
            "series",
            f"{first.column} of {event.endpoint}",
            round(first.observed, 3),
            closed.bits,
            1.0,
            [(round(first.expected, 3), 0.5)],
            text,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings.model_dump(mode="json"),
            "id_paths": self.reader.id_paths,
            "past": {name: each.count for name, each in self.past.items()},
            "endpoints": [[*key, each.to_json()] for key, each in self.endpoints.items()],
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, each in self.past.items():
            arrays[f"{name}.means"], arrays[f"{name}.variances"] = each.means, each.variances
        for number, series in enumerate(self.endpoints.values()):
            arrays |= series.tensors(f"endpoint.{number}")
        return arrays

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
    ) -> SeriesLevel:
        level = cls(WatchSettings(**content["settings"]))
        level.reader = ResultReader(content["id_paths"])
        level._forget()
        for name, each in level.past.items():
            each.count = content["past"][name]
            each.means, each.variances = tensors[f"{name}.means"], tensors[f"{name}.variances"]
        for number, (tenant, endpoint, stored) in enumerate(content["endpoints"]):
            series = EndpointSeries.from_json(stored, tensors, f"endpoint.{number}")
            level.endpoints[tenant, endpoint] = series
        return level
