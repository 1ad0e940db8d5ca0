"""Builds the mixers that are shown."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import reduce
from math import sqrt
from operator import or_
from typing import Any

import torch

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Attention, Can, Mixer
from regard.pattern import Pattern
from regard.registry import Recipe, create, not_causal


def pattern_of(mixer: Mixer) -> Pattern | None:
    """Attention pattern of a mixer (the union if it has several attentions), or None.

    A mixer without an attention map has no pattern: in several passes, tokens reach more than one
    pattern shows.
    """
    if not mixer.can.maps:
        return None
    patterns: list[Pattern] = []
    for module in mixer.modules():
        if isinstance(module, SoftmaxAttention):
            patterns.append(module.causal_pattern if mixer.causal else module.pattern)
        elif isinstance(module, Attention):
            return None
    return reduce(or_, patterns) if patterns else None


def build_example(recipe: Recipe, n: int, *, causal: bool = False) -> Mixer:
    """The recipe's example for n tokens, with the same random parameters each time."""
    arguments = dict(recipe.example_kwargs)
    if "length" in recipe.parameters:
        arguments["length"] = n
    if "rank" in arguments:
        arguments["rank"] = min(arguments["rank"], n)
    heads = recipe.default_heads(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_mixer(recipe, {**arguments, "dim": 8 * heads, "heads": heads}, causal)


def build_mixer(recipe: Recipe, arguments: Mapping[str, Any], causal: bool) -> Mixer:
    """Build the recipe; `causal=False` means its default, since some recipes are causal only."""
    return create(recipe.name, **{**arguments, "causal": True} if causal else arguments)


def fill_length_arguments(recipe: Recipe, n: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Add `length`, and `width` of a square image if required, for n tokens, unless given."""
    arguments, parameters = dict(given), recipe.parameters
    if "length" in parameters:
        arguments.setdefault("length", n)
    if "width" in parameters and parameters["width"].default is inspect.Parameter.empty:
        arguments.setdefault("width", max(1, round(sqrt(n))))
    return arguments


def mixer_capabilities(recipe: Recipe, mixer: Mixer, arguments: Mapping[str, Any]) -> Can:
    """Capabilities of a mixer, including whether it can be built with causal=True."""
    if mixer.causal or not mixer.can.causal:
        return mixer.can
    try:
        with torch.device("meta") if pattern_of(mixer) is None else torch.device("cpu"):
            build_mixer(recipe, arguments, True)
    except Unsupported as error:
        return not_causal(mixer.can, error)
    return mixer.can
