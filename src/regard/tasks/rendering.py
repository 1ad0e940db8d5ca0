"""How a person sees an example or a prediction: text, table, image, curve or sound.

Every rendering has a form for the terminal (`to_text`); `regard.report` turns it into HTML.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SHADES = " ░▒▓█"
BARS = "▁▂▃▄▅▆▇█"
MAX_COLUMNS = 96  # of an image or a curve in the terminal


class Rendered(ABC):
    """Something to show."""

    @abstractmethod
    def to_text(self) -> str:
        """The form for the terminal."""


@dataclass(frozen=True)
class RenderedText(Rendered):
    """A text, with the spans (start, end, label) that are marked in it."""

    text: str
    spans: Sequence[tuple[int, int, str]] = ()

    def pieces(self) -> Iterator[tuple[str, str | None]]:
        """The text in order, in pieces with the label of their span or None; of spans that overlap,
        the first."""
        end = 0
        for start, stop, label in sorted(self.spans, key=lambda span: span[:2]):
            if start < end:
                continue
            if start > end:
                yield self.text[end:start], None
            yield self.text[start:stop], label
            end = stop
        if end < len(self.text):
            yield self.text[end:], None

    def to_text(self) -> str:
        """See `Rendered`: spans are written as [text](label)."""
        return "".join(
            text if label is None else f"[{text}]({label})" for text, label in self.pieces()
        )


@dataclass(frozen=True)
class RenderedTable(Rendered):
    """A table of texts and numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def to_text(self) -> str:
        """See `Rendered`."""
        lines = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


@dataclass(frozen=True)
class RenderedMatrix(Rendered):
    """Numbers from 0 to 1 (rows, columns) with a name for each row and column, as shades."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    caption: str = ""

    def to_text(self) -> str:
        """See `Rendered`: two characters per number, in five shades, under numbered columns."""
        width = max([len(name) for name in self.rows] + [0])
        numbers = "".join(f"{number % 100:>2}" for number in range(1, len(self.columns) + 1))
        lines = [f"{'':{width}} {numbers}"]
        for name, values in zip(self.rows, np.asarray(self.values).tolist(), strict=True):
            shades = (SHADES[min(4, max(0, int(5 * value)))] for value in values)
            lines.append(f"{name:{width}} {''.join(2 * shade for shade in shades)}".rstrip())
        names = ", ".join(f"{number} {name}" for number, name in enumerate(self.columns, 1))
        return "\n".join([*lines, names, *([self.caption] if self.caption else [])])


@dataclass(frozen=True)
class RenderedImage(Rendered):
    """Pixels (h, w) or (h, w, 3) of uint8, with a caption."""

    pixels: np.ndarray
    caption: str = ""

    def to_text(self) -> str:
        """See `Rendered`: two characters per pixel, in five shades."""
        gray = self.pixels if self.pixels.ndim == 2 else self.pixels.mean(-1)
        step = max(1, -(-2 * gray.shape[1] // MAX_COLUMNS))
        shades = gray[::step, ::step].astype(np.int64) * len(SHADES) // 256
        rows = ("".join(2 * SHADES[shade] for shade in row).rstrip() for row in shades.tolist())
        return "\n".join([*rows, *([self.caption] if self.caption else [])])


@dataclass(frozen=True)
class RenderedCurve(Rendered):
    """One or several curves by name, each a sequence of numbers; NaN is a gap."""

    series: Mapping[str, Sequence[float]]
    caption: str = ""

    def to_text(self) -> str:
        """See `Rendered`: one line of bars per curve."""
        lines = []
        for name, series in self.series.items():
            values = np.asarray(series, dtype=float)
            values = values[:: max(1, -(-len(values) // MAX_COLUMNS))]
            known = values[np.isfinite(values)]
            low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
            steps = (values - low) / ((high - low) or 1) * (len(BARS) - 1)
            bars = "".join(
                BARS[round(step)] if math.isfinite(step) else " " for step in steps.tolist()
            )
            lines.append(f"{name} {bars} {low:.3g} to {high:.3g}")
        return "\n".join([*lines, *([self.caption] if self.caption else [])])


@dataclass(frozen=True)
class RenderedSound(Rendered):
    """A wave (n) between -1 and 1 with its sampling rate in Hz."""

    wave: np.ndarray
    rate: int
    caption: str = ""

    def to_text(self) -> str:
        """See `Rendered`: its loudness over time."""
        parts = np.array_split(np.abs(self.wave), min(len(self.wave), MAX_COLUMNS) or 1)
        loudness = [float(part.max()) if len(part) else 0.0 for part in parts]
        seconds = f"{len(self.wave) / self.rate:.2f} s at {self.rate} Hz"
        return RenderedCurve({seconds: loudness}, self.caption).to_text()


@dataclass(frozen=True)
class RenderedParts(Rendered):
    """Several renderings, one below the other."""

    parts: Sequence[Rendered] = field(default_factory=list)

    def to_text(self) -> str:
        """See `Rendered`."""
        return "\n".join(part.to_text() for part in self.parts)
