"""New shapes of requests: keys that an endpoint never had, or always had and lacks now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from regard.watch.event import Event, value_kind
from regard.watch.follow.store import Shape
from regard.watch.leaves.schema import EndpointSchema

MIN_EVENTS = 200  # of an endpoint, before a key can be one that it always has
MAX_SHAPES = 32  # new ones of one endpoint; further ones are counted together
MAX_ENDPOINTS = 10_000
MAX_NEW_ENDPOINTS = 500  # reported one by one; further ones are counted together
OTHER_KEYS, OTHER_ENDPOINTS = "(other keys)", "(other endpoints)"

Key = tuple[str, str]


@dataclass
class EndpointKeys:
    """The keys of an endpoint: those it has had, and those that every event has had.

    Attributes:
        events: Events that were seen while it was learned.
        known: Paths of leaves.
        always: Paths that all of at least 200 events had.
        shapes: Ids of its new shapes.
    """

    events: int = 0
    known: set[str] = field(default_factory=set)
    always: frozenset[str] = frozenset()
    shapes: set[str] = field(default_factory=set)


@dataclass
class ShapeEvents:
    """Events of a new shape since the last commit."""

    shape: Shape
    entities: set[str] = field(default_factory=set)


class ShapeMonitor:
    """Finds requests whose keys differ from all that their endpoint has had.

    A difference is one shape, whatever the values: it is reported once, and then counted with its
    entities until someone accepts it. What an endpoint had is what the model learned; a new
    endpoint is a shape itself, and its first `learning_events` events say what its keys are.

    Args:
        schemas: (tenant, endpoint) -> keys that the model learned.
        learning_events: Events that a new endpoint learns from.
        reported: Shapes that are stored already.
    """

    def __init__(
        self,
        schemas: Mapping[Key, EndpointSchema],
        *,
        learning_events: int,
        reported: Sequence[Shape] = (),
    ) -> None:
        self.learning_events = learning_events
        self.endpoints: dict[Key, EndpointKeys] = {}
        self.new_endpoints = 0
        self.reported: dict[str, Shape] = {}
        for key, schema in schemas.items():
            counted = {path: schema.presence.get(i, 0) for path, i in schema.contexts.items()}
            always = (path for path, count in counted.items() if count >= schema.events)
            self.endpoints[key] = EndpointKeys(
                events=max(schema.events, learning_events),
                known=set(counted),
                always=frozenset(always if schema.events >= MIN_EVENTS else ()),
            )
        for shape in reported:
            self.reported[shape.id] = shape
            keys = self.endpoints.setdefault((shape.tenant, shape.endpoint), EndpointKeys())
            keys.shapes.add(shape.id)
            if shape.status == "accepted":
                self.accept(shape)

    def accept(self, shape: Shape) -> None:
        """Count the keys of a shape as known from now on."""
        keys = self.endpoints.setdefault((shape.tenant, shape.endpoint), EndpointKeys())
        keys.known.update(path for path, _ in shape.added)
        keys.always -= set(shape.missing)
        self.reported[shape.id] = shape

    def find(self, event: Event) -> Shape | None:
        """The new shape that an event has; None if its keys are known."""
        key = event.tenant, event.endpoint
        keys = self.endpoints.get(key)
        if keys is None:
            return self._find_endpoint(event)
        if keys.events < self.learning_events:
            keys.events += 1
            keys.known.update(event.paths)
            return None
        if keys.known.issuperset(event.paths) and keys.always.issubset(event.paths):
            return None
        added = {
            path: value_kind(value)
            for path, value in zip(event.paths, event.values, strict=True)
            if path not in keys.known
        }
        shape = create_shape(
            event, sorted(added.items()), sorted(keys.always.difference(event.paths))
        )
        if shape.id not in keys.shapes:
            if len(keys.shapes) >= MAX_SHAPES:
                return create_shape(event, [(OTHER_KEYS, "")], [])
            keys.shapes.add(shape.id)
        return shape

    def _find_endpoint(self, event: Event) -> Shape:
        """The shape of an endpoint that is new."""
        if self.new_endpoints >= MAX_NEW_ENDPOINTS or len(self.endpoints) >= MAX_ENDPOINTS:
            return create_shape(event, [], [], endpoint=OTHER_ENDPOINTS)
        self.new_endpoints += 1
        shape = create_shape(event, [], [])
        self.endpoints[event.tenant, event.endpoint] = EndpointKeys(
            events=1, known=set(event.paths), shapes={shape.id}
        )
        return shape

    def add(self, events: Iterable[Event]) -> tuple[dict[str, ShapeEvents], list[str | None]]:
        """Count events.

        Returns what is to be stored, by the id of the shape, and for each event the id of its
        shape, None if its keys are known.
        """
        counted: dict[str, ShapeEvents] = {}
        ids: list[str | None] = []
        for event in events:
            found = self.find(event)
            ids.append(None if found is None else found.id)
            if found is None:
                continue
            if found.id not in counted:
                counted[found.id] = ShapeEvents(found)
            counted[found.id].entities.add(event.entity)
            shape = counted[found.id].shape
            shape.events += 1
            shape.first_seen = min(shape.first_seen, event.time)
            shape.last_seen = max(shape.last_seen, event.time)
        return counted, ids


def create_shape(
    event: Event, added: list[tuple[str, str]], missing: list[str], *, endpoint: str | None = None
) -> Shape:
    """A shape without events, first seen in an event."""
    endpoint = event.endpoint if endpoint is None else endpoint
    names = [event.tenant, endpoint, *(f"+{path}" for path, _ in added)]
    names += [f"-{path}" for path in missing]
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogatepass")).hexdigest()
    return Shape(
        id=digest[:12],
        tenant=event.tenant,
        endpoint=endpoint,
        added=added,
        missing=missing,
        first_seen=event.time,
        last_seen=event.time,
        example=event.source,
    )


def describe_shape(shape: Shape) -> str:
    """A shape in words: "GET /orders: new key items[].discount (number)"."""
    parts = []
    if shape.added:
        keys = ", ".join(f"{path} ({kind})" if kind else path for path, kind in shape.added)
        parts.append(f"new key{'s' * (len(shape.added) > 1)} {keys}")
    if shape.missing:
        parts.append(f"without {', '.join(shape.missing)}")
    return f"{shape.endpoint}: {'; '.join(parts) or 'new endpoint'}"
