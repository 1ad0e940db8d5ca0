"""Describes a recipe at a length: capabilities, parameters, keys per query, and the backend."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regard.backends import BackendChoice, explain
from regard.mixer import CAPABILITIES, Can, Mixer
from regard.pattern import Pattern, classify_tiles, position_tiles
from regard.registry import FAMILIES, Recipe
from regard.show.build import (
    build_example,
    build_mixer,
    fill_length_arguments,
    mixer_capabilities,
    pattern_of,
)
from regard.show.cache_size import CacheSize, cache_size

MAX_TILES = 80_000  # partly filled tiles that are counted exactly; beyond, a sample of the queries
SAMPLE = 128


@dataclass(frozen=True)
class KeyCounts:
    """Keys per query; `exact` is False if only a sample of the queries was counted."""

    mean: float
    most: int
    density: float
    exact: bool


@dataclass(frozen=True)
class RecipeDescription:
    """A recipe, built with `arguments` for `length` tokens."""

    recipe: Recipe
    arguments: Mapping[str, Any]
    length: int
    mixer: Mixer
    can: Can
    pattern: Pattern | None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.mixer.parameters())

    def keys(self) -> KeyCounts | None:
        """Keys per query of the pattern, without global tokens."""
        return None if self.pattern is None else count_keys(self.pattern, self.length)

    def cache(self) -> CacheSize:
        """Size of the causal form's state."""
        return cache_size(self.recipe, self.arguments, self.length, self.can)

    def backend(self, *, grad: bool) -> BackendChoice | None:
        """The backend that `backend="auto"` would choose."""
        if self.pattern is None:
            return None
        heads = int(self.arguments["heads"])
        width = self.arguments["dim"] // heads
        return explain(self.pattern, self.length, heads=heads, width=width, grad=grad)


def describe_recipe(
    recipe: Recipe, n: int, arguments: Mapping[str, Any], *, causal: bool = False
) -> RecipeDescription:
    """Build a recipe for n tokens.

    Without a pattern it may be very large, and is built on the meta device.
    """
    arguments = fill_length_arguments(recipe, n, arguments)
    has_pattern = pattern_of(build_example(recipe, min(n, 48))) is not None
    with torch.device("cpu" if has_pattern else "meta"):
        mixer = build_mixer(recipe, arguments, causal)
    if mixer.length is not None and n > mixer.length:
        raise ValueError(f"{recipe.name} was built with length={mixer.length}, but --length is {n}")
    can = mixer_capabilities(recipe, mixer, arguments)
    return RecipeDescription(recipe, arguments, n, mixer, can, pattern_of(mixer))


def count_keys(pattern: Pattern, n: int) -> KeyCounts:
    """Count the keys of each query among n tokens; the mean is over queries and heads."""
    plain = pattern.resolve_global_mask(False, False)
    heads = Counter(plain.parts if plain.heads else (plain,))
    total, most, exact = 0.0, 0, True
    for head, repeats in heads.items():
        tiles = position_tiles(n)
        some, every = classify_tiles(head, tiles, tiles)
        if int((some & ~every).sum()) <= MAX_TILES:
            counts = head.keys_per_query(n)
        else:
            exact, keys = False, torch.arange(n)
            queries = torch.linspace(0, n - 1, SAMPLE).long().split(16)
            counts = torch.cat([head.allows(q[:, None], keys[None]).sum(-1) for q in queries])
        total += counts.double().mean().item() * repeats
        most = max(most, int(counts.max()))
    mean = total / heads.total()
    return KeyCounts(mean, most, mean / n, exact)


def description_json(description: RecipeDescription) -> dict[str, Any]:
    """The description as plain values."""
    recipe, keys = description.recipe, description.keys()
    return recipe_json(recipe, description.can) | {
        "description": inspect.getdoc(recipe.function) or "",
        "reasons": dict(description.can.unsupported),
        "length": description.length,
        "causal": description.mixer.causal,
        "arguments": {name: _plain(value) for name, value in description.arguments.items()},
        "parameters": description.parameters,
        "pattern": None if description.pattern is None else repr(description.pattern),
        "keys_per_query": None
        if keys is None
        else {"mean": keys.mean, "max": keys.most, "exact": keys.exact},
        "density": None if keys is None else keys.density,
        "cache": description.cache().to_json(),
        "forward": _choice_json(description.backend(grad=False)),
        "forward_and_backward": _choice_json(description.backend(grad=True)),
    }


def recipe_json(recipe: Recipe, can: Can) -> dict[str, Any]:
    """A recipe and its capabilities as plain values."""
    return {
        "name": recipe.name,
        "family": recipe.family,
        "family_title": FAMILIES.get(recipe.family, ""),
        "paper": recipe.paper,
        "arxiv": recipe.arxiv or None,
        "url": paper_url(recipe),
        "formula": recipe.formula,
        "summary": recipe.summary,
        "can": {name: getattr(can, name) for name in CAPABILITIES},
    }


def paper_url(recipe: Recipe) -> str | None:
    """Address of the paper."""
    return f"https://arxiv.org/abs/{recipe.arxiv}" if recipe.arxiv else None


def _choice_json(choice: BackendChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return {
        "backend": choice.backend,
        "reason": choice.reason,
        "ms": milliseconds(choice.seconds()),
        "candidates": [
            {"backend": c.backend, "ms": milliseconds(c.seconds), "reason": c.reason}
            for c in choice.candidates
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
