"""The sections of the page without plots: recommendations, tables, pictures and settings."""

from __future__ import annotations

import json
from collections.abc import Sequence

import regard
from regard.compare import ResultRow, Verdict
from regard.compare.formatting import (
    NO_RESULT,
    describe_caveats,
    describe_verdict,
    format_row,
    table_header,
)
from regard.compare.results import group_metric, group_rows, rank_rows
from regard.report.data import ComparisonReport
from regard.report.figures import map_figure, pattern_figure
from regard.report.markup import Content, SafeHtml, join, tag
from regard.report.renderings import render_html
from regard.tasks.metrics import Metric

NO_MIXER = "no mixer"  # beside the name of a baseline


def section(name: str, title: str, *content: Content) -> SafeHtml:
    """Return a section with a heading; the contents link to its name."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def group_title(task: str, length: int) -> str:
    """Return the title of a table or plot."""
    return f"{task}, {length:,} tokens"


def recommendations(report: ComparisonReport) -> SafeHtml:
    """Return the verdict of each task and length with its caveats."""
    cards = []
    for verdict in report.result.verdicts:
        row = verdict.recommended
        choice = "none" if row is None else tag("span", row.mixer, class_="choice")
        heading = tag("h3", group_title(verdict.task, verdict.length), ": ", choice)
        items = [tag("li", text) for text in describe_caveats(verdict.caveats, verdict)]
        caveats = tag("ul", *items, class_="caveats") if items else ""
        text = tag("p", describe_verdict(verdict))
        cards.append(tag("article", heading, text, caveats, class_="verdict"))
    return section("recommendation", "Recommendation", cards or tag("p", NO_RESULT))


def tables(report: ComparisonReport) -> SafeHtml:
    """Return a table for each task and length, best mixer first."""
    rows = report.result.rows
    note = (
        "Scores are means over seeds on the test split, with the standard deviation. Memory is the "
        "peak of the training process, minus what it used before the model was built. Baselines "
        f"are marked “{NO_MIXER}”: they need no network, and “constant” ignores the input."
    )
    verdicts = {(verdict.task, verdict.length): verdict for verdict in report.result.verdicts}
    all_tables = (
        join(table(group, verdicts.get(key), report.metrics[key]), all_metrics(group))
        for key, group in group_rows(rows).items()
    )
    return section("table", "All results", tag("p", note, class_="muted"), *all_tables)


def row_name(name: str, row: ResultRow | None = None) -> SafeHtml:
    """Return the header of a row, marked if it is that of a baseline or was eliminated."""
    if row is not None and row.is_baseline:
        return tag("th", name, " ", tag("span", NO_MIXER, class_="badge"), scope="row")
    if row is not None and row.eliminated and row.scores:
        badge = tag("span", f"until rung {row.rung + 1}", class_="badge")
        return tag("th", name, " ", badge, scope="row")
    return tag("th", name, scope="row")


def scrolling_table(
    title: str, header: Sequence[Content], body: Sequence[SafeHtml], *, text_last: bool = False
) -> SafeHtml:
    """Return a table with a caption. It scrolls by itself in a narrow window.

    Args:
        text_last: Whether the last column has text; all but the first have numbers otherwise.
    """
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    class_ = "text-last" if text_last else False
    rows = tag("tbody", *body)
    whole = tag("table", tag("caption", title), tag("thead", head), rows, class_=class_)
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)


def describe_metric(metric: Metric) -> str:
    """Return the name, the unit and the direction of a metric."""
    unit = f" in {metric.unit}" if metric.unit else ""
    direction = "higher" if metric.higher_is_better else "lower"
    return f"{metric.name}{unit}, {direction} is better"


def all_metrics(rows: list[ResultRow]) -> SafeHtml | str:
    """Return a folded table of all metrics; nothing if there is only one."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    if len(names) < 2:
        return ""
    body = []
    for row in rank_rows(rows):
        if row.metrics:
            cells = (
                tag(
                    "td", f"{row.metrics[name]:.4g}" if name in row.metrics else "", class_="number"
                )
                for name in names
            )
            body.append(tag("tr", row_name(row.mixer, row), *cells))
    title = f"{group_title(rows[0].task, rows[0].length)}: all metrics on the test examples"
    summary = tag("summary", "all metrics")
    return tag("details", summary, scrolling_table(title, ["mixer", *names], body))


