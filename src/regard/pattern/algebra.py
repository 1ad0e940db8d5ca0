"""What every pattern answers, and the operators that combine them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial, reduce
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import check_int

MAX_POSITION = (
    1 << 40
)  # beyond every position: stands for an unlimited reach, and for "any later query" in eviction
COUNT_TILE = 64  # the tile in which `keys_per_query` counts
COUNT_AT_ONCE = 512  # tiles evaluated exactly in one go: 2 MiB of booleans

Block = tuple[Tensor, Tensor]


class Pattern(ABC):
    """An expression over positions; see the module's docstring.  Instances are immutable and equal by value."""

    parts: tuple[Pattern, ...] = ()  # what an operator combines
    heads: int | None = None  # how many heads it tells apart (None: all alike)
    text: str | None = (
        None  # what it prints, where that was written down for an operator; see `regard.backends.traced`
    )

    # of a leaf:
    _compares_positions: bool = True
    _length: int | None = None
    _marks: str | None = None  # which side's marks it asks about: "queries" or "keys"

    # No `cached_property`: it holds a lock, and a graph that is compiled cannot.
    @property
    def compares_positions(self) -> bool:
        """Whether it compares query positions with key positions: then x and memory must be one sequence."""
        return (
            any(part.compares_positions for part in self.parts)
            if self.parts
            else self._compares_positions
        )

    @property
    def needs_global_mask(self) -> bool:
        """Whether it needs `marks`, which are known only at run time."""
        return (
            any(part.needs_global_mask for part in self.parts)
            if self.parts
            else self._marks is not None
        )

    @property
    def length(self) -> int | None:
        """How many positions it describes; None: any number."""
        limits = [part.length for part in self.parts] if self.parts else [self._length]
        known = [length for length in limits if length is not None]
        return min(known) if known else None

    def leaves(self) -> Iterator[Pattern]:
        """The leaves of the expression, from left to right."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    @abstractmethod
    def _allowed(self, q: Tensor, k: Tensor) -> Tensor: ...

    @abstractmethod
    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block: ...

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether query positions `q` see key positions `k`: integer tensors in, a bool tensor of their common shape out.

        Where heads differ, the result has a head axis in front.
        """
        return self._allowed(q, k).expand(self._shape(q, k))

    def block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        """(some, every) for the rectangles of queries q0..q1 and keys k0..k1, both ends included."""
        some, every = self._block(q0, q1, k0, k1)
        shape = self._shape(q0, q1, k0, k1)
        return some.expand(shape), every.expand(shape)

    def _shape(self, *positions: Tensor) -> tuple[int, ...]:
        shape = torch.broadcast_shapes(*(p.shape for p in positions))
        return (self.heads, *shape) if self.heads else tuple(shape)

    def first_visible_key(self, q: int) -> int | None:
        """The first key that query q sees, where it sees all from there to itself; None: where that is not so, or not known."""
        return None

    def dense(self, n: int, m: int | None = None) -> Tensor:
        """The whole mask, (n m), or (h n m) for `PerHead`.  Quadratic: for small sizes and for oracles."""
        check_int(0, n=n, m=n if m is None else m)
        q, k = torch.arange(n)[:, None], torch.arange(n if m is None else m)[None, :]
        return self.allowed(q, k)

    def keys_per_query(self, n: int, m: int | None = None) -> Tensor:
        """How many keys each query sees, (n), or (h n) where heads differ: counted by tiles, without an n x m mask."""
        if self.heads:
            return torch.stack([p.keys_per_query(n, m) for p in self.parts])
        q, k = position_tiles(n), position_tiles(n if m is None else m)
        some, every = classify_tiles(self, q, k)
        counts = (every.long() @ (k >= 0).sum(1))[:, None].repeat(1, COUNT_TILE)
        for at in (some & ~every).nonzero().split(COUNT_AT_ONCE):
            rows, cols = q[at[:, 0]], k[at[:, 1]]
            keep = self.allowed(rows[:, :, None], cols[:, None, :]) & (cols >= 0)[:, None, :]
            counts.index_add_(0, at[:, 0], keep.sum(-1))
        return counts.flatten()[:n]

    def density(self, n: int, m: int | None = None) -> float:
        """The share of all query-key pairs that may look at each other, in [0, 1]."""
        pairs = n * (n if m is None else m)
        return self.keys_per_query(n, m).double().mean().item() * n / pairs if pairs else 0.0

    def map_leaves(self, new: Callable[[Pattern], Pattern]) -> Pattern:
        """The same expression with `new(leaf)` for each leaf."""
        if not self.parts:
            return new(self)
        parts = [part.map_leaves(new) for part in self.parts]
        if isinstance(self, Not):
            return ~parts[0]
        return PerHead(tuple(parts)) if self.heads else reduce(partial(_combine, type(self)), parts)  # type: ignore[arg-type]

    def resolve_global_mask(self, queries: bool, keys: bool) -> Pattern:
        """What is left of the expression once it is known whether the query, and whether the key, is marked."""
        known = {None: None, "queries": queries, "keys": keys}

        def settle(leaf: Pattern) -> Pattern:
            value = known[leaf._marks]
            return leaf if value is None else Full() if value else Nothing()

        return self.map_leaves(settle) if self.needs_global_mask else self

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
    """The positions 0..n-1 in tiles of `size`, the last one filled up with -1."""
    at = torch.arange(-(-n // size) * size)
    return torch.where(at < n, at, -1).unflatten(0, (-1, size))


def tile_extent(positions: Tensor) -> Block:
    """The first and the last position in each tile."""
    return torch.where(positions < 0, MAX_POSITION, positions).amin(1), positions.amax(1)


# ---------------------------------------------------------------------------------------------- operators
@dataclass(frozen=True, repr=False)
class _Junction(Pattern):
    parts: tuple[Pattern, ...]

    symbol: ClassVar[str]

    @staticmethod
    @abstractmethod
    def join(a: Tensor, b: Tensor) -> Tensor: ...

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(self.join, (p._allowed(q, k) for p in self.parts))

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = zip(*(p._block(q0, q1, k0, k1) for p in self.parts), strict=True)
        return reduce(self.join, some), reduce(self.join, every)

    def __repr__(self) -> str:
        inner = (f"({p!r})" if isinstance(p, _Junction) else repr(p) for p in self.parts)
        return f" {self.symbol} ".join(inner)


class Or(_Junction):
    """At least one of the parts allows it.  Written `a | b`."""

    symbol = "|"

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        """Elementwise."""
        return a | b


class And(_Junction):
    """All of the parts allow it.  Written `a & b`."""

    symbol = "&"

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        """Elementwise."""
        return a & b

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern`: the latest of the parts."""
        firsts = [part.first_visible_key(q) for part in self.parts]
        return None if None in firsts else max(firsts)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """What the part does not allow.  Written `~a`."""

    parts: tuple[Pattern]

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return ~self.parts[0]._allowed(q, k)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = self.parts[0]._block(q0, q1, k0, k1)
        return ~every, ~some

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if isinstance(part, _Junction) else f"~{part!r}"


def _combine(kind: type[Or] | type[And], a: Pattern, b: Pattern) -> Pattern:
    """a | b or a & b, flattened, without repeats, and with Full and Nothing worked out."""
    if not isinstance(b, Pattern):
        raise TypeError(f"a pattern combines with a pattern, not with {b!r} ({type(b).__name__})")
    if a.heads or b.heads:
        return _by_head(kind, a, b)
    neutral, absorbing = (Nothing(), Full()) if kind is Or else (Full(), Nothing())
    parts: dict[Pattern, None] = {}
    for p in (a, b):
        parts |= dict.fromkeys(p.parts if type(p) is kind else (p,))
    parts.pop(neutral, None)
    if absorbing in parts:
        return absorbing
    return kind(tuple(parts)) if len(parts) > 1 else next(iter(parts), neutral)


def _by_head(kind: type[Or] | type[And], a: Pattern, b: Pattern) -> Pattern:
    left, right = (p.parts if p.heads else (p,) * (a.heads or b.heads or 1) for p in (a, b))
    if len(left) != len(right):
        raise ValueError(f"patterns for {len(left)} and for {len(right)} heads do not combine")
    return PerHead(tuple(_combine(kind, x, y) for x, y in zip(left, right, strict=True)))


class Leaf(Pattern):
    def _check(self, **least: int) -> None:
        """Each named field must be a whole number of at least so much."""
        for name, low in least.items():
            check_int(low, **{f"{type(self).__name__}: {name}": getattr(self, name)})

    def __repr__(self) -> str:
        """The shortest call that builds it again: trailing defaults are left out."""
        shown = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        while shown and shown[-1][1] == shown[-1][2]:
            shown.pop()
        return f"{type(self).__name__}({', '.join(repr(value) for _, value, _ in shown)})"


@dataclass(frozen=True, repr=False)
class Full(Leaf):
    """Every query sees every key."""

    _compares_positions = False

    def first_visible_key(self, q: int) -> int | None:
        """See `Pattern`."""
        return 0

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=q.device)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        seen = torch.ones((), dtype=torch.bool, device=q0.device)
        return seen, seen


def Nothing() -> Pattern:
    """No query sees any key."""
    return Not((Full(),))


@dataclass(frozen=True, repr=False)
class PerHead(Pattern):
    """One pattern for each head.  Operators act on each, so that it always stands outermost; masks get a head axis."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, list | tuple):
            raise ValueError(f"PerHead takes a pattern for each head, not {self.parts!r}")
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "heads", len(self.parts))
        if not self.parts or not all(isinstance(p, Pattern) and not p.heads for p in self.parts):
            raise ValueError(f"PerHead takes a pattern for each head, not {self.parts!r}")

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([p.allowed(q, k) for p in self.parts])

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        some, every = zip(*(p.block(q0, q1, k0, k1) for p in self.parts), strict=True)
        return torch.stack(some), torch.stack(every)

    def __repr__(self) -> str:
        return f"PerHead({self.parts!r})"
