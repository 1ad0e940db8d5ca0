"""Learning curves: the validation score of each mechanism as it is trained, over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.plan import spec_label
from regard.models import ModuleSpec


class Point(NamedTuple):
    """An evaluation: means over seeds, and the least and greatest score of a seed."""

    step: int
    seconds: float
    score: float
    low: float
    high: float


class Curve(NamedTuple):
    """Of one mechanism at one place."""

    mixer: str
    task: str
    length: int
    points: list[Point]


def curves(entries: Iterable[LedgerEntry]) -> list[Curve]:
    """One for each mechanism, task and length that has a finished run."""
    groups: dict[tuple[str, str, int], list[list[dict[str, Any]]]] = {}
    for entry in entries:
        if entry.status == DONE and entry.result is not None:
            words = entry.words
            key = (
                spec_label(ModuleSpec(**words["mixer"])),
                spec_label(ModuleSpec(**words["task"])),
                int(words["length"]),
            )
            groups.setdefault(key, []).append(entry.result["curve"])
    return [Curve(*key, points(runs)) for key, runs in groups.items()]


def points(runs: list[list[dict[str, Any]]]) -> list[Point]:
    """At the steps that all seeds were judged at: a mean over fewer would jump where a seed ends."""
    by_step = [{row["step"]: row for row in run} for run in runs]
    shared = sorted(set.intersection(*(set(each) for each in by_step)))
    found = (_point([each[step] for each in by_step]) for step in shared)
    return [point for point in found if math.isfinite(point.score)]


def _point(rows: list[dict[str, Any]]) -> Point:
    scores = [row["valid"] for row in rows]
    seconds = statistics.fmean(row["seconds"] for row in rows)
    return Point(rows[0]["step"], seconds, statistics.fmean(scores), min(scores), max(scores))
