"""Plot a curve in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot_text(
    steps: Sequence[float],
    values: Sequence[float],
    name: str,
    *,
    width: int = 60,
    height: int = 6,
) -> str:
    """Plot values over steps as columns, with the range at the side and the steps below."""
    points = [i for i, value in enumerate(values) if math.isfinite(value)]
    if not points:
        return f"{name}: no values yet"
    low, high = min(values[i] for i in points), max(values[i] for i in points)
    if len(points) > width:
        shown = [points[round(i * (len(points) - 1) / (width - 1))] for i in range(width)]
    else:  # repeat columns, so that a few values are visible
        repeat = max(1, min(4, width // len(points)))
        shown = [point for point in points for _ in range(repeat)]
    fractions = [1.0 if high == low else (values[i] - low) / (high - low) for i in shown]
    eighths = [1 + round(fraction * (8 * height - 1)) for fraction in fractions]
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    lines = [name]
    for row, label in zip(reversed(range(height)), labels, strict=True):
        bars = "".join(EIGHTHS[max(0, min(8, filled - 8 * row))] for filled in eighths)
        lines.append(f"{label.rjust(margin)} │{bars}")
    first, last = f"{steps[points[0]]:g}", f"{steps[points[-1]]:g}"
    if len(points) > 1:
        first += last.rjust(max(len(last) + 1, len(shown) - len(first)))
    return "\n".join(
        [*lines, f"{' ' * margin} └{'─' * len(shown)}", f"{' ' * (margin + 2)}{first}"]
    )
