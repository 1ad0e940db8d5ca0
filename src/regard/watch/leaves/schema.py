"""Which keys an endpoint has, how often, and in which combinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import Any

MAX_SHAPES = 64  # combinations of keys that are kept for an endpoint


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
        signals: Kind of a signal -> number of events that have it.
    """

    events: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    presence: dict[int, int] = field(default_factory=dict)
    shapes: dict[frozenset[int], int] = field(default_factory=dict)
    shape_types: int = 0
    signals: dict[str, int] = field(default_factory=dict)

    def add(self, shape: frozenset[int], events: int) -> None:
        """Count events of a shape."""
        self.events += events
        for context in shape:
            self.presence[context] = self.presence.get(context, 0) + events
        if shape not in self.shapes:
            self.shape_types += 1
            if len(self.shapes) >= MAX_SHAPES:
                del self.shapes[min(self.shapes, key=self.shapes.__getitem__)]
        self.shapes[shape] = self.shapes.get(shape, 0) + events

    def new_shape_bits(self) -> float:
        """Surprise of a combination of keys that is new."""
        return log2((self.events + self.shape_types) / self.shape_types)

    def nearest_shape(self, shape: frozenset[int]) -> frozenset[int]:
        """The known shape that differs in the fewest keys; the more frequent of two."""
        if shape in self.shapes or not self.shapes:
            return shape
        return min(self.shapes, key=lambda each: (len(each ^ shape), -self.shapes[each]))

    def unseen_key_bits(self) -> float:
        """Surprise of a key that no event had, from the number of keys that one event had
        (Good 1953)."""
        once = sum(count == 1 for count in self.presence.values()) if self.events > 1 else 0
        return log2((self.events + 1) / (once + 0.5)) if self.events else 0.0

    def present_bits(self, context: int) -> float:
        """Surprise that a key is there."""
        return log2((self.events + 1) / (self.presence.get(context, 0) + 0.5))

    def missing_bits(self, context: int) -> float:
        """Surprise that a key is not there."""
        absent = self.events - self.presence.get(context, 0)
        return log2((self.events + 1) / (absent + 0.5))

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
            signals=content["signals"],
        )
