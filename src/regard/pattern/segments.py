"""Packed sequences: several sequences one after another, each attending within itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from regard.errors import Unsupported, check_int
from regard.pattern.algebra import MAX_START, Block, Full, Leaf, Pattern
from regard.pattern.leaves import Band, GlobalMaskKeys, GlobalMaskQueries

# These leaves are the same from whichever position one counts.
_SHIFT_INVARIANT = (Full, Band, GlobalMaskQueries, GlobalMaskKeys)


class _SegmentLeaf(Leaf):
    """A leaf over segments of the given lengths, one after another."""

    lengths: tuple[int, ...]

    _tables: ClassVar[tuple[Tensor, Tensor]]  # of each instance, but not one of its fields

    def _set_tables(self) -> None:
        name, lengths = type(self).__name__, self.lengths
        if not isinstance(lengths, Sequence) or not lengths:
            raise ValueError(f"{name}: lengths must list the length of each segment: {lengths!r}")
        for length in lengths:
            check_int(1, **{f"{name}: each of lengths": length})
        check_int(1, MAX_START, **{f"{name}: the sum of lengths": sum(lengths)})
        object.__setattr__(self, "lengths", tuple(lengths))
        object.__setattr__(self, "_length", sum(lengths))
        object.__setattr__(self, "_tables", _segment_tables(self.lengths))

    def _segment(self, positions: Tensor) -> Tensor:
        """The number of the segment of each position; positions past the end are in one more."""
        numbers = self._tables[1].to(positions.device)
        return numbers[positions.clamp(0, len(numbers) - 1)]

    def _starts(self, device: torch.device) -> Tensor:
        """The first position of each segment, and the first position past the end."""
        return self._tables[0].to(device)


@lru_cache(64)
def _segment_tables(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The starts (s + 1) of s segments, and the segment of each position (n + 1)."""
    with torch.inference_mode(False):  # the tables are cached and must be usable in training
        sizes = torch.tensor([*lengths, 1], device="cpu")
        numbers = torch.arange(len(sizes), dtype=torch.int32, device="cpu")
        return sizes.cumsum(0) - sizes, numbers.repeat_interleave(sizes)


