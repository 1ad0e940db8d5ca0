"""Learning curves: the validation score of each mixer during training, over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.results import entry_labels


class CurvePoint(NamedTuple):
    """One evaluation: means over seeds, and the lowest and highest score of a seed."""

    step: int
    seconds: float
    score: float
    low: float
    high: float


class LearningCurve(NamedTuple):
    """The curve of one mixer on one task at one length."""

    mixer: str
    task: str
    length: int
    points: list[CurvePoint]


def learning_curves(entries: Iterable[LedgerEntry]) -> list[LearningCurve]:
    """Return the curve of each mixer, task and length that has a finished run."""
    groups: dict[tuple[str, str, int], list[list[dict[str, Any]]]] = {}
    for entry in entries:
        if entry.status == DONE and entry.result is not None:
            groups.setdefault(entry_labels(entry), []).append(entry.result["curve"])
    return [LearningCurve(*labels, average_curves(runs)) for labels, runs in groups.items()]


def average_curves(runs: list[list[dict[str, Any]]]) -> list[CurvePoint]:
    """Average over seeds at the steps where all seeds were evaluated.

    A mean over fewer seeds would jump where one of them ends.
    """
    by_step = [{row["step"]: row for row in run} for run in runs]
    points = []
    for step in sorted(set.intersection(*(set(rows) for rows in by_step))):
        rows = [run[step] for run in by_step]
        scores = [row["valid"] for row in rows]
        score = statistics.fmean(scores)
        if math.isfinite(score):
            seconds = statistics.fmean(row["seconds"] for row in rows)
            points.append(CurvePoint(step, seconds, score, min(scores), max(scores)))
    return points
