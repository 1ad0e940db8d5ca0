"""The recipes, one function a paper; importing this package registers them all."""

from regard.recipes import (
    capacity,
    compressed,
    early,
    free,
    grid,
    heads,
    light,
    linear,
    priors,
    prototypes,
    routed,
    sets,
    sparse,
    vanilla,
)

__all__ = [
    "capacity",
    "compressed",
    "early",
    "free",
    "grid",
    "heads",
    "light",
    "linear",
    "priors",
    "prototypes",
    "routed",
    "sets",
    "sparse",
    "vanilla",
]
