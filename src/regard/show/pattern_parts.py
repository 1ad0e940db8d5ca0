"""The parts of a pattern, with words for them: what a legend names and a colour stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

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
)


@dataclass(frozen=True)
class PatternPart:
    """One member of a union: its kind, which decides its colour, the words of the legend, and the pairs it allows."""

    kind: str
    words: str
    pattern: Pattern


def split_pattern(pattern: Pattern, n: int) -> list[PatternPart]:
    """The members of the union that a pattern is, in its order; members of one name are one part.

    Marks are known only at run time, so two of the n tokens stand for them.
    """
    among = set(pattern.leaves())
    found: dict[tuple[str, str], Pattern] = {}
    for member in _members(pattern):
        name = _name(member, among)
        found[name] = found.get(name, Nothing()) | _with_marks(member, n)
    return [PatternPart(kind, words, p) for (kind, words), p in found.items()]


def _members(pattern: Pattern) -> Iterator[Pattern]:
    """(a | b) & c has two: a & c and b & c."""
    if isinstance(pattern, Or):
        for part in pattern.parts:
            yield from _members(part)
        return
    union = (
        next((p for p in pattern.parts if isinstance(p, Or)), None)
        if isinstance(pattern, And)
        else None
    )
    if union is None:
        yield pattern
        return
    rest = reduce(and_, (p for p in pattern.parts if p is not union))
    for part in union.parts:
        yield from _members(part & rest)


def _with_marks(pattern: Pattern, n: int) -> Pattern:
    """The same with tokens n/4 and 2n/3 marked."""
    marked = (n // 4, 2 * n // 3)

    def settle(leaf: Pattern) -> Pattern:
        kind = {"queries": Queries, "keys": Keys}.get(leaf._marks or "")
        return leaf if kind is None else reduce(or_, (kind(at, at + 1) for at in marked))

    return pattern.map_leaves(settle)


# ---------------------------------------------------------------------------------------------- words
def _name(pattern: Pattern, among: set[Pattern]) -> tuple[str, str]:
    """(kind, words) of a member; `among` are all leaves, for a leaf that means another thing beside another leaf."""
    if isinstance(pattern, And):
        names = [_name(p, among) for p in pattern.parts if p != Causal()]
        return names[0][0], " and ".join(words for _, words in names)
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
        return "dilated", "window with gaps"
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
            return "queries", "marked queries (two, say)"
        case GlobalMaskKeys():
            return "keys", "marked keys (two, say)"
        case KeyPhase():
            return "cells", "summary cells"
        case RandomBlocks():
            return "random", "random blocks"
        case BlockTable():
            return "random", "blocks by plan"
        case Neighbourhood():
            return "window", "window, shifted inward at the border"
        case Blocks():
            return "block", "own block and around it"
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
