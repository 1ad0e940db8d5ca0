"""Which keys an endpoint has, how often, and in which combinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import Any

MAX_SHAPES = 64  # combinations of keys that are kept for an endpoint
KNOWN = 16  # events of an endpoint before what is new in it counts for the rates of all endpoints
PRIOR_EVENTS = 10.0  # weight of the rates of all endpoints in those of one


@dataclass
class NoveltyRates:
    """How often events of endpoints that are known bring something new: an endpoint with few events
    is like the others.

    Attributes:
        events: Number of events.
        shapes: Number of events with a new combination of keys.
        keys: Number of events with a key that their endpoint never had.
    """

    events: int = 0
    shapes: int = 0
    keys: int = 0

    @property
    def new_shape(self) -> float:
        """Probability of a new combination."""
        return (self.shapes + 0.5) / (self.events + 1)

    @property
    def new_key(self) -> float:
        """Probability of a new key."""
        return (self.keys + 0.5) / (self.events + 1)


@dataclass
class PathHistory:
    """A path of leaves or of an object in events, such as "request.body": how often it is there,
    and how often it brings a key that was never there.

    Attributes:
        events: Number of events that have it.
        once: Number of keys directly beneath it that one event had.
    """

    events: int = 0
    once: int = 0

    def new_key_bits(self) -> float:
        """Surprise of a key that no event had (Good 1953)."""
        return max(log2((self.events + 1) / (self.once + 0.5)), 0.0)


def ancestors(path: str) -> list[str]:
    """The objects that a path is in, the nearest first; the last is "", the event."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


@dataclass
class EndpointSchema:
    """The keys of the events of one endpoint.

    A shape is a set of contexts; a context is a path at an endpoint, by number.

    Attributes:
        events: Number of events.
        contexts: Path -> context.
        presence: Context -> number of events that have it.
        shapes: Shape -> number of events, for the most frequent ones.
        shape_types: Number of different shapes, kept or not.
        sizes: Number of leaves that repeat a path, in steps of a quarter of a doubling -> number of
            events.
        signals: Kind of a signal -> number of events that have it.
    """

    events: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    presence: dict[int, int] = field(default_factory=dict)
    shapes: dict[frozenset[int], int] = field(default_factory=dict)
    shape_types: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    signals: dict[str, int] = field(default_factory=dict)

    def add(self, shape: frozenset[int], repeated: int, events: int, rates: NoveltyRates) -> None:
        """Count events of a shape.

        Args:
            repeated: Number of their leaves that share a path with one before.
            rates: Counts what is new in them, for all endpoints.
        """
        if self.events >= KNOWN:
            rates.events += events
            rates.shapes += shape not in self.shapes
            rates.keys += not self.presence.keys() >= shape
        self.events += events
        step = _size_step(repeated)
        self.sizes[step] = self.sizes.get(step, 0) + events
        for context in shape:
            self.presence[context] = self.presence.get(context, 0) + events
        if shape not in self.shapes:
            self.shape_types += 1
            if len(self.shapes) >= MAX_SHAPES:
                del self.shapes[min(self.shapes, key=self.shapes.__getitem__)]
        self.shapes[shape] = self.shapes.get(shape, 0) + events

    def new_shape_bits(self, rates: NoveltyRates) -> float:
        """Surprise of a combination of keys that is new, from the number of combinations that one
        event had (Good 1953)."""
        once = sum(count == 1 for count in self.shapes.values())
        return self._new_bits(once, rates.new_shape)

    def nearest_shape(self, shape: frozenset[int]) -> frozenset[int]:
        """The known shape that differs in the fewest keys; the more frequent of two."""
        if shape in self.shapes or not self.shapes:
            return shape
        return min(self.shapes, key=lambda each: (len(each ^ shape), -self.shapes[each]))

    def unseen_key_bits(self, rates: NoveltyRates) -> float:
        """Surprise of a key that no event had, from the number of keys that one event had."""
        once = sum(count == 1 for count in self.presence.values()) if self.events > 1 else 0
        return self._new_bits(once, rates.new_key)

    def present_bits(self, context: int) -> float:
        """Surprise that a key is there which some events had."""
        return log2((self.events + 1) / (self.presence[context] + 0.5))

    def missing_bits(self, context: int, rates: NoveltyRates) -> float:
        """Surprise that a key is not there."""
        absent = self.events - self.presence[context]
        if not absent:
            return self._new_bits(0, rates.new_shape)
        return log2((self.events + 1) / (absent + 0.5))

    def _new_bits(self, once: int, rate: float) -> float:
        """Surprise of something new: a share of `once` of the events, with a prior."""
        new = once + PRIOR_EVENTS * rate
        return max(log2((self.events + PRIOR_EVENTS) / new), 0.0)

    def size_bits(self, repeated: int) -> float:
        """Surprise of the number of leaves that share a path with one before; half of the weight of
        a size goes to the sizes beside it."""
        step = _size_step(repeated)
        beside = self.sizes.get(step - 1, 0) + self.sizes.get(step + 1, 0)
        seen = self.sizes.get(step, 0) + beside / 4
        return max(log2((1.5 * self.events + 0.5) / (seen + 0.5 / 64)), 0.0) if self.events else 0.0

    def signal_bits(self, kind: str) -> float:
        """Surprise of a signal."""
        return log2((self.events + 1) / (self.signals.get(kind, 0) + 0.5))

    def to_json(self) -> dict[str, Any]:
        """What was counted, as JSON values."""
        return {
            "events": self.events,
            "contexts": self.contexts,
            "presence": list(self.presence.items()),
            "shapes": [[sorted(shape), count] for shape, count in self.shapes.items()],
            "shape_types": self.shape_types,
            "sizes": list(self.sizes.items()),
            "signals": self.signals,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> EndpointSchema:
        """The inverse of `to_json`."""
        return cls(
            events=content["events"],
            contexts=content["contexts"],
            presence=dict(content["presence"]),
            shapes={frozenset(shape): count for shape, count in content["shapes"]},
            shape_types=content["shape_types"],
            sizes=dict(content["sizes"]),
            signals=content["signals"],
        )


def _size_step(repeated: int) -> int:
    return round(4 * log2(1 + repeated))
