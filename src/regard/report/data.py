"""The content of a report: a result with its curves, patterns, maps, examples and settings."""

from __future__ import annotations

import dataclasses
import math
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
from regard.report.maps import (
    READ_ERRORS,
    AttentionMap,
    PatternPictures,
    load_maps,
    load_patterns,
)
from regard.tasks import Task
from regard.tasks.metrics import Metric
from regard.tasks.rendering import Rendered, RenderedText
from regard.train.run import SPEC_FILE

MAX_UNIQUE = 2  # examples shown of those that one mixer alone gets right


@dataclass(frozen=True)
class UniqueSuccesses:
    """Test examples that one mixer alone gets right.

    Attributes:
        indices: All of them.
        shown: The first ones, for a person.
    """

    mixer: str
    task: str
    length: int
    indices: list[int]
    shown: list[Rendered]


@dataclass(frozen=True)
class ComparisonReport:
    """All that the page shows.

    Attributes:
        result: Rows, verdicts, search, costs and differences.
        metrics: The metric that decides, by task and length.
        curves: Learning curves.
        patterns: Pictures of the pattern of each mixer.
        maps: Attention maps of the trained models.
        unique: Test examples that one mixer alone gets right.
        samples: (task, length, one test example).
        specs: The spec of each run that has started, by name.
        environments: The distinct environments the runs were executed in.
    """

    result: ComparisonResult
    metrics: dict[tuple[str, int], Metric]
    curves: list[LearningCurve]
    patterns: list[PatternPictures]
    maps: list[AttentionMap]
    unique: list[UniqueSuccesses]
    samples: list[tuple[str, int, Rendered]]
    specs: dict[str, Any]
    environments: list[dict[str, Any]]


def load_report(folder: Path) -> ComparisonReport:
    """Build the report of a comparison's folder; ValueError if it is not one."""
    return build_report(folder, load_result(folder))


def build_report(folder: Path, result: ComparisonResult) -> ComparisonReport:
    """Build the report of a result; curves, models and specs are read from the folder."""
    plan, entries = result.record.plan, result.entries
    samples: list[tuple[str, int, Rendered]] = []
    metrics: dict[tuple[str, int], Metric] = {}
    unique: list[UniqueSuccesses] = []
    for spec in plan.tasks:
        tasks = [cached_task(sized) for sized in tasks_at_lengths(spec, plan.lengths)]
        shortest = min(tasks, key=lambda task: task.length)
        sample = shortest.render(shortest.example("test", 0))
        samples.append((spec_label(spec), shortest.length, sample))
        for task in tasks:
            key = (spec_label(spec), task.length)
            metrics[key] = task.metric
            for mixer, indices in result.unique_successes.get(key, {}).items():
                if not indices:
                    continue
                shown = [render_example(task, index) for index in indices[:MAX_UNIQUE]]
                unique.append(UniqueSuccesses(mixer, *key, indices, shown))
    paths = {entry.name: folder / RUNS_DIR / entry.key / SPEC_FILE for entry in entries}
    environments: list[dict[str, Any]] = []
    for entry in entries:
        environment = {} if entry.result is None else entry.result["environment"]
        if environment and environment not in environments:
            environments.append(environment)
    return ComparisonReport(
        result,
        metrics,
        learning_curves(entries),
        load_patterns(folder, entries),
        load_maps(folder, entries),
        unique,
        samples,
        {name: read_json(path) for name, path in paths.items() if path.is_file()},
        environments,
    )


def render_example(task: Task, index: int) -> Rendered:
    """Return a test example for a person, or why it cannot be shown: the data may have changed."""
    try:
        return task.render(task.example("test", index))
    except (LookupError, *READ_ERRORS) as error:
        return RenderedText(f"example {index} cannot be shown: {error}")


def report_to_json(report: ComparisonReport) -> dict[str, Any]:
    """Return the data of the page as plain values."""
    result = report.result
    return {
        "version": regard.__version__,
        "command": result.record.command,
        "plan": result.record.plan.model_dump(mode="json"),
        "rows": [row_to_json(row) for row in result.rows],
        "verdicts": [verdict_to_json(verdict) for verdict in result.verdicts],
        "differences": to_plain(result.differences),
        "search": to_plain(result.search),
        "rungs": to_plain(result.rungs),
        "costs": to_plain(result.costs),
        "load": result.load,
        "unique_successes": [
            {
                "mixer": each.mixer,
                "task": each.task,
                "length": each.length,
                "indices": each.indices,
                "shown": [rendered.to_text() for rendered in each.shown],
            }
            for each in report.unique
        ],
        "curves": [
            curve._asdict() | {"points": [point._asdict() for point in curve.points]}
            for curve in report.curves
        ],
        "maps": [_map_to_json(each) for each in report.maps],
        "samples": [
            {"task": task, "length": length, "text": sample.to_text()}
            for task, length, sample in report.samples
        ],
        "specs": report.specs,
        "environments": report.environments,
    }


def to_plain(value: Any) -> Any:
    """Return dataclasses and tuples as plain values; numbers that are not finite are None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
