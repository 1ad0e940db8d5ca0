"""Attention over a pattern with a KV cache for incremental decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from regard.mixer import Attention, Can, check_batch
from regard.pattern import MAX_POSITION, Full, Pattern, Queries
from regard.position.frequencies import token_positions
from regard.state import join_positions, per_example, share_position

EVICTION_SLACK = 64  # look for keys to evict once this many could be
MIN_FREE_ROWS = 64  # free rows after a copy of the buffer, at least

COMPARES_POSITIONS = "it compares positions, and those of two sequences are unrelated"

Positions = NDArray[np.int64]
_buffer_lock = Lock()


class CallPositions(NamedTuple):
    """The pattern of one call and the positions of its queries and keys.

    Attributes:
        pattern: Pattern to attend over.
        q_start: Position of the first query; (b) if it differs between examples.
        k_positions: Position of the first of consecutive keys, or the positions of all keys (m);
            (b m) if they differ between examples, with -1 for keys that do not exist.
    """

    pattern: Pattern
    q_start: int | Tensor = 0
    k_positions: int | Tensor = 0


@per_example("positions", "next_position")
class KVCache(NamedTuple):
    """Keys and values that later queries may still attend to.

    Attributes:
        k: Keys (b, h, m, e), or None before the first token.
        v: Values (b, h, m, f), or None before the first token.
        positions: Positions of the keys (m), ascending, if all examples agree; else a tensor (b m)
            with -1 for keys that do not exist.
        next_position: Position of the next token; (b) if it differs between examples.
        evict_at: Number of keys at which to look for keys to evict.
        buffer: Bookkeeping of the tensors behind k and v. See `append_rows`.
    """

    k: Tensor | None
    v: Tensor | None
    positions: Positions | Tensor
    next_position: int | Tensor
    evict_at: int
    buffer: Positions | None = None

    def append(self, k: Tensor, v: Tensor) -> KVCache:
        """Add the keys and values of the next tokens."""
        if isinstance(self.next_position, Tensor):
            return self._append_per_example(k, v)
        end = self.next_position + k.shape[2]
        if self.k is None or self.v is None:
            return KVCache(k, v, np.arange(self.next_position, end), end, self.evict_at)
        check_batch(self.k, k)
        assert isinstance(self.positions, np.ndarray)
        (k, v), positions, buffer = append_rows(
            (self.k, self.v), (k, v), self.positions, end, self.buffer
        )
        return KVCache(k, v, positions, end, self.evict_at, buffer)

    def _append_per_example(self, k: Tensor, v: Tensor) -> KVCache:
        """`append` for examples at different positions. Positions grow in place as the keys do,
        as (b 1 m 1)."""
        assert self.k is not None
        assert self.v is not None
        assert isinstance(self.positions, Tensor)
        check_batch(self.k, k)
        m, n = self.k.shape[2], k.shape[2]
        row, column = self.positions.stride()
        old = self.positions.as_strided((len(k), 1, m, 1), (row, row, column, 1))
        new = token_positions(self.next_position, n, k.device)[:, None, :, None]
        (k, v, positions), _, buffer = append_rows(
            (self.k, self.v, old),
            (k, v, new),
            np.arange(m),
            m + n,
            self.buffer,
        )
        end = self.next_position + n
        return KVCache(k, v, positions[:, 0, :, 0], end, self.evict_at, buffer)

    def visible(
        self, pattern: Pattern, q_start: int | Tensor
    ) -> tuple[Tensor, Tensor, CallPositions]:
        """Keys and values for the queries from `q_start` on, and where they are.

        A single query that sees every key from some position on gets those keys and no pattern.
        """
        assert self.k is not None
        assert self.v is not None
        k, v, positions = self.k, self.v, self.positions
        if isinstance(positions, Tensor):
            return k, v, CallPositions(pattern, q_start, positions)
        assert isinstance(q_start, int)
        first = pattern.first_visible_key(q_start) if q_start == self.next_position - 1 else None
        if first is not None:
            skip = np.searchsorted(positions, first)
            k, v, positions, pattern = k[:, :, skip:], v[:, :, skip:], positions[skip:], Full()
        if not len(positions):
            return k, v, CallPositions(pattern, q_start)
        start, end = int(positions[0]), int(positions[-1])
        consecutive = end - start == len(positions) - 1
        k_positions = start if consecutive else torch.from_numpy(positions)
        return k, v, CallPositions(pattern, q_start, k_positions)

    def evict(self, pattern: Pattern) -> KVCache:
        """Drop the keys that no later query can see."""
        positions = self.positions
        if positions.shape[-1] < self.evict_at:
            return self
        assert self.k is not None
        assert self.v is not None
        pattern = pattern.resolve_global_mask(False, False)
        if isinstance(positions, Tensor):
            start = torch.as_tensor(self.next_position, device=positions.device)[:, None]
            keys, end = positions.clamp(min=0), torch.tensor(MAX_POSITION, device=positions.device)
            seen, _ = pattern.block(start, end, keys, keys)
            return self._select_keys((seen.any(0) if pattern.heads else seen) & (positions >= 0))
        keys = torch.from_numpy(positions)
        queries = torch.tensor(self.next_position), torch.tensor(MAX_POSITION)
        seen, _ = pattern.block(*queries, keys, keys)
        keep = (seen.any(0) if pattern.heads else seen).nonzero()[:, 0]
        evict_at = max(2 * len(keep), len(keep) + EVICTION_SLACK)
        if len(keep) == len(keys):
            return self._replace(evict_at=evict_at)
        positions = positions[np.array(keep.tolist(), int)]  # keep.numpy() fails inside torch.func
        k, v = self.k[:, :, keep], self.v[:, :, keep]
        return KVCache(k, v, positions, self.next_position, evict_at)

    def _select_keys(self, keep: Tensor) -> KVCache:
        """The cache with the keys `keep` (b m) of each example, in its last columns."""
        assert self.k is not None
        assert self.v is not None
        assert isinstance(self.positions, Tensor)
        count = int(keep.sum(1).max()) if keep.numel() else 0
        evict_at = max(2 * count, count + EVICTION_SLACK)
        if count == keep.shape[1]:
            return self._replace(evict_at=evict_at)
        columns = keep.int().argsort(dim=1, stable=True)[:, keep.shape[1] - count :]
        kept = keep.gather(1, columns)
        positions = self.positions.gather(1, columns).masked_fill(~kept, -1)
        k, v = (
            x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            for x in (self.k, self.v)
        )
        return KVCache(k, v, positions, self.next_position, evict_at)

    # -------------------------------------------------------------- joining, see `regard.state`
    @classmethod
    def join_states(cls, caches: Sequence[KVCache], sizes: Sequence[int]) -> KVCache:
        """One cache for the examples of several, padded on the left if their lengths differ."""
        example = next((cache for cache in caches if cache.k is not None), None)
        if example is None:
            return caches[0]
        assert example.k is not None
        assert example.v is not None
        device, evict_at = example.k.device, max(cache.evict_at for cache in caches)
        count = max(cache.positions.shape[-1] for cache in caches)
        parts = []
        for cache, size in zip(caches, sizes, strict=True):
            k = example.k.new_zeros(size, *example.k.shape[1:2], 0, example.k.shape[3])
            v = example.v.new_zeros(size, *example.v.shape[1:2], 0, example.v.shape[3])
            if cache.k is not None and cache.v is not None:
                k, v = cache.k, cache.v
            positions = torch.as_tensor(cache.positions, device=device).expand(size, -1)
            padding = count - k.shape[2]
            k, v = (F.pad(x, (0, 0, padding, 0)) if padding else x for x in (k, v))
            parts.append((k, v, F.pad(positions, (padding, 0), value=-1)))
        k, v, positions = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        start = join_positions([cache.next_position for cache in caches], sizes, device)
        return KVCache(k, v, positions, start, evict_at).share_positions()

    def share_positions(self) -> KVCache:
        """The cache without columns that no example uses, and with shared positions if they
        agree."""
        if not isinstance(self.positions, Tensor) or not len(self.positions):
            return self
        cache = self._select_keys(self.positions >= 0)._replace(evict_at=self.evict_at)
        start, positions = share_position(self.next_position), cache.positions
        assert isinstance(positions, Tensor)
        if isinstance(start, int) and bool((positions == positions[:1]).all()):
            shared = positions[0].cpu().numpy().copy()
            return KVCache(cache.k, cache.v, shared, start, cache.evict_at)
        if isinstance(start, int):
            start = torch.full((len(positions),), start, device=positions.device)
        return cache._replace(next_position=start)

    def join_key(self) -> Any:
        """Equal for caches at the same positions, with the same shapes."""
        shapes = [None if x is None else (x.dtype, x.shape[1:]) for x in (self.k, self.v)]
        start, positions = self.next_position, self.positions
        if isinstance(start, Tensor):
            return shapes[0], shapes[1], tuple(start.tolist()), id(positions)
        return shapes[0], shapes[1], start, tuple(positions.tolist())

    def join_mismatch(self, other: KVCache) -> str | None:
        """Why the caches cannot be of the same attention, or None."""
        for name, x, y in (("keys", self.k, other.k), ("values", self.v, other.v)):
            if x is None or y is None:
                continue
            if x.dtype != y.dtype or x.device != y.device:
                return f"the {name} are {x.dtype} on {x.device} and {y.dtype} on {y.device}"
            if x.shape[1] != y.shape[1]:
                return f"one has {x.shape[1]} heads, the other {y.shape[1]}"
            if x.shape[3] != y.shape[3]:
                return f"the {name} have width {x.shape[3]} and {y.shape[3]}"
        return None


class KVCacheAttention(Attention):
    """Base class for attention over a pattern. Subclasses implement `attend`.

    The pattern decides which keys each query sees, and so which keys a stream has to keep.

    Attributes:
        pattern: Pattern without the causal restriction.
        causal_pattern: Pattern with it. Built once, since a compiled graph cannot build patterns.
    """

    pattern: Pattern
    causal_pattern: Pattern

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: CallPositions,
        *,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the keys at the given positions.

        Args:
            q: Queries (b h n e).
            k: Keys (b h m e).
            v: Values (b h m f).
            positions: The pattern and the positions of queries and keys.
            mask: Padding mask (b m), True = keep.
            attn_mask: Pair mask that broadcasts to (b h n m), True = keep.
            global_attention_mask: (b n), True = global token.

        Returns:
            Outputs (b h n f).
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: KVCache | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Attend over the pattern; with a cache, append the new keys and evict invisible ones."""
        pattern = self.causal_pattern if causal else self.pattern
        if state is None:
            out = self.attend(
                q,
                k,
                v,
                CallPositions(pattern),
                mask=mask,
                attn_mask=attn_mask,
                global_attention_mask=global_attention_mask,
            )
            return out, None
        cache = state.append(k, v)
        out = self.attend(q, *cache.visible(pattern, state.next_position))
        return out, cache.evict(pattern)

    def initial_state(self) -> KVCache:
        """An empty cache."""
        return KVCache(None, None, np.empty(0, dtype=np.int64), 0, EVICTION_SLACK)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return repr(self.pattern)


