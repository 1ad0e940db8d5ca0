"""Parse and check the arguments of a recipe: `--set block=32 --set split=merged`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.errors import did_you_mean
from regard.literals import parse_literal

if TYPE_CHECKING:
    from regard.registry import Recipe

OPTIONS = ("dim", "heads", "length", "causal")  # have their own option


def parse_recipe_arguments(recipe: Recipe, settings: Sequence[str]) -> dict[str, Any]:
    """Parse name=value settings and check them against the signature of the recipe."""
    arguments: dict[str, Any] = {}
    settable = [name for name in recipe.parameters if name not in OPTIONS]
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals:
            raise ValueError(f"--set takes name=value, not {setting!r}.")
        if name in OPTIONS:
            raise ValueError(f"Set {name!r} with its own option: --{name}")
        if name not in settable:
            hint = did_you_mean(name, settable) if settable else "it has no arguments."
            raise ValueError(f"{recipe.name} takes no argument {name!r}: {hint}")
        arguments[name] = _validate(recipe, name, parse_literal(text.strip()))
    return arguments


def _validate(recipe: Recipe, name: str, value: Any) -> Any:
    """Convert a value to the annotated type of the argument."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from regard.pattern import MAX_POSITION

    annotation = recipe.type_hints().get(name, Any)
    if "Pattern" in str(annotation):
        raise ValueError(
            f"{name!r} takes patterns, which are written in Python: "
            f"regard.create({recipe.name!r}, {name}=...)"
        )
    if isinstance(value, int) and abs(value) > MAX_POSITION:
        raise ValueError(f"{name}={value} is larger than the largest position, {MAX_POSITION}.")
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}={value!r}: {error.errors()[0]['msg'].lower()}") from error
