"""Edits planted into normal events: is the edited event found, and is the edited leaf named?

There are no labels in normal traffic, but an edit of one leaf is known. The share of edits for
which the first finding names the edited leaf (hit@1) is a direct test of explanations.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from regard.watch.event import Event, Value, value_kind

LEAF_EDITS = ("rare_value", "wrong_type", "unseen_key", "missing_key")
CLOSED_VALUES = 50  # a path with more different values has no rare ones
COMMON = 100  # values of a path, before an edit of it counts as unusual
ALWAYS = 0.99  # share of the events of an endpoint that have a key, before its absence is unusual
NEW_KEYS = ("debug", "isAdmin", "override", "role_id", "internalFlag", "x_trace", "verified")
MAX_VALUES = 1_000  # values that are remembered of a path


class PlantedEdit(NamedTuple):
    """An event with an edit.

    Attributes:
        kind: One of `LEAF_EDITS`.
        event: The edited event.
        path: Path of the leaf that was changed, added or removed.
        place: Place of the event among those that edits were planted into.
    """

    kind: str
    event: Event
    path: str
    place: int


class EditPlanter:
    """Plants edits that are unusual given normal events.

    Args:
        events: Normal events: what they do not have is unusual.
        seed: Seed of the choices.
    """

    def __init__(self, events: Sequence[Event], seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.values: dict[str, Counter[Value]] = defaultdict(Counter)
        self.kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self.endpoints: Counter[str] = Counter()
        self.presence: Counter[tuple[str, str]] = Counter()
        for event in events:
            self.endpoints[event.endpoint] += 1
            self.presence.update((event.endpoint, path) for path in set(event.paths))
            for path, value in zip(event.paths, event.values, strict=True):
                self.kinds[path][value_kind(value)] += 1
                if len(self.values[path]) < MAX_VALUES or value in self.values[path]:
                    self.values[path][value] += 1

    def plant(self, events: Sequence[Event], kind: str, count: int) -> list[PlantedEdit]:
        """At most `count` edits of a kind, each in another event, in order of the events."""
        edit: Callable[[Event], tuple[Event, str] | None] = getattr(self, f"_{kind}")
        places = list(range(len(events)))
        self.rng.shuffle(places)
        planted: list[PlantedEdit] = []
        for place in places:
            changed = edit(events[place]) if len(planted) < count else None
            if changed is not None:
                planted.append(PlantedEdit(kind, *changed, place))
        return sorted(planted, key=lambda each: each.place)

    def _rare_value(self, event: Event) -> tuple[Event, str] | None:
        """A value of the same kind from another path, in a path with few different values."""
        closed = [
            i
            for i, path in enumerate(event.paths)
            if event.paths.count(path) == 1
            and value_kind(event.values[i]) in ("string", "integer")
            and len(self.values[path]) <= CLOSED_VALUES
            and sum(self.values[path].values()) >= COMMON
        ]
        if not closed:
            return None
        i = self.rng.choice(closed)
        path, kind = event.paths[i], value_kind(event.values[i])
        others = [each for each in self.values if each != path]
        for other in self.rng.sample(others, len(others)):
            value = self.rng.choice(list(self.values[other])) if self.values[other] else None
            if value_kind(value) == kind and value not in self.values[path]:
                return _with_value(event, i, value), path
        return None

    def _wrong_type(self, event: Event) -> tuple[Event, str] | None:
        """A value of a kind that its path never has."""
        uniform = [
            i
            for i, path in enumerate(event.paths)
            if event.paths.count(path) == 1
            and len(self.kinds[path]) == 1
            and self.kinds[path].total() >= COMMON
        ]
        if not uniform:
            return None
        i = self.rng.choice(uniform)
        value = event.values[i]
        if isinstance(value, str):
            new: Value = self.rng.choice((len(value), 1.5, True))
        elif value is None:
            new = self.rng.choice((0, "null"))
        else:
            new = str(value)
        return _with_value(event, i, new), event.paths[i]

    def _unseen_key(self, event: Event) -> tuple[Event, str] | None:
        """A key that no event had, beside another one."""
        beside = self.rng.choice(event.paths).rpartition(".")[0] if event.paths else ""
        name = self.rng.choice(NEW_KEYS)
        path = f"{beside}.{name}" if beside else name
        if path in self.kinds or path in event.paths:
            return None
        value = self.rng.choice((True, 1, "true"))
        return replace(event, paths=[*event.paths, path], values=[*event.values, value]), path

    def _missing_key(self, event: Event) -> tuple[Event, str] | None:
        """Without a key that nearly all events of the endpoint have."""
        total = self.endpoints[event.endpoint]
        always = [
            path
            for path in dict.fromkeys(event.paths)
            if total >= COMMON and self.presence[event.endpoint, path] >= ALWAYS * total
        ]
        if not always:
            return None
        path = self.rng.choice(always)
        kept = [i for i, each in enumerate(event.paths) if each != path]
        paths, values = [event.paths[i] for i in kept], [event.values[i] for i in kept]
        return replace(event, paths=paths, values=values), path


def _with_value(event: Event, place: int, value: Value) -> Event:
    values = list(event.values)
    values[place] = value
    return replace(event, values=values)
