"""VUS-ROC and VUS-PR against values of TSB-AD 1.5, and errors.

The expected values were computed by `TSB_AD.evaluation.metrics.generate_curve(labels, scores,
window, "opt", 250)` of TSB-AD 1.5 with numpy 1.26.
"""

import numpy as np
import pytest

from regard.watch.vus import volume_under_surface


def make_series(n, ranges, boost, digits=6):
    """Labels of inclusive ranges, and scores of a fixed sequence that is higher within them."""
    labels = np.zeros(n, dtype=int)
    for first, last in ranges:
        labels[first : last + 1] = 1
    scores = (np.arange(n) ** 2 * 7919 % 10007) / 10007 + boost * labels
    return labels, np.round(scores, digits)


@pytest.mark.parametrize(
    ("series", "window", "roc", "pr"),
    [
        pytest.param(
            (400, [(50, 70), (300, 310)], 0.5),
            20,
            0.93137095946369,
            0.73016119467879,
            id="two ranges",
        ),
        pytest.param(
            (300, [(40, 44), (52, 60), (200, 200)], 0.5),
            30,
            0.93243692318101,
            0.70852779771095,
            id="meet",
        ),
        pytest.param(
            (250, [(0, 9), (100, 120), (240, 249)], 0.0),
            25,
            0.58750520497932,
            0.24144417497131,
            id="at ends",
        ),
        pytest.param(
            (300, [(100, 130)], 0.4, 1), 16, 0.86816399265582, 0.51768876510642, id="ties"
        ),
        pytest.param(
            (60, [(20, 24)], 0.3),
            10,
            0.92483726129356,
            0.71327551041557,
            id="fewer points than thresholds",
        ),
        pytest.param(
            (500, [(10, 30), (35, 37), (400, 480)], 0.2),
            33,
            0.74424093923154,
            0.49872015538582,
            id="odd window",
        ),
        pytest.param(
            (300, [(100, 130)], 0.4), 0, 0.84386617100372, 0.53889155991594, id="no buffer"
        ),
    ],
)
def test_volumes_equal_those_of_tsb_ad(series, window, roc, pr):
    """Fails if buffers, thresholds, ties or the reward for found ranges are counted otherwise."""
    labels, scores = make_series(*series)
    found = volume_under_surface(labels, scores, window=window)
    assert found == pytest.approx((roc, pr), abs=1e-12)


def test_perfect_and_reversed_scores():
    """Fails if the volumes are not bounded by what a perfect and a reversed score reach."""
    labels, _ = make_series(200, [(50, 80)], 0)
    assert volume_under_surface(labels, labels, window=0) == pytest.approx((1, 1))
    reversed_scores = volume_under_surface(labels, -labels, window=0)
    assert reversed_scores.roc < 0.5 and reversed_scores.pr < 0.2


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 0, 0], [1, 2, 3], "0 of 3 points are labelled anomalous"),
        ([1, 1], [1, 2], "2 of 2 points are labelled anomalous"),
        ([0, 1, 2], [1, 2, 3], "labels must be 0 or 1"),
        ([0, 1], [1, float("nan")], "1 of 2 scores are NaN"),
        ([0, 1], [1, 2, 3], r"their shapes are \(2,\) and \(3,\)"),
    ],
)
def test_bad_labels_and_scores(labels, scores, message):
    """Fails if labels without a meaning give a number instead of an error."""
    with pytest.raises(ValueError, match=message):
        volume_under_surface(labels, scores)
