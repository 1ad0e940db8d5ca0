"""What labels teach: a small head that re-ranks alerts.

A logistic regression tells alerts that people called "attack" from those that they called
"normal", by what was found. It moves alerts up or down in the list. It never hides one: what is
an alert depends on the p-value and the budget alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2, log10
from typing import Any, NamedTuple

import numpy as np

MIN_LABELS = 3  # of each kind, before the head counts
REGULARIZATION = 1.0  # inverse of sklearn's C
MAX_SHIFT = 3.0  # in powers of ten of p
HASHED = 64  # features for endpoint, path and kind


class RankingHead(NamedTuple):
    """Weights of a logistic regression on the features of an alert.

    Attributes:
        weights: One for each feature, and the intercept.
        attacks: Alerts labelled "attack".
        normals: Alerts labelled "normal".
        accuracy: Leave-one-out accuracy on the labels, balanced; 0.5 is chance.
    """

    weights: list[float]
    attacks: int
    normals: int
    accuracy: float


def alert_features(content: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Features of an alert: its surprise, how many findings it has and of which levels, and hashes
    of its endpoint, and of level, kind and path of its findings."""
    from zlib import crc32

    findings = content["findings"][:8]
    vector = np.zeros(4 + HASHED)
    vector[0] = min(-log10(max(content["p"], 1e-30)), 12.0) / 6
    vector[1] = len(findings) / 4
    vector[2] = log2(1 + max((each["bits"] for each in findings), default=0.0)) / 4
    vector[3] = float(bool(content["extrapolated"]))
    names = {f"endpoint {content['endpoint']}", f"entity kind {content['kind']}"}
    for rank, each in enumerate(findings[:3]):
        names.add(f"level {each['level']}")
        names.add(f"kind {each['kind']}")
        names.add(f"path {each['path']}")
        if rank == 0:
            names.add(f"first {each['kind']} {each['path']}")
    for name in sorted(names):
        vector[4 + crc32(name.encode(errors="replace")) % HASHED] += 1.0
    return vector


def train_ranking(alerts: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> RankingHead | None:
    """Fit the head on labelled alerts; None while there are fewer than three of each kind.

    Args:
        alerts: Contents of alerts, as `Alert.to_json`.
        labels: "attack" or "normal" for each.
    """
    y = np.array([label == "attack" for label in labels], dtype=float)
    attacks, normals = int(y.sum()), int((1 - y).sum())
    if min(attacks, normals) < MIN_LABELS:
        return None
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_predict
    except ImportError:
        raise ImportError(
            "Labels need the package scikit-learn: pip install 'regard[watch]'"
        ) from None
    x = np.stack([alert_features(content) for content in alerts])
    model = LogisticRegression(C=1 / REGULARIZATION, class_weight="balanced", max_iter=1000)
    folds = min(attacks, normals, 10)
    guessed = cross_val_predict(model, x, y, cv=folds)
    accuracy = float((guessed[y == 1].mean() + 1 - guessed[y == 0].mean()) / 2)
    model.fit(x, y)
    return RankingHead(
        [*model.coef_[0].tolist(), *model.intercept_.tolist()], attacks, normals, accuracy
    )


def priority(content: Mapping[str, Any], head: RankingHead | None) -> float:
    """Rank of an alert: -log10 of its p-value, and up to three more or less for what labels say."""
    rank = -log10(max(content["p"], 1e-30))
    if head is None:
        return rank
    logit = float(alert_features(content) @ np.array(head.weights[:-1]) + head.weights[-1])
    return rank + float(np.clip(logit, -MAX_SHIFT, MAX_SHIFT))
