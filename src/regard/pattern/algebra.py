"""The base class of patterns and the operators `|`, `&`, `~` and `PerHead`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import check_int

# beyond every position: unlimited reach, or "any later query" in cache eviction
MAX_POSITION = 1 << 40
MAX_START = MAX_POSITION >> 1  # of the first query or key of a call, which has more tokens
MAX_SIZE = 1 << 53  # of the numbers of a leaf: sums with positions stay far below 2**63
COUNT_TILE = 64  # tile size used by `keys_per_query`
COUNT_BATCH = 512  # partial tiles that `keys_per_query` evaluates at once: 2 MiB of booleans

Block = tuple[Tensor, Tensor]  # (some, every), see `regard.pattern`


class Pattern(ABC):
    """An expression over positions, see `regard.pattern`.

    Patterns are immutable, hashable and equal by value.
    """

    parts: tuple[Pattern, ...] = ()  # operands; empty for a leaf
    heads: int | None = None  # number of heads for `PerHead`; None if all heads are alike
    graph_id: str | None = None  # set by `regard.backends.traced.intern_pattern`

    # Set by leaves:
    _compares_positions: bool = True
    _length: int | None = None
    _global_mask_side: str | None = None  # "queries" or "keys"

    # These are plain properties because `cached_property` holds a lock, which torch.compile cannot
    # trace.
    @property
    def compares_positions(self) -> bool:
        """Whether query positions are compared with key positions.

        Such a pattern does not fit cross-attention.
        """
        return any(leaf._compares_positions for leaf in self.leaves())

    @property
    def needs_global_mask(self) -> bool:
        """Whether it contains `GlobalMask`, which depends on the `global_attention_mask` of the
        call.
        """
        if not self.parts:
            return self._global_mask_side is not None
        return any(part.needs_global_mask for part in self.parts)

    @property
    def length(self) -> int | None:
        """Maximum number of positions; None if unlimited."""
        if not self.parts:
            return self._length
        limits = [part.length for part in self.parts]
        lengths = [limit for limit in limits if limit is not None]
        return min(lengths) if lengths else None  # torch.compile breaks at min(default=)

    def leaves(self) -> Iterator[Pattern]:
        """The leaves of the expression, from left to right."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    @abstractmethod
    def _allows(self, q: Tensor, k: Tensor) -> Tensor: ...

    @abstractmethod
    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block: ...

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether query positions `q` may attend to key positions `k`: integer tensors that
        broadcast -> bool tensor.

        With `PerHead` the result has a leading head axis.
        """
        return self._allows(q, k).expand(self._shape(q, k))

    def block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        """(some, every) for rectangles of queries q0..q1 and keys k0..k1, both ends included."""
        some, every = self._block(q0, q1, k0, k1)
        shape = self._shape(q0, q1, k0, k1)
        return some.expand(shape), every.expand(shape)

    def _shape(self, *positions: Tensor) -> tuple[int, ...]:
        shape = torch.broadcast_shapes(*(p.shape for p in positions))
        return (self.heads, *shape) if self.heads else tuple(shape)

    def first_visible_key(self, q: int) -> int | None:
        """The first key of query q if it sees every key from there to itself; None if not, or if
        unknown.
        """
        return None

    def dense(self, n: int, m: int | None = None) -> Tensor:
        """The full mask (n m), or (h n m) for `PerHead`. Quadratic: for small sizes and tests."""
        check_int(0, n=n, m=n if m is None else m)
        q, k = torch.arange(n)[:, None], torch.arange(n if m is None else m)[None, :]
        return self.allows(q, k)

    def keys_per_query(self, n: int, m: int | None = None) -> Tensor:
        """Number of keys that each query sees, (n) or (h n) for `PerHead`; counted by tiles,
        without the n x m mask.
        """
        if self.heads:
            return torch.stack([p.keys_per_query(n, m) for p in self.parts])
        q, k = position_tiles(n), position_tiles(n if m is None else m)
        some, every = classify_tiles(self, q, k)
        counts = (every.long() @ (k >= 0).sum(1))[:, None].repeat(1, COUNT_TILE)
        for at in (some & ~every).nonzero().split(COUNT_BATCH):
            rows, cols = q[at[:, 0]], k[at[:, 1]]
            keep = self.allows(rows[:, :, None], cols[:, None, :]) & (cols >= 0)[:, None, :]
            counts.index_add_(0, at[:, 0], keep.sum(-1))
        return counts.flatten()[:n]

    def density(self, n: int, m: int | None = None) -> float:
        """The fraction of query-key pairs that are allowed, in [0, 1]."""
        pairs = n * (n if m is None else m)
        return self.keys_per_query(n, m).double().mean().item() * n / pairs if pairs else 0.0

    def map_leaves(self, new: Callable[[Pattern], Pattern]) -> Pattern:
        """The same expression with every leaf replaced by `new(leaf)`."""
        if not self.parts:
            return new(self)
        parts = [part.map_leaves(new) for part in self.parts]
        if isinstance(self, Not):
            return ~parts[0]
        if self.heads:
            return PerHead(tuple(parts))
        return reduce(partial(_combine, type(self)), parts)  # type: ignore[arg-type]

    def resolve_global_mask(self, queries: bool, keys: bool) -> Pattern:
        """The pattern for queries and keys that are, or are not, in the `global_attention_mask`."""
        if not self.needs_global_mask:
            return self
        known = {None: None, "queries": queries, "keys": keys}

        def resolve(leaf: Pattern) -> Pattern:
            value = known[leaf._global_mask_side]
            return leaf if value is None else Full() if value else Nothing()

        return self.map_leaves(resolve)

    def __or__(self, other: Pattern) -> Pattern:
        return _combine(Or, self, other)

    def __and__(self, other: Pattern) -> Pattern:
        return _combine(And, self, other)

    def __invert__(self) -> Pattern:
        if self.heads:
            return PerHead(tuple(~p for p in self.parts))
        return self.parts[0] if isinstance(self, Not) else Not((self,))


def classify_tiles(pattern: Pattern, q: Tensor, k: Tensor) -> Block:
    """(some, every), each (r c), for tiles of positions q (r s) and k (c t); -1 = no token."""
    (q0, q1), (k0, k1) = tile_extent(q), tile_extent(k)
    return pattern.block(q0[:, None], q1[:, None], k0[None], k1[None])


def position_tiles(n: int, size: int = COUNT_TILE) -> Tensor:
    """The positions 0..n-1 in tiles (tiles size), the last one padded with -1."""
    at = torch.arange(-(-n // size) * size)
    return torch.where(at < n, at, -1).unflatten(0, (-1, size))


def tile_extent(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position of each tile."""
    return torch.where(positions < 0, MAX_POSITION, positions).amin(1), positions.amax(1)


