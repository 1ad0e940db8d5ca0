"""Naive loops, one for each recipe, written from the papers. Nothing here may import the library.

Each oracle is called as

    oracle(p, x, heads=..., causal=..., context=None, mask=None, global_attention_mask=None,
    **kwargs)

and returns (b n d). `p` holds the parameters and buffers by name, as plain tensors; `kwargs` are
the arguments of the recipe. Masked tokens are skipped as keys; their own rows of the output are
undefined.

Each file covers one family of recipes. Its `CASES` list the recipes, and the arguments to check
them with.
"""

from oracles import (
    compressed,
    early,
    free,
    grid,
    hybrid,
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
    hybrid,
)
CASES = {name: cases for family in FAMILIES for name, cases in family.CASES.items()}
ORACLES = {name: getattr(family, name) for family in FAMILIES for name in family.CASES}
