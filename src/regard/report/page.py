"""The page: one file with everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import regard
from regard.compare.plan import CONSTANT_BASELINE
from regard.report.bundle import plots_available, vega_javascript
from regard.report.data import ComparisonReport
from regard.report.markup import SafeHtml, join, tag
from regard.report.plots import Plots
from regard.report.sections import (
    configurations,
    environment,
    maps,
    patterns,
    recommendations,
    repeat,
    samples,
    tables,
)

# Nothing is loaded from anywhere, and the browser is told so.  Vega compiles its expressions, hence unsafe-eval.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'"
CONTENTS = {
    "recommendation": "Recommendation",
    "table": "Results",
    "tradeoffs": "Score and cost",
    "curves": "Learning",
    "scaling": "Growth",
    "patterns": "Patterns",
    "maps": "Maps",
    "samples": "Tasks",
    "configurations": "Configurations",
    "environment": "Environment",
    "repeat": "Again",
}


def write_page(found: ComparisonReport, path: Path) -> int:
    """Write the page; its size in bytes."""
    content = render_page(found).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)


def render_page(found: ComparisonReport) -> str:
    """The whole of it, as HTML."""
    plots = Plots(found, drawn=plots_available())
    parts = [
        recommendations(found),
        tables(found),
        plots.tradeoffs(),
        plots.learning(),
        plots.scaling(),
        patterns(found),
        maps(found),
        samples(found),
        configurations(found),
        environment(found),
        repeat(found),
    ]
    return document("Comparison of mixers", _top(found), parts)


def document(title: str, top: SafeHtml, parts: Sequence[SafeHtml]) -> str:
    """A page of parts, with all that its plots need where they can be drawn, and nothing from elsewhere."""
    scripts = (
        [tag("script", SafeHtml(text)) for text in (vega_javascript(), _file("draw.js"))]
        if plots_available()
        else []
    )
    main = tag("main", *parts)
    size = sum(map(len, (main, *scripts))) / 1e6
    foot = tag(
        "footer",
        f"Regard {regard.__version__}. One file of about {size:.1f} MB that needs no network.",
    )
    return join(
        SafeHtml("<!doctype html>\n"),
        tag("html", _head(title), tag("body", top, main, foot, *scripts), lang="en"),
    )


def _head(title: str) -> SafeHtml:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{title} · Regard"),
        tag("style", SafeHtml(_file("style.css"))),
    )


def _top(found: ComparisonReport) -> SafeHtml:
    """The title, what was compared, and the contents."""
    plan = found.record.plan
    mechanisms = len({row.mixer for row in found.rows} - {CONSTANT_BASELINE})
    counts = (
        (plan.seeds, "seed"),
        (plan.layers, "layer"),
        (plan.heads, "head"),
        (plan.settings.steps, "step"),
    )
    words = (
        f"{_many(mechanisms, 'mechanism')} on {_many(len(plan.tasks), 'task')}: width {plan.dim}, "
    )
    words += ", ".join(_many(*count) for count in counts) + " at most"
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title in CONTENTS.items())
    contents = tag("nav", tag("ul", *links), aria_label="Contents")
    return tag(
        "header", tag("h1", "Which mixer to take"), tag("p", words, class_="muted"), contents
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _file(name: str) -> str:
    return (files("regard.report") / name).read_text(encoding="utf-8")