# ---------------------------------------------------------------------- operators
@dataclass(frozen=True, repr=False)
class _Junction(Pattern):
    parts: tuple[Pattern, ...]

    symbol: ClassVar[str]
    join: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(type(self).join, [p._allows(q, k) for p in self.parts])

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = zip(*(p._block(q0, q1, k0, k1) for p in self.parts), strict=True)
        return reduce(type(self).join, some), reduce(type(self).join, every)

    def __repr__(self) -> str:
        inner = (f"({p!r})" if isinstance(p, _Junction) else repr(p) for p in self.parts)
        return f" {self.symbol} ".join(inner)


class Or(_Junction):
    """Pairs that at least one part allows, written `a | b`."""

    symbol, join = "|", operator.or_


class And(_Junction):
    """Pairs that all parts allow, written `a & b`."""

    symbol, join = "&", operator.and_

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern.first_visible_key`."""
        firsts = [part.first_visible_key(q) for part in self.parts]
        return None if None in firsts else max(firsts)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """Pairs that the part does not allow, written `~a`."""

    parts: tuple[Pattern]

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return ~self.parts[0]._allows(q, k)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = self.parts[0]._block(q0, q1, k0, k1)
        return ~every, ~some

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if isinstance(part, _Junction) else f"~{part!r}"


def _combine(kind: type[Or] | type[And], a: Pattern, b: Pattern) -> Pattern:
    """a | b or a & b: flattened, without duplicates, simplified where a part is Full or Nothing."""
    if not isinstance(b, Pattern):
        raise TypeError(f"a pattern combines with a pattern, not with {b!r} ({type(b).__name__})")
    if a.heads or b.heads:
        left, right = (p.parts if p.heads else (p,) * (a.heads or b.heads or 1) for p in (a, b))
        if len(left) != len(right):
            raise ValueError(f"cannot combine patterns for {len(left)} and for {len(right)} heads")
        return PerHead(tuple(_combine(kind, x, y) for x, y in zip(left, right, strict=True)))
    neutral, absorbing = (Nothing(), Full()) if kind is Or else (Full(), Nothing())
    parts: dict[Pattern, None] = {}
    for p in (a, b):
        parts |= dict.fromkeys(p.parts if type(p) is kind else (p,))
    parts.pop(neutral, None)
    if absorbing in parts:
        return absorbing
    return kind(tuple(parts)) if len(parts) > 1 else next(iter(parts), neutral)


@dataclass(frozen=True, repr=False)
class PerHead(Pattern):
    """One pattern per head.

    Operators apply to each head, so `PerHead` is always outermost; masks get a head axis.
    """

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        valid = isinstance(self.parts, list | tuple) and self.parts
        if not valid or not all(isinstance(p, Pattern) and not p.heads for p in self.parts):
            raise ValueError(f"PerHead takes one pattern per head, not {self.parts!r}")
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "heads", len(self.parts))

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([p.allows(q, k) for p in self.parts])

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = zip(*(p.block(q0, q1, k0, k1) for p in self.parts), strict=True)
        return torch.stack(some), torch.stack(every)

    def __repr__(self) -> str:
        return f"PerHead({self.parts!r})"


# ---------------------------------------------------------------------- leaves
class Leaf(Pattern):
    """Base class of leaves, which are frozen dataclasses."""

    def _check(self, **least: int) -> None:
        """Each named field must be an integer from the given value to `MAX_SIZE`."""
        for name, low in least.items():
            check_int(low, MAX_SIZE, **{f"{type(self).__name__}: {name}": getattr(self, name)})

    def __repr__(self) -> str:
        """The shortest call that builds the leaf: trailing defaults are omitted."""
        values = [(getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        while values and values[-1][0] == values[-1][1]:
            values.pop()
        return f"{type(self).__name__}({', '.join(repr(value) for value, _ in values)})"


@dataclass(frozen=True, repr=False)
class Full(Leaf):
    """Every query sees every key."""

    _compares_positions = False

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern.first_visible_key`."""
        return 0

    def _allows(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=q.device)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        every = self._allows(q0, k0)
        return every, every


def Nothing() -> Pattern:
    """No query sees any key."""
    return Not((Full(),))
