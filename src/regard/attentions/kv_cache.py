"""Attention over a pattern that streams: the whole at once, or chunk by chunk with a cache that forgets what no one can see."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attentions.kv_buffer import Room, append_rows
from regard.mixer import Attention, Can, check_batch
from regard.pattern import MAX_POSITION, Full, Pattern

SLACK = 64  # keys are evicted once so many could be

COMPARES_POSITIONS = "it compares positions, and those of two sequences are not comparable"


class KVCache(NamedTuple):
    """The keys and values that a later query may still see, k (b h m e) and v (b h m f), and where they stand."""

    k: Tensor | None
    v: Tensor | None
    at: NDArray[np.int64]  # (m), ascending; the same for all examples, so no tensor
    next: int  # the position of the next token
    check: int  # look for keys to evict once there are so many
    room: Room | None = None  # behind k and v, for the next keys: see `rows`


class CallPositions(NamedTuple):
    """Where a call stands: the pattern that holds for it, the first query, and the first key or all of them."""

    pattern: Pattern
    q_start: int = 0
    k_positions: int | Tensor = 0


class KVCacheAttention(Attention):
    """A subclass writes `attend_tiles`, once; `pattern` tells who may look at whom, and so which keys a stream keeps."""

    pattern: Pattern
    causal_pattern: (
        Pattern  # the pattern where causal: made beside it, for a graph that is compiled makes none
    )

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        place: CallPositions,
        *,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """q (b h n e), k (b h m e), v (b h m f), mask (b m), marks (b n) -> (b h n f)."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: KVCache | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """See `Attention.forward`; marks (b n)."""
        pattern = self.causal_pattern if causal else self.pattern
        if state is None:
            return self.attend(
                q,
                k,
                v,
                CallPositions(pattern),
                mask=mask,
                global_attention_mask=global_attention_mask,
            ), None
        now = _grown(state, k, v)
        return self.attend(q, *_seen(now, pattern, state.next)), _kept(now, pattern)

    def initial_state(self) -> KVCache:
        """An empty cache."""
        return KVCache(None, None, np.empty(0, dtype=np.int64), 0, SLACK)

    def extra_repr(self) -> str:
        """Shown by print."""
        return repr(self.pattern)


def pattern_capabilities(pattern: Pattern, *, compares_positions: bool = False) -> Can:
    """What attention over a pattern can do; `relates`: something beside the pattern compares positions too."""
    unsupported = {}
    if pattern.compares_positions or compares_positions:
        unsupported["cross"] = COMPARES_POSITIONS
    if pattern.length is not None:
        unsupported["length"] = f"its pattern was drawn for {pattern.length} positions"
    return Can(supports_global_mask=pattern.needs_global_mask, **unsupported)


def _grown(state: KVCache, k: Tensor, v: Tensor) -> KVCache:
    """The cache with the next keys and values in it."""
    end = state.next + k.shape[2]
    if state.k is None or state.v is None:
        return KVCache(k, v, np.arange(state.next, end), end, state.check)
    check_batch(state.k, k)
    (k, v), at, room = append_rows((state.k, state.v), (k, v), state.at, end, state.room)
    return KVCache(k, v, at, end, state.check, room)


def _seen(cache: KVCache, pattern: Pattern, first: int) -> tuple[Tensor, Tensor, CallPositions]:
    """Keys and values for the queries from `first` on.  One that sees all from some key on is given these, and no mask."""
    assert cache.k is not None
    assert cache.v is not None
    first_visible_key = pattern.first_visible_key(first) if first == cache.next - 1 else None
    if first_visible_key is None:
        return cache.k, cache.v, CallPositions(pattern, first, _start(cache.at))
    skip = np.searchsorted(cache.at, first_visible_key)
    return (
        cache.k[:, :, skip:],
        cache.v[:, :, skip:],
        CallPositions(Full(), first, _start(cache.at[skip:])),
    )


def _start(at: NDArray[np.int64]) -> int | Tensor:
    """Keys that stand in a row are told by their first position; where there are none, by any."""
    if not len(at):
        return 0
    first, last = int(at[0]), int(at[-1])
    return first if last - first == len(at) - 1 else torch.from_numpy(at)


def _kept(cache: KVCache, pattern: Pattern) -> KVCache:
    """The cache without the keys that no later query may see: the pattern knows."""
    if len(cache.at) < cache.check:
        return cache
    assert cache.k is not None
    assert cache.v is not None
    places = torch.from_numpy(cache.at)
    some, _ = pattern.resolve_global_mask(False, False).block(
        torch.tensor(cache.next), torch.tensor(MAX_POSITION), places, places
    )
    keep = (some.any(0) if pattern.heads else some).nonzero()[:, 0]
    check = max(2 * len(keep), len(keep) + SLACK)
    if len(keep) == len(cache.at):
        return cache._replace(check=check)
    return KVCache(
        cache.k[:, :, keep], cache.v[:, :, keep], cache.at[keep.numpy()], cache.next, check
    )
