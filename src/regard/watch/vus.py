"""Volume under the surface: how well scores find labelled ranges of a series.

Labels of ranges are vague at their ends, so a detector that fires a little early or late should not
be punished, and one that fires once in a long range should not be rewarded as if it had found all
of it, which is what point adjustment does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class VUS(NamedTuple):
    """Volumes under the ROC and precision-recall surfaces, each from 0 to 1."""

    roc: float
    pr: float


def volume_under_surface(
    labels: npt.ArrayLike, scores: npt.ArrayLike, *, window: int = 100, thresholds: int = 250
) -> VUS:
    """VUS-ROC and VUS-PR of scores for labelled points of one series.

    Each labelled range is extended on both sides by a buffer of ℓ/2 points, whose labels fall as
    sqrt(1 − distance/ℓ). With these soft labels, at each threshold,

        recall    = TP / (P + B/2) · (share of ranges with a hit in them or their buffers)
        precision = TP / predicted

    where P counts labelled points, B sums the soft labels of the buffers' hits, and TP is the soft
    labels of all hits. The areas under both curves are averaged over ℓ = 0 … `window`.
    (Paparrizos et al., VLDB 2022. The result equals that of TSB-AD's `metrics["VUS-PR"]`.)

    Args:
        labels: (n), 1 where a point is anomalous.
        scores: (n), larger where a point is more anomalous.
        window: Largest buffer, for both sides together.
        thresholds: Number of thresholds, at equal steps of the rank.
    """
    anomalous, values = _validate(labels, scores, window, thresholds)
    n, positives = len(values), int(anomalous.sum())
    edges = np.flatnonzero(np.diff(np.concatenate([[0], anomalous.astype(np.int8), [0]])))
    starts, ends = edges[::2], edges[1::2] - 1

    # The step at which a falling threshold first reaches each point: every count below is a
    # cumulative sum over it.
    ranks = np.linspace(0, n - 1, thresholds).astype(np.int64)
    levels = np.sort(values)[::-1][ranks]
    step = np.searchsorted(-levels, -values, side="left")
    predicted = np.cumsum(np.bincount(step, minlength=thresholds))
    hits_inside = np.cumsum(np.bincount(step[anomalous], minlength=thresholds))

    roc, pr = [], []
    for length in range(window + 1):
        soft = _buffer_labels(anomalous, starts, ends, length)
        buffer = np.flatnonzero(soft)
        hits_buffer = np.cumsum(np.bincount(step[buffer], soft[buffer], minlength=thresholds))
        found = _share_of_ranges(step, starts, ends, length // 2, thresholds)

        true_positives = hits_inside + hits_buffer
        weight = positives + hits_buffer / 2
        recall = np.minimum(true_positives / weight, 1) * found
        false_rate = (predicted - true_positives) / (n - weight)
        precision = true_positives / predicted

        tpr, fpr = np.concatenate([[0], recall, [1]]), np.concatenate([[0], false_rate, [1]])
        roc.append(float(np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2)))
        pr.append(float(np.sum(np.diff(recall, prepend=0.0) * precision)))
    return VUS(float(np.mean(roc)), float(np.mean(pr)))


def _validate(
    labels: npt.ArrayLike, scores: npt.ArrayLike, window: int, thresholds: int
) -> tuple[npt.NDArray[np.bool_], Floats]:
    given: npt.NDArray[Any] = np.asarray(labels)
    values = np.asarray(scores, dtype=np.float64)
    if given.ndim != 1 or values.shape != given.shape:
        raise ValueError(
            f"labels and scores must be one-dimensional and of one length, but their shapes are "
            f"{given.shape} and {values.shape}"
        )
    if not np.isin(given, (0, 1)).all():
        raise ValueError("labels must be 0 or 1")
    if not np.isfinite(values).all():
        raise ValueError(
            f"{int((~np.isfinite(values)).sum())} of {len(values)} scores are NaN or infinite"
        )
    anomalous = given.astype(bool)
    if anomalous.all() or not anomalous.any():
        raise ValueError(f"{int(anomalous.sum())} of {len(values)} points are labelled anomalous")
    if window < 0 or thresholds < 2:
        raise ValueError(f"window={window} must be >= 0, and thresholds={thresholds} >= 2")
    return anomalous, values


def _buffer_labels(
    anomalous: npt.NDArray[np.bool_], starts: npt.NDArray[Any], ends: npt.NDArray[Any], length: int
) -> Floats:
    """Soft labels (n) of the points in the buffers; 0 elsewhere, also within the ranges."""
    n, half = len(anomalous), length // 2
    soft = np.zeros(n)
    if half == 0:
        return soft
    falling = np.sqrt(1 - np.arange(1, half + 1) / length)
    for start, end in zip(starts, ends, strict=True):
        after = min(half, n - 1 - end)
        before = min(half, start)
        soft[end + 1 : end + 1 + after] += falling[:after]
        soft[start - before : start] += falling[:before][::-1]
    soft[anomalous] = 0
    return np.minimum(soft, 1)


def _share_of_ranges(
    step: npt.NDArray[Any],
    starts: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    half: int,
    thresholds: int,
) -> Floats:
    """Share of ranges that contain a hit, at each threshold; ranges whose buffers meet are one."""
    apart = ends[:-1] + half < starts[1:] - half
    first = np.maximum(starts - half, 0)[np.concatenate([[True], apart])]
    last = np.minimum(ends + half, len(step) - 1)[np.concatenate([apart, [True]])]
    reached = [int(step[a : b + 1].min()) for a, b in zip(first, last, strict=True)]
    return np.cumsum(np.bincount(reached, minlength=thresholds)) / len(reached)
