"""Fields of events by expressions, such as 'request.user' and 'method path'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from regard.watch.events.ids import endpoint_text

REQUEST_LINE = re.compile(r"([A-Z]{3,16}) (\S+) HTTP/\d(?:\.\d)?")
MAX_FIELD = 512  # characters of an entity, an endpoint or a tenant
MAX_CACHED = 256  # characters of a text whose endpoint is remembered
MAX_SHAPES = 1_000  # sets of keys for which the alternatives are remembered

Path = Sequence[str]


class FieldExpression:
    """Reads one field of an event.

    A path names a value: `request.user`, `userIdentity.arn`, `headers.0.value`; a key that contains
    dots is found too. Several paths, separated by spaces, are joined by spaces. `|` separates
    alternatives: the first one of which all paths are there is taken.

    >>> FieldExpression("user.name|ip")({"user": {"name": None}, "ip": "192.0.2.1"})
    '192.0.2.1'

    Args:
        text: The expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.alternatives: list[list[Path]] = [
            [path.split(".") for path in alternative.split()] for alternative in text.split("|")
        ]
        if not all(self.alternatives):
            raise ValueError(
                f"field {text!r} has an empty alternative: write paths such as 'request.user', "
                f"joined by spaces, with alternatives separated by '|'"
            )
        self.possible: dict[tuple[str, ...], list[list[Path]]] = {}

    def __call__(self, content: dict[str, Any]) -> Any:
        """The value of the first alternative that is there: a string if it has several paths; else
        whatever JSON value it is. None if there is no alternative."""
        values = self._find(content)
        if not values:
            return None
        return values[0] if len(values) == 1 else " ".join(map(str, values))

    def name(self, content: dict[str, Any]) -> str:
        """The value as a name: a string, "" if it is not there or "-"."""
        value = self(content)
        return "" if value is None or value == "-" else str(value)[:MAX_FIELD]

    def endpoint(self, content: dict[str, Any]) -> str:
        """The values with ids in URLs replaced by classes, such as "GET /orders/{id}"."""
        values = self._find(content)
        return " ".join([endpoint_part(value) for value in values])[:MAX_FIELD]

    def _find(self, content: dict[str, Any]) -> list[Any]:
        """The values of the first alternative of which all are there."""
        keys = tuple(content)
        possible = self.possible.get(keys)
        if possible is None:
            if len(self.possible) >= MAX_SHAPES:
                self.possible.clear()
            possible = self.possible[keys] = [
                paths for paths in self.alternatives if all(may_have(keys, p) for p in paths)
            ]
        for paths in possible:
            values = [find_value(content, path) for path in paths]
            if None not in values:
                return values
        return []


def may_have(keys: tuple[str, ...], path: Path) -> bool:
    """Whether an object with these keys can have a value at a path."""
    return any(".".join(path[:end]) in keys for end in range(1, len(path) + 1))


def find_value(content: Any, path: Path) -> Any:
    """The value at a path, or None. Numbers are indices of arrays; other keys of an array are those
    of its first element."""
    for depth, key in enumerate(path):
        if isinstance(content, list):
            if key.isdecimal():
                content = content[int(key)] if int(key) < len(content) else None
                continue
            content = content[0] if content else None
        if not isinstance(content, dict):
            return None
        value = content.get(key)
        if value is None and depth + 1 < len(path):
            for end in range(len(path), depth + 1, -1):
                if (merged := content.get(".".join(path[depth:end]))) is not None:
                    return find_value(merged, path[end:])
        content = value
    return content


def endpoint_part(value: Any) -> str:
    """The endpoint that one value names: a URL without ids, a request line without its protocol."""
    if not isinstance(value, str):
        return str(value)[:MAX_FIELD]
    return cached_endpoint(value) if len(value) <= MAX_CACHED else endpoint_of(value)


def endpoint_of(text: str) -> str:
    """The endpoint that a URL, a request line or another text names."""
    request = REQUEST_LINE.fullmatch(text)
    if request is None:
        return endpoint_text(text)
    return f"{request[1]} {endpoint_text(request[2])}"


cached_endpoint = lru_cache(maxsize=8_192)(endpoint_of)
