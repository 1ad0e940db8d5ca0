"""Pictures as PNG, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from regard.show.picture import Picture
from regard.show.style import Colour, PartStyle, assign_styles, blend, legend_entries

BACKGROUND: Colour = (238, 240, 244)
INK, PALE = "#1d2330", "#6b7280"
CELLS = 96  # maximum cells per side
GRID_CELLS = 64  # up to this size there are lines between the cells
DPI = 140
LINE = 0.26  # height of a line of the legend, in inches


def save(path: Path, pictures: Sequence[Picture], title: str, subtitle: str) -> None:
    """Save the pictures of one recipe."""
    side = 5.6 if len(pictures) == 1 else 3.6
    sheet = FigureSheet(
        len(pictures), side, gap=(0.85, 0.75), margin=(0.85, 0.4), top=1.6, bottom=0.85
    )
    sheet.title(title, subtitle)
    look = assign_styles(pictures)
    for index, picture in enumerate(pictures):
        axes = sheet.square(index)
        _paint(axes, picture, look)
        _axes(axes, picture)
    sheet.legend(look)
    sheet.save(path)


def save_gallery(path: Path, named: Sequence[tuple[str, str, Picture]], title: str) -> None:
    """Save many recipes, each as (name, paper, picture), in one grid with one legend."""
    look = assign_styles([picture for _, _, picture in named])
    # names and papers, and at most one line per colour
    below = 0.85 + LINE * len(legend_entries(look))
    sheet = FigureSheet(
        len(named), 2.8, gap=(0.3, 0.75), margin=(0.35, 0.35), top=1.15, bottom=below
    )
    tokens = max(picture.tokens for _, _, picture in named)
    subtitle = f"{tokens} tokens; rows are queries, columns are keys; coloured pairs may attend"
    sheet.title(title, subtitle)
    for index, (name, paper, picture) in enumerate(named):
        axes = sheet.square(index)
        _paint(axes, picture, look)
        axes.set_xticks([])
        axes.set_yticks([])
        centred = {"transform": axes.transAxes, "ha": "center", "va": "top"}
        axes.text(0.5, -0.045, name, fontsize=13, weight="bold", color=INK, **centred)
        axes.text(0.5, -0.125, paper, fontsize=9, color=PALE, **centred)
    sheet.legend(look)
    sheet.save(path)


class FigureSheet:
    """A figure with a grid of equal squares, up to four per row. Sizes are in inches."""

    def __init__(
        self,
        count: int,
        side: float,
        *,
        gap: tuple[float, float],
        margin: tuple[float, float],
        top: float,
        bottom: float,
    ) -> None:
        self.columns = min(count, 4)
        rows = ceil(count / self.columns)
        self.side, self.gap, self.left, self.top = side, gap, margin[0], top
        self.width = sum(margin) + self.columns * side + (self.columns - 1) * gap[0]
        self.height = top + bottom + rows * side + (rows - 1) * gap[1]
        self.figure = _figure(self.width, self.height)

    def title(self, title: str, subtitle: str) -> None:
        """Add a title and a subtitle."""
        for words, down, look in (
            (title, 0.42, {"fontsize": 19, "weight": "bold", "color": INK}),
            (subtitle, 0.8, {"fontsize": 10.5, "color": PALE}),
        ):
            self.figure.text(0.35 / self.width, 1 - down / self.height, words, va="center", **look)

    def square(self, index: int) -> Any:
        """Axes of a square, counted by rows from the top left."""
        row, column = divmod(index, self.columns)
        x = self.left + column * (self.side + self.gap[0])
        y = self.height - self.top - self.side - row * (self.side + self.gap[1])
        return self.figure.add_axes(
            (x / self.width, y / self.height, self.side / self.width, self.side / self.height)
        )

    def legend(self, look: Mapping[str, PartStyle]) -> None:
        """Add a legend at the bottom."""
        from matplotlib.patches import Patch

        patches = [
            Patch(facecolor=_share(style.colour), label=words)
            for style, words in legend_entries(look)
        ]
        longest = max((len(words) for words in look), default=0)
        columns = max(1, min(len(patches), int(self.width / (0.5 + 0.075 * longest))))
        self.figure.legend(
            handles=patches,
            loc="lower center",
            ncols=columns,
            frameon=False,
            fontsize=10.5,
            labelcolor=INK,
            handlelength=1.1,
            handleheight=1.1,
            columnspacing=1.3,
            handletextpad=0.6,
            bbox_to_anchor=(0.5, 0.12 / self.height),
        )

    def save(self, path: Path) -> None:
        """Save as PNG, whatever the suffix."""
        self.figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Saving a PNG requires matplotlib: pip install regard[plot]") from error
    return Figure(figsize=(width, height))


def _paint(axes: Any, picture: Picture, look: dict[str, PartStyle]) -> None:
    """Draw the cells, with lines between them if they are few."""
    size = picture.cells
    pixels = [[_pixel(picture, look, i, j) for j in range(size)] for i in range(size)]
    axes.imshow(pixels, interpolation="nearest", aspect="equal")
    for side in axes.spines.values():
        side.set_visible(False)
    if size <= GRID_CELLS:
        for edge in range(size + 1):
            axes.axhline(edge - 0.5, color="white", linewidth=22 / max(size, 12))
            axes.axvline(edge - 0.5, color="white", linewidth=22 / max(size, 12))
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)


def _pixel(picture: Picture, look: dict[str, PartStyle], i: int, j: int) -> Colour:
    index = int(picture.part[i, j])
    if index < 0:
        return BACKGROUND
    return blend(look[picture.parts[index].label].colour, BACKGROUND, float(picture.shade[i, j]))


def _axes(axes: Any, picture: Picture) -> None:
    """Label the positions of keys (top) and queries (left)."""
    n = picture.tokens
    labels = sorted({0, n // 3, 2 * n // 3, n - 1})
    per = -(-n // picture.cells)
    at = [(position + 0.5) / per - 0.5 for position in labels]
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    words = [f"{position:,}" for position in labels]
    axes.set_xticks(at, words, color=PALE, fontsize=9)
    axes.set_yticks(at, words, color=PALE, fontsize=9)
    axes.tick_params(length=0)
    label = f"key token  ·  {picture.title}" if picture.title else "key token"
    axes.set_xlabel(label, color=INK, fontsize=10.5, labelpad=5)
    axes.set_ylabel("query token", color=INK, fontsize=10.5, labelpad=5)


def _share(colour: Colour) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
