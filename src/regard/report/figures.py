"""Patterns and maps as figures: pixels in a data URI, token names beside them."""

from __future__ import annotations

import math

from torch import Tensor

from regard.report.maps import AttentionMap, PatternPictures, coarse
from regard.report.markup import SafeHtml, join, tag
from regard.report.png import pattern_pixels, png_data_uri, weight_pixels
from regard.show.picture import Picture
from regard.show.style import assign_styles, legend_entries

SIDE, MARGIN = 330, 28  # of a labelled map and of the names beside it, in units of its picture
LETTERS = 9.5  # units that a name needs


def pattern_figure(drawn: PatternPictures) -> SafeHtml:
    """The pictures of a mechanism, and what their colours mean."""
    name = tag("figcaption", tag("strong", drawn.mixer), " · ", drawn.words)
    if not drawn.pictures:
        return tag("figure", tag("div", "not drawn", class_="nothing"), name, class_="card")
    look = assign_styles(drawn.pictures)
    squares = (
        _square(
            drawn.mixer,
            p,
            [look[part.words].colour if part.words in look else (0, 0, 0) for part in p.parts],
        )
        for p in drawn.pictures
    )
    keys = (tag("li", _sample(style.colour), words) for style, words in legend_entries(look))
    return tag(
        "figure",
        tag("div", *squares, class_="squares"),
        name,
        tag("ul", *keys, class_="legend"),
        class_="card",
    )


def _square(name: str, picture: Picture, colours: list[tuple[int, int, int]]) -> SafeHtml:
    words = f"Who may look at whom: {name} {picture.title}, {picture.tokens} tokens, rows are queries, columns are keys."
    seen = tag(
        "img",
        class_="pixels",
        src=png_data_uri(pattern_pixels(picture.part, picture.shade, colours)),
        alt=words,
    )
    return tag("div", seen, tag("span", picture.title) if picture.title else "")


def _sample(colour: tuple[int, int, int]) -> SafeHtml:
    return tag("i", class_="sample", style=f"background:rgb{colour}", aria_hidden="true")


# ---------------------------------------------------------------------------------------------- maps
def map_figure(found: AttentionMap) -> SafeHtml:
    """The mean over the heads of the first layer that has a map, and all heads folded below."""
    name = tag("strong", found.mixer)
    number = next((i for i, layer in enumerate(found.layers) if layer is not None), None)
    if number is None:
        return tag(
            "figure",
            tag("div", "no map", class_="nothing"),
            tag("figcaption", name, " · ", found.why),
            class_="card",
        )
    layer = found.layers[number]
    assert layer is not None
    title = f"Attention map of {found.mixer} on a test example of {found.task}: rows are queries, columns are keys."
    words = f" · layer {number + 1}, mean of {len(layer)} heads"
    return tag(
        "figure",
        labelled(layer.mean(0), found, title),
        tag("figcaption", name, words),
        _heads(found),
        class_="card",
    )


def labelled(weights: Tensor, found: AttentionMap, title: str) -> SafeHtml:
    """A map with the names of its tokens: keys above, queries at the left, those that have a target in bold."""
    whole = MARGIN + SIDE
    image = tag(
        "image",
        href=png_data_uri(weight_pixels(coarse(weights))),
        x=MARGIN,
        y=MARGIN,
        width=SIDE,
        height=SIDE,
        class_="pixels",
        preserveAspectRatio="none",
    )
    frame = tag("rect", x=MARGIN, y=MARGIN, width=SIDE, height=SIDE, class_="frame")
    names = _names(found) if len(found.tokens) == len(weights) else join()
    return tag(
        "svg",
        tag("title", title),
        image,
        frame,
        names,
        viewBox=f"0 0 {whole} {whole}",
        role="img",
        class_="map",
    )


def _names(found: AttentionMap) -> SafeHtml:
    """As many as can be read."""
    n = len(found.tokens)
    cell = SIDE / n
    made = []
    for i in range(0, n, max(1, math.ceil(LETTERS / cell))):
        at, name = MARGIN + (i + 0.5) * cell, found.tokens[i]
        look = "asked" if found.asked[i] else ""
        made.append(
            tag("text", name, x=MARGIN - 4, y=f"{at + 3:.1f}", text_anchor="end", class_=look)
        )
        turned = f"translate({at + 3:.1f},{MARGIN - 4}) rotate(-90)"
        made.append(tag("text", name, transform=turned, class_=look))
    return join(*made)


def _heads(found: AttentionMap) -> SafeHtml:
    """All heads of all layers, small."""
    small = [
        tag(
            "div",
            tag(
                "img",
                class_="pixels",
                src=png_data_uri(weight_pixels(coarse(head))),
                alt=f"layer {number}, head {h}",
            ),
            tag("span", f"layer {number}, head {h}"),
        )
        for number, layer in enumerate(found.layers, 1)
        if layer is not None
        for h, head in enumerate(layer, 1)
    ]
    return tag("details", tag("summary", "each head"), tag("div", *small, class_="squares heads"))
