"""What a stream keeps: keys that a later token may still see, or a state; found out from the pattern, or by streaming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from regard.mixer import Can, Mixer, MultiHead
from regard.pattern import MAX_POSITION, Causal, Pattern
from regard.registry import Recipe
from regard.show.build import build_mixer, pattern_of

CHUNK = 512  # tokens that are streamed at once
MOST = 4096  # and at most in all
WIDTH = 8  # of a head, for it


@dataclass(frozen=True)
class CacheSize:
    """What is kept when the last of n tokens comes.

    refusal   why it does not stream, else None
    keys      for each head, how many keys it or a later token may still see; None where there is a state instead
    held      how many are kept for that: heads share a cache
    sizes     of a state, in vectors of a token's width, after half of the tokens and after all
    tokens    how many were streamed to find out
    """

    refusal: str | None = None
    keys: tuple[int, ...] | None = None
    held: int = 0
    sizes: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0

    def words(self) -> str:
        """In a line."""
        if self.refusal is not None:
            return f"does not stream: {self.refusal}"
        if self.keys is None:
            half, whole = self.sizes
            size = f"about {whole:,.0f} vectors of a token's width after {self.tokens:,} tokens"
            return (
                f"a state of fixed size, {size}"
                if half == whole
                else f"a state that may grow: {size}"
            )
        least, most = min(self.keys), max(self.keys)
        if least == most:
            return f"{most:,} keys in each of {len(self.keys)} heads of keys, when the last token comes"
        return f"{least:,} to {most:,} keys a head when the last token comes, {self.held:,} in the cache that they share"


def cache_size(recipe: Recipe, arguments: Mapping[str, Any], n: int, can: Can) -> CacheSize:
    """Of a recipe that is built causal with these arguments, and streams n tokens."""
    refusal = can.reason("stream") or can.reason("causal")
    if refusal is not None:
        return CacheSize(refusal)
    heads = int(arguments["heads"])
    mixer = build_mixer(recipe, {**arguments, "dim": WIDTH * heads}, True)
    pattern = pattern_of(mixer)
    if pattern is None:
        return CacheSize(sizes=_streamed(mixer, min(n, MOST)), tokens=min(n, MOST))
    return _keys(pattern, mixer.kv_heads if isinstance(mixer, MultiHead) else heads, n)


def _keys(pattern: Pattern, heads: int, n: int) -> CacheSize:
    """By the pattern: what the token at n − 1, or one behind it, may see of those before it."""
    at = torch.arange(n - 1)
    some, _ = (
        (pattern & Causal())
        .resolve_global_mask(False, False)
        .block(torch.tensor(n - 1), torch.tensor(MAX_POSITION), at, at)
    )
    each = some if pattern.heads else some.expand(heads, -1)
    return CacheSize(keys=tuple(each.sum(1).tolist()), held=int(each.any(0).sum()))


def _streamed(mixer: Mixer, n: int) -> tuple[float, float]:
    """By streaming: the size of the state after half of the tokens, and after all."""
    state, sizes = None, []
    tokens = torch.randn(
        1, n, mixer.dim, generator=torch.Generator().manual_seed(0)
    )  # zeros would all be alike
    with torch.no_grad():
        for half in (tokens[:, : n // 2], tokens[:, n // 2 :]):
            for chunk in half.split(CHUNK, 1):
                _, state = mixer.stream(chunk, state)
            sizes.append(sum(t.numel() for t in state_tensors(state)) / mixer.dim)
    return sizes[0], sizes[1]


def state_tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        yield from state_tensors(tuple(state.values()))
    elif is_dataclass(state):
        yield from state_tensors(tuple(getattr(state, field.name) for field in fields(state)))
    elif isinstance(state, list | tuple):
        for part in state:
            yield from state_tensors(part)
