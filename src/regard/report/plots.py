"""The sections of the page with plots."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from regard.compare import ResultRow
from regard.compare.plan import DENSE_MIXER, spec_label
from regard.compare.results import group_rows
from regard.report.bundle import MISSING
from regard.report.charts import (
    LATENCY,
    MEMORY,
    SPEED,
    BaselineLevel,
    Chart,
    CurveAxis,
    learning_chart,
    near_levels,
    pareto_chart,
    scaling_chart,
)
from regard.report.curves import LearningCurve
from regard.report.data import ComparisonReport
from regard.report.markup import SafeHtml, join, tag
from regard.report.sections import group_title, section
from regard.report.styles import SeriesStyle, legend, series_styles

AXIS_HEIGHT = 40  # below a plot, so that the page does not move when it is drawn
STEPS = CurveAxis("step", "training steps")
SECONDS = CurveAxis("seconds", "seconds of training")
STEP_TIME = "milliseconds per training step"
Groups = dict[tuple[str, int], list[ResultRow]]
Styles = dict[str, SeriesStyle]


def plot_sections(report: ComparisonReport, *, available: bool) -> list[SafeHtml]:
    """Return the sections score against cost, learning curves and scaling with length.

    Args:
        report: What to plot.
        available: Whether plots can be drawn; if not, each section says what to install.
    """
    styles = report_styles(report)
    scored: Groups = {}
    for key, rows in group_rows(report.result.rows).items():
        rows = [r for r in rows if not r.is_baseline and math.isfinite(r.score)]
        if rows:
            scored[key] = rows
    sections = []
    for name, title, note, make_charts in (
        (
            "tradeoffs",
            "Score against cost",
            "The dashed line is the Pareto front: the mixers that no other beats in both. "
            "Vertical lines are the standard deviation over seeds. Hollow points were eliminated "
            "early, after less training. Horizontal lines are baselines, which are no mixers.",
            tradeoff_charts,
        ),
        (
            "curves",
            "Learning curves",
            "Lines are means over seeds, bands range from the worst seed to the best. "
            + time_note(report),
            curve_charts,
        ),
        (
            "scaling",
            "Scaling with length",
            "Both axes are logarithmic. " + time_note(report),
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
    """Plot score against speed, memory and latency, where they are known, by title."""
    charts: dict[str, list[Chart]] = {}
    for key, rows in scored.items():
        levels = near_levels(rows, baseline_levels(report, key))
        for cost in (SPEED, MEMORY, LATENCY):
            known = [row for row in rows if not math.isnan(cost.value(row))]
            if known:
                chart = pareto_chart(known, cost, report.metrics[key], styles, levels)
                charts.setdefault(group_title(*key), []).append(chart)
    return charts


def report_styles(report: ComparisonReport) -> Styles:
    """Return the style of each mixer that has a score."""
    rows = [row for row in report.result.rows if row.scores and not row.is_baseline]
    return series_styles((row.mixer for row in rows), reference_name(report))


def reference_name(report: ComparisonReport) -> str:
    """Return the name of dense softmax, or of the default of the part that varies."""
    names = (row.mixer for row in report.result.rows if row.is_reference)
    return next(names, spec_label(DENSE_MIXER))


def baseline_levels(report: ComparisonReport, key: tuple[str, int]) -> list[BaselineLevel]:
    """Return the scores of the baselines of a task and length."""
    rows = group_rows(report.result.rows)[key]
    return [
        BaselineLevel(row.mixer, row.score)
        for row in rows
        if row.is_baseline and math.isfinite(row.score)
    ]


def step_seconds(report: ComparisonReport) -> dict[tuple[str, str, int], float]:
    """Return the seconds of a training step by mixer, task and length, as they were measured apart;
    if nothing was measured, those of the runs."""
    measured = {
        (cost.mixer, cost.task, cost.length): cost.step_seconds
        for cost in report.result.costs
        if math.isfinite(cost.step_seconds)
    }
    return measured or {
        (row.mixer, row.task, row.length): row.seconds / row.steps
        for row in report.result.rows
        if row.scores and row.steps > 0
    }


def time_note(report: ComparisonReport) -> str:
    """Return a sentence on what the times of steps are."""
    if any(math.isfinite(cost.step_seconds) for cost in report.result.costs):
        return "Times are steps × the time of a step, which was measured apart from the runs."
    return "Times are those of the runs, evaluations included: costs were not measured apart."


def curve_charts(
    report: ComparisonReport, scored: Groups, styles: Styles
) -> dict[str, list[Chart]]:
    """Plot learning curves over steps and over time."""
    charts: dict[str, list[Chart]] = {}
    for key in scored:
        metric, levels = report.metrics[key], baseline_levels(report, key)
        curves = [c for c in report.curves if (c.task, c.length) == key and c.points]
        for axis, shown in ((STEPS, curves), (SECONDS, timed_curves(report, curves))):
            if shown:
                chart = learning_chart(shown, axis, metric, styles, levels)
                charts.setdefault(group_title(*key), []).append(chart)
    return charts


def timed_curves(report: ComparisonReport, curves: Sequence[LearningCurve]) -> list[LearningCurve]:
    """Return curves whose seconds are steps × the time of a step; those without are left out."""
    seconds = step_seconds(report)
    timed = []
    for curve in curves:
        each = seconds.get((curve.mixer, curve.task, curve.length))
        if each is not None:
            points = [point._replace(seconds=point.step * each) for point in curve.points]
            timed.append(curve._replace(points=points))
    return timed


def scaling_charts(
    report: ComparisonReport, scored: Groups, styles: Styles
) -> dict[str, list[Chart]]:
    """Plot the time and memory of training, and the latency of inference, by length."""
    charts: dict[str, list[Chart]] = {}
    seconds = step_seconds(report)
    for task, rows in rows_by_task(scored).items():
        times = [seconds.get((row.mixer, task, row.length), math.nan) for row in rows]
        for title, values in (
            (STEP_TIME, [1e3 * each for each in times]),
            (MEMORY.title, [MEMORY.value(row) for row in rows]),
            (LATENCY.title, [LATENCY.value(row) for row in rows]),
        ):
            # a log axis needs values above 0; the memory of a tiny model may be too small to see
            points = [
                (row.mixer, row.length, value)
                for row, value in zip(rows, values, strict=True)
                if value > 0
            ]
            if points:
                charts.setdefault(task, []).append(scaling_chart(points, title, styles))
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
    plot = tag(
        "div",
        class_="plot",
        role="img",
        aria_label=str(chart["description"]),
        style=f"min-height:{chart['height'] + AXIS_HEIGHT}px",
    )
    return tag("figure", plot, tag("script", text, type="application/json"))
