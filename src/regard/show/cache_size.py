"""Size of a stream's state: the keys that later tokens can see, or a state of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.mixer import Can, Mixer
from regard.pattern import MAX_POSITION, Causal
from regard.registry import Recipe
from regard.show.build import build_mixer, pattern_of
from regard.state import leaves

CHUNK = 512  # tokens per streamed chunk
MAX_TOKENS = 4096  # streamed tokens in all
HEAD_WIDTH = 8  # of the mixer that is streamed


@dataclass(frozen=True)
class CacheSize:
    """Size of the state of a causal mixer after n tokens.

    Attributes:
        reason: Why it cannot stream, or None.
        keys: Keys per head that later tokens can see, or None if there is another kind of state.
        held: Keys in the cache, which all heads share.
        sizes: Size of another state after half of the tokens and after all, in vectors of width
            dim.
        tokens: Number of streamed tokens, for `sizes`.
    """

    reason: str | None = None
    keys: tuple[int, ...] | None = None
    held: int = 0
    sizes: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0

    def __str__(self) -> str:
        if self.reason is not None:
            return f"cannot stream: {self.reason}"
        if self.keys is None:
            half, whole = self.sizes
            kind = "state of constant size" if half == whole else "state that may grow"
            return f"{kind}: about {whole:,.0f} vectors of width dim after {self.tokens:,} tokens"
        least, most = min(self.keys), max(self.keys)
        if least == most:
            return f"{most:,} keys in each of {len(self.keys)} KV heads at the last token"
        return (
            f"{least:,} to {most:,} keys per head at the last token, "
            f"{self.held:,} in the shared cache"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        is_state = self.reason is None and self.keys is None
        return {
            "streams": self.reason is None,
            "keys": None if self.keys is None else list(self.keys),
            "held": None if self.keys is None else self.held,
            "state": list(self.sizes) if is_state else None,
        }


def cache_size(recipe: Recipe, arguments: Mapping[str, Any], n: int, can: Can) -> CacheSize:
    """State size of the causal form of a recipe after n tokens."""
    reason = can.reason("stream") or can.reason("causal")
    if reason is not None:
        return CacheSize(reason)
    heads = int(arguments["heads"])
    mixer = build_mixer(recipe, {**arguments, "dim": HEAD_WIDTH * heads}, True)
    pattern = pattern_of(mixer)
    if pattern is None:
        tokens = min(n, MAX_TOKENS)
        return CacheSize(sizes=_streamed_sizes(mixer, tokens), tokens=tokens)
    # keys before token n − 1 that it or a later token can see
    keys = torch.arange(n - 1)
    causal = (pattern & Causal()).resolve_global_mask(False, False)
    visible, _ = causal.block(torch.tensor(n - 1), torch.tensor(MAX_POSITION), keys, keys)
    if not pattern.heads:
        visible = visible.expand(_cached_heads(mixer), -1)
    return CacheSize(keys=tuple(visible.sum(1).tolist()), held=int(visible.any(0).sum()))


def _cached_heads(mixer: Mixer) -> int:
    """Heads of keys and values in the cache, found by streaming a token."""
    with torch.no_grad():
        _, state = mixer.stream(torch.zeros(1, 1, mixer.dim))
    return next(t.shape[1] for t in leaves(state) if isinstance(t, Tensor) and t.dim() == 4)


def _streamed_sizes(mixer: Mixer, n: int) -> tuple[float, float]:
    """Size of the state after half of n random tokens and after all."""
    state, sizes = None, []
    tokens = torch.randn(1, n, mixer.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for half in (tokens[:, : n // 2], tokens[:, n // 2 :]):
            for chunk in half.split(CHUNK, 1):
                _, state = mixer.stream(chunk, state)
            sizes.append(sum(t.numel() for t in leaves(state) if isinstance(t, Tensor)) / mixer.dim)
    return sizes[0], sizes[1]
