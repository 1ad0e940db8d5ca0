"""Pictures in the terminal: half blocks with colours, or characters without."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard.show.picture import Picture
from regard.show.style import (
    Colour,
    PartStyle,
    assign_styles,
    blend,
    cell_character,
    legend_entries as style_legend,
)

GROUND: Colour = (43, 43, 51)
EMPTY = "·"
COLUMNS = 80


def supports_colour(console: Console) -> bool:
    """Whether the console shows colours: not with NO_COLOR, a pipe or a file."""
    return console.color_system is not None and not console.no_color


def max_cells(count: int, colour: bool) -> int:
    """Maximum number of cells per side for `count` pictures."""
    if colour:
        return {1: 48, 2: 36}.get(count, 24)
    return 40 if count == 1 else 18


def render_pictures(pictures: Sequence[Picture], colour: bool) -> RenderableType:
    """Pictures side by side, with a legend."""
    look = assign_styles(pictures)
    drawn = []
    for picture in pictures:
        lines = render_colour(picture, look) if colour else render_plain(picture, look)
        drawn.append(Text.assemble(picture.title, "\n", lines) if picture.title else lines)
    width = max(p.cells for p in pictures) * (1 if colour else 2) + 3
    each = max(1, COLUMNS // width)
    rows: list[RenderableType] = []
    for start in range(0, len(drawn), each):
        row = Table.grid(padding=(0, 3, 1, 0))
        row.add_row(*drawn[start : start + each])
        rows.append(row)
    return Group(*rows, legend(pictures, look, colour))


def render_plain(picture: Picture, look: dict[str, PartStyle]) -> Text:
    """Render without colours; a cell is two characters, about square."""
    return Text(
        "\n".join(
            "".join(2 * _mark(picture, look, i, j) for j in range(picture.cells))
            for i in range(picture.cells)
        )
    )


def _mark(picture: Picture, look: dict[str, PartStyle], i: int, j: int) -> str:
    index = int(picture.part[i, j])
    if index < 0:
        return EMPTY
    part = picture.parts[index]
    return cell_character(look[part.label], part.kind, float(picture.shade[i, j]))


def render_colour(picture: Picture, look: dict[str, PartStyle]) -> Text:
    """Render with colours; a line shows two rows of cells, as half blocks."""
    size, text = picture.cells, Text()
    for i in range(0, size, 2):
        for j in range(size):
            upper = _hex(_colour(picture, look, i, j))
            lower = f" on {_hex(_colour(picture, look, i + 1, j))}" if i + 1 < size else ""
            text.append("▀", upper + lower)
        text.append("\n" if i + 2 < size else "")
    return text


def _colour(picture: Picture, look: dict[str, PartStyle], i: int, j: int) -> Colour:
    index = int(picture.part[i, j])
    if index < 0:
        return GROUND
    return blend(look[picture.parts[index].label].colour, GROUND, float(picture.shade[i, j]))


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def legend(pictures: Sequence[Picture], look: dict[str, PartStyle], colour: bool) -> Text:
    """Legend: a sample and the label of each part."""
    kind = pictures[0].parts[0].kind
    items = []
    for style, words in style_legend(look):
        sample = Text("██", _hex(style.colour)) if colour else Text(_sample(style, kind))
        items.append(Text.assemble(sample, " ", words))
    return Text("   ").join(items)


def _sample(style: PartStyle, kind: str) -> str:
    if kind == "weight":
        return f"{cell_character(style, kind, 0.0)} … {cell_character(style, kind, 1.0)}"
    return 2 * style.mark
