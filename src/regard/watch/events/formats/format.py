"""What a format is: how to know it, how its events are read, and which fields mean what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Content = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of events.

    Attributes:
        name: For `--format`.
        title: For people.
        entity: Default expression of who acts; see `FieldExpression`.
        endpoint: Default expression of what is called.
        time: Default expression of the event's clock.
        matches: Whether an event is of this format: an object for formats of JSON, else a line.
        read_line: Makes an object of a line, or None of a line that is not of this format. None for
            formats of JSON.
        unpack: Makes events of an object of JSON; None: the object is the event.
    """

    name: str
    title: str
    entity: str
    endpoint: str
    time: str
    matches: Callable[[Any], bool]
    read_line: Callable[[str], Content | None] | None = None
    unpack: Callable[[Content], list[Content]] | None = None
