"""Results of a comparison in words, the same for the terminal, JSON, CSV and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from regard.compare.halving import Rung
from regard.compare.plan import Preference, spec_label
from regard.compare.record import ComparisonRecord, ComparisonResult
from regard.compare.results import (
    FASTER,
    PREFERENCES,
    SMALLER,
    Caveats,
    CostRow,
    ResultRow,
    Verdict,
    relative_cost,
)

PARAMETERS = "para-\nmeters"  # the header of a column
NO_RESULT = "No run finished, so there is no recommendation."
GAINS: dict[Preference, str] = {
    "speed": "the training speed",
    "latency": "the speed of inference",
    "memory": "the peak memory",
}


def describe_plan(record: ComparisonRecord, seconds: float) -> list[str]:
    """Return the plan in sentences: what every rung trains, and how long it takes."""
    lines = []
    for group in record.schedule:
        lines.append(f"Plan for {spec_label(group.task)} at {group.length:,} tokens:")
        for index, rung in enumerate(group.rungs):
            lines.append(f"  rung {index + 1}: {describe_rung(rung)}")
    if seconds:
        lines.append(f"Estimated time: {seconds / 60:.1f} minutes.")
    return lines


def describe_rung(rung: Rung) -> str:
    """Return "4 candidates x 3 seeds, 120 to 340 steps (linear 340, vanilla 120), ..."."""
    parts = [f"{rung.keep} candidates"]
    if len(rung.rates) > 1:
        rates = ", ".join(f"{rate:g}" for rate in rung.rates)
        parts.append(f"learning rates {rates}")
    if len(rung.seeds) > 1:
        parts.append(f"{len(rung.seeds)} seeds")
    text = " × ".join(parts)
    counts = set(rung.steps.values())
    if len(counts) == 1:
        steps = f"{counts.pop():,} steps each"
    else:
        steps = ", ".join(f"{label} {count:,}" for label, count in rung.steps.items())
        steps = f"steps: {steps}"
    return f"{text}; {steps}; at most {rung.eval_examples:,} examples per evaluation"


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
        text += f"{_describe_costs(row, dense)} of {dense.mixer} ({format_score(dense)})"
        if math.isnan(dense.peak_bytes):
            text += "; this system does not tell the peak memory"
    if verdict.better_baseline is not None:
        cheap = verdict.better_baseline
        text = (
            f"{cheap.mixer}, which needs no network, has {format_score(cheap)}, and no mixer has a "
            f"better score on {place}. If you need a network: {text[0].lower()}{text[1:]}"
        )
    return f"{text}. {_describe_basis(verdict)}"


def _describe_costs(row: ResultRow, dense: ResultRow) -> str:
    """Speed and memory relative to dense softmax, each where it is known."""
    parts = []
    for what, gain in GAINS.items():
        ratio = relative_cost(row, dense, what)
        if not math.isnan(ratio):
            parts.append(f"{ratio if what == 'memory' else 1 / ratio:.2g} × {gain}")
    if not parts:
        return ", instead"
    *first, last = parts
    return f", {', '.join(first)} and {last}" if first else f", {last}"


def _describe_basis(verdict: Verdict) -> str:
    """Why this row is recommended: the margin, and whether it is material and significant."""
    row, dense = verdict.recommended, verdict.dense
    assert row is not None
    if dense is None:
        return "The reference has no score, so this is the best score, without a comparison."
    material = f"{verdict.margin:.3g}"
    if verdict.basis == "default":
        looked = " and ".join(PREFERENCES[verdict.prefer])
        text = (
            f"No other is better by a material and significant margin in {looked} (the score by at "
            f"least {material}, speed and latency by {FASTER} ×, memory by {SMALLER} ×; 95 %, "
            "corrected for the number of mixers)."
        )
    else:
        assert row.difference is not None
        difference = format_difference(row)
        if verdict.basis == "score":
            text = (
                f"Its score differs by {difference}, which is significant "
                f"(p = {row.difference.adjusted_p:.2g}, corrected) and more than {material}."
            )
        else:
            needed = f"{SMALLER} ×" if verdict.basis == "memory" else f"{FASTER} ×"
            text = (
                f"It is chosen for its {verdict.basis} (at least {needed} is material), and its "
                f"score differs by {difference}: a loss of {material} or more is excluded."
            )
    if verdict.ties and verdict.dense is not None:
        names = ", ".join(tie.mixer for tie in verdict.ties)
        text += f" Not significantly different from {verdict.dense.mixer}: {names}."
    return text


def describe_caveats(caveats: Caveats, verdict: Verdict | None = None) -> list[str]:
    """Return a sentence for each caveat that applies."""
    sentences = []
    if caveats.seeds == 1:
        sentences.append(
            "One seed only: the variance between runs is unknown, so no difference is significant. "
            "Use --seeds 3."
        )
    elif caveats.seeds:
        sentences.append(f"{caveats.seeds} seeds give only a rough estimate of the variance.")
    if caveats.test_examples:
        fewest, most = caveats.test_examples
        sentences.append(
            f"Some models were tested on {fewest:,} examples, others on {most:,}: differences are "
            "those on the examples of both."
        )
    if caveats.parameters:
        fewest, most = caveats.parameters
        sentences.append(f"Model sizes differ: from {fewest:,} to {most:,} parameters.")
    for row in verdict.unproven if verdict is not None else ():
        assert verdict is not None
        assert verdict.dense is not None
        cost = next(each for each in PREFERENCES[verdict.prefer] if each != "score")
        ratio = relative_cost(row, verdict.dense, cost)
        sentences.append(
            f"{row.mixer} has {ratio if cost == 'memory' else 1 / ratio:.2g} × {GAINS[cost]}, and "
            f"its score differs by {format_difference(row)}: a loss of {verdict.margin:.3g} or "
            "more is not excluded. More seeds or test examples would tell."
        )
    if caveats.load:
        sentences.append(caveats.load)
    sentences.extend(caveats.data)
    if caveats.failed_runs:
        sentences.append("Some runs failed: see the table.")
    elif caveats.unfinished_runs:
        sentences.append("Some runs have not finished.")
    return sentences


def format_score(row: ResultRow) -> str:
    """Return "0.93 ± 0.01 accuracy"."""
    std = f" ± {row.std:.2g}" if len(row.scores) > 1 else ""
    return f"{row.score:.3g}{std} {row.metric}"


def format_difference(row: ResultRow) -> str:
    """Return "+0.021 [+0.009, +0.033]", the difference to dense softmax with its interval."""
    found = row.difference
    if found is None:
        return ""
    if math.isnan(found.low):
        return f"{found.estimate:+.3f} [unknown]"
    return f"{found.estimate:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def format_interval(row: ResultRow) -> str:
    """Return "[+0.009, +0.033]", the interval of the difference to dense softmax; the difference
    itself, in brackets, if there is one seed."""
    found = row.difference
    if found is None:
        return ""
    if math.isnan(found.low):
        return f"({found.estimate:+.3f})"
    return f"[{found.low:+.3f}, {found.high:+.3f}]"


def table_header(metric: str) -> tuple[str, ...]:
    """Return the column names of `format_row`."""
    return (
        "mixer",
        metric,
        "95 % interval\n(difference)",
        "lr",
        "steps",
        "tokens/s",
        "latency\nms",
        "peak\nMB",
        PARAMETERS,
        "note",
    )


def format_row(row: ResultRow, verdict: Verdict | None) -> list[str]:
    """Return the cells of a table row; cells without a value are empty."""

    def number(value: float, spec: str) -> str:
        return "" if math.isnan(value) else format(value, spec)

    return [
        row.mixer,
        number(row.score, ".3f"),
        format_interval(row),
        number(row.lr, "g"),
        number(row.steps, ",.0f"),
        number(row.tokens_per_second, ",.0f"),
        number(1e3 * row.latency, ",.3g"),
        number(row.peak_bytes / 1e6, ",.0f"),
        f"{row.parameters:,}" if row.parameters else "",
        "; ".join(row_notes(row, verdict)),
    ]


def row_notes(row: ResultRow, verdict: Verdict | None) -> Iterator[str]:
    """Yield what there is to say about a row: why it has no score, or what became of it."""
    if row.reason:
        yield row.reason
    if row.is_baseline and row.scores:
        yield "no network"
    if row.eliminated:
        yield f"out in rung {row.rung + 1}"
    if verdict is not None and row is verdict.recommended:
        yield "← recommended"


def _plain(value: Any) -> Any:
    """A value for JSON: numbers that are missing or infinite are None."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ratios(row: ResultRow | CostRow) -> dict[str, Any]:
    """The speed relative to dense softmax, with its interval."""
    ratios = {"speedup": row.speedup, "latency_speedup": row.latency_speedup}
    return {name: None if each is None else each._asdict() for name, each in ratios.items()}


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
        "metrics": row.metrics,
        "difference": None if row.difference is None else asdict(row.difference),
        "lr": row.lr,
        "steps": row.steps,
        "seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "latency": row.latency,
        **_ratios(row),
        "peak_bytes": row.peak_bytes,
        "parameters": row.parameters,
        "test_examples": row.test_examples,
        "rung": row.rung,
        "eliminated": row.eliminated,
        "reason": row.reason,
        "is_baseline": row.is_baseline,
    }
    return {key: _plain(value) for key, value in values.items()}


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values: names of mixers, and the text that the table shows."""
    values = {
        "task": verdict.task,
        "length": verdict.length,
        "recommended": verdict.recommended and verdict.recommended.mixer,
        "basis": verdict.basis,
        "prefer": verdict.prefer,
        "margin": verdict.margin,
        "best": verdict.best.mixer,
        "better_baseline": verdict.better_baseline and verdict.better_baseline.mixer,
        "ties": [row.mixer for row in verdict.ties],
        "unproven": [row.mixer for row in verdict.unproven],
        "summary": describe_verdict(verdict),
        "caveats": describe_caveats(verdict.caveats, verdict),
    }
    return {key: _plain(value) for key, value in values.items()}


def result_to_json(result: ComparisonResult) -> dict[str, Any]:
    """Return a whole result as plain values."""
    costs = [_plain(asdict(cost) | _ratios(cost)) for cost in result.costs]
    return {
        "plan": result.record.plan.model_dump(mode="json"),
        "schedule": [each.model_dump(mode="json") for each in result.record.schedule],
        "rows": [row_to_json(row) for row in result.rows],
        "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
        "search": [_plain(asdict(point)) for point in result.search],
        "costs": costs,
        "rungs": [asdict(rung) for rung in result.rungs],
        "differences": [_plain(asdict(each)) for each in result.differences],
        "load": result.load,
        "unique_successes": [
            {"task": task, "length": length, "examples": examples}
            for (task, length), examples in result.unique_successes.items()
        ],
    }
