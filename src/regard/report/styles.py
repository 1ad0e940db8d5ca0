"""How a mechanism looks: a colour, a shape and a dash, the same in all plots of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from regard.compare.plan import CONSTANT_BASELINE, DENSE_MIXER, spec_label
from regard.report.markup import SafeHtml, join, tag

GREY = "#808080"  # dense softmax, always; it can be read on black and on white
# colours that are told apart by those who confuse red and green (Okabe & Ito 2008), without black and yellow
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
    """Of one mechanism."""

    colour: str
    shape: str
    dash: tuple[int, ...]


def assign_styles(
    names: Iterable[str], dense: str = spec_label(DENSE_MIXER)
) -> dict[str, SeriesStyle]:
    """name -> look; colours come again with another dash and shape, so that no two are alike before 24 of them."""
    found = {dense: SeriesStyle(GREY, "circle", DASHES[0])}
    others = [name for name in dict.fromkeys(names) if name not in (dense, CONSTANT_BASELINE)]
    shapes = list(SHAPES)
    for i, name in enumerate(others):
        turn, colour = divmod(i, len(COLOURS))
        found[name] = SeriesStyle(
            COLOURS[colour], shapes[(colour + turn + 1) % len(shapes)], DASHES[turn % len(DASHES)]
        )
    return found


def legend(found: dict[str, SeriesStyle]) -> SafeHtml:
    """A sample of each, and its name."""
    items = (
        tag(
            "li",
            swatch(look),
            name + (" (dense softmax)" if name == spec_label(DENSE_MIXER) else ""),
        )
        for name, look in found.items()
    )
    return tag("ul", *items, class_="legend")


def swatch(look: SeriesStyle) -> SafeHtml:
    """A short line with the shape on it."""
    dash = " ".join(map(str, look.dash)) if look.dash[1] else "none"
    line = tag(
        "line", x1=0, y1=8, x2=30, y2=8, stroke=look.colour, stroke_width=2, stroke_dasharray=dash
    )
    shape = tag("path", d=SHAPES[look.shape], transform="translate(15,8)", fill=look.colour)
    return tag(
        "svg", join(line, shape), width=30, height=16, viewBox="0 0 30 16", aria_hidden="true"
    )
