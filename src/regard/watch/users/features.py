"""What an event says about its user: indicators of endpoint, hour, and values that users share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event, Value

MAX_ENDPOINTS = 48
MAX_PATHS = 16
MAX_VALUES = 7  # of one path, beside "other"
MAX_LABELS = 200  # of a path, to be looked at
MIN_SHARING = (
    3  # entities that use a value: an id of the user would say who it is, not how they act
)
HOURS = 6  # of the day, in one feature
QUANTILES = (0.25, 0.5, 0.75)
OTHER = "other"
ENDPOINT, HOUR = "endpoint", "hour of day"


class UserFeatures:
    """Maps an event to indicators, in blocks: its endpoint, its part of the day, and for each of
    some paths its value, or the quartile of its number.

    The mean of the indicators of a user's events is a histogram for each block. Paths are those
    whose values differ most between entities, among the values that several entities share.

    Attributes:
        blocks: (name, labels) of each block; the last label is "other".
        size: Number of features d.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[str, list[str]]] = []
        self.cuts: dict[str, list[float]] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Build the tables for `indicators` from the blocks."""
        self.starts = np.cumsum([0, *(len(labels) for _, labels in self.blocks)])
        self.size = int(self.starts[-1])
        self.tables: dict[str, dict[str, int]] = {}
        self.others: dict[str, int] = {}
        for (name, labels), start in zip(self.blocks, self.starts, strict=False):
            self.tables[name] = {label: int(start) + i for i, label in enumerate(labels)}
            self.others[name] = int(start) + len(labels) - 1

    def fit(self, events: Sequence[Event]) -> None:
        """Choose the features from normal events."""
        endpoints = Counter(event.endpoint for event in events)
        self.blocks = [
            (ENDPOINT, [*(name for name, _ in endpoints.most_common(MAX_ENDPOINTS)), OTHER]),
            (HOUR, [str(start) for start in range(0, 24, HOURS)]),
        ]
        self.cuts = number_cuts(events)
        ranked = []
        for path, by_entity in self._count_labels(events).items():
            users = Counter(label for counts in by_entity.values() for label in counts)
            total = sum(by_entity.values(), Counter())
            shared = Counter({k: n for k, n in total.items() if users[k] >= MIN_SHARING})
            labels = [label for label, _ in shared.most_common(MAX_VALUES)]
            if len(labels) > 1 and shared.total() > total.total() / 2:
                ranked.append((between_entities(by_entity, labels), path, [*labels, OTHER]))
        ranked.sort(key=lambda each: (-each[0], each[1]))
        self.blocks += [(path, labels) for _, path, labels in ranked[:MAX_PATHS]]
        self._prepare()

    def _count_labels(self, events: Sequence[Event]) -> dict[str, dict[str, Counter[str]]]:
        """path -> entity -> counts of labels, for paths with few labels."""
        counts: dict[str, dict[str, Counter[str]]] = {}
        labels: dict[str, set[str]] = defaultdict(set)
        for event in events:
            if not event.entity:
                continue
            for path, value in zip(event.paths, event.values, strict=True):
                if len(labels[path]) <= MAX_LABELS:
                    label = self._label(path, value)
                    labels[path].add(label)
                    by_entity = counts.setdefault(path, defaultdict(Counter))
                    by_entity[event.entity][label] += 1
        return {path: counts[path] for path in counts if len(labels[path]) <= MAX_LABELS}

    def _label(self, path: str, value: Value) -> str:
        """The label of a value: itself, or its quartile if the path has many numbers."""
        if path in self.cuts and isinstance(value, int | float):
            return f"quartile {bisect_right(self.cuts[path], value) + 1}"
        return f"{value}"[:80]

    def indicators(self, event: Event) -> list[int]:
        """The features of an event that are 1; a block without any is not in it."""
        found = [
            self.tables[ENDPOINT].get(event.endpoint, self.others[ENDPOINT]),
            self.tables[HOUR][str(int(event.time // 3600) % 24 // HOURS * HOURS)],
        ]
        tables = self.tables
        for path, value in zip(event.paths, event.values, strict=True):
            table = tables.get(path)
            if table is not None:
                found.append(table.get(self._label(path, value), self.others[path]))
        return list(dict.fromkeys(found))

    def matrix(self, events: Sequence[Event]) -> npt.NDArray[np.float32]:
        """Indicators of events, (events, d)."""
        matrix = np.zeros((len(events), self.size), np.float32)
        for row, event in zip(matrix, events, strict=True):
            row[self.indicators(event)] = 1.0
        return matrix

    def describe(self, feature: int) -> str:
        """A feature in words: "endpoint GET /orders"."""
        block = int(np.searchsorted(self.starts, feature, side="right")) - 1
        name, labels = self.blocks[block]
        label = labels[feature - int(self.starts[block])]
        if name == HOUR:
            return f"{label}:00 to {int(label) + HOURS}:00 UTC"
        return label if name == ENDPOINT else f"{name} = {label}"

    def to_json(self) -> dict[str, Any]:
        """What was learned."""
        return {"blocks": self.blocks, "cuts": self.cuts}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> UserFeatures:
        """The inverse of `to_json`."""
        features = cls()
        features.blocks = [(str(name), list(labels)) for name, labels in content["blocks"]]
        features.cuts = {path: list(cuts) for path, cuts in content["cuts"].items()}
        features._prepare()
        return features


def number_cuts(events: Sequence[Event], most: int = 20_000) -> dict[str, list[float]]:
    """Quartiles of each path that has many different numbers."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for event in events[:: max(1, len(events) // most)]:
        for path, value in zip(event.paths, event.values, strict=True):
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[path].append(float(value))
    return {
        path: [float(each) for each in np.quantile(found, QUANTILES)]
        for path, found in numbers.items()
        if len(set(found)) > MAX_VALUES
    }


def between_entities(counts: dict[str, Counter[str]], labels: Sequence[str]) -> float:
    """How much of the variance of the indicators of some labels is between entities, 0 to 1."""
    table = np.array([[found[label] for label in labels] for found in counts.values()], float)
    table = table[table.sum(1) >= 2]
    if len(table) < 2:
        return 0.0
    events = table.sum(1)
    shares, mean = table / events[:, None], table.sum(0) / table.sum()
    between = (events[:, None] * (shares - mean) ** 2).sum()
    total = events.sum() * (mean * (1 - mean)).sum()
    return float(between / total) if total > 0 else 0.0
