"""What users write in one word: parts with arguments, lists, and spans of time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from regard.cli.arguments import value
from regard.models import Part

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parts(text: str) -> list[Part]:
    """ "vanilla,local:window=64" -> two parts."""
    found = [part(word.strip()) for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"there is no name in {text!r}")
    return found


def part(word: str) -> Part:
    """ "local:window=64:block=32" -> a name and its arguments."""
    name, *settings = word.split(":")
    return Part(name=name.strip(), arguments=keyed(settings, f"arguments are written name:key=value, not {word!r}"))


def keyed(settings: Iterable[str], otherwise: str) -> dict[str, Any]:
    """["window=64", "block=32"] -> {"window": 64, "block": 32}; what is not written so is an error with these words."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(otherwise)
        found[key.strip()] = value(text.strip())
    return found


def whole_numbers(text: str) -> tuple[int, ...]:
    """ "256,1024" -> (256, 1024)."""
    try:
        found = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"whole numbers with commas between them are expected, not {text!r}") from None
    if any(number < 1 for number in found):
        raise ValueError(f"lengths are at least 1, not {text!r}")
    return found


def span(text: str) -> float:
    """ "90s", "3m", "1h30m" -> seconds."""
    pieces = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if (
        not pieces
        or "".join(a + b for a, b in pieces) != text.strip()
        or not (total := sum(float(a) * UNITS[b] for a, b in pieces))
    ):
        raise ValueError(f"a span of time such as 90s, 3m or 1h30m is expected, not {text!r}")
    return total
