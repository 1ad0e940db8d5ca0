"""Splits a pattern into labelled parts for legends and colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_

from regard.pattern import (
    And,
    Band,
    Blocks,
    Blocks2D,
    BlockTable,
    Causal,
    Chunks,
    Full,
    GlobalMaskKeys,
    GlobalMaskQueries,
    KeyPhase,
    Keys,
    Neighbourhood,
    Not,
    Nothing,
    Or,
    Pattern,
    Queries,
    RandomBlocks,
    Restarted,
    Segments,
)


@dataclass(frozen=True)
class PatternPart:
    """One member of a union: its kind (sets the colour), its label in the legend, and its pairs."""

    kind: str
    label: str
    pattern: Pattern


def split_pattern(pattern: Pattern, n: int) -> list[PatternPart]:
    """Members of the union in their order; members with the same label are one part.

    Global tokens are chosen at run time; two of the n tokens stand for them.
    """
    among = set(pattern.leaves())
    found: dict[tuple[str, str], Pattern] = {}
    for member in _members(pattern):
        name = _name(member, among)
        found[name] = found.get(name, Nothing()) | _with_global_tokens(member, n)
    return [PatternPart(kind, label, p) for (kind, label), p in found.items()]


def _members(pattern: Pattern) -> Iterator[Pattern]:
    """Members of a union; (a | b) & c has two, a & c and b & c."""
    if isinstance(pattern, Or):
        for part in pattern.parts:
            yield from _members(part)
        return
    parts = pattern.parts if isinstance(pattern, And) else ()
    union = next((p for p in parts if isinstance(p, Or)), None)
    if union is None:
        yield pattern
        return
    rest = reduce(and_, (p for p in pattern.parts if p is not union))
    for part in union.parts:
        yield from _members(part & rest)


def _with_global_tokens(pattern: Pattern, n: int) -> Pattern:
    """The pattern with tokens n/4 and 2n/3 as global tokens."""

    def resolve(leaf: Pattern) -> Pattern:
        kind: type[Queries | Keys]
        if isinstance(leaf, GlobalMaskQueries):
            kind = Queries
        elif isinstance(leaf, GlobalMaskKeys):
            kind = Keys
        else:
            return leaf
        return kind(n // 4, n // 4 + 1) | kind(2 * n // 3, 2 * n // 3 + 1)

    return pattern.map_leaves(resolve)


# ----------------------------------------------------------------------------------------- labels
def _name(pattern: Pattern, among: set[Pattern]) -> tuple[str, str]:
    """Kind and label of a member.

    `among` are all leaves: the label of a leaf may depend on the others.
    """
    if isinstance(pattern, And):
        names = [_name(p, among) for p in pattern.parts if p != Causal()]
        return names[0][0], " and ".join(label for _, label in names)
    if isinstance(pattern, Not) and pattern != Nothing():
        return "other", f"all but {_name(pattern.parts[0], among)[1]}"
    if isinstance(pattern, Band):
        return _band(pattern, among)
    if isinstance(pattern, Chunks):
        return _chunks(pattern, among)
    return _leaf(pattern)


def _band(band: Band, among: set[Pattern]) -> tuple[str, str]:
    unlimited = band.left is None and band.right is None
    if unlimited and band.step > 1:
        return (
            ("stride", "own column")
            if Chunks(band.step) in among
            else ("stride", f"every {_nth(band.step)} token")
        )
    if band.step > 1:
        return "dilated", "dilated window"
    if band == Causal():
        return "past", "the past"
    return ("all", "everything") if unlimited else ("window", "window")


def _chunks(chunks: Chunks, among: set[Pattern]) -> tuple[str, str]:
    if chunks.back or chunks.ahead:
        return "window", "window"
    return "block", "own row" if Band(step=chunks.size) in among else "own block"


def _leaf(leaf: Pattern) -> tuple[str, str]:
    match leaf:
        case Full():
            return "all", "everything"
        case Queries():
            return "queries", "global queries"
        case Keys():
            return "keys", "global keys"
        case GlobalMaskQueries():
            return "queries", "global queries (two examples)"
        case GlobalMaskKeys():
            return "keys", "global keys (two examples)"
        case KeyPhase():
            return "cells", "summary cells"
        case RandomBlocks():
            return "random", "random blocks"
        case BlockTable():
            return "random", "listed blocks"
        case Neighbourhood():
            return "window", "window, shifted inward at the border"
        case Blocks():
            return "block", "own block and around it"
        case Segments():
            return "block", "own segment"
        case Restarted():
            return _name(leaf.leaf, set())
        case Blocks2D(rows=1, cols=1):
            return "window", "window on the image"
        case Blocks2D():
            return "block", "own block of the image and around it"
        case _:
            return "other", repr(leaf)


def _nth(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
