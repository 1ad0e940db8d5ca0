"""The level "leaf": surprise of each leaf of an event, given its endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Finding, Level, Surprise
from regard.watch.settings import WatchSettings


class LeafLevel(Level):
    """Surprise of leaves."""

    name = "leaf"

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.counts: Counter[tuple[str, str]] = Counter()
        self.totals: Counter[str] = Counter()

    def fit(self, events: Sequence[Event]) -> None:
        self.update(events)

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        offsets = np.cumsum([0, *(len(event.paths) for event in events)])
        bits = [
            log2((self.totals[path] + 2) / (self.counts[path, repr(value)] + 1))
            for event in events
            for path, value in zip(event.paths, event.values, strict=True)
        ]
        return Surprise(offsets, np.zeros(len(bits), np.int32), np.array(bits, np.float64))

    def update(self, events: Sequence[Event]) -> None:
        for event in events:
            for path, value in zip(event.paths, event.values, strict=True):
                self.counts[path, repr(value)] += 1
                self.totals[path] += 1

    def group_names(self) -> Sequence[str]:
        return ["leaf"]

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        return Finding(self.name, "value", event.paths[part], event.values[part], 0.0, 1.0)

    def to_json(self) -> dict[str, Any]:
        return {"counts": [[*key, count] for key, count in self.counts.items()]}

    @classmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> LeafLevel:
        raise NotImplementedError
