"""The distance between two users, chosen by measurement.

A metric is good if two halves of the events of one user are nearer to each other than halves of
two users. The share of such comparisons that come out right is the *same-user AUC*. Every metric
here is a map to a space in which the Euclidean distance is taken, so that clusters and centres
mean the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.users.features import UserFeatures

Matrix = npt.NDArray[np.float64]

BASELINE = "hellinger_endpoints"
MIN_USERS = 10  # with both halves, to measure a metric
MIN_EVENTS = 20  # of a user
MAX_USERS = 2000
RIDGE = 0.1  # of the covariance in `rca`, as a share of its mean variance


@dataclass
class MetricScore:
    """The same-user AUC of a metric.

    Attributes:
        name: Name of the metric.
        auc: Share of comparisons in which the other half of the same user is nearer than the other
            half of another user; 0.5 by chance.
        error: Its standard error over users.
        gain: AUC minus that of the baseline, over the same users.
        gain_error: Standard error of the gain.
        users: Number of users.
    """

    name: str
    auc: float
    error: float
    gain: float
    gain_error: float
    users: int

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class UserMetric:
    """Maps histograms of features (users, d) to points between which distance is Euclidean.

    | name | map | reference |
    | --- | --- | --- |
    | hellinger_endpoints | square root of the histogram of endpoints | Hellinger distance |
    | cosine_endpoints | the histogram of endpoints, of length 1 | cosine distance |
    | hellinger | square root of the histograms of all blocks | product of Hellinger distances |
    | cosine | all histograms, weighted by idf, of length 1 | TF-IDF |
    | rca | `hellinger`, whitened by the covariance within users | Bar-Hillel et al. 2003 |

    Args:
        name: One of `METRICS`.
        features: The features.
    """

    def __init__(self, name: str, features: UserFeatures) -> None:
        self.name = name
        self.endpoints = int(features.starts[1])
        self.blocks = len(features.blocks)
        self.weights = np.ones(features.size)
        self.whitening: Matrix | None = None

    def fit(self, first: Matrix, second: Matrix) -> None:
        """Estimate weights or whitening from the two halves of each user, (users, d) each."""
        if self.name == "cosine":
            users = ((first + second) > 0).sum(0)
            self.weights = np.log((1 + len(first)) / (1 + users)) + 1.0
        if self.name == "rca":
            difference = np.sqrt(first) - np.sqrt(second)
            within = difference.T @ difference / (2 * len(difference))
            within += RIDGE * np.trace(within) / len(within) * np.eye(len(within)) + 1e-9 * np.eye(
                len(within)
            )
            values, vectors = np.linalg.eigh(within)
            self.whitening = vectors / np.sqrt(values)

    def map(self, histograms: Matrix) -> Matrix:
        """Points (users, m) of histograms (users, d)."""
        if self.name == "hellinger_endpoints":
            return np.sqrt(histograms[:, : self.endpoints])
        if self.name == "cosine_endpoints":
            return normalize(histograms[:, : self.endpoints])
        if self.name == "hellinger":
            return np.sqrt(histograms / self.blocks)
        if self.name == "cosine":
            return normalize(histograms * self.weights)
        assert self.whitening is not None
        return np.sqrt(histograms) @ self.whitening


METRICS = (BASELINE, "cosine_endpoints", "hellinger", "cosine", "rca")


def normalize(rows: Matrix) -> Matrix:
    """Rows of length 1; a row of zeros stays."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def same_user_comparisons(first: Matrix, second: Matrix) -> npt.NDArray[np.float64]:
    """For each user, the share of other users whose second half is farther from its first half
    than its own second half is; ties count half. Inputs are points (users, m)."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2 * first @ second.T
    own = np.diagonal(squares)[:, None]
    scale = 1e-9 * (1 + np.abs(squares).max())
    farther = (squares > own + scale) + 0.5 * (np.abs(squares - own) <= scale)
    np.fill_diagonal(farther, 0.0)
    return np.asarray(farther.sum(1) / (len(first) - 1))


def choose_metric(
    first: Matrix, second: Matrix, features: UserFeatures, *, seed: int
) -> tuple[UserMetric, list[MetricScore]]:
    """The metric with the best same-user AUC, and the scores of all.

    Metrics are fitted on half of the users and measured on the others, and the other way round.
    Hellinger distance on endpoint histograms stays unless another one is better by more than two
    standard errors of the paired difference.

    Args:
        first: Histograms of the first half of each user's events, (users, d).
        second: Histograms of the second half.
        features: What the histograms are of.
        seed: Seed of the split of the users.
    """
    users = len(first)
    if users < MIN_USERS:
        return UserMetric(BASELINE, features), []
    order = np.random.default_rng(seed).permutation(users)
    folds: Sequence[Any] = (order[: users // 2], order[users // 2 :])
    shares = {name: np.zeros(users) for name in METRICS}
    for name in METRICS:
        for fitted, measured in (folds, folds[::-1]):
            metric = UserMetric(name, features)
            metric.fit(first[fitted], second[fitted])
            shares[name][measured] = same_user_comparisons(
                metric.map(first[measured]), metric.map(second[measured])
            )
    scores = []
    for name in METRICS:
        gain = shares[name] - shares[BASELINE]
        scores.append(
            MetricScore(
                name,
                float(shares[name].mean()),
                float(shares[name].std(ddof=1) / users**0.5),
                float(gain.mean()),
                float(gain.std(ddof=1) / users**0.5),
                users,
            )
        )
    best = max(scores, key=lambda score: score.auc)
    if best.gain <= 2 * best.gain_error:
        best = scores[0]
    metric = UserMetric(best.name, features)
    metric.fit(first, second)
    return metric, scores
