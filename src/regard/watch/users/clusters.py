"""Clusters of users, by scikit-learn's MiniBatchKMeans.

River's DBSTREAM was the other candidate. It finds the number of clusters by itself, but gives them
new numbers while it runs, so that "moved from cluster 2 to cluster 5" means nothing the day after;
it slows as micro-clusters accumulate (river issue 1086). Centres of k-means keep their numbers and
follow slow changes by the update that fitted them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

MAX_CLUSTERS = 12
MIN_MEMBERS = 5  # users for each cluster, on average
MIN_SILHOUETTE = 0.1  # below, users are one cloud: one cluster
SILHOUETTE_SAMPLE = 2000
MAX_COUNT = 10_000.0  # points that a centre remembers, so that it can follow a slow change


class UserClusters:
    """Centres of clusters of points, updated online.

    Attributes:
        centres: (clusters, m).
        counts: Points that each centre is the mean of, at most `MAX_COUNT`.
        spread: Mean squared distance of a point from its centre.
        silhouettes: Silhouette of each number of clusters that was tried.
    """

    def __init__(
        self, centres: Matrix, counts: Matrix, spread: float, silhouettes: dict[int, float]
    ) -> None:
        self.centres, self.counts = centres, counts
        self.spread, self.silhouettes = spread, silhouettes

    @classmethod
    def fit(cls, points: Matrix, *, seed: int) -> UserClusters:
        """Cluster points (users, m); the number of clusters has the largest silhouette."""
        silhouettes: dict[int, float] = {}
        best = None
        distinct = len(np.unique(points, axis=0))
        most = min(MAX_CLUSTERS, len(points) // MIN_MEMBERS, distinct - 1)
        if most >= 2:
            try:
                from sklearn.cluster import MiniBatchKMeans
                from sklearn.metrics import silhouette_score
            except ImportError:
                raise ImportError(
                    "Clusters of users need the package scikit-learn: pip install 'regard[watch]'"
                ) from None
            for count in range(2, most + 1):
                fitted = MiniBatchKMeans(count, random_state=seed, n_init=5).fit(points)
                if len(set(fitted.labels_)) < 2:
                    continue
                sample = min(SILHOUETTE_SAMPLE, len(points))
                score = silhouette_score(
                    points, fitted.labels_, sample_size=sample, random_state=seed
                )
                silhouettes[count] = float(score)
                if score >= max(silhouettes.values()):
                    best = fitted
        if best is None or max(silhouettes.values()) < MIN_SILHOUETTE:
            centres, labels = points.mean(0, keepdims=True), np.zeros(len(points), int)
        else:
            centres, labels = best.cluster_centers_.astype(np.float64), best.labels_
        counts = np.bincount(labels, minlength=len(centres)).astype(np.float64)
        spread = float(((points - centres[labels]) ** 2).sum(1).mean())
        return cls(centres, np.minimum(counts, MAX_COUNT), max(spread, 1e-6), silhouettes)

    def squared_distances(self, points: Matrix) -> Matrix:
        """(points, clusters)."""
        squares = (points**2).sum(1)[:, None] + (self.centres**2).sum(1)
        return np.maximum(squares - 2 * points @ self.centres.T, 0.0)

    def probabilities(self, points: Matrix) -> Matrix:
        """Soft assignment (points, clusters), proportional to exp(-squared distance / spread)."""
        exponents = -self.squared_distances(points) / self.spread
        exponents -= exponents.max(1, keepdims=True)
        shares = np.exp(exponents)
        return np.asarray(shares / shares.sum(1, keepdims=True))

    def update(self, points: Matrix) -> None:
        """Move the centre nearest to each point towards it by 1/count, as MiniBatchKMeans does."""
        for point, nearest in zip(points, self.squared_distances(points).argmin(1), strict=True):
            self.counts[nearest] = min(self.counts[nearest] + 1, MAX_COUNT)
            self.centres[nearest] += (point - self.centres[nearest]) / self.counts[nearest]
