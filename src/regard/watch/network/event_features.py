"""Events as tokens: features of an event for a network that reads the events of an entity."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from regard.watch.event import Event, Value
from regard.watch.network.leaf_vocabulary import Key, value_key
from regard.watch.sequences.level import gap_class

OTHER = 0  # class of endpoints that are not known
START, FIRST_HASH = 1, 2  # features: the start of a history, the first hashed feature
BUCKETS = 4096
CONTEXT = 8  # paths whose values are features of an event
WIDTH = 3 + CONTEXT  # endpoint, gap, hour, values
MAX_ENDPOINTS, MIN_COUNT = 2048, 2
COUNTED = 20_000  # events from which the paths are chosen
MAX_KINDS = 64  # different values of such a path
MIN_SHARE, MIN_BITS = 0.2, 0.1  # of the events that have the path; entropy of its values

Token = list[int]
"""The `WIDTH` features of an event."""

START_TOKEN: Token = [START] + [0] * (WIDTH - 1)


class EventFeatures:
    """Features of events, and the classes of their endpoints.

    The features are hashes of the endpoint, the class of the gap since the entity's event before,
    the hour, and the values of up to `CONTEXT` paths: those with the highest entropy among the
    paths with few different values, such as the method and the status.

    Args:
        endpoints: Tenant and name of the endpoints that are classes of their own, from class 1.
        paths: The paths whose values are features.
    """

    def __init__(self, endpoints: Sequence[tuple[str, str]], paths: Sequence[str]) -> None:
        self.endpoints, self.paths = list(endpoints), list(paths)
        self.classes = {key: number for number, key in enumerate(self.endpoints, 1)}
        self._column = {path: 3 + number for number, path in enumerate(self.paths)}
        self._memo: dict[Any, int] = {}

    @classmethod
    def learn(cls, events: Sequence[Event]) -> EventFeatures:
        """The endpoints that occur more than once, and the paths. An endpoint that occurs once is
        "other", so that a network learns how often that happens."""
        counts = Counter((event.tenant, event.endpoint) for event in events)
        known = [key for key, n in counts.most_common(MAX_ENDPOINTS) if n >= MIN_COUNT]
        return cls(known, _choose_paths(events[-COUNTED:]))

    @property
    def num_classes(self) -> int:
        """Number of classes of endpoints."""
        return 1 + len(self.endpoints)

    def endpoint_class(self, event: Event) -> int:
        """The class of the endpoint of an event."""
        return self.classes.get((event.tenant, event.endpoint), OTHER)

    def token(self, event: Event, gap: float) -> Token:
        """The features of an event; `gap` is NaN for the first of an entity."""
        hour = int(event.time // 3600) % 24 if math.isfinite(event.time) else 0
        token = [
            self._hash("endpoint", (event.tenant, event.endpoint)),
            self._hash("gap", gap_class(gap)),
            self._hash("hour", hour),
        ] + [0] * CONTEXT
        for path, value in zip(event.paths, event.values, strict=True):
            column = self._column.get(path)
            if column is not None:
                token[column] = self._hash(path, _memo_key(value))
        return token

    def _hash(self, name: str, value: Any) -> int:
        known = self._memo.get((name, value))
        if known is None:
            digest = blake2b(f"{name}\0{value!r}".encode("utf-8", "surrogatepass"), digest_size=8)
            known = FIRST_HASH + int.from_bytes(digest.digest(), "little") % (BUCKETS - FIRST_HASH)
            if len(self._memo) >= BUCKETS:
                self._memo.clear()
            self._memo[name, value] = known
        return known

    def to_json(self) -> dict[str, Any]:
        """The features as JSON values."""
        return {"endpoints": [list(key) for key in self.endpoints], "paths": self.paths}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EventFeatures:
        """The inverse of `to_json`."""
        endpoints = [(tenant, name) for tenant, name in content["endpoints"]]
        return cls(endpoints, content["paths"])


def _memo_key(value: Value) -> Any:
    return value if isinstance(value, str) else (value.__class__.__name__, value)


def _choose_paths(events: Sequence[Event]) -> list[str]:
    counts: dict[str, Counter[Key]] = defaultdict(Counter)
    for event in events:
        for path, value in zip(event.paths, event.values, strict=True):
            if len(counts[path]) <= MAX_KINDS:
                counts[path][value_key(value)] += 1
    entropies = []
    for path, counter in counts.items():
        p = np.array(list(counter.values())) / counter.total()
        entropy = float(-(p * np.log2(p)).sum())
        few = len(counter) <= MAX_KINDS and counter.total() >= MIN_SHARE * len(events)
        if few and entropy >= MIN_BITS:
            entropies.append((-entropy, path))
    return [path for _, path in sorted(entropies)[:CONTEXT]]
