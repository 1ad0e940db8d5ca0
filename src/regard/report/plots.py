"""The sections of the page with plots."""

from __future__ import annotations

import json
import math

from regard.compare import ResultRow
from regard.compare.plan import CONSTANT_BASELINE
from regard.compare.results import group_metric, group_rows
from regard.report.bundle import MISSING
from regard.report.charts import (
    MEMORY,
    SPEED,
    TIME,
    Chart,
    learning_chart,
    pareto_chart,
    scaling_chart,
)
from regard.report.data import ComparisonReport
from regard.report.markup import SafeHtml, join, tag
from regard.report.sections import group_title, section
from regard.report.styles import SeriesStyle, legend, series_styles

Groups = dict[tuple[str, int], list[ResultRow]]
Styles = dict[str, SeriesStyle]


def plot_sections(report: ComparisonReport, *, available: bool) -> list[SafeHtml]:
    """Return the sections score against cost, learning curves and scaling with length.

    Args:
        report: What to plot.
        available: Whether plots can be drawn; if not, each section says what to install.
    """
    styles = series_styles(row.mixer for row in report.result.rows if row.scores)
    scored: Groups = {}
    for key, rows in group_rows(report.result.rows).items():
        rows = [r for r in rows if r.mixer != CONSTANT_BASELINE and math.isfinite(r.score)]
        if rows:
            scored[key] = rows
    sections = []
    for name, title, note, make_charts in (
        (
            "tradeoffs",
            "Score against cost",
            "The dashed line is the Pareto front: the mixers that no other beats in both. "
            "Vertical lines are the standard deviation over seeds.",
            tradeoff_charts,
        ),
        (
            "curves",
            "Learning curves",
            "Lines are means over seeds, bands range from the worst seed to the best.",
            curve_charts,
        ),
        (
            "scaling",
            "Scaling with length",
            "Both axes are logarithmic. The time of a step includes its share of evaluations.",
            scaling_charts,
        ),
    ):
        if not scored:
            sections.append(section(name, title, tag("p", "No run finished.")))
        elif make_charts is scaling_charts and not rows_by_task(scored):
            hint = "All tasks were run at one length. Use --lengths 128,512 to see how cost grows."
            sections.append(section(name, title, tag("p", hint)))
        elif not available:
            sections.append(section(name, title, tag("p", MISSING, class_="missing")))
        else:
            charts = make_charts(report, scored, styles)
            sections.append(plot_section(name, title, note, styles, charts))
    return sections


def tradeoff_charts(
    report: ComparisonReport, scored: Groups, styles: Styles
) -> dict[str, list[Chart]]:
    """Plot score against speed, and against memory where the system tells it, by title."""
    return {
        group_title(*key): [
            pareto_chart(rows, cost, styles)
            for cost in (SPEED, MEMORY)
            if not any(math.isnan(cost.value(row)) for row in rows)
        ]
        for key, rows in scored.items()
    }


def curve_charts(
    report: ComparisonReport, scored: Groups, styles: Styles
) -> dict[str, list[Chart]]:
    """Plot learning curves by step and by time."""
    groups = group_rows(report.result.rows)
    charts = {}
    for key in scored:
        rows = groups[key]
        baseline = next((row.score for row in rows if row.mixer == CONSTANT_BASELINE), None)
        curves = [c for c in report.curves if (c.task, c.length) == key and c.points]
        charts[group_title(*key)] = [
            learning_chart(curves, by, group_metric(rows), styles, baseline)
            for by in ("step", "seconds")
        ]
    return charts


def scaling_charts(
    report: ComparisonReport, scored: Groups, styles: Styles
) -> dict[str, list[Chart]]:
    """Plot the time and memory of training by length."""
    charts: dict[str, list[Chart]] = {}
    for task, rows in rows_by_task(scored).items():
        for cost in (TIME, MEMORY):
            points = [(row.mixer, row.length, cost.value(row)) for row in rows]
            # a log axis needs values above 0; the memory of a tiny model may be too small to see
            if any(value > 0 for _, _, value in points):
                charts.setdefault(task, []).append(scaling_chart(points, cost.title, styles))
    return charts


def rows_by_task(scored: Groups) -> dict[str, list[ResultRow]]:
    """Return the rows of each task that was run at several lengths."""
    rows: dict[str, list[ResultRow]] = {}
    for (task, _), group in scored.items():
        rows.setdefault(task, []).extend(group)
    return {task: each for task, each in rows.items() if len({r.length for r in each}) > 1}


def plot_section(
    name: str,
    title: str,
    note: str,
    styles: Styles,
    charts: dict[str, list[Chart]],
) -> SafeHtml:
    """Return a section of plots, those of one title side by side."""
    rows = (
        join(tag("h3", heading), tag("div", *map(plot_figure, row), class_="pair"))
        for heading, row in charts.items()
    )
    return section(name, title, tag("p", note, class_="muted"), legend(styles), *rows)


def plot_figure(chart: Chart) -> SafeHtml:
    """Return the element of a plot with its specification; no text in it can end the script."""
    text = SafeHtml(json.dumps(chart, allow_nan=False).replace("<", "\\u003c"))
    plot = tag("div", class_="plot", role="img", aria_label=str(chart["description"]))
    return tag("figure", plot, tag("script", text, type="application/json"))
