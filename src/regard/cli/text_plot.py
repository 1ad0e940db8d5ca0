"""A curve in a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot_text(
    steps: Sequence[float], values: Sequence[float], name: str, *, width: int = 60, height: int = 6
) -> str:
    """Values over steps as columns, the largest and the smallest written at the side, the steps below."""
    places = [i for i, value in enumerate(values) if math.isfinite(value)]
    if not places:
        return f"{name}: no values yet"
    low, high = min(values[i] for i in places), max(values[i] for i in places)
    columns = [columned(values[i], low, high, height) for i in sampled(places, width)]
    lines = ["".join(column[row] for column in columns) for row in reversed(range(height))]
    side = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    wide = max(map(len, side))
    shown = [f"{text.rjust(wide)} │{line}" for text, line in zip(side, lines, strict=True)]
    first, last = f"{steps[places[0]]:g}", f"{steps[places[-1]]:g}"
    below = (
        f"{first}{last.rjust(max(len(last) + 1, len(columns) - len(first)))}"
        if len(places) > 1
        else first
    )
    return "\n".join(
        [name, *shown, f"{' ' * wide} └{'─' * len(columns)}", f"{' ' * (wide + 2)}{below}"]
    )


def sampled(places: Sequence[int], width: int) -> list[int]:
    """At most so many of them, evenly; few are drawn several times, to be seen."""
    repeat = max(1, min(4, width // len(places)))
    if len(places) > width:
        return [places[round(i * (len(places) - 1) / (width - 1))] for i in range(width)]
    return [place for place in places for _ in range(repeat)]


def columned(value: float, low: float, high: float, height: int) -> list[str]:
    """One value as a column of characters, the lowest first: at least an eighth, at most all of it."""
    share = 1.0 if high == low else (value - low) / (high - low)
    eighths = 1 + round(share * (8 * height - 1))
    return [EIGHTHS[max(0, min(8, eighths - 8 * row))] for row in range(height)]
