"""Rows in words, the same in the terminal, in JSON and on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from regard.compare.verdict import ResultRow, Verdict

COLUMNS = (
    "mixer",
    "task",
    "length",
    "metric",
    "score",
    "spread",
    "seeds",
    "speed",
    "memory",
    "parameters",
    "steps",
    "why",
)


def group_rows(rows: Iterable[ResultRow]) -> dict[tuple[str, int], list[ResultRow]]:
    """The rows by task and length: only those of one place can be compared."""
    found: dict[tuple[str, int], list[ResultRow]] = {}
    for row in rows:
        found.setdefault((row.task, row.length), []).append(row)
    return found


def metric_of(rows: Iterable[ResultRow]) -> str:
    """What the rows of a place were judged by; "" where none has a score."""
    return next((row.metric for row in rows if row.metric), "")


def rank_rows(rows: list[ResultRow]) -> list[ResultRow]:
    """The best first; those without a score last."""
    sign = -1 if metric_of(rows) == "accuracy" else 1
    return sorted(rows, key=lambda row: (not row.scores, sign * row.score if row.scores else 0))


def headings(metric: str) -> tuple[str, ...]:
    """What stands above the words of `format_row`."""
    return (
        "mechanism",
        metric,
        "± seeds",
        "tokens/s",
        "× dense",
        "memory MB",
        "parameters",
        "steps",
        "",
    )


def format_row(row: ResultRow, verdict: Verdict | None) -> list[str]:
    """One row in words."""
    dense = verdict.dense if verdict is not None else None
    ratio = "" if dense is None or math.isnan(row.speed) else f"{row.speed / dense.speed:.2f}"
    note = row.why or ("← take this" if verdict is not None and row is verdict.take else "")
    return [
        row.mixer,
        shown(row.score, "{:.3f}"),
        shown(row.spread, "{:.3f}"),
        shown(row.speed, "{:,.0f}"),
        ratio,
        shown(row.memory / 1e6, "{:,.0f}"),
        f"{row.parameters:,}" if row.parameters else "",
        shown(row.steps, "{:,.0f}"),
        note,
    ]


def shown(number: float, form: str) -> str:
    """A number, or nothing where there is none."""
    return "" if math.isnan(number) else form.format(number)


def row_to_json(row: ResultRow) -> dict[str, Any]:
    """One row; what is not there is null."""
    values = (
        row.mixer,
        row.task,
        row.length,
        row.metric,
        row.score,
        row.spread,
        row.scores,
        row.speed,
        row.memory,
        row.parameters,
        row.steps,
        row.why,
    )
    return {
        k: None if isinstance(v, float) and math.isnan(v) else v
        for k, v in zip(COLUMNS, values, strict=True)
    }
