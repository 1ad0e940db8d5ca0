"""What users write in one word: parts with arguments, lists, and spans of time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard.literals import parse_literal
from regard.models import ModuleSpec
from regard.tasks.rows import HUGGING_FACE

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_specs(text: str) -> list[ModuleSpec]:
    """ "vanilla,local:window=64" -> two parts."""
    found = [parse_spec(word.strip()) for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"there is no name in {text!r}")
    return found


def parse_spec(word: str) -> ModuleSpec:
    """ "local:window=64:block=32" -> a name and its arguments; the colon of `data=hf:imdb` parts nothing."""
    name, *settings = re.split(r"(?<!=hf):", word)
    return ModuleSpec(
        name=name.strip(),
        arguments=parse_key_values(settings, f"arguments are written name:key=value, not {word!r}"),
    )


def add_data_arguments(named: ModuleSpec, data: str | None, more: dict[str, Any]) -> ModuleSpec:
    """A task with what options say of its data; None: nothing is said."""
    given = {name: value for name, value in more.items() if value is not None}
    given |= {} if data is None else {"data": absolute_path(data)}
    return ModuleSpec(name=named.name, arguments=named.arguments | given)


def absolute_path(data: str) -> str:
    """A path from the root; a name on the hub stays as it is."""
    if not data.startswith(HUGGING_FACE):
        return str(Path(data).expanduser().absolute())
    folder = Path(data.removeprefix(HUGGING_FACE)).expanduser()
    return f"{HUGGING_FACE}{folder.absolute()}" if folder.is_dir() else data


def parse_key_values(settings: Iterable[str], otherwise: str) -> dict[str, Any]:
    """["window=64", "block=32"] -> {"window": 64, "block": 32}; what is not written so is an error with these words."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(otherwise)
        found[key.strip()] = parse_literal(text.strip())
    return found


def parse_ints(text: str, what: str = "lengths") -> tuple[int, ...]:
    """ "256,1024" -> (256, 1024)."""
    try:
        found = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(
            f"whole numbers with commas between them are expected, not {text!r}"
        ) from None
    if any(number < 1 for number in found):
        raise ValueError(f"{what} are at least 1, not {text!r}")
    return found


def parse_duration(text: str) -> float:
    """ "90s", "3m", "1h30m" -> seconds."""
    pieces = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if (
        not pieces
        or "".join(a + b for a, b in pieces) != text.strip()
        or not (total := sum(float(a) * UNITS[b] for a, b in pieces))
    ):
        raise ValueError(f"a span of time such as 90s, 3m or 1h30m is expected, not {text!r}")
    return total
