"""What the families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.errors import Unsupported, did_you_mean

Json = Mapping[str, Any]
LAYER = "trunk.stack.layers.{i}"
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


def require(their: Json, **values: object) -> None:
    """What we have no form for must be as it usually is."""
    for name, value in values.items():
        if their.get(name, value) != value:
            raise Unsupported(
                f"their {name} is {their[name]!r}, and there is a form for {value!r} only"
            )


def activation(theirs: str) -> str:
    """Their name of an activation -> ours."""
    if theirs not in ACTIVATIONS:
        raise Unsupported(
            f"no activation for their {theirs!r}: {did_you_mean(theirs, ACTIVATIONS)}"
        )
    return ACTIVATIONS[theirs]
