"""The page: one HTML file with everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import regard
from regard.report.bundle import plots_available, vega_javascript
from regard.report.data import ComparisonReport
from regard.report.evidence import costs, differences, search, unique_successes
from regard.report.markup import SafeHtml, join, tag
from regard.report.plots import plot_sections
from regard.report.sections import (
    environment,
    maps,
    patterns,
    recommendations,
    reproduce,
    samples,
    settings,
    tables,
)

# The page may load nothing. Vega compiles its expressions, hence unsafe-eval.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'"
)
CONTENTS = {
    "recommendation": "Recommendation",
    "table": "Results",
    "differences": "Differences",
    "search": "Search",
    "costs": "Cost",
    "tradeoffs": "Pareto front",
    "curves": "Learning curves",
    "scaling": "Scaling",
    "patterns": "Patterns",
    "maps": "Attention maps",
    "unique": "Unique successes",
    "samples": "Tasks",
    "settings": "Settings",
    "environment": "Environment",
    "reproduce": "Reproduce",
}


def write_page(report: ComparisonReport, path: Path) -> int:
    """Write the page and return its size in bytes."""
    content = render_page(report).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: delete it, or give the target as --html.")
    path.write_bytes(content)
    return len(content)


def render_page(report: ComparisonReport) -> str:
    """Return the page of a comparison as HTML."""
    plan = report.result.record.plan
    mixers = len({row.mixer for row in report.result.rows if not row.is_baseline})
    counts = (
        (mixers, "mixer"),
        (len(plan.tasks), "task"),
        (plan.seeds, "seed"),
        (plan.layers, "layer"),
        (plan.heads, "head"),
    )
    summary = ", ".join(f"{n:,} {name}{'' if n == 1 else 's'}" for n, name in counts)
    summary += f", width {plan.dim}, at most {plan.settings.steps:,} steps"
    links = (tag("li", tag("a", title, href=f"#{name}")) for name, title in CONTENTS.items())
    header = tag(
        "header",
        tag("h1", "Comparison of mixers"),
        tag("p", summary, class_="muted"),
        tag("nav", tag("ul", *links), aria_label="Contents"),
    )
    available = plots_available()
    sections = [
        recommendations(report),
        tables(report),
        differences(report, available=available),
        search(report),
        costs(report),
        *plot_sections(report, available=available),
        patterns(report),
        maps(report),
        unique_successes(report),
        samples(report),
        settings(report),
        environment(report),
        reproduce(report),
    ]
    return document("Comparison of mixers", header, sections)


def document(title: str, header: SafeHtml, sections: Sequence[SafeHtml]) -> str:
    """Return an HTML document with style and scripts inside."""

    def resource(name: str) -> SafeHtml:
        return SafeHtml((files("regard.report") / name).read_text(encoding="utf-8"))

    scripts = []
    if plots_available():
        scripts = [tag("script", SafeHtml(vega_javascript())), tag("script", resource("draw.js"))]
    main = tag("main", *sections)
    megabytes = sum(map(len, (main, *scripts))) / 1e6
    footer = f"Regard {regard.__version__}. One file of about {megabytes:.1f} MB, works offline."
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
        tag("title", f"{title} · Regard"),
        tag("style", resource("style.css")),
    )
    body = tag("body", header, main, tag("footer", footer), *scripts)
    return join(SafeHtml("<!doctype html>\n"), tag("html", head, body, lang="en"))
