"""The sections of the page without a plot: recommendations, tables, pictures, samples, and how to have it again."""

from __future__ import annotations

import json

import regard
from regard.compare import ResultRow, Verdict
from regard.compare.formatting import format_row, group_rows, headings, metric_of, rank_rows
from regard.report.data import ComparisonReport, find_caveats
from regard.report.figures import map_figure, pattern_figure
from regard.report.markup import Inside, SafeHtml, join, tag

NO_VERDICT = "No run came to an end: nothing can be recommended."


def section(name: str, title: str, *inside: Inside) -> SafeHtml:
    """A part of the page that the contents lead to."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        *inside,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def place(task: str, length: int) -> str:
    """What a table or a plot is about."""
    return f"{task}, {length:,} tokens"


# ---------------------------------------------------------------------------------------------- what to take
def recommendations(found: ComparisonReport) -> SafeHtml:
    """For each task and length, what to take, with its evidence and its doubt."""
    cards = [_recommended(found, verdict) for verdict in found.verdicts]
    return section("recommendation", "Recommendation", cards or tag("p", NO_VERDICT))


def _recommended(found: ComparisonReport, verdict: Verdict) -> SafeHtml:
    against = find_caveats(found, verdict)
    items = tag("ul", *(tag("li", text) for text in against), class_="doubts") if against else ""
    taken = (
        "nothing yet" if verdict.take is None else tag("span", verdict.take.mixer, class_="take")
    )
    title = tag("h3", place(verdict.task, verdict.length), ": ", taken)
    return tag("article", title, tag("p", verdict.words), items, class_="verdict")


# ---------------------------------------------------------------------------------------------- table
def tables(found: ComparisonReport) -> SafeHtml:
    """All rows, a table for each task and length, the best first."""
    verdict = {(v.task, v.length): v for v in found.verdicts}
    made = [table(rows, verdict.get(key)) for key, rows in group_rows(found.rows).items()]
    note = "Scores are means over seeds on the test split, ± the standard deviation. Memory is the peak of the training process "
    note += (
        "beyond what it had before the model was made. “constant” says the same whatever the input."
    )
    if any(row.metric == "bits" for row in found.rows):
        note += (
            " Bits are what it takes to foretell one character or byte of the text: less is better."
        )
    return section("table", "All results", tag("p", note, class_="muted"), *made)


def table(rows: list[ResultRow], verdict: Verdict | None) -> SafeHtml:
    """The rows of one place; it scrolls by itself where the window is narrow."""
    title = place(rows[0].task, rows[0].length)
    head = tag(
        "tr",
        *(
            tag("th", name or tag("span", "note", class_="hidden"), scope="col")
            for name in headings(metric_of(rows))
        ),
    )
    body = (_line(row, verdict) for row in rank_rows(rows))
    whole = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)


def _line(row: ResultRow, verdict: Verdict | None) -> SafeHtml:
    name, *rest = format_row(row, verdict)
    look = (
        "muted"
        if not row.scores
        else "taken"
        if verdict is not None and row is verdict.take
        else False
    )
    if not row.scores:  # one cell for the reason, instead of seven empty ones
        return tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", tag("div", row.why), colspan=len(rest), class_="why"),
            class_="muted",
        )
    *numbers, note = rest
    cells = (tag("td", text, class_="number") for text in numbers)
    return tag("tr", tag("th", name, scope="row"), *cells, tag("td", note), class_=look)


# ---------------------------------------------------------------------------------------------- pictures
def patterns(found: ComparisonReport) -> SafeHtml:
    """Who may look at whom."""
    note = "Rows are queries, columns are keys: a coloured cell says that this query may look at this key."
    figures = (pattern_figure(each) for each in found.patterns)
    return section(
        "patterns",
        "Patterns",
        tag("p", note, class_="muted"),
        tag("div", *figures, class_="grid small"),
    )


def maps(found: ComparisonReport) -> SafeHtml:
    """What the trained models look at."""
    by_task: dict[tuple[str, int], list[SafeHtml]] = {}
    for each in found.maps:
        by_task.setdefault((each.task, each.length), []).append(map_figure(each))
    note = "Trained models on the first test example. Rows are queries, columns are keys, by the number of the token; in bold "
    note += "where there is a target. The darker or brighter, the more weight (its root, each map by its own greatest)."
    parts = (
        join(tag("h3", place(*key)), tag("div", *figures, class_="grid"))
        for key, figures in by_task.items()
    )
    return section("maps", "Attention maps", tag("p", note, class_="muted"), *parts)


def samples(found: ComparisonReport) -> SafeHtml:
    """One example of each task."""
    shown = (
        join(tag("h3", place(task, n)), tag("pre", text, class_="scroll", tabindex=0))
        for task, n, text in found.samples
    )
    return section("samples", "One example of each task", *shown)


# ---------------------------------------------------------------------------------------------- to have it again
def configurations(found: ComparisonReport) -> SafeHtml:
    """The words of the plan and of each run, folded."""
    plan = found.record.plan.model_dump(mode="json")
    runs = (_folded(name, value) for name, value in found.specs.items())
    each = tag("details", tag("summary", f"each run ({len(found.specs)})"), *runs)
    return section("configurations", "Configurations", _folded("the plan", plan), each)


def _folded(name: str, value: object) -> SafeHtml:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return tag("details", tag("summary", name), tag("pre", text, class_="scroll", tabindex=0))


def environment(found: ComparisonReport) -> SafeHtml:
    """Where it was measured."""
    note = (
        ""
        if len(found.environments) < 2
        else tag("p", "The runs were not all made in the same environment:")
    )
    lists = (
        tag(
            "dl",
            *(
                join(tag("dt", k), tag("dd", str(v)))
                for k, v in {"regard": regard.__version__, **each}.items()
            ),
        )
        for each in found.environments
    )
    return section(
        "environment", "Environment", note, list(lists) or tag("p", "No run came to an end.")
    )


def repeat(found: ComparisonReport) -> SafeHtml:
    """The command."""
    note = "The same command in the same folder goes on with what is missing; in another folder it does all again."
    command = tag("pre", tag("code", found.record.command), class_="scroll", tabindex=0)
    return section("repeat", "To have it again", command, tag("p", note, class_="muted"))