def table(rows: list[ResultRow], verdict: Verdict | None, metric: Metric) -> SafeHtml:
    """Return the table of one task and length."""
    title = f"{group_title(rows[0].task, rows[0].length)} · {describe_metric(metric)}"
    names = (name.replace("-\n", "") for name in table_header(group_metric(rows)[0]))  # hyphens
    header = [name or tag("span", "note", class_="hidden") for name in names]
    body = []
    for row in rank_rows(rows):
        name, *numbers, note = format_row(row, verdict)
        cells = [row_name(name, row)]
        if row.scores:
            cells += [tag("td", text, class_="number") for text in numbers]
            cells.append(tag("td", note, class_="note"))
            recommended = verdict is not None and row is verdict.recommended
            body.append(tag("tr", *cells, class_="recommended" if recommended else False))
        else:  # one wide cell for the reason instead of empty ones
            reason = tag("div", row.reason)
            cells.append(tag("td", reason, colspan=len(numbers) + 1, class_="reason"))
            body.append(tag("tr", *cells, class_="muted"))
    return scrolling_table(title, header, body, text_last=True)


def patterns(report: ComparisonReport) -> SafeHtml:
    """Return the pattern of each mixer."""
    note = "Rows are queries, columns are keys. A coloured cell: this query may attend to this key."
    figures = (pattern_figure(each) for each in report.patterns)
    grid = tag("div", *figures, class_="grid small")
    return section("patterns", "Patterns", tag("p", note, class_="muted"), grid)


def maps(report: ComparisonReport) -> SafeHtml:
    """Return the attention maps of the trained models."""
    groups: dict[tuple[str, int], list[SafeHtml]] = {}
    for each in report.maps:
        groups.setdefault((each.task, each.length), []).append(map_figure(each))
    note = (
        "Trained models on the first test example. Rows are queries, columns are keys, named by "
        "token id; tokens with a target are bold. Opacity is the square root of the weight, "
        "relative to the largest of the map. To see all layers and heads of a run, and what they "
        "are for: regard look RUN --example 0, with a folder in runs/ of the comparison."
    )
    grids = (
        join(tag("h3", group_title(*key)), tag("div", *figures, class_="grid"))
        for key, figures in groups.items()
    )
    return section("maps", "Attention maps", tag("p", note, class_="muted"), *grids)


def samples(report: ComparisonReport) -> SafeHtml:
    """Return one test example of each task."""
    examples = (
        join(
            tag("h3", group_title(task, length)),
            render_html(sample),
        )
        for task, length, sample in report.samples
    )
    return section("samples", "One example of each task", *examples)


def settings(report: ComparisonReport) -> SafeHtml:
    """Return the settings of the plan and of each run, folded."""

    def fold_json(name: str, value: object) -> SafeHtml:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        return tag("details", tag("summary", name), tag("pre", text, class_="scroll", tabindex=0))

    plan = fold_json("comparison", report.result.record.plan.model_dump(mode="json"))
    runs = (fold_json(name, value) for name, value in report.specs.items())
    summary = tag("summary", f"runs ({len(report.specs)})")
    return section("settings", "Settings", plan, tag("details", summary, *runs))


def environment(report: ComparisonReport) -> SafeHtml:
    """Return the environments the runs were executed in."""
    lists = [
        tag(
            "dl",
            *(join(tag("dt", key), tag("dd", str(value))) for key, value in values.items()),
        )
        for values in ({"regard": regard.__version__, **each} for each in report.environments)
    ]
    note = tag("p", "The runs were executed in different environments:") if len(lists) > 1 else ""
    return section("environment", "Environment", note, lists or tag("p", "No run finished."))


def reproduce(report: ComparisonReport) -> SafeHtml:
    """Return the command that repeats the comparison."""
    command = tag("code", report.result.record.command)
    note = (
        "In the same folder this command completes missing runs; in another folder it repeats all."
    )
    pre = tag("pre", command, class_="scroll", tabindex=0)
    return section("reproduce", "Reproduce", pre, tag("p", note, class_="muted"))
