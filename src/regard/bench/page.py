"""The page of a benchmark: tables and log-log plots in one file that works offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from regard.bench.cell import DENSE, MODES, SCOPES
from regard.bench.formatting import (
    HEADER,
    LEAD_HEADER,
    TableKey,
    crossover_lines,
    format_row,
    group_rows,
    missing_reasons,
    peer_notes,
    summary_lines,
    table_title,
)
from regard.bench.plan import DONE, BenchResult, BenchRow
from regard.environment import environment
from regard.report.bundle import MISSING, plots_available
from regard.report.charts import Chart, scaling_chart
from regard.report.markup import SafeHtml, join, tag
from regard.report.page import document
from regard.report.plots import plot_section
from regard.report.sections import section
from regard.report.styles import series_styles


def write_page(bench: BenchResult, path: Path) -> int:
    """Write the page and return its size in bytes."""
    content = render_page(bench).encode()
    path.write_bytes(content)
    return len(content)


def render_page(bench: BenchResult) -> str:
    """Return the page as HTML."""
    lines = summary_lines(bench)
    if bench.ended != DONE:
        lines.append(f"incomplete: {bench.ended}")
    header = tag("header", tag("h1", "Benchmark"), tag("p", "; ".join(lines), class_="muted"))
    items = [tag("li", line) for line in (*crossover_lines(bench), *peer_notes(bench))]
    none = tag("p", "Fewer than two lengths were measured together with dense attention.")
    values = (join(tag("dt", k), tag("dd", str(v))) for k, v in environment().items())
    sections = [
        plots(bench),
        *(table(key, rows) for key, rows in group_rows(bench.rows)),
        section("crossovers", "Crossover lengths", tag("ul", *items) if items else none),
        section("environment", "Environment", tag("dl", *values)),
    ]
    return document("Benchmark of mixers", header, sections)


def _speedup(row: BenchRow) -> float | None:
    if row.name == DENSE:
        return None if row.seconds is None else 1.0
    return None if row.speedup is None else row.speedup.median


PLOTS: dict[str, Callable[[BenchRow], float | None]] = {
    "milliseconds": lambda row: None if row.seconds is None else 1e3 * row.seconds,
    f"speedup over {DENSE}": _speedup,
    "peak memory in MB": lambda row: (
        row.peak_bytes / 1e6 if row.seconds is not None and row.peak_bytes else None
    ),
}


def plots(bench: BenchResult) -> SafeHtml:
    """Return plots of time, speedup and memory by length, where there are two lengths or more."""
    name, title = "plots", "Scaling with length"
    if not plots_available():
        return section(name, title, tag("p", MISSING, class_="missing"))
    styles = series_styles((row.name for row in bench.rows if row.seconds is not None), DENSE)
    charts: dict[str, list[Chart]] = {}
    for key, rows in group_rows(bench.rows):
        for axis, value in PLOTS.items():
            points = list(
                dict.fromkeys(
                    (row.name, row.cell.length, v) for row in rows if (v := value(row)) is not None
                )
            )
            if len({length for _, length, _ in points}) > 1:
                chart = scaling_chart(points, axis, styles)
                charts.setdefault(table_title(key), []).append(chart)
    if not charts:
        return section(name, title, tag("p", "Fewer than two lengths were measured."))
    note = "Both axes are logarithmic. Memory is the peak of one call in its own process."
    return plot_section(name, title, note, styles, charts)


def table(key: TableKey, rows: Sequence[BenchRow]) -> SafeHtml:
    """Return the table of one mode, scope and thread count."""
    mode, scope, _ = key
    with_lead = any(row.reference for row in rows)
    header = [
        tag(
            "th",
            name or tag("span", "interval", class_="hidden"),
            scope="col",
            class_="name" if name == "name" else "number",
        )
        for name in (*HEADER, *([LEAD_HEADER] if with_lead else []))
    ]
    body = []
    for row in rows:
        if row.seconds is not None:
            length, name, *numbers = format_row(row, with_lead)
            body.append(
                tag(
                    "tr",
                    tag("td", length, class_="number"),
                    tag("th", name, scope="row"),
                    *(tag("td", number, class_="number") for number in numbers),
                )
            )
    title = table_title(key)
    whole = tag(
        "table", tag("caption", title), tag("thead", tag("tr", *header)), tag("tbody", *body)
    )
    reasons = [tag("li", f"{name}: {reason}") for name, reason in missing_reasons(rows)]
    return section(
        "-".join(map(str, key)),
        title,
        tag("p", f"{mode}: {MODES[mode]}. {scope}: {SCOPES[scope]}.", class_="muted"),
        tag("div", whole, class_="scroll", tabindex=0)
        if body
        else tag("p", "Nothing was measured."),
        tag("ul", *reasons, class_="caveats") if reasons else "",
    )
