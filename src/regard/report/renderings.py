"""What `Task.render` returns as HTML: text, tables, images, curves and sounds.

All text comes from the user's data, so it goes through `tag` and `join`, which escape it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regard.report.markup import SafeHtml, join, tag
from regard.report.png import png_data_uri
from regard.report.styles import COLOURS
from regard.report.wav import wav_data_uri
from regard.tasks.rendering import (
    Rendered,
    RenderedCurve,
    RenderedImage,
    RenderedMatrix,
    RenderedParts,
    RenderedSound,
    RenderedTable,
    RenderedText,
)

MAX_CHARACTERS = 20_000  # of a text; the rest is left out
MAX_ROWS = 200  # of a table
MAX_PIXELS = 512  # per side of an image; a larger one is thinned out
MAX_POINTS = 1000  # of a curve
MAX_SECONDS = 10.0  # of a sound
SMALL_IMAGE = 192  # pixels of the page that a small image is enlarged to
CURVE_WIDTH, CURVE_HEIGHT, CURVE_MARGIN = 480, 120, 4  # in SVG units


def render_html(rendered: Rendered) -> SafeHtml:
    """Return a rendering as HTML; of an unknown kind its form for the terminal."""
    for kind, render in RENDERERS.items():
        if isinstance(rendered, kind):
            return render(rendered)
    return text_html(RenderedText(rendered.to_text()))


def text_html(rendered: RenderedText) -> SafeHtml:
    """Return a text with its spans marked; a span that overlaps the one before is left out."""
    text = rendered.text[:MAX_CHARACTERS]
    pieces: list[str] = []
    end = 0
    for start, stop, label in sorted(rendered.spans, key=lambda span: span[:2]):
        if start < end or stop > len(text):
            continue
        mark = tag("mark", text[start:stop], tag("small", str(label)) if label else "")
        pieces += [text[end:start], mark]
        end = stop
    left_out = len(rendered.text) - len(text)
    note = f"… ({left_out:,} more characters)" if left_out else ""
    return tag("pre", *pieces, text[end:], note, class_="scroll example", tabindex=0)


def table_html(rendered: RenderedTable) -> SafeHtml:
    """Return a table. It scrolls by itself in a narrow window."""
    header = [tag("th", str(name), scope="col") for name in rendered.columns]
    body = [tag("tr", *(tag("td", str(cell)) for cell in row)) for row in rendered.rows[:MAX_ROWS]]
    left_out = len(rendered.rows) - len(body)
    note = tag("figcaption", f"{left_out:,} more rows") if left_out > 0 else ""
    whole = tag("table", tag("thead", tag("tr", *header)), tag("tbody", *body))
    return tag("figure", tag("div", whole, class_="scroll example", tabindex=0), note)


def matrix_html(rendered: RenderedMatrix) -> SafeHtml:
    """Return a matrix as a table with shaded cells, whose values are shown on hovering."""
    header = [tag("th", str(name), scope="col") for name in rendered.columns[:MAX_ROWS]]
    body = []
    values = np.asarray(rendered.values)[:MAX_ROWS, :MAX_ROWS].tolist()
    for name, row in zip(rendered.rows, values, strict=False):
        cells = [
            tag("td", title=f"{value:.2f}", style=f"background:rgba(37,99,235,{value:.3f})")
            for value in (min(max(each, 0.0), 1.0) for each in row)
        ]
        body.append(tag("tr", tag("th", str(name), scope="row"), *cells))
    whole = tag("table", tag("thead", tag("tr", tag("td"), *header)), tag("tbody", *body))
    return _figure(tag("div", whole, class_="scroll example", tabindex=0), rendered.caption)


def image_html(rendered: RenderedImage) -> SafeHtml:
    """Return an image as PNG; a small one is enlarged."""
    pixels = np.asarray(rendered.pixels)
    height, width = pixels.shape[:2]
    if not pixels.size:
        return _figure(tag("div", "empty image", class_="empty"), rendered.caption)
    step = max(1, math.ceil(max(height, width) / MAX_PIXELS))
    pixels = pixels[::step, ::step]
    colour = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, -1)
    opaque = np.full((*colour.shape[:2], 1), 255, np.uint8)
    rgba = np.concatenate((colour.astype(np.uint8), opaque), -1)
    scale = max(1, SMALL_IMAGE // max(pixels.shape[:2]))
    image = tag(
        "img",
        src=png_data_uri(rgba),
        alt=rendered.caption or f"image of {width} × {height} pixels",
        width=scale * pixels.shape[1],
        class_="picture",
    )
    return _figure(image, rendered.caption)


def curve_html(rendered: RenderedCurve) -> SafeHtml:
    """Return curves as SVG, each with its range; NaN is a gap."""
    series = {str(name): thin_out(values) for name, values in rendered.series.items()}
    known = [values[np.isfinite(values)] for values in series.values()]
    numbers = np.concatenate([*known, np.empty(0)])
    if not len(numbers):
        return _figure(tag("div", "empty curve", class_="empty"), rendered.caption)
    low, high = float(numbers.min()), float(numbers.max())
    lines, keys = [], []
    for i, (name, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = curve_path(values, low, high)
        lines.append(tag("path", d=path, stroke=colour, fill="none", stroke_width=1.5))
        swatch = tag("i", class_="sample", style=f"background:{colour}", aria_hidden="true")
        keys.append(tag("li", swatch, name))
    svg = tag(
        "svg",
        tag("title", f"{', '.join(series)}: from {low:.3g} to {high:.3g}"),
        *lines,
        viewBox=f"0 0 {CURVE_WIDTH} {CURVE_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        class_="curve",
    )
    limits = tag("li", f"from {low:.3g} to {high:.3g}")
    return _figure(join(svg, tag("ul", *keys, limits, class_="legend")), rendered.caption)


def thin_out(values: Sequence[float]) -> np.ndarray:
    """Return at most MAX_POINTS values, evenly spaced, as an array."""
    array = np.asarray(values, dtype=float)
    return array[:: max(1, math.ceil(len(array) / MAX_POINTS))]


def curve_path(values: np.ndarray, low: float, high: float) -> str:
    """Return the path of a curve in an SVG, interrupted where a value is not finite."""
    across = (CURVE_WIDTH - 2 * CURVE_MARGIN) / max(1, len(values) - 1)
    down = (CURVE_HEIGHT - 2 * CURVE_MARGIN) / ((high - low) or 1)
    path, command = [], "M"
    for i, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            command = "M"
            continue
        x, y = CURVE_MARGIN + i * across, CURVE_HEIGHT - CURVE_MARGIN - (value - low) * down
        path.append(f"{command}{x:.1f},{y:.1f}")
        if command == "M":
            path.append(f"L{x:.1f},{y:.1f}")  # so that a single point is visible
        command = "L"
    return "".join(path)


def sound_html(rendered: RenderedSound) -> SafeHtml:
    """Return a sound as WAV with its wave; of a long one the beginning."""
    wave = np.asarray(rendered.wave, dtype=float)
    if not len(wave):
        return _figure(tag("div", "empty sound", class_="empty"), rendered.caption)
    kept = wave[: max(1, int(MAX_SECONDS * rendered.rate))]
    seconds = f"{len(wave) / rendered.rate:.2f} s at {rendered.rate:,} Hz"
    if len(kept) < len(wave):
        seconds = f"first {MAX_SECONDS:.0f} s of {seconds}"
    parts = np.array_split(np.abs(kept), min(len(kept), MAX_POINTS))
    loudness = RenderedCurve({seconds: [float(part.max()) for part in parts]})
    player = tag("audio", src=wav_data_uri(kept, rendered.rate), controls=True, preload="metadata")
    return _figure(join(player, curve_html(loudness)), rendered.caption)


def parts_html(rendered: RenderedParts) -> SafeHtml:
    """Return several renderings, one below the other."""
    return tag("div", *map(render_html, rendered.parts), class_="parts")


def _figure(content: SafeHtml, caption: str) -> SafeHtml:
    return tag("figure", content, tag("figcaption", caption) if caption else "")


RENDERERS: dict[type[Rendered], Callable[[Any], SafeHtml]] = {
    RenderedText: text_html,
    RenderedTable: table_html,
    RenderedImage: image_html,
    RenderedMatrix: matrix_html,
    RenderedCurve: curve_html,
    RenderedSound: sound_html,
    RenderedParts: parts_html,
}
