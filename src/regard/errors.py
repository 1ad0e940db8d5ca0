"""What goes wrong, said so that the reader knows what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Unsupported(TypeError):
    """What was asked is not defined for this mechanism, or not by this executor; never: it was not yet written."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the closest that does, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def check_positive(name: str, value: object) -> None:
    """The value must be a finite number above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """The value must be one of the words."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def check_int(least: int, **values: object) -> None:
    """Each value must be a whole number of at least so much; the message names the one that is not."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")
