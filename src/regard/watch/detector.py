"""The detector: levels, calibration and budget together. From events to alerts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from regard.watch.alert import Alert
from regard.watch.event import Event
from regard.watch.level import Level
from regard.watch.settings import WatchSettings

EntityStates = MutableMapping[tuple[str, str], dict[str, Any]]
"""(tenant, entity) -> {name of a level: JSON state}. A plain dict works."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, and how many of how many events are done."""

LEVEL_CLASSES = {
    "leaf": "regard.watch.leaves:LeafLevel",
    "sequence": "regard.watch.sequences:SequenceLevel",
    "path": "regard.watch.sequences:PathLevel",
    "series": "regard.watch.series:SeriesLevel",
    "user": "regard.watch.users:UserLevel",
}
"""Name -> module:class. A class is built with the `WatchSettings` as its only argument."""


@dataclass(slots=True)
class ScoredEvent:
    """An event with its p-value.

    Attributes:
        event: The event.
        p: Share of normal events that are at least as unusual.
        extrapolated: Whether p is beyond what the calibration sample can show.
        status: "normal", or "alert"; "shadow" for an alert of a new endpoint, "learning" for any
            event of an endpoint that is newer still, "repeated" for an alert whose finding was
            reported often enough today.
        level_p: p-value of each level.
        parts: For each level the calibration groups, bits and p-values of its parts.
        states: State of the entity before the batch, by level; for explanations.
        earlier: Events of the same entity that came before it in the batch.
    """

    event: Event
    p: float
    extrapolated: bool
    status: str
    level_p: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    earlier: list[Event] = field(default_factory=list)


class Detector:
    """Scores events by several levels, and says which are alerts.

    Example:
        detector = Detector.learn(read_events("traffic.jsonl", settings), settings)
        states = {}
        scored = detector.score(events, states)
        alerts = [detector.alert(each) for each in scored if each.status == "alert"]
        detector.update(scored)
    """

    def __init__(self, settings: WatchSettings, levels: Sequence[Level]) -> None:
        self.settings, self.levels = settings, list(levels)

    @classmethod
    def learn(
        cls,
        events: Iterable[Event],
        settings: WatchSettings,
        on_progress: OnProgress = lambda stage, done, total: None,
    ) -> Detector:
        """Learn what is normal."""
        known = sorted(events, key=lambda event: event.time)
        levels = []
        for name in settings.levels:
            module, _, class_name = LEVEL_CLASSES[name].partition(":")
            if find_spec(module) is None:
                continue
            level = getattr(import_module(module), class_name)(settings)
            level.fit(known)
            levels.append(level)
        return cls(settings, levels)

    def score(self, events: Sequence[Event], states: EntityStates) -> list[ScoredEvent]:
        """Score a micro-batch of events in order of time.

        Args:
            events: An entity may occur several times.
            states: State of each entity, updated in place. Nothing else changes: the model learns
                by `update`.
        """
        p = [1.0] * len(events)
        for level in self.levels:
            keys = {(event.tenant, event.entity) for event in events}
            known: dict[tuple[str, str], Any] = {
                key: states.get(key, {}).get(level.name) for key in keys
            }
            surprise = level.score(events, known)
            for key, state in known.items():
                if state is not None:
                    states.setdefault(key, {})[level.name] = state
            for i in range(len(events)):
                bits = surprise.bits[surprise.offsets[i] : surprise.offsets[i + 1]]
                p[i] = min(p[i], 2.0 ** -float(bits.max(initial=0.0)))
        threshold = 1e-3
        return [
            ScoredEvent(event, value, False, "alert" if value < threshold else "normal")
            for event, value in zip(events, p, strict=True)
        ]

    def alert(self, scored: ScoredEvent) -> Alert:
        """Explain an event."""
        event = scored.event
        digest = hashlib.sha256(f"{event.tenant}\0{event.source}".encode()).hexdigest()[:16]
        return Alert(
            id=digest,
            time=event.time,
            source=event.source,
            tenant=event.tenant,
            entity=event.entity,
            endpoint=event.endpoint,
            p=scored.p,
            extrapolated=scored.extrapolated,
            severity="low",
            kind="value",
            findings=[],
            status=scored.status,
        )

    def update(self, scored: Sequence[ScoredEvent], *, accepted: bool = False) -> None:
        """Learn from scored events.

        Args:
            scored: Alerts among them are left out, unless someone accepted them.
            accepted: Whether someone said that all of them are normal.
        """
        events = [each.event for each in scored if accepted or each.status != "alert"]
        for level in self.levels:
            level.update(events)
