"""Results of a comparison in words, the same for the terminal, JSON, CSV and the page."""

from __future__ import annotations

import math
from typing import Any

from regard.compare.results import SINGLE_SEED_GAP, Caveats, ResultRow, Verdict

NO_RESULT = "No run finished, so there is no recommendation."


def describe_verdict(verdict: Verdict) -> str:
    """Return the recommendation and its evidence."""
    row, best, dense, baseline = (
        verdict.recommended,
        verdict.best,
        verdict.dense,
        verdict.baseline,
    )
    place = f"{verdict.task} at {verdict.length:,} tokens"
    if row is None:
        assert baseline is not None
        return (
            f"No recommendation for {place}: nothing was learned. The best mixer, {best.mixer}, "
            f"has {format_score(best)}; the constant baseline has {format_score(baseline)}. "
            "Train longer or make the task easier."
        )
    text = f"Use {row.mixer} for {place} on this machine: {format_score(row)}"
    if dense is not None and row is not dense:
        text += f", {row.tokens_per_second / dense.tokens_per_second:.2g} × the training speed"
        # 0: a model too small to be measured; NaN: a system that does not tell the peak
        if dense.peak_bytes > 0 and row.peak_bytes >= 0:
            text += f" and {row.peak_bytes / dense.peak_bytes:.2g} × the peak memory"
        elif math.isnan(dense.peak_bytes):
            text += " (this system does not tell the peak memory)"
        text += f" of dense softmax ({format_score(dense)})"
    if not verdict.ties:
        return f"{text}. No other mixer is close."
    ties = [
        f"{tie.mixer} ({format_score(tie)}, the best score)" if tie is best else tie.mixer
        for tie in verdict.ties
    ]
    significant = "significantly " if len(row.scores) > 1 else "clearly "
    return f"{text}. Not {significant}different: {', '.join(ties)}."


def describe_caveats(caveats: Caveats) -> list[str]:
    """Return a sentence for each caveat that applies."""
    sentences = []
    if caveats.seeds == 1:
        sentences.append(
            "One seed only: the variance is unknown and differences below "
            f"{SINGLE_SEED_GAP:.0%} count as ties. Use --seeds 3."
        )
    elif caveats.seeds:
        sentences.append(f"{caveats.seeds} seeds give only a rough estimate of the variance.")
    if caveats.test_examples:
        fewest, most = caveats.test_examples
        sentences.append(
            f"Out of time: some models were tested on {fewest:,} examples, others on {most:,}."
        )
    if caveats.parameters:
        fewest, most = caveats.parameters
        sentences.append(f"Model sizes differ: from {fewest:,} to {most:,} parameters.")
    if caveats.failed_runs:
        sentences.append("Some runs failed: see the table.")
    elif caveats.unfinished_runs:
        sentences.append("Some runs have not finished.")
    return sentences


def format_score(row: ResultRow) -> str:
    """Return "0.93 ± 0.01 accuracy"."""
    std = f" ± {row.std:.2g}" if len(row.scores) > 1 else ""
    return f"{row.score:.3g}{std} {row.metric}"


def table_header(metric: str) -> tuple[str, ...]:
    """Return the column names of `format_row`."""
    return (
        "mixer",
        metric,
        "± std",
        "tokens/s",
        "× dense",
        "peak MB",
        "parameters",
        "steps",
        "",
    )


def format_row(row: ResultRow, verdict: Verdict | None) -> list[str]:
    """Return the cells of a table row; cells without a value are empty."""

    def number(value: float, spec: str) -> str:
        return "" if math.isnan(value) else format(value, spec)

    dense = (
        math.nan if verdict is None or verdict.dense is None else verdict.dense.tokens_per_second
    )
    recommended = verdict is not None and row is verdict.recommended
    return [
        row.mixer,
        number(row.score, ".3f"),
        number(row.std, ".3f"),
        number(row.tokens_per_second, ",.0f"),
        number(row.tokens_per_second / dense, ".2f"),
        number(row.peak_bytes / 1e6, ",.0f"),
        f"{row.parameters:,}" if row.parameters else "",
        number(row.steps, ",.0f"),
        row.reason or ("← recommended" if recommended else ""),
    ]


def row_to_json(row: ResultRow) -> dict[str, Any]:
    """Return a row as plain values; numbers that are missing are None."""
    values = {
        "mixer": row.mixer,
        "task": row.task,
        "length": row.length,
        "metric": row.metric,
        "score": row.score,
        "std": row.std,
        "scores": row.scores,
        "tokens_per_second": row.tokens_per_second,
        "peak_bytes": row.peak_bytes,
        "parameters": row.parameters,
        "steps": row.steps,
        "reason": row.reason,
    }
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values: names of mixers, and the text that the table shows."""
    return {
        "task": verdict.task,
        "length": verdict.length,
        "recommended": verdict.recommended and verdict.recommended.mixer,
        "best": verdict.best.mixer,
        "ties": [row.mixer for row in verdict.ties],
        "summary": describe_verdict(verdict),
        "caveats": describe_caveats(verdict.caveats),
    }