@dataclass(frozen=True, repr=False)
class Segments(_SegmentLeaf):
    """The sequence is a row of segments of the given lengths; a query sees its own segment.

    This is the block-diagonal mask of packed sequences. Defined for `sum(lengths)` positions.
    `Segments.from_cu_seqlens` and `Segments.from_ids` build it from what other libraries use.

    >>> Segments((2, 1)).dense(3).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        self._set_tables()

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, n: int | None = None) -> Segments:
        """Segments that begin and end at the given offsets, as in FlashAttention.

        Args:
            cu_seqlens: (s + 1) integers: 0, the end of each sequence, the last of them n. Empty
                sequences are left out.
            n: Number of tokens. If given, the last offset must be n.
        """
        return cls(lengths_from_cu_seqlens(cu_seqlens, n))

    @classmethod
    def from_ids(cls, ids: Tensor) -> Segments:
        """Segments of equal ids (n), which must not decrease.

        >>> Segments.from_ids(torch.tensor([0, 0, 0, 4, 4]))
        Segments((3, 2))
        """
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point():
            got = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else repr(ids)
            raise ValueError(f"segment ids must be a tensor of integers of shape (n,), not {got}")
        steps = ids.long().diff()
        if bool((steps < 0).any()):
            at = int((steps < 0).nonzero()[0]) + 1
            raise ValueError(
                f"segment ids must be sorted, but ids[{at}] = {int(ids[at])} follows "
                f"{int(ids[at - 1])}: sort the tokens by segment first"
            )
        return cls(tuple(torch.unique_consecutive(ids, return_counts=True)[1].tolist()))

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        segment = self._segment(q)
        return (segment == self._segment(k)) & (segment < len(self.lengths))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        first_q, last_q, first_k, last_k = (self._segment(x) for x in (q0, q1, k0, k1))
        first, last = torch.maximum(first_q, first_k), torch.minimum(last_q, last_k)
        some = (first <= last) & (first < len(self.lengths))
        return some, some & (first_q == last_q) & (first_k == last_k)


@dataclass(frozen=True, repr=False)
class Restarted(_SegmentLeaf):
    """A leaf whose positions restart at 0 in each segment; no pair of two segments is visible."""

    leaf: Pattern
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.leaf, Leaf):
            raise ValueError(
                f"Restarted takes a leaf such as Chunks(64), not {self.leaf!r}: use PerSegment"
            )
        self._set_tables()
        _check_longest(self.leaf, self.lengths)

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        segment, starts = self._segment(q), self._starts(q.device)
        same = (segment == self._segment(k)) & (segment < len(self.lengths))
        start = starts[segment]
        return same & self.leaf._allows((q - start).clamp(min=0), (k - start).clamp(min=0))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        starts, count = self._starts(q0.device), len(self.lengths)
        first = torch.maximum(self._segment(q0), self._segment(k0))
        last = torch.minimum(self._segment(q1), self._segment(k1))
        # Queries and keys share the segments first..last. If that is a single one, ask the leaf
        # about the part of the rectangle that is inside it.
        single = first.clamp(max=count - 1)
        start, end = starts[single], starts[single + 1] - 1
        inside = [torch.maximum(x, start) for x in (q0, k0)]
        inside += [torch.minimum(x, end) for x in (q1, k1)]
        a0, b0, a1, b1 = ((x - start).clamp(min=0) for x in inside)
        some, every = self.leaf._block(a0, torch.maximum(a0, a1), b0, torch.maximum(b0, b1))
        shared = (first <= last) & (first < count)
        whole = (q0 >= start) & (k0 >= start) & (q1 <= end) & (k1 <= end)
        return shared & ((first < last) | some), shared & whole & every


@_disable_dynamo  # lengths are data: a graph does not depend on them
def PerSegment(pattern: Pattern, lengths: Sequence[int]) -> Pattern:
    """The pattern within each of several packed segments: positions restart at 0 in each of them.

    `PerSegment(Causal(), lengths)` is `Causal() & Segments(lengths)`. Leaves that depend on
    absolute positions, such as `Chunks` and `Keys`, are wrapped in `Restarted`.

    Args:
        pattern: The pattern of one sequence.
        lengths: Length of each segment.
    """
    return _per_segment(pattern, tuple(lengths))


@lru_cache(256)  # all layers of a model ask for the same
def _per_segment(pattern: Pattern, lengths: tuple[int, ...]) -> Pattern:
    def restart(leaf: Pattern) -> Pattern:
        return leaf if isinstance(leaf, _SHIFT_INVARIANT) else Restarted(leaf, lengths)

    return pattern.map_leaves(restart) & Segments(lengths)


def _check_longest(pattern: Pattern, lengths: tuple[int, ...]) -> None:
    if pattern.length is not None and max(lengths) > pattern.length:
        raise ValueError(
            f"{pattern!r} supports {pattern.length} positions, but a segment has {max(lengths)}"
        )


def lengths_from_cu_seqlens(cu_seqlens: Tensor, n: int | None = None) -> tuple[int, ...]:
    """The lengths of the sequences that are not empty; see `Segments.from_cu_seqlens`."""
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        got = (
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
            if isinstance(cu_seqlens, Tensor)
            else repr(cu_seqlens)
        )
        raise ValueError(
            "cu_seqlens must be an int32 or int64 tensor of shape (sequences + 1,) with the "
            f"offsets of the sequences, such as [0, 3, 5], not {got}"
        )
    if torch.compiler.is_exporting():
        raise Unsupported(
            "cu_seqlens cannot be exported, because the pattern depends on its values: export with "
            "a batch of padded sequences and a mask"
        )
    offsets: list[int] = cu_seqlens.tolist()
    if len(offsets) < 2 or offsets[0] != 0:
        raise ValueError(
            f"cu_seqlens must begin with 0 and have 2 entries or more, not {offsets[:4]}"
        )
    lengths = [end - start for start, end in pairwise(offsets)]
    if min(lengths) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"cu_seqlens must not decrease, but {offsets[at + 1]} follows {offsets[at]} "
            f"(entry {at + 1})"
        )
    if n is not None and offsets[-1] != n:
        raise ValueError(f"cu_seqlens must end with the number of tokens, {n}, not {offsets[-1]}")
    return tuple(length for length in lengths if length)
