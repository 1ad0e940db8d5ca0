"""Building blocks of configurations: strict models, and modules by name with arguments."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from regard.errors import UNKNOWN_KEY, did_you_mean

# The upper bounds keep a file from asking for more than any machine has.
Size = Annotated[int, Field(ge=1, le=1 << 20)]
VocabSize = Annotated[int, Field(ge=1, le=1 << 24)]
Depth = Annotated[int, Field(ge=1, le=4096)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class StrictModel(BaseModel):
    """Frozen pydantic model whose errors name the nearest valid key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields)
                message = f"{cls.__name__} has no {key!r}: {hint}"
                raise PydanticCustomError(UNKNOWN_KEY, "{message}", {"message": message})
        return values


def parse_json_int(digits: str) -> int:
    """Parse an integer of a JSON file. Larger than 2^53 is an error: JSON readers disagree."""
    if abs(int(digits)) > 1 << 53:
        raise ValueError(f"{digits[:20]}… is larger than 2^53")
    return int(digits)


class ModuleSpec(StrictModel):
    """Name of a module and the arguments to build it with.

    Written as "local", or {"name": "local", "arguments": {"window": 64}}.
    """

    name: str
    arguments: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("arguments")
    @classmethod
    def _check_json(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(arguments, allow_nan=False)
            return dict(json.loads(text, parse_int=parse_json_int))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"arguments must be JSON values, so that the model can be saved: {error}"
            ) from None


def module_spec(name: str, /, **arguments: Any) -> ModuleSpec:
    """Shorthand for a `ModuleSpec`: `module_spec("local", window=64)`."""
    return ModuleSpec(name=name, arguments=arguments)


def as_list(value: Any) -> Any:
    """Wrap a single spec into a list."""
    return [value] if isinstance(value, str | dict | ModuleSpec) else value


def as_optional_list(value: Any) -> Any:
    """Wrap a single spec, or None, into a list."""
    return [None] if value is None else as_list(value)


SpecList = Annotated[list[ModuleSpec], BeforeValidator(as_list)]
OptionalSpecList = Annotated[list[ModuleSpec | None], BeforeValidator(as_optional_list)]
