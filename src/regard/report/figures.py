"""Patterns and attention maps as figures."""

from __future__ import annotations

import math

from torch import Tensor

from regard.report.maps import AttentionMap, PatternPictures, downsample
from regard.report.markup import SafeHtml, join, tag
from regard.report.png import pattern_pixels, png_data_uri, weight_pixels
from regard.show.style import assign_styles, legend_entries

MAP_SIZE, MAP_MARGIN = 330, 28  # of a map and the token names beside it, in SVG units
NAME_HEIGHT = 9.5  # of a token name


def pattern_figure(drawn: PatternPictures) -> SafeHtml:
    """Return the pictures of a mixer's pattern with a legend."""
    caption = tag("figcaption", tag("strong", drawn.mixer), " · ", drawn.caption)
    if not drawn.pictures:
        return tag("figure", tag("div", "not drawn", class_="empty"), caption, class_="card")
    styles = assign_styles(drawn.pictures)
    squares = []
    for picture in drawn.pictures:
        colours = [
            styles[part.label].colour if part.label in styles else (0, 0, 0)
            for part in picture.parts
        ]
        image = tag(
            "img",
            class_="pixels",
            src=png_data_uri(pattern_pixels(picture.part, picture.shade, colours)),
            alt=f"Attention pattern of {drawn.mixer} {picture.title} on {picture.tokens} tokens: "
            "rows are queries, columns are keys.",
        )
        title = tag("span", picture.title) if picture.title else ""
        squares.append(tag("div", image, title))
    keys = []
    for style, text in legend_entries(styles):
        colour = f"background:rgb{style.colour}"
        keys.append(tag("li", tag("i", class_="sample", style=colour, aria_hidden="true"), text))
    return tag(
        "figure",
        tag("div", *squares, class_="squares"),
        caption,
        tag("ul", *keys, class_="legend"),
        class_="card",
    )


def map_figure(found: AttentionMap) -> SafeHtml:
    """Return the first layer that has a map, averaged over heads, with all heads folded below."""
    name = tag("strong", found.mixer)
    layers = [(i, layer) for i, layer in enumerate(found.layers, 1) if layer is not None]
    if not layers:
        caption = tag("figcaption", name, " · ", found.reason)
        return tag("figure", tag("div", "no map", class_="empty"), caption, class_="card")
    number, first = layers[0]
    title = (
        f"Attention map of {found.mixer} on a test example of {found.task}: rows are queries, "
        "columns are keys."
    )
    small = []
    for i, layer in layers:
        for h, head in enumerate(layer, 1):
            alt = f"layer {i}, head {h}"
            pixels = png_data_uri(weight_pixels(downsample(head)))
            image = tag("img", class_="pixels", src=pixels, alt=alt)
            small.append(tag("div", image, tag("span", alt)))
    heads = tag("div", *small, class_="squares heads")
    return tag(
        "figure",
        map_svg(first.mean(0), found, title),
        tag("figcaption", name, f" · layer {number}, mean of {len(first)} heads"),
        tag("details", tag("summary", "all heads"), heads),
        class_="card",
    )


def map_svg(weights: Tensor, found: AttentionMap, title: str) -> SafeHtml:
    """Return a map with token names: keys above, queries on the left, those with a target bold."""
    box = {"x": MAP_MARGIN, "y": MAP_MARGIN, "width": MAP_SIZE, "height": MAP_SIZE}
    image = tag(
        "image",
        href=png_data_uri(weight_pixels(downsample(weights))),
        **box,
        class_="pixels",
        preserveAspectRatio="none",
    )
    names = []
    if len(found.tokens) == len(weights):
        cell = MAP_SIZE / len(weights)
        for i in range(0, len(weights), max(1, math.ceil(NAME_HEIGHT / cell))):
            position, name = MAP_MARGIN + (i + 0.5) * cell + 3, found.tokens[i]
            style = "target" if found.has_target[i] else ""
            y = f"{position:.1f}"
            names.append(tag("text", name, x=MAP_MARGIN - 4, y=y, text_anchor="end", class_=style))
            rotated = f"translate({position:.1f},{MAP_MARGIN - 4}) rotate(-90)"
            names.append(tag("text", name, transform=rotated, class_=style))
    size = MAP_MARGIN + MAP_SIZE
    return tag(
        "svg",
        tag("title", title),
        image,
        tag("rect", **box, class_="frame"),
        join(*names),
        viewBox=f"0 0 {size} {size}",
        role="img",
        class_="map",
    )
