"""What there is to say of a recipe at a length: promises, parameters, keys for each query, and what would run."""

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

COUNTED = 80_000  # tiles in which keys are counted one by one; where there are more, a sample of the queries stands for all
SAMPLE = 128


@dataclass(frozen=True)
class KeyCounts:
    """How many keys a query sees; `exact`: of all queries, else of a sample of them."""

    mean: float
    most: int
    density: float
    exact: bool


@dataclass(frozen=True)
class RecipeDescription:
    """A recipe, built: `arguments` are those that its function was called with."""

    recipe: Recipe
    arguments: Mapping[str, Any]
    length: int
    mixer: Mixer
    can: Can
    pattern: Pattern | None

    @property
    def parameters(self) -> int:
        """How many numbers it learns."""
        return sum(p.numel() for p in self.mixer.parameters())

    def keys(self) -> KeyCounts | None:
        """Of the pattern, without marked tokens."""
        return None if self.pattern is None else count_keys(self.pattern, self.length)

    def cache(self) -> CacheSize:
        """What its causal form keeps while it streams."""
        return cache_size(self.recipe, self.arguments, self.length, self.can)

    def runs(self, *, grad: bool) -> BackendChoice | None:
        """What `auto` would choose."""
        if self.pattern is None:
            return None
        heads = int(self.arguments["heads"])
        return explain(
            self.pattern, self.length, heads=heads, width=self.arguments["dim"] // heads, grad=grad
        )


def describe_recipe(
    recipe: Recipe, n: int, arguments: Mapping[str, Any], *, causal: bool = False
) -> RecipeDescription:
    """Build it for n tokens; a mixer without a pattern may be very large, and is built without its numbers."""
    arguments = fill_length_arguments(recipe, n, arguments)
    weightless = pattern_of(build_example(recipe, min(n, 48))) is None
    with torch.device("meta") if weightless else torch.device("cpu"):
        mixer = build_mixer(recipe, arguments, causal)
    if mixer.length is not None and n > mixer.length:
        raise ValueError(
            f"{recipe.name} was built for at most {mixer.length} tokens, and --length is {n}"
        )
    return RecipeDescription(
        recipe, arguments, n, mixer, mixer_capabilities(recipe, mixer, arguments), pattern_of(mixer)
    )


def count_keys(pattern: Pattern, n: int) -> KeyCounts:
    """Keys for each query among n tokens."""
    plain = pattern.resolve_global_mask(False, False)
    heads = Counter(plain.parts if plain.heads else (plain,))
    counted = {head: _counts(head, n) for head in heads}
    mean = (
        sum(counted[head][0].double().mean().item() * times for head, times in heads.items())
        / heads.total()
    )
    most = max(int(counts.max()) for counts, _ in counted.values())
    return KeyCounts(mean, most, mean / n, all(exact for _, exact in counted.values()))


def _counts(pattern: Pattern, n: int) -> tuple[torch.Tensor, bool]:
    """How many keys each query sees, and whether all queries were asked."""
    tiles = position_tiles(n)
    some, every = classify_tiles(pattern, tiles, tiles)
    exact = int((some & ~every).sum()) <= COUNTED
    return (pattern.keys_per_query(n), True) if exact else (_sampled(pattern, n), False)


def _sampled(pattern: Pattern, n: int) -> torch.Tensor:
    q = torch.linspace(0, n - 1, SAMPLE).long()
    k = torch.arange(n)
    return torch.stack(
        [pattern.allows(at[:, None], k[None]).sum(-1) for at in q.split(16)], 0
    ).flatten()


def description_json(facts: RecipeDescription) -> dict[str, Any]:
    """The same, as plain values."""
    recipe, keys = facts.recipe, facts.keys()
    return recipe_json(recipe, facts.can) | {
        "description": inspect.getdoc(recipe.build) or "",
        "reasons": dict(facts.can.unsupported),
        "length": facts.length,
        "causal": facts.mixer.causal,
        "arguments": {name: _plain(value) for name, value in facts.arguments.items()},
        "parameters": facts.parameters,
        "pattern": None if facts.pattern is None else repr(facts.pattern),
        "keys_per_query": None
        if keys is None
        else {"mean": keys.mean, "max": keys.most, "exact": keys.exact},
        "density": None if keys is None else keys.density,
        "cache": _cache(facts.cache()),
        "forward": _choice(facts.runs(grad=False)),
        "forward_and_backward": _choice(facts.runs(grad=True)),
    }


def recipe_json(recipe: Recipe, can: Can) -> dict[str, Any]:
    """A recipe and its promises, as plain values."""
    return {
        "name": recipe.name,
        "family": recipe.family,
        "family_title": FAMILIES.get(recipe.family, ""),
        "paper": recipe.paper,
        "arxiv": recipe.arxiv or None,
        "url": paper_url(recipe),
        "formula": recipe.formula,
        "summary": recipe.summary,
        "can": {promise: getattr(can, promise) for promise in CAPABILITIES},
    }


def paper_url(recipe: Recipe) -> str | None:
    """Where the paper can be read."""
    return f"https://arxiv.org/abs/{recipe.arxiv}" if recipe.arxiv else None


def _milliseconds(choice: BackendChoice) -> float | None:
    """The estimate for the executor that was chosen."""
    seconds = choice.dense_seconds if choice.backend == "sdpa" else choice.sparse_seconds
    return None if seconds is None else seconds * 1e3


def _choice(choice: BackendChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    dense, sparse = (
        None if s is None else s * 1e3 for s in (choice.dense_seconds, choice.sparse_seconds)
    )
    return {
        "backend": choice.backend,
        "reason": choice.reason,
        "ms": _milliseconds(choice),
        "dense_ms": dense,
        "sparse_ms": sparse,
    }


def _cache(cache: CacheSize) -> dict[str, Any]:
    """Keys for each head and in all, or the size of a state in vectors after half of the tokens and after all."""
    state = None if cache.refusal or cache.keys is not None else list(cache.sizes)
    keys = None if cache.keys is None else list(cache.keys)
    return {
        "streams": cache.refusal is None,
        "keys": keys,
        "held": None if keys is None else cache.held,
        "state": state,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
