"""The sections with the evidence of a verdict: differences with intervals, search, costs, and the
examples that one mixer alone gets right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from regard.bench.stats import Ratio
from regard.compare import CostRow, Difference, ResultRow, RungOutcome, SearchPoint
from regard.compare.results import group_rows, rank_rows
from regard.report.bundle import MISSING
from regard.report.charts import forest_chart, format_difference, format_interval
from regard.report.data import ComparisonReport
from regard.report.markup import Content, SafeHtml, join, tag
from regard.report.plots import plot_figure, reference_name, report_styles
from regard.report.renderings import render_html
from regard.report.sections import describe_metric, group_title, row_name, scrolling_table, section
from regard.tasks.metrics import Metric

NONE = "–"  # a number that is missing
SMALLEST_P = 0.001
DARKEST = 0.45  # opacity of the best cell of the search

Key = tuple[str, int]


def differences(report: ComparisonReport, *, available: bool) -> SafeHtml:
    """Return the paired differences to dense softmax with their intervals.

    Args:
        report: What to show.
        available: Whether plots can be drawn; if not, the section says what to install.
    """
    name, title = "differences", f"Difference to {reference_name(report)}"
    groups: dict[Key, list[Difference]] = {}
    for each in report.result.differences:
        if math.isfinite(each.estimate):
            groups.setdefault((each.task, each.length), []).append(each)
    if not groups:
        hint = (
            "There is no other mixer with a score on the same test examples, so there is no "
            "difference to show."
        )
        return section(name, title, tag("p", hint))
    note = (
        "Paired on the same test examples and over seeds, with 95 % intervals; the adjusted p is "
        "Holm's, for the number of mixers. The shaded band is what does not matter in practice. "
        "Hollow marks are baselines, which are no mixers."
    )
    content: list[Content] = [tag("p", note, class_="muted")]
    if all(math.isnan(each.low) for group in groups.values() for each in group):
        warning = "One seed only: there are no intervals and no p-values. Use --seeds 3."
        content.append(tag("p", warning, class_="warning"))
    if not available:
        content.append(tag("p", MISSING, class_="missing"))
    styles = report_styles(report)
    verdicts = {(verdict.task, verdict.length): verdict for verdict in report.result.verdicts}
    for key, group in groups.items():
        metric = report.metrics[key]
        sign = -1 if metric.higher_is_better else 1
        group.sort(key=lambda each: sign * each.estimate)
        rows = {row.mixer: row for row in group_rows(report.result.rows)[key]}
        baselines = [name for name, row in rows.items() if row.is_baseline]
        margin = verdicts[key].margin if key in verdicts else math.nan
        content.append(tag("h3", group_title(*key)))
        if available:
            chart = forest_chart(group, metric, margin, styles, baselines)
            content.append(tag("div", plot_figure(chart), class_="pair"))
        content.append(difference_table(group, metric, rows))
        if not math.isnan(margin):
            text = f"A difference of {metric.format_value(margin)} counts as material."
            content.append(tag("p", text, class_="muted"))
    return section(name, title, *content)


def difference_table(
    group: Sequence[Difference], metric: Metric, rows: Mapping[str, ResultRow]
) -> SafeHtml:
    """Return the differences of one task and length as a table."""
    body = []
    for each in group:
        cells = (
            format_difference(each.estimate, metric),
            format_interval(each, metric) or NONE,
            format_p(each.p),
            format_p(each.adjusted_p),
            f"{each.seeds:,}",
            f"{each.examples:,}",
        )
        significant = "yes" if each.significant else NONE if math.isnan(each.p) else "no"
        body.append(
            tag(
                "tr",
                row_name(each.mixer, rows.get(each.mixer)),
                *(tag("td", cell, class_="number") for cell in cells),
                tag("td", significant),
            )
        )
    header = (
        "mixer",
        "difference",
        "95 % interval",
        "p",
        "adjusted p",
        "seeds",
        "examples",
        "significant",
    )
    first = group[0]
    title = f"{group_title(first.task, first.length)}: difference to {first.reference}"
    title = f"{title} · {describe_metric(metric)}"
    return scrolling_table(title, header, body, text_last=True)


def format_p(p: float) -> str:
    """Return a p-value with three decimals."""
    if math.isnan(p):
        return NONE
    return f"< {SMALLEST_P}" if p < SMALLEST_P else f"{p:.3f}"


def search(report: ComparisonReport) -> SafeHtml:
    """Return the search: scores by learning rate, and who continued after each rung."""
    name, title = "search", "Search of learning rates"
    points = report.result.search
    if not any(has_choice(points, p.mixer, p.rung) or p.rung > 0 for p in points):
        rates = sorted({row.lr for row in report.result.rows if math.isfinite(row.lr)})
        used = ", ".join(f"{rate:g}" for rate in rates)
        hint = "There was no search: every mixer was trained with the learning rate that was given"
        return section(name, title, tag("p", f"{hint}, {used}." if used else f"{hint}."))
    note = (
        "Validation scores. The darker a cell, the better its rank in the table. ✓ is the learning "
        "rate that was chosen."
    )
    content: list[Content] = [tag("p", note, class_="muted")]
    for key, rows in group_rows(report.result.rows).items():
        own = [point for point in points if (point.task, point.length) == key]
        if not own:
            continue
        metric = report.metrics[key]
        ranked = [row.mixer for row in rank_rows(rows) if not row.is_baseline]
        order = {mixer: i for i, mixer in enumerate(ranked)}
        own.sort(key=lambda point: order.get(point.mixer, len(order)))
        content.append(tag("h3", group_title(*key)))
        for rung in sorted({point.rung for point in own}):
            tried = [point for point in own if point.rung == rung]
            if any(has_choice(tried, point.mixer, rung) for point in tried):
                content.append(rate_table(tried, metric))
        rungs = [r for r in report.result.rungs if (r.task, r.length) == key]
        if len(rungs) > 1:
            content.append(rung_table(rungs, own, metric))
        content.append(failure_list(own))
    return section(name, title, *content)


def has_choice(points: Sequence[SearchPoint], mixer: str, rung: int) -> bool:
    """Whether a mixer was trained at several learning rates in a rung."""
    return len({p.lr for p in points if p.mixer == mixer and p.rung == rung}) > 1


def rate_table(points: Sequence[SearchPoint], metric: Metric) -> SafeHtml:
    """Return the scores of one rung, mixers × learning rates."""
    rates = sorted({point.lr for point in points})
    scores = {
        (mixer, rate): mean_score(p for p in points if p.mixer == mixer and p.lr == rate)
        for mixer in dict.fromkeys(point.mixer for point in points)
        for rate in rates
    }
    known = sorted(
        (score for score in scores.values() if score is not None),
        reverse=not metric.higher_is_better,
    )
    body = []
    for mixer in dict.fromkeys(point.mixer for point in points):
        cells = []
        for rate in rates:
            own = [p for p in points if p.mixer == mixer and p.lr == rate]
            score = scores[mixer, rate]
            if score is None:
                text = "no score" if any(point.reason for point in own) else NONE
                cells.append(tag("td", text if own else "", class_="number muted"))
                continue
            is_chosen = any(point.chosen for point in own)
            opacity = DARKEST * known.index(score) / max(1, len(known) - 1)
            text = metric.format_value(score)
            mark = tag("strong", text, " ✓") if is_chosen else text
            style = f"background:rgb(0 114 178 / {opacity:.2f})"
            class_ = "number chosen" if is_chosen else "number"
            cells.append(tag("td", mark, style=style, class_=class_))
        body.append(tag("tr", row_name(mixer), *cells))
    first = points[0]
    title = f"Rung {first.rung + 1}, {describe_steps([p.steps for p in points])}"
    header = ["mixer", *(f"lr {rate:.3g}" for rate in rates)]
    return scrolling_table(f"{title}: validation {metric.name} by learning rate", header, body)


def rung_table(
    rungs: Sequence[RungOutcome], points: Sequence[SearchPoint], metric: Metric
) -> SafeHtml:
    """Return who took part in each rung and who continued."""
    rungs = sorted(rungs, key=lambda rung: rung.index)
    last = rungs[-1].index
    names = [name for rung in reversed(rungs) for name in (*rung.survived, *rung.entered)]
    body = []
    for mixer in dict.fromkeys(names):
        cells = []
        for rung in rungs:
            if mixer not in rung.entered:
                cells.append(tag("td", ""))
                continue
            own = [p for p in points if p.mixer == mixer and p.rung == rung.index]
            score = rung_score(own, metric)
            text = NONE if score is None else metric.format_value(score)
            cells.append(tag("td", text, " ", rung_mark(rung, mixer, last), class_="number"))
        body.append(tag("tr", row_name(mixer), *cells))
    header: list[Content] = ["mixer"]
    for rung in rungs:
        seeds = f"{len(rung.seeds)} seed{'' if len(rung.seeds) == 1 else 's'}"
        steps = describe_steps([rung.steps[m] for m in rung.entered if m in rung.steps])
        small = tag("small", f"{steps}, {seeds}")
        header.append(join(f"rung {rung.index + 1}", tag("br"), small))
    counts = " → ".join(str(len(rung.entered)) for rung in rungs)
    title = f"Successive halving, {counts} mixers: best validation {metric.name}"
    return scrolling_table(title, header, body)


def rung_mark(rung: RungOutcome, mixer: str, last: int) -> SafeHtml:
    """Return whether a mixer continued after a rung."""
    if not rung.survived:
        return tag("span", "not complete", class_="badge")
    if mixer not in rung.survived:
        return tag("span", "failed" if rung.index == last else "left out", class_="badge")
    if rung.index == last:
        return tag("span", "finished", class_="badge good")
    return tag("span", "continued", class_="badge good")


def rung_score(points: Sequence[SearchPoint], metric: Metric) -> float | None:
    """Return the score of a mixer in a rung: mean over seeds at its best learning rate."""
    by_rate: dict[float, list[SearchPoint]] = {}
    for point in points:
        by_rate.setdefault(point.lr, []).append(point)
    scores = [score for each in by_rate.values() if (score := mean_score(each)) is not None]
    if not scores:
        return None
    return max(scores) if metric.higher_is_better else min(scores)


def mean_score(points: Iterable[SearchPoint]) -> float | None:
    """Return the mean validation score over seeds; None if no run has one."""
    scores = [point.valid for point in points if math.isfinite(point.valid)]
    return statistics.fmean(scores) if scores else None


def failure_list(points: Sequence[SearchPoint]) -> SafeHtml | str:
    """Return why runs of the search have no score."""
    items = [
        tag("li", f"{point.mixer}, rung {point.rung + 1}, lr {point.lr:.3g}: {point.reason}")
        for point in points
        if point.reason
    ]
    if not items:
        return ""
    summary = tag("summary", f"{len(items)} without a score")
    return tag("details", summary, tag("ul", *items))


def describe_steps(steps: Sequence[int]) -> str:
    """Return "200 steps" or "120 to 260 steps"."""
    if not steps:
        return "no steps"
    low, high = min(steps), max(steps)
    return f"{low:,} steps" if low == high else f"{low:,} to {high:,} steps"


def costs(report: ComparisonReport) -> SafeHtml:
    """Return what each mixer costs, and how busy the machine was."""
    name, title = "costs", "Cost"
    load = [tag("li", sentence) for sentence in report.result.load]
    machine = tag("ul", *load, class_="caveats") if load else ""
    if not report.result.costs:
        hint = (
            "Costs were not measured apart from learning: speeds are those of the runs, "
            "evaluations included, and there is no latency of inference."
        )
        return section(name, title, tag("p", hint), machine)
    reference = reference_name(report)
    note = (
        f"Measured apart from learning, all mixers in turn. × {reference} is the speed relative to "
        f"{reference}, paired by round, with a 95 % interval. Latency is that of one example at "
        "the full length. Memory is the peak of training."
    )
    quiet = "" if load else tag("p", "No other process kept the machine busy.", class_="muted")
    groups: dict[Key, list[CostRow]] = {}
    for cost in report.result.costs:
        groups.setdefault((cost.task, cost.length), []).append(cost)
    tables = (cost_table(report, key, group, reference) for key, group in groups.items())
    return section(name, title, tag("p", note, class_="muted"), machine, quiet, *tables)


def cost_table(
    report: ComparisonReport, key: Key, group: Sequence[CostRow], reference: str
) -> SafeHtml:
    """Return the costs of one task and length, the fastest training step first."""
    rows = group_rows(report.result.rows).get(key, [])
    peaks = {row.mixer: row.peak_bytes / 1e6 for row in rows if not row.is_baseline}
    measured = sorted(
        (cost for cost in group if not cost.reason), key=lambda cost: cost.step_seconds
    )
    body = []
    for cost in measured:
        cells = (
            format_number(1e3 * cost.step_seconds, ",.3g"),
            format_number(cost.tokens_per_second, ",.0f"),
            format_ratio(cost.speedup),
            format_number(1e3 * cost.latency, ",.3g"),
            format_ratio(cost.latency_speedup),
            format_number(peaks.get(cost.mixer, math.nan), ",.0f"),
        )
        numbers = (tag("td", cell, class_="number") for cell in cells)
        body.append(tag("tr", row_name(cost.mixer), *numbers))
    header = (
        "mixer",
        "ms per step",
        "tokens/s",
        f"× {reference}",
        "latency in ms",
        f"× {reference}",
        "peak MB",
    )
    for cost in group:
        if cost.reason:
            reason = tag("td", tag("div", cost.reason), colspan=len(header) - 1, class_="reason")
            body.append(tag("tr", row_name(cost.mixer), reason, class_="muted"))
    title = f"{group_title(*key)}: training and inference"
    return scrolling_table(title, header, body)


def format_number(value: float, spec: str) -> str:
    """Return a number, or a dash if it is missing."""
    return format(value, spec) if math.isfinite(value) else NONE


def format_ratio(ratio: Ratio | None) -> str:
    """Return a ratio with its interval: "1.31 (1.22 to 1.40)"."""
    if ratio is None:
        return NONE
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def unique_successes(report: ComparisonReport) -> SafeHtml:
    """Return test examples that one mixer alone gets right."""
    name, title = "unique", "Right by one mixer alone"
    if not report.unique:
        hint = (
            "None. They exist for metrics that say of each example whether it is right, if "
            "at least two mixers have a score and one is right where all others are wrong."
        )
        return section(name, title, tag("p", hint))
    note = (
        "Test examples that one mixer gets right, in most of its seeds, and all others of its "
        "table get wrong."
    )
    content: list[Content] = [tag("p", note, class_="muted")]
    groups: dict[Key, list[Content]] = {}
    for each in report.unique:
        count = len(each.indices)
        plural = "" if count == 1 else "s"
        shown = f", {len(each.shown)} shown" if len(each.shown) < count else ""
        heading = tag("h4", each.mixer, tag("small", f" {count:,} example{plural}{shown}"))
        examples = (
            tag("div", tag("small", f"test example {index:,}"), render_html(rendered))
            for index, rendered in zip(each.indices, each.shown, strict=False)
        )
        card = tag("article", heading, *examples, class_="card")
        groups.setdefault((each.task, each.length), []).append(card)
    for key, cards in groups.items():
        content += [tag("h3", group_title(*key)), tag("div", *cards, class_="grid wide")]
    return section(name, title, *content)
