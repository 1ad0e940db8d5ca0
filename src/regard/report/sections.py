"""The sections of the page without plots: recommendations, tables, pictures and settings."""

from __future__ import annotations

import json

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
        items = [tag("li", text) for text in describe_caveats(verdict.caveats)]
        caveats = tag("ul", *items, class_="caveats") if items else ""
        text = tag("p", describe_verdict(verdict))
        cards.append(tag("article", heading, text, caveats, class_="verdict"))
    return section("recommendation", "Recommendation", cards or tag("p", NO_RESULT))


def tables(report: ComparisonReport) -> SafeHtml:
    """Return a table for each task and length, best mixer first."""
    rows = report.result.rows
    note = (
        "Scores are means over seeds on the test split, with the standard deviation. Memory is the "
        "peak of the training process, minus what it used before the model was built. “constant” "
        "is the constant baseline: it ignores the input."
    )
    if any(row.metric.startswith("bits") for row in rows):
        note += " Bits are per character or byte of text; lower is better."
    verdicts = {(verdict.task, verdict.length): verdict for verdict in report.result.verdicts}
    all_tables = (table(group, verdicts.get(key)) for key, group in group_rows(rows).items())
    return section("table", "All results", tag("p", note, class_="muted"), *all_tables)


def table(rows: list[ResultRow], verdict: Verdict | None) -> SafeHtml:
    """Return the table of one task and length. It scrolls by itself in a narrow window."""
    title = group_title(rows[0].task, rows[0].length)
    header = [
        tag("th", name or tag("span", "note", class_="hidden"), scope="col")
        for name in table_header(group_metric(rows))
    ]
    body = []
    for row in rank_rows(rows):
        name, *numbers, note = format_row(row, verdict)
        cells = [tag("th", name, scope="row")]
        if row.scores:
            cells += [tag("td", text, class_="number") for text in numbers]
            cells.append(tag("td", note))
            recommended = verdict is not None and row is verdict.recommended
            body.append(tag("tr", *cells, class_="recommended" if recommended else False))
        else:  # one wide cell for the reason instead of empty ones
            reason = tag("div", row.reason)
            cells.append(tag("td", reason, colspan=len(numbers) + 1, class_="reason"))
            body.append(tag("tr", *cells, class_="muted"))
    whole = tag(
        "table", tag("caption", title), tag("thead", tag("tr", *header)), tag("tbody", *body)
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)


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
        "relative to the largest of the map."
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
            tag("pre", text, class_="scroll", tabindex=0),
        )
        for task, length, text in report.samples
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
