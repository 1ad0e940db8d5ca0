"""Colours and characters of the parts of a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regard.show.picture import Picture

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class PartStyle:
    """Colour of a part, and its character without colours."""

    colour: Colour
    mark: str


# distinguishable with red-green colour blindness
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
RAMP = ".:-=+*#%@"  # characters for weights, from small to large
FAINT = 0.3  # opacity of the lightest shade


def assign_styles(pictures: Sequence[Picture]) -> dict[str, PartStyle]:
    """Label -> style of all visible parts.

    A kind has the same style in all pictures; parts of one picture differ.
    """
    chosen: dict[str, PartStyle] = {}
    for picture in pictures:
        parts = picture.legend()
        for part in parts:
            if part.label not in chosen:
                taken = [chosen[other.label] for other in parts if other.label in chosen]
                chosen[part.label] = next(
                    (s for s in (STYLES[part.kind], *SPARE) if s not in taken), SPARE[-1]
                )
    return chosen


def legend_entries(look: Mapping[str, PartStyle]) -> list[tuple[PartStyle, str]]:
    """Entries of a legend; parts with the same style share one."""
    words: dict[PartStyle, list[str]] = {}
    for part, style in look.items():
        words.setdefault(style, []).append(part)
    return [(style, ", ".join(parts)) for style, parts in words.items()]


def blend(colour: Colour, ground: Colour, shade: float) -> Colour:
    """Blend a colour with a background by the shade in [0, 1]."""
    strength = FAINT + (1 - FAINT) * shade**0.5
    red, green, blue = (round(g + (c - g) * strength) for c, g in zip(colour, ground, strict=True))
    return red, green, blue


def cell_character(style: PartStyle, kind: str, shade: float) -> str:
    """Character of a cell, for output without colours."""
    return RAMP[min(int(shade * len(RAMP)), len(RAMP) - 1)] if kind == "weight" else style.mark
