"""What a user may set of a recipe, read safely: `--set block=32 --set split=merged`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from regard.errors import did_you_mean
from regard.literals import parse_literal
from regard.pattern import MAX_POSITION
from regard.registry import Recipe

OPTIONS = ("dim", "heads", "length", "causal")  # have an option of their own
HINTS_OF_PATTERNS = "Pattern"


def parse_recipe_arguments(recipe: Recipe, settings: Sequence[str]) -> dict[str, Any]:
    """name=value, each checked against the recipe's signature."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals:
            raise ValueError(f"--set takes name=value, not {setting!r}")
        _check_name(recipe, name)
        found[name] = _checked(recipe, name, parse_literal(text.strip()))
    return found


def _check_name(recipe: Recipe, name: str) -> None:
    if name in OPTIONS:
        raise ValueError(f"{name!r} has an option of its own: --{name}")
    settable = [known for known in recipe.parameters if known not in OPTIONS]
    if name not in settable:
        hint = did_you_mean(name, settable) if settable else "there is nothing to set"
        raise ValueError(f"{recipe.name} takes no argument {name!r}: {hint}")


def _checked(recipe: Recipe, name: str, value: Any) -> Any:
    hint = get_type_hints(recipe.build).get(name, Any)
    if HINTS_OF_PATTERNS in str(hint):
        raise ValueError(
            f"{name!r} takes patterns, which are written in Python: regard.create({recipe.name!r}, {name}=...)"
        )
    if isinstance(value, int) and abs(value) > MAX_POSITION:
        raise ValueError(f"{name}={value} is beyond every position")
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
            value
        )
    except ValidationError as error:
        raise ValueError(f"{name}={value!r}: {error.errors()[0]['msg'].lower()}") from error
