"""Mixers to be shown: a recipe at its real size, or as small as its example."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import reduce
from math import isqrt
from operator import or_
from typing import Any

import torch

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Can, Mixer, MultiHead
from regard.pattern import Pattern
from regard.registry import Recipe, create


def pattern_of(mixer: Mixer) -> Pattern | None:
    """Who may look at whom; None: the mixer has no such thing.  Several attentions side by side see what any sees.

    What has no map has no pattern: in several passes, tokens are reached that no single pass looks at.
    """
    if not mixer.can.maps:
        return None
    found: list[Pattern] = []
    for module in mixer.modules():
        if isinstance(module, MultiHead):
            if not isinstance(module.inner, SoftmaxAttention):
                return None
            found.append(module.inner.causal_pattern if module.causal else module.inner.pattern)
    return reduce(or_, found) if found else None


def default_heads(recipe: Recipe, otherwise: int) -> int:
    """The heads that a recipe is built with when nobody asks for a number."""
    default = recipe.parameters["heads"].default
    return otherwise if default is inspect.Parameter.empty else int(default)


def build_example(recipe: Recipe, n: int, *, causal: bool = False) -> Mixer:
    """The recipe's own example, for n tokens, with the same random parameters each time."""
    arguments = dict(recipe.example_kwargs)
    if "length" in recipe.parameters:
        arguments["length"] = n
    if "rank" in arguments:
        arguments["rank"] = min(arguments["rank"], n)
    heads = default_heads(recipe, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_mixer(recipe, {**arguments, "dim": 8 * heads, "heads": heads}, causal)


def build_mixer(recipe: Recipe, arguments: Mapping[str, Any], causal: bool) -> Mixer:
    """The recipe with these arguments; causal only where it is asked for, since not every recipe knows the word."""
    return create(recipe.name, **arguments, **({"causal": True} if causal else {}))


def fill_length_arguments(recipe: Recipe, n: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe needs to know of the length, unless given: `length`, and the `width` of a square image."""
    found = dict(given)
    parameters = recipe.parameters
    values = {"length": n, "width": max(1, _root(n))}
    for name, value in values.items():
        if (
            name in parameters
            and name not in found
            and (name == "length" or parameters[name].default is inspect.Parameter.empty)
        ):
            found[name] = value
    return found


def _root(n: int) -> int:
    """The whole number nearest to the root of n."""
    low = isqrt(n)
    return low + (n - low * low > low)


def mixer_capabilities(recipe: Recipe, mixer: Mixer, arguments: Mapping[str, Any]) -> Can:
    """What a mixer promises, and whether it could be built causal."""
    if mixer.causal or not mixer.can.causal:
        return mixer.can
    try:
        with torch.device("meta") if pattern_of(mixer) is None else torch.device("cpu"):
            build_mixer(recipe, arguments, True)
    except Unsupported as refusal:
        return mixer.can & Can(
            supports_global_mask=True, causal=str(refusal), stream="only a causal form can"
        )
    return mixer.can
