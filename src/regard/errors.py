"""Exceptions and argument checks.

Messages say what was wrong, what is expected and, for names, the nearest valid choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from torch import Tensor


class Unsupported(TypeError):
    """The request is not defined for this mixer, or not possible on this backend."""


UNKNOWN_KEY = "unknown_key"  # the type of pydantic's error for a key that a model has not
OTHER_FIELDS = ("missing", UNKNOWN_KEY, "extra_forbidden", "union_tag_invalid")
MAX_LISTED = 200  # names in a hint; there are fewer recipes
SIMILARITY = 0.65  # of a suggestion; difflib's default, 0.6, takes head_dim for heads


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known name, or the first of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1, SIMILARITY)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - MAX_LISTED:,} more" if len(known) > MAX_LISTED else ""
    return f"choose from {', '.join(known[:MAX_LISTED])}{more}"


def format_validation_error(error: ValidationError) -> str:
    """Pydantic's errors on one line: "field: message; field: message"."""
    messages = []
    for entry in error.errors():
        message = entry["msg"].removeprefix("Value error, ")
        if entry["type"] not in ("value_error", "missing", UNKNOWN_KEY):
            message = f"{message}, got {entry['input']!r:.80}"
        field = ".".join(map(str, entry["loc"]))
        messages.append(message if message.startswith(field) else f"{field}: {message}")
    return "; ".join(messages)


def describe_stored_error(path: object, error: ValidationError, kind: str) -> str:
    """Why a file that Regard wrote cannot be read: its fields are not those of this version, or a
    value is wrong.

    Args:
        kind: What the file should be: "the result of a run".
    """
    entries = error.errors()
    if any(entry["type"] not in OTHER_FIELDS for entry in entries):
        return f"{path} is not {kind}: {format_validation_error(error)}"
    fields = []
    for entry in entries:
        name = ".".join(map(str, entry["loc"]))
        known = {"missing": f"no {name!r}", "extra_forbidden": f"{name!r} is unknown"}
        fields.append(known.get(entry["type"], entry["msg"]))
    return f"{path} was written by another version of Regard, or edited: {'; '.join(fields)}"


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    known = list(known)
    if value not in known:
        message = f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}"
        close = difflib.get_close_matches(str(value), known, 1, SIMILARITY)
        raise ValueError(f"{message}; did you mean {close[0]!r}?" if close else message)


def check_int(least: int, most: int | None = None, /, **values: object) -> None:
    """Raise ValueError unless each of the named values is an integer from `least` to `most`:
    `check_int(1, heads=heads)`.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, not {value!r}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most}, not {value!r}")


def check_stream_length(length: int | None, end: int | Tensor) -> None:
    """Raise ValueError if a stream of `end` tokens, an int or (b), exceeds the maximum length."""
    if length is None:
        return
    if not isinstance(end, int):
        end = int(end.max()) if len(end) else 0
    if end > length:
        raise ValueError(
            f"the stream has {end} tokens, but the mixer was built with length={length}"
        )
