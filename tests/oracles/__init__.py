"""Naive loops, one for each recipe, written from the papers.  Nothing here may import the library that they check.

Each is called as

    oracle(p, x, heads=..., causal=..., memory=None, mask=None, marks=None, **arguments) -> (b n d)

with p the parameters and buffers by name, as plain tensors, and the arguments that the recipe was given.  Left-out tokens
(mask False) are skipped as keys; what stands in their own rows of the output means nothing.

A file is a family.  Its `CASES` name the recipes that it checks, and the arguments to check them with.
"""

from oracles import (
    capacity,
    compressed,
    early,
    free,
    grid,
    light,
    linear,
    priors,
    prototypes,
    routed,
    sets,
    sparse,
    synthesizer,
    vanilla,
)

FAMILIES = (
    vanilla,
    sparse,
    grid,
    routed,
    linear,
    compressed,
    prototypes,
    sets,
    priors,
    free,
    synthesizer,
    early,
    capacity,
    light,
)
CASES = {name: cases for family in FAMILIES for name, cases in family.CASES.items()}
ORACLES = {name: getattr(family, name) for family in FAMILIES for name in family.CASES}
