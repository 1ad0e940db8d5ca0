"""Parse the values of command-line options: specs, lists of numbers, and durations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.literals import parse_literal

if TYPE_CHECKING:
    from regard.models import ModuleSpec

HUGGING_FACE = "hf:"
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_specs(text: str) -> list[ModuleSpec]:
    """Parse several specs: "vanilla,local:window=64"."""
    specs = [parse_spec(word.strip()) for word in text.split(",") if word.strip()]
    if not specs:
        raise ValueError(f"Expected a name, got {text!r}.")
    return specs


def parse_spec(text: str) -> ModuleSpec:
    """Parse a name with arguments: "local:window=64:block=32"."""
    from regard.models import ModuleSpec

    # "data=hf:imdb" and "tokenizer=run:runs/a" are one argument each
    name, *arguments = re.split(r"(?<!=hf)(?<!=run):", text)
    message = f"Write arguments as name:key=value, not {text!r}."
    return ModuleSpec(name=name.strip(), arguments=parse_key_values(arguments, message))


def parse_key_values(items: Iterable[str], message: str) -> dict[str, Any]:
    """Parse ["window=64", "block=32"]; `message` is the error for anything else."""
    values: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(message)
        values[key.strip()] = parse_literal(text.strip())
    return values


def add_data_arguments(task: ModuleSpec, data: str | None, arguments: dict[str, Any]) -> ModuleSpec:
    """Add the options that describe a task's data to its arguments; None values are left out."""
    from regard.tasks import similar_argument, takes_argument

    path = None if data is None else absolute_path(data)
    given = {k: v for k, v in (arguments | {"data": path}).items() if v is not None}
    for name in given:
        if not takes_argument(task.name, name):
            raise ValueError(
                f"Task {task.name!r} takes no --{name}: {similar_argument(task.name, name)} "
                f"Write arguments as --task {task.name}:name=value."
            )
    return task.model_copy(update={"arguments": task.arguments | given})


def absolute_path(data: str) -> str:
    """The absolute path of data, to use a run from any folder; hub names stay."""
    if any("\ud800" <= letter <= "\udfff" for letter in data):
        raise ValueError(f"{data!r} is not UTF-8: rename the file or folder.")
    if not data.startswith(HUGGING_FACE):
        return str(Path(data).expanduser().absolute())
    folder = Path(data.removeprefix(HUGGING_FACE)).expanduser()
    return f"{HUGGING_FACE}{folder.absolute()}" if folder.is_dir() else data


def parse_ints(text: str, what: str = "lengths") -> tuple[int, ...]:
    """Parse positive integers: "256,1024"."""
    try:
        numbers = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"Expected integers separated by commas, got {text!r}.") from None
    if any(number < 1 for number in numbers):
        raise ValueError(f"{what} must be at least 1, got {text!r}.")
    return numbers


def parse_duration(text: str) -> float:
    """Parse a duration such as "90s", "3m" or "1h30m" to seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    total = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not total or "".join(number + unit for number, unit in parts) != text.strip():
        raise ValueError(f"Expected a duration such as 90s, 3m or 1h30m, got {text!r}.")
    return total
