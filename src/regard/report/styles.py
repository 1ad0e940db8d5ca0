"""The colour, shape and dash of each mixer, the same in all plots of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from regard.compare.plan import DENSE_MIXER, spec_label
from regard.report.markup import SafeHtml, tag

GREY = "#808080"  # dense softmax; visible on black and on white
# the colour-blind safe palette of Okabe & Ito (2008) without black and yellow
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
SHAPES = {
    "circle": "M0,-4.5A4.5,4.5 0 1 1 -0.01,-4.5Z",
    "square": "M-4,-4h8v8h-8Z",
    "triangle-up": "M0,-5L5,4H-5Z",
    "diamond": "M0,-5.5L4.5,0L0,5.5L-4.5,0Z",
    "triangle-down": "M0,5L5,-4H-5Z",
    "cross": "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
}
DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))


class SeriesStyle(NamedTuple):
    """How one mixer is drawn."""

    colour: str
    shape: str
    dash: tuple[int, ...]


def series_styles(
    names: Iterable[str], dense: str = spec_label(DENSE_MIXER)
) -> dict[str, SeriesStyle]:
    """Return a style for each name; up to 24 are distinct."""
    styles = {dense: SeriesStyle(GREY, "circle", DASHES[0])}
    others = [name for name in dict.fromkeys(names) if name != dense]
    shapes = list(SHAPES)
    for i, name in enumerate(others):
        cycle, colour = divmod(i, len(COLOURS))
        shape = shapes[(colour + cycle + 1) % len(shapes)]
        styles[name] = SeriesStyle(COLOURS[colour], shape, DASHES[cycle % len(DASHES)])
    return styles


def legend(styles: dict[str, SeriesStyle]) -> SafeHtml:
    """Return a list of all names, each with a short line in its style."""
    items = []
    for name, style in styles.items():
        colour, shape, dash = style
        dashes = " ".join(map(str, dash)) if dash[1] else "none"
        line = tag(
            "line", x1=0, y1=8, x2=30, y2=8, stroke=colour, stroke_width=2, stroke_dasharray=dashes
        )
        mark = tag("path", d=SHAPES[shape], transform="translate(15,8)", fill=colour)
        swatch = tag(
            "svg", line, mark, width=30, height=16, viewBox="0 0 30 16", aria_hidden="true"
        )
        suffix = " (dense softmax)" if name == spec_label(DENSE_MIXER) else ""
        items.append(tag("li", swatch, name + suffix))
    return tag("ul", *items, class_="legend")
