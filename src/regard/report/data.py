"""All that a report says of a comparison, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regard
from regard.compare import ResultRow, Verdict, compute_verdicts
from regard.compare.formatting import group_rows, row_to_json
from regard.compare.ledger import DONE, FAILED, REFUSED, LedgerEntry
from regard.compare.plan import cached_task, spec_label, tasks_at_lengths
from regard.compare.record import ComparisonRecord, read_entries, read_record, result_rows
from regard.json_files import read_json
from regard.report.curves import Curve, curves
from regard.report.maps import AttentionMap, PatternPictures, maps, patterns
from regard.train.run import SPEC_FILE

FEW = 3  # seeds from which a spread says something
APART = 0.1  # a difference of parameters that is worth a word


@dataclass(frozen=True)
class ComparisonReport:
    """A comparison, and what came of it.

    samples   (task, length, one example as its task shows it)
    specs     the words of each run by its name, and where it was run by `environments`
    """

    record: ComparisonRecord
    rows: list[ResultRow]
    verdicts: list[Verdict]
    runs: list[LedgerEntry]
    curves: list[Curve]
    patterns: list[PatternPictures]
    maps: list[AttentionMap]
    samples: list[tuple[str, int, str]]
    specs: dict[str, Any]
    environments: list[dict[str, Any]]


def load_report(folder: Path) -> ComparisonReport:
    """Read the folder of a comparison; ValueError where it is none."""
    record = read_record(folder)
    runs = read_entries(folder, record)
    rows = result_rows(record.plan, runs)
    return ComparisonReport(
        record,
        rows,
        compute_verdicts(rows),
        runs,
        curves(runs),
        patterns(folder, runs),
        maps(folder, runs),
        samples(record),
        specs(folder, runs),
        environments(runs),
    )


def samples(record: ComparisonRecord) -> list[tuple[str, int, str]]:
    """The first test example of each task, at its shortest length."""
    found = []
    for part in record.plan.tasks:
        short = min(
            map(cached_task, tasks_at_lengths(part, record.plan.lengths)),
            key=lambda task: task.length,
        )
        found.append((spec_label(part), short.length, short.show(short.example("test", 0))))
    return found


def specs(folder: Path, runs: list[LedgerEntry]) -> dict[str, Any]:
    """What each run was made from, by its name; a run that never began has none."""
    paths = {run.name: folder / "runs" / run.key / SPEC_FILE for run in runs}
    return {name: read_json(path) for name, path in paths.items() if path.is_file()}


def environments(runs: list[LedgerEntry]) -> list[dict[str, Any]]:
    """Where the runs were made, each that differs once."""
    found: list[dict[str, Any]] = []
    for run in runs:
        place = {} if run.result is None else run.result["environment"]
        if place and place not in found:
            found.append(place)
    return found


def find_caveats(found: ComparisonReport, verdict: Verdict) -> list[str]:
    """What speaks against taking a recommendation at its word."""
    rows = group_rows(found.rows)[verdict.task, verdict.length]
    said = []
    seeds = len(verdict.best.scores)
    if 1 < seeds < FEW:
        said.append(f"{seeds} seeds give a rough idea of the noise only.")
    judged = [row.examples for row in rows if row.examples]
    if judged and max(judged) > min(judged):
        said.append(
            f"Time was short: some were judged on {min(judged):,} test examples, others on {max(judged):,}."
        )
    sizes = [row.parameters for row in rows if row.parameters]
    if max(sizes) > (1 + APART) * min(sizes):
        said.append(
            f"The models are not of one size: from {min(sizes):,} to {max(sizes):,} parameters."
        )
    ends = {run.status for run in found.runs}
    if not ends <= {DONE, REFUSED}:
        said.append(
            "Some runs did not come to an end."
            if FAILED not in ends
            else "Some runs failed: see the table."
        )
    return said


def report_to_json(found: ComparisonReport) -> dict[str, Any]:
    """The data behind the page."""
    return {
        "version": regard.__version__,
        "command": found.record.command,
        "plan": found.record.plan.model_dump(mode="json"),
        "rows": [row_to_json(row) for row in found.rows],
        "verdicts": [
            {
                "task": v.task,
                "length": v.length,
                "take": v.take and v.take.mixer,
                "words": v.words,
                "doubts": find_caveats(found, v),
            }
            for v in found.verdicts
        ],
        "curves": [c._asdict() | {"points": [p._asdict() for p in c.points]} for c in found.curves],
        "maps": [_map_json(each) for each in found.maps],
        "samples": [
            {"task": name, "length": length, "text": text} for name, length, text in found.samples
        ],
        "specs": found.specs,
        "environments": found.environments,
    }


def _map_json(found: AttentionMap) -> dict[str, Any]:
    """The map of the first layer that has one, the mean over its heads."""
    first = next((layer for layer in found.layers if layer is not None), None)
    weights = (
        None if first is None else [[round(w, 5) for w in row] for row in first.mean(0).tolist()]
    )
    return {
        "mixer": found.mixer,
        "task": found.task,
        "length": found.length,
        "tokens": found.tokens,
        "weights": weights,
        "why": found.why,
    }
