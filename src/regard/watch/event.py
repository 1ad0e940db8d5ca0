"""Events: what a level of the detector reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Value = str | int | float | bool | None


class Signal(NamedTuple):
    """Something about the form of an event that is suspicious in itself.

    Attributes:
        kind: "duplicate_key", "truncated_value", "too_many_leaves", "time_missing" ...
        path: Where, as in `Event.paths`.
    """

    kind: str
    path: str


@dataclass(slots=True)
class Event:
    """One event: the leaves of a JSON object, and who did it, where and when.

    Attributes:
        time: Seconds since 1970, by the event's own clock; the arrival time if it has none.
        entity: Who acted, such as a user or an API key; "" if unknown.
        endpoint: What was called, such as "GET /orders/{id}".
        paths: Path of each leaf, such as "request.headers.Accept" or "items[].price"; indices of
            arrays are not in it, so the elements of an array share a path.
        values: Value of each leaf, in the order of `paths`.
        source: Where the event came from, unique in its stream: "traffic.jsonl:17",
            "redis:requests:1690000000000-0". The id of an alert is made from it.
        tenant: Namespace of vocabularies and hashes; "" if there is one tenant.
        signals: Suspicious facts about the form, such as duplicate keys.
    """

    time: float
    entity: str
    endpoint: str
    paths: list[str]
    values: list[Value]
    source: str
    tenant: str = ""
    signals: tuple[Signal, ...] = ()


def value_kind(value: Value) -> str:
    """The JSON type of a value: "string", "integer", "number", "boolean" or "null"."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    return "null" if value is None else "number"
