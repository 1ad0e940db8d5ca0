"""The content of a report: a result with its curves, patterns, maps and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regard
from regard.compare import ComparisonResult, load_result
from regard.compare.formatting import row_to_json, verdict_to_json
from regard.compare.plan import cached_task, spec_label, tasks_at_lengths
from regard.compare.record import RUNS_DIR
from regard.json_files import read_json
from regard.report.curves import LearningCurve, learning_curves
from regard.report.maps import AttentionMap, PatternPictures, load_maps, load_patterns
from regard.train.run import SPEC_FILE


@dataclass(frozen=True)
class ComparisonReport:
    """All that the page shows.

    Attributes:
        result: Rows and verdicts.
        curves: Learning curves.
        patterns: Pictures of the pattern of each mixer.
        maps: Attention maps of the trained models.
        samples: (task, length, text of one test example).
        specs: The spec of each run that has started, by name.
        environments: The distinct environments the runs were executed in.
    """

    result: ComparisonResult
    curves: list[LearningCurve]
    patterns: list[PatternPictures]
    maps: list[AttentionMap]
    samples: list[tuple[str, int, str]]
    specs: dict[str, Any]
    environments: list[dict[str, Any]]


def load_report(folder: Path) -> ComparisonReport:
    """Build the report of a comparison's folder; ValueError if it is not one."""
    return build_report(folder, load_result(folder))


def build_report(folder: Path, result: ComparisonResult) -> ComparisonReport:
    """Build the report of a result; curves, models and specs are read from the folder."""
    plan, entries = result.record.plan, result.entries
    samples = []
    for spec in plan.tasks:
        tasks = [cached_task(sized) for sized in tasks_at_lengths(spec, plan.lengths)]
        shortest = min(tasks, key=lambda task: task.length)
        text = shortest.show(shortest.example("test", 0))
        samples.append((spec_label(spec), shortest.length, text))
    paths = {entry.name: folder / RUNS_DIR / entry.key / SPEC_FILE for entry in entries}
    environments: list[dict[str, Any]] = []
    for entry in entries:
        environment = {} if entry.result is None else entry.result["environment"]
        if environment and environment not in environments:
            environments.append(environment)
    return ComparisonReport(
        result,
        learning_curves(entries),
        load_patterns(folder, entries),
        load_maps(folder, entries),
        samples,
        {name: read_json(path) for name, path in paths.items() if path.is_file()},
        environments,
    )


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    """Return the data of the page as plain values."""
    result = report.result
    return {
        "version": regard.__version__,
        "command": result.record.command,
        "plan": result.record.plan.model_dump(mode="json"),
        "rows": [row_to_json(row) for row in result.rows],
        "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
        "curves": [
            curve._asdict() | {"points": [point._asdict() for point in curve.points]}
            for curve in report.curves
        ],
        "maps": [_map_to_json(each) for each in report.maps],
        "samples": [
            {"task": task, "length": length, "text": text} for task, length, text in report.samples
        ],
        "specs": report.specs,
        "environments": report.environments,
    }


def _map_to_json(each: AttentionMap) -> dict[str, Any]:
    """Return the first layer that has a map, averaged over its heads."""
    layer = next((layer for layer in each.layers if layer is not None), None)
    weights = None
    if layer is not None:
        weights = [[round(weight, 5) for weight in row] for row in layer.mean(0).tolist()]
    return {
        "mixer": each.mixer,
        "task": each.task,
        "length": each.length,
        "tokens": each.tokens,
        "weights": weights,
        "reason": each.reason,
    }
