"""The page of a measurement: tables and log-log plots in one file that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from regard.bench.cell import DENSE, MODES, SCOPES
from regard.bench.formatting import (
    BESIDE,
    HEADINGS,
    cells,
    crossing,
    first_lines,
    many,
    notes,
    reasons,
    tables,
)
from regard.bench.plan import DONE, BenchResult, BenchRow
from regard.environment import environment
from regard.report.bundle import MISSING, plots_available
from regard.report.charts import Chart, scaling_chart
from regard.report.markup import SafeHtml, join, tag
from regard.report.page import document
from regard.report.plots import plot_figure
from regard.report.sections import section
from regard.report.styles import SeriesStyle, legend, series_styles

SEVERAL = 2  # lengths from which a line can be drawn
Value = Callable[[BenchRow], float | None]
PLOTS: dict[str, Value] = {
    "milliseconds": lambda row: None if row.seconds is None else 1e3 * row.seconds,
    f"times faster than {DENSE}": lambda row: _faster(row),
}
MEMORY: Value = lambda row: None if row.seconds is None or not row.memory else row.memory / 1e6  # noqa: E731


def _faster(row: BenchRow) -> float | None:
    if row.name == DENSE:
        return None if row.seconds is None else 1.0
    return None if row.faster is None else row.faster.median


def write(found: BenchResult, path: Path) -> int:
    """Write the page; its size in bytes."""
    content = page(found).encode()
    path.write_bytes(content)
    return len(content)


def page(found: BenchResult) -> str:
    """The whole of it, as HTML."""
    words = "; ".join(first_lines(found)) + (
        "" if found.ended == DONE else f"; not all was measured: {found.ended}"
    )
    top = tag("header", tag("h1", "How fast it is here"), tag("p", words, class_="muted"))
    parts = [
        _plots(found),
        *(_table(key, rows) for key, rows in tables(found.rows)),
        _lines(found),
        _where(),
    ]
    return document("Benchmark of mixers", top, parts)


def _plots(found: BenchResult) -> SafeHtml:
    if not plots_available():
        return section("plots", "Growth with the length", tag("p", MISSING, class_="missing"))
    look = series_styles((row.name for row in found.rows if row.seconds is not None), DENSE)
    figures = [_pair(key, rows, look) for key, rows in tables(found.rows)]
    figures = [figure for figure in figures if figure]
    if not figures:
        return section(
            "plots",
            "Growth with the length",
            tag("p", "No two lengths were measured: there is no line to draw."),
        )
    note = "Both axes are logarithmic. Memory is the peak of one call in a process of its own."
    return section(
        "plots", "Growth with the length", tag("p", note, class_="muted"), legend(look), *figures
    )


def _pair(
    key: tuple[str, str, int], rows: Sequence[BenchRow], look: dict[str, SeriesStyle]
) -> SafeHtml:
    """Time, ratio and memory side by side, where there are two lengths of them."""
    charts: list[Callable[[], Chart]] = []
    for words, value in {**PLOTS, "peak memory in MB": MEMORY}.items():
        points = list(
            dict.fromkeys(
                (row.name, row.cell.length, v) for row in rows if (v := value(row)) is not None
            )
        )
        if len({length for _, length, _ in points}) >= SEVERAL:
            charts.append(lambda points=points, words=words: scaling_chart(points, words, look))  # type: ignore[misc]
    return (
        join(tag("h3", _title(key)), tag("div", *(plot_figure(c()) for c in charts), class_="pair"))
        if charts
        else SafeHtml("")
    )


def _title(key: tuple[str, str, int]) -> str:
    way, level, threads = key
    return f"{way}, {level}, {many(threads, 'thread')}"


def _table(key: tuple[str, str, int], rows: Sequence[BenchRow]) -> SafeHtml:
    beside = any(row.of for row in rows)
    names = (*HEADINGS, *((BESIDE,) if beside else ()))
    head = tag("tr", *map(_heading, names))
    body = [tag("tr", *_cells(row, beside)) for row in rows if row.seconds is not None]
    whole = tag("table", tag("caption", _title(key)), tag("thead", head), tag("tbody", *body))
    shown = (
        tag("div", whole, class_="scroll", tabindex=0)
        if body
        else tag("p", "Nothing was measured.")
    )
    missing = [tag("li", f"{name}: {why}") for name, why in reasons(rows)]
    about = tag("p", f"{key[0]}: {MODES[key[0]]}. {key[1]}: {SCOPES[key[1]]}.", class_="muted")
    name = "-".join(map(str, key))
    listed = tag("ul", *missing, class_="doubts") if missing else ""
    return section(name, _title(key), about, shown, listed)


def _heading(name: str) -> SafeHtml:
    words = name or tag("span", "interval", class_="hidden")
    return tag("th", words, scope="col", class_="name" if name == "name" else "number")


def _cells(row: BenchRow, beside: bool) -> list[SafeHtml]:
    first, name, *rest = cells(row, beside)
    return [
        tag("td", first, class_="number"),
        tag("th", name, scope="row"),
        *(tag("td", c, class_="number") for c in rest),
    ]


def _lines(found: BenchResult) -> SafeHtml:
    items = [tag("li", line) for line in (*crossing(found), *notes(found))]
    none = "No two lengths were measured beside dense attention."
    return section(
        "crossovers", "From which length on", tag("ul", *items) if items else tag("p", none)
    )


def _where() -> SafeHtml:
    pairs = (join(tag("dt", key), tag("dd", str(value))) for key, value in environment().items())
    return section("environment", "Environment", tag("dl", *pairs))