def pattern_capabilities(pattern: Pattern, *declared: str, compares_positions: bool = False) -> Can:
    """Capabilities of attention over a pattern.

    Args:
        pattern: The pattern.
        *declared: Capabilities besides the pattern's, see `Can`.
        compares_positions: Whether something besides the pattern depends on positions.
    """
    unsupported = {}
    if pattern.compares_positions or compares_positions:
        unsupported["cross"] = COMPARES_POSITIONS
    if any(isinstance(leaf, Queries) for leaf in pattern.leaves()):
        unsupported["independent_queries"] = "its pattern depends on the positions of the queries"
    if pattern.length is not None:
        unsupported["length"] = f"its pattern was built for {pattern.length} positions"
    if pattern.needs_global_mask:
        declared += ("global_attention_mask",)
    return Can(*declared, **unsupported)


def append_rows(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    positions: Positions,
    end: int,
    buffer: Positions | None,
) -> tuple[list[Tensor], Positions, Positions | None]:
    """Append each of `new` (b h n ·) to its `old` (b h m ·), in place if possible.

    A state is a value: several streams may continue from it, and each must find what was there. So
    the rows of a cache live in larger tensors, and all states that share these tensors share one
    `buffer`, an array whose first entry counts the rows written so far and whose other entries are
    the positions of all rows, written or free. A state that holds all written rows may write the
    next ones in place. A state that holds fewer continues in a copy. No row is written twice.

    Args:
        old: Keys and values so far.
        new: Keys and values of the next tokens.
        positions: Positions of the old rows (m).
        end: Position after the last new row.
        buffer: Returned together with `old`, or None if it came from elsewhere.

    Returns:
        The longer tensors, their positions and their buffer.
    """
    m, n = old[0].shape[2], new[0].shape[2]
    size = m + n
    if not all(map(_can_write_in_place, old, new)):
        longer = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
        return longer, np.concatenate((positions, np.arange(end - n, end))), None
    if buffer is None or not _claim_rows(old, buffer, size):
        capacity = size + max(MIN_FREE_ROWS, size // 2)
        old = [x.new_empty(*x.shape[:2], capacity, x.shape[3])[:, :, :m].copy_(x) for x in old]
        following = np.arange(end - n, end - n + capacity - m)
        buffer = np.concatenate(([size], positions, following))
    longer = []
    for x, rows in zip(old, new, strict=True):
        both = x.as_strided((*x.shape[:2], size, x.shape[3]), x.stride())
        both[:, :, m:] = rows
        longer.append(both)
    return longer, buffer[1 : size + 1], buffer


def _can_write_in_place(old: Tensor, new: Tensor) -> bool:
    """No: if autograd or a compiler may still need `old`, or if it is an inference tensor outside
    inference mode."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if type(old) is not Tensor or type(new) is not Tensor:
        return False
    same_shape = old.shape[:2] == new.shape[:2] and old.shape[3] == new.shape[3]
    same_kind = old.dtype == new.dtype and old.device == new.device
    writable = not old.is_inference() or torch.is_inference_mode_enabled()
    return same_shape and same_kind and writable


def _claim_rows(old: Sequence[Tensor], buffer: Positions, size: int) -> bool:
    """Reserve the rows up to `size` for the caller, if they are free and follow those of `old`."""
    capacity = len(buffer) - 1
    for x in old:
        _, h, _, e = x.shape
        if x.stride() != (h * capacity * e, capacity * e, e, 1):  # a copy, or a part of the buffer
            return False
    with _buffer_lock:
        if buffer[0] != old[0].shape[2] or size > capacity:
            return False
        buffer[0] = size
    return True
