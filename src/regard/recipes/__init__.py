"""The recipes, one function per paper. Importing this package registers all of them."""

from regard.recipes import (
    checkpoints,
    compressed,
    early,
    free,
    grid,
    heads,
    hybrid,
    linear,
    priors,
    prototypes,
    routed,
    sets,
    sparse,
    vanilla,
)

__all__ = [
    "checkpoints",
    "compressed",
    "early",
    "free",
    "grid",
    "heads",
    "hybrid",
    "linear",
    "priors",
    "prototypes",
    "routed",
    "sets",
    "sparse",
    "vanilla",
]
