"""The sections of the page that hold plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from regard.compare import ResultRow
from regard.compare.formatting import group_rows, metric_of
from regard.compare.plan import CONSTANT_BASELINE
from regard.report.bundle import MISSING
from regard.report.charts import MEMORY, SPEED, TIME, Chart, CostAxis, growth, learning, pareto
from regard.report.data import ComparisonReport
from regard.report.markup import Inside, SafeHtml, join, tag
from regard.report.sections import place, section
from regard.report.styles import assign_styles, legend

Pair = tuple[
    str, list[Callable[[], Chart]]
]  # a title, and the plots that stand side by side below it


class Plots:
    """Makes them, or says why it does not; a mechanism looks the same in all."""

    def __init__(self, found: ComparisonReport, *, drawn: bool) -> None:
        self.found, self.drawn = found, drawn
        self.look = assign_styles(row.mixer for row in found.rows if row.scores)
        self.scored = {
            key: _scored(rows) for key, rows in group_rows(found.rows).items() if _scored(rows)
        }

    def tradeoffs(self) -> SafeHtml:
        """Score against speed and against memory."""
        note = "The broken line joins the mechanisms that no other beats in both. Upright lines are ± the spread over seeds."
        pairs = [
            (place(*key), [self._pareto(rows, cost) for cost in (SPEED, MEMORY)])
            for key, rows in self.scored.items()
        ]
        return self._section("tradeoffs", "Score against cost", note, pairs)

    def _pareto(self, rows: list[ResultRow], cost: CostAxis) -> Callable[[], Chart]:
        return lambda: pareto(rows, cost, self.look)

    def learning(self) -> SafeHtml:
        """By step, and by time."""
        note = "Lines are means over seeds, bands reach from the worst seed to the best."
        pairs = [
            (place(*key), [self._learning(key, by) for by in ("step", "seconds")])
            for key in self.scored
        ]
        return self._section("curves", "Learning curves", note, pairs)

    def _learning(self, key: tuple[str, int], by: str) -> Callable[[], Chart]:
        rows = group_rows(self.found.rows)[key]
        level = next((row.score for row in rows if row.mixer == CONSTANT_BASELINE), None)
        mine = [
            curve
            for curve in self.found.curves
            if (curve.task, curve.length) == key and curve.points
        ]
        return lambda: learning(mine, by, metric_of(rows), self.look, level)

    def scaling(self) -> SafeHtml:
        """Time and memory by length, where there are several."""
        by_task: dict[str, list[ResultRow]] = {}
        for (task, _), rows in self.scored.items():
            by_task.setdefault(task, []).extend(rows)
        several = {
            task: rows for task, rows in by_task.items() if len({row.length for row in rows}) > 1
        }
        if not several:
            only = tag(
                "p",
                "Each task was run at one length only: --lengths 128,512 would show how cost grows with it.",
            )
            return section("scaling", "Growth with the length", only)
        note = "Both axes are logarithmic. A step is an update of the weights, its share of evaluations included."
        pairs = [
            (task, [self._growth(rows, cost) for cost in _above_zero(rows)])
            for task, rows in several.items()
        ]
        return self._section("scaling", "Growth with the length", note, pairs)

    def _growth(self, rows: list[ResultRow], cost: CostAxis) -> Callable[[], Chart]:
        return lambda: growth(
            [(row.mixer, row.length, cost.of(row)) for row in rows], cost.words, self.look
        )

    def _section(self, name: str, title: str, note: str, pairs: list[Pair]) -> SafeHtml:
        if not pairs:
            return section(name, title, tag("p", "No run came to an end."))
        if not self.drawn:
            return section(name, title, tag("p", MISSING, class_="missing"))
        return section(
            name,
            title,
            tag("p", note, class_="muted"),
            legend(self.look),
            *(side_by_side(*pair) for pair in pairs),
        )


def _scored(rows: list[ResultRow]) -> list[ResultRow]:
    """Those that a plot can show."""
    return [row for row in rows if row.mixer != CONSTANT_BASELINE and math.isfinite(row.score)]


def _above_zero(rows: list[ResultRow]) -> list[CostAxis]:
    """A logarithm needs it; a very small model may take no memory beyond what the process had."""
    return [cost for cost in (TIME, MEMORY) if any(cost.of(row) > 0 for row in rows)]


def side_by_side(title: str, charts: list[Callable[[], Chart]]) -> SafeHtml:
    """Plots, made one after the other, below a title."""
    figures: list[Inside] = [_figure(chart()) for chart in charts]
    return join(tag("h3", title), tag("div", *figures, class_="pair"))


def _figure(chart: Chart) -> SafeHtml:
    """The place of a plot, with its specification beside it; no text in it can end the script."""
    text = SafeHtml(json.dumps(chart, allow_nan=False).replace("<", "\\u003c"))
    plot = tag("div", class_="plot", role="img", aria_label=str(chart["description"]))
    return tag("figure", plot, tag("script", text, type="application/json"))
