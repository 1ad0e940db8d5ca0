"""Colours and characters: one for each part, the same wherever that part appears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regard.show.picture import Picture

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class PartStyle:
    """How a part looks: in colour, and without."""

    colour: Colour
    mark: str


# colours that people who confuse red and green can tell apart; marks that say what they mean where that is possible
STYLES = {
    "window": PartStyle((46, 110, 216), "#"),
    "queries": PartStyle((214, 73, 51), "="),
    "keys": PartStyle((244, 157, 55), "|"),
    "random": PartStyle((34, 160, 107), "o"),
    "block": PartStyle((0, 150, 160), "%"),
    "dilated": PartStyle((92, 176, 232), "+"),
    "stride": PartStyle((154, 88, 196), ":"),
    "cells": PartStyle((218, 92, 150), "!"),
    "past": PartStyle((46, 110, 216), "#"),
    "all": PartStyle((46, 110, 216), "#"),
    "weight": PartStyle((46, 110, 216), "#"),
    "other": PartStyle((128, 128, 140), "x"),
}
SPARE = (
    PartStyle((140, 110, 50), "&"),
    PartStyle((230, 200, 40), "*"),
    PartStyle((100, 100, 100), "~"),
)
RAMP = ".:-=+*#%@"  # of weights, from little to much
FAINT = 0.3  # how strong the lightest shade is: less could not be told from nothing


def assign_styles(pictures: Sequence[Picture]) -> dict[str, PartStyle]:
    """words -> style, for all parts that can be seen.  A kind looks the same in all pictures, two parts of one never alike."""
    chosen: dict[str, PartStyle] = {}
    for picture in pictures:
        parts = picture.legend()
        for part in parts:
            if part.words not in chosen:
                taken = [chosen[other.words] for other in parts if other.words in chosen]
                chosen[part.words] = next(
                    (s for s in (STYLES[part.kind], *SPARE) if s not in taken), SPARE[-1]
                )
    return chosen


def legend_entries(look: Mapping[str, PartStyle]) -> list[tuple[PartStyle, str]]:
    """The samples of a legend: parts that look alike share one."""
    words: dict[PartStyle, list[str]] = {}
    for part, style in look.items():
        words.setdefault(style, []).append(part)
    return [(style, ", ".join(parts)) for style, parts in words.items()]


def blend(colour: Colour, ground: Colour, shade: float) -> Colour:
    """A colour laid on a ground, the thinner the less of it there is."""
    strength = FAINT + (1 - FAINT) * shade**0.5
    red, green, blue = (round(g + (c - g) * strength) for c, g in zip(colour, ground, strict=True))
    return red, green, blue


def cell_character(style: PartStyle, kind: str, shade: float) -> str:
    """The character of a cell without colour."""
    return RAMP[min(int(shade * len(RAMP)), len(RAMP) - 1)] if kind == "weight" else style.mark
