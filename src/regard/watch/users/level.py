"""The level "user": how far an entity is from what it usually does, and from its own cluster.

The embedding of an entity is the decayed mean of the indicators of its events (see `features`),
with two rates: a fast one, which is what it does now, and a slow one, which is what it usually
does. The parts of an event are

- the surprise that the entity now belongs to the cluster where it usually is,
- the distance between the two embeddings, in the metric that told users apart best on the training
  events (see `metrics`),
- for each block of features, the surprise of what this event has, given what this entity usually
  has there: a token that is used from another country is unlike its own past, however usual that
  country is.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Finding, Level, Surprise
from regard.watch.settings import WatchSettings
from regard.watch.users.clusters import UserClusters
from regard.watch.users.features import ENDPOINT, HOUR, HOURS, UserFeatures
from regard.watch.users.metrics import (
    BASELINE,
    MAX_USERS,
    MIN_EVENTS,
    MIN_USERS,
    Matrix,
    MetricScore,
    UserMetric,
    choose_metric,
)

FAST, SLOW = 1 / 16, 1 / 256  # weight of an event in the two means
MIN_HABIT = 5  # events of an entity before its habits are compared
PRIOR_EVENTS = 2.0  # weight of what all entities do, in the habits of one
CLUSTER, DISTANCE, HABITS = 0, 1, 2  # columns of the parts; one habit for each block
MAX_MOVED = 10_000  # points that wait for `update`

Key = tuple[str, str]


class UserPlace(NamedTuple):
    """Where an entity is: the cluster it is in now, its usual one, and a point on a map."""

    cluster: int
    home: int
    x: float
    y: float
    events: int


class UserLevel(Level):
    """Entity embeddings, kept online, and moves between clusters.

    Events without an entity have no parts. Habits are compared after 5 events of an entity,
    clusters and distances after 20.

    Attributes:
        metric: The metric that was chosen.
        metric_scores: The same-user AUC of every metric; empty with fewer than 10 users.
        clusters: The clusters of users.
    """

    name = "user"

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.features = UserFeatures()
        self.metric_scores: list[MetricScore] = []
        self.labels: list[str] = []
        self._moved: dict[Key, npt.NDArray[np.float64]] = {}

    def fit(self, events: Sequence[Event]) -> None:
        self.features.fit(events)
        self.shares = self._mean_indicators(events)
        rows: dict[Key, list[int]] = defaultdict(list)
        for i, event in enumerate(events):
            if event.entity:
                rows[event.tenant, event.entity].append(i)
        active = [found for found in rows.values() if len(found) >= MIN_EVENTS][:MAX_USERS]

        first = np.zeros((len(active), self.features.size))
        second = np.zeros_like(first)
        for i, found in enumerate(active):
            half = len(found) // 2
            first[i] = self._mean_indicators([events[j] for j in found[:half]])
            second[i] = self._mean_indicators([events[j] for j in found[half:]])
        self.metric, self.metric_scores = choose_metric(
            first, second, self.features, seed=self.settings.seed
        )

        histograms = (first + second) / 2 if active else np.zeros((1, self.features.size))
        points = self.metric.map(histograms)
        self.clusters = UserClusters.fit(points, seed=self.settings.seed)
        self.labels = self._label_clusters(histograms, points)
        self.centre = points.mean(0)
        axes = np.linalg.svd(points - self.centre, full_matrices=False)[2][:2]
        self.axes = np.zeros((2, points.shape[1]))
        self.axes[: len(axes)] = axes

    def _mean_indicators(self, events: Sequence[Event]) -> Matrix:
        """The histogram (d) of events: the mean of their indicators."""
        total = np.zeros(self.features.size)
        for i in range(0, len(events), 1024):
            total += self.features.matrix(events[i : i + 1024]).sum(0)
        return total / max(1, len(events))

    def _label_clusters(self, histograms: Matrix, points: Matrix) -> list[str]:
        """For each cluster, what its users do more often than the users of all clusters."""
        members = self.clusters.squared_distances(points).argmin(1)
        labels = []
        for cluster in range(len(self.clusters.centres)):
            own = histograms[members == cluster]
            more = own.mean(0) - histograms.mean(0) if len(own) else np.zeros(self.features.size)
            top = [int(i) for i in np.argsort(-more)[:2] if more[i] > 0]
            described = ", ".join(self.features.describe(i) for i in top)
            labels.append(f"more often {described}" if described else "all users")
        return labels

    def score(self, events: Sequence[Event], states: dict[Key, Any]) -> Surprise:
        bits, embeddings = self._advance(events, states)
        groups = np.arange(bits.shape[1], dtype=np.int32)
        points = self.metric.map(np.array([*embeddings.values()]).reshape(-1, self.features.size))
        if len(self._moved) > MAX_MOVED:  # nobody calls `update`
            self._moved.clear()
        self._moved.update(zip(embeddings, points, strict=True))
        present = ~np.isnan(bits)
        return Surprise(
            offsets=np.concatenate([[0], np.cumsum(present.sum(1))]),
            groups=np.broadcast_to(groups, bits.shape)[present],
            bits=bits[present],
        )

    def _advance(
        self, events: Sequence[Event], states: dict[Key, Any]
    ) -> tuple[Matrix, dict[Key, npt.NDArray[np.float32]]]:
        """Add events to the embeddings of their entities.

        Returns the bits of the parts, (events, 2 + blocks), NaN where there is none, and the fast
        embeddings of the entities that have enough events.
        """
        keys = list(dict.fromkeys((e.tenant, e.entity) for e in events if e.entity))
        row_of = {key: row for row, key in enumerate(keys)}
        counts, fast, slow = self._read_states([states.get(key) for key in keys])
        indicators = self.features.matrix(events)

        # Events of one entity follow each other; those of different entities are one step.
        steps: list[list[int]] = []
        occurrences = [0] * len(keys)
        for i, event in enumerate(events):
            if not event.entity:
                continue
            row = row_of[event.tenant, event.entity]
            if occurrences[row] == len(steps):
                steps.append([])
            steps[occurrences[row]].append(i)
            occurrences[row] += 1

        seen = np.full(len(events), -1)  # events of the entity before this one
        before = np.zeros_like(indicators)
        fast_after, slow_after = np.zeros_like(indicators), np.zeros_like(indicators)
        for members in steps:
            rows = np.array([row_of[events[i].tenant, events[i].entity] for i in members])
            seen[members], before[members] = counts[rows], slow[rows]
            counts[rows] += 1
            for means, rate, after in ((fast, FAST, fast_after), (slow, SLOW, slow_after)):
                # a plain mean of the first events, then a decayed one
                weight = np.maximum(1 / counts[rows], rate)[:, None]
                means[rows] += weight * (indicators[members] - means[rows])
                after[members] = means[rows]

        bits = np.full((len(events), HABITS + len(self.features.blocks)), np.nan)
        habitual, old = seen >= MIN_HABIT, seen >= MIN_EVENTS
        bits[habitual, HABITS:] = self._habit_bits(
            indicators[habitual], before[habitual], seen[habitual]
        )
        bits[old, :HABITS] = self._move_bits(fast_after[old], slow_after[old])

        embeddings = {}
        for key, count, now, usual in zip(keys, counts, fast, slow, strict=True):
            same = count <= 1 / FAST  # until then, both are the plain mean
            states[key] = [int(count), encode(now), *([] if same else [encode(usual)])]
            if count > MIN_EVENTS:
                embeddings[key] = now
        return bits, embeddings

    def _read_states(self, states: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Counts (n) and the two means (n, d) of states; zeros for entities that are new."""
        counts = np.zeros(len(states), np.int64)
        fast = np.zeros((len(states), self.features.size), np.float32)
        slow = np.zeros_like(fast)
        for row, state in enumerate(states):
            if state is not None:
                counts[row] = state[0]
                fast[row], slow[row] = decode(state[1]), decode(state[-1])
        return counts, fast, slow

    def _habit_bits(self, indicators: Any, slow: Any, counts: Any) -> Matrix:
        """Bits of what events have in each block, given the means of their entities before,
        (n, blocks); NaN for a block that an event does not have."""
        events = np.minimum(counts, 1 / SLOW)[:, None]
        starts = self.features.starts[:-1]
        seen = events * slow + PRIOR_EVENTS * self.shares
        shares = np.add.reduceat(seen * indicators, starts, axis=1) / np.add.reduceat(
            seen, starts, axis=1
        )
        present = np.add.reduceat(indicators, starts, axis=1) > 0
        return np.where(present, -np.log2(np.maximum(shares, 1e-12)), np.nan)

    def _move_bits(self, fast: Any, slow: Any) -> Matrix:
        """Bits of a move between clusters, and the distance between now and before, (n, 2)."""
        now = self.metric.map(fast.astype(np.float64))
        usual = self.metric.map(slow.astype(np.float64))
        home = self.clusters.squared_distances(usual).argmin(1)
        at_home = self.clusters.probabilities(now)[np.arange(len(now)), home]
        distance = np.linalg.norm(now - usual, axis=1) / self.clusters.spread**0.5
        return np.stack([-np.log2(np.maximum(at_home, 1e-300)), distance], axis=1)

    def update(self, events: Sequence[Event]) -> None:
        """Move the centres towards the entities of these events, once for each entity and batch."""
        keys = dict.fromkeys((event.tenant, event.entity) for event in events)
        points = [self._moved[key] for key in keys if key in self._moved]
        self._moved.clear()
        if points:
            self.clusters.update(np.array(points))

    def group_names(self) -> Sequence[str]:
        habits = (f"habit: {name}" for name, _ in self.features.blocks)
        return ["move between clusters", "distance to own past", *habits]

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        """Parts are counted among those that the event has, as in `score`."""
        key = event.tenant, event.entity
        before = self._read_states([state])
        states = {key: state}
        bits, _ = self._advance([event], states)
        column = int(np.flatnonzero(~np.isnan(bits[0]))[part])
        if column >= HABITS:
            finding = self._explain_habit(event, column - HABITS, before[2][0])
        else:
            _, fast, slow = self._read_states([states[key]])
            finding = self._explain_move(event.entity, column, fast, slow)
        finding.bits = float(bits[0, column])
        return finding

    def _explain_habit(self, event: Event, block: int, slow: Any) -> Finding:
        """What an entity usually has in a block, and has not in this event."""
        name, labels = self.features.blocks[block]
        start, end = self.features.starts[block : block + 2]
        usual = slow[start:end] / max(float(slow[start:end].sum()), 1e-12)
        top = [int(i) for i in np.argsort(-usual)[:3] if usual[i] > 0]
        here = next(i for i in self.features.indicators(event) if start <= i < end)
        observed: Any = labels[here - start]
        if name == ENDPOINT:
            observed = event.endpoint
        elif name == HOUR:
            labels = [f"{label}:00 to {int(label) + HOURS}:00 UTC" for label in labels]
            observed = labels[here - start]
        else:
            observed = event.values[event.paths.index(name)]
        expected = [(labels[i], round(float(usual[i]), 4)) for i in top]
        usually = " or ".join(f"{label} ({share:.0%})" for label, share in expected) or "nothing"
        return Finding(
            level=self.name,
            kind="habit",
            path=name,
            observed=observed,
            bits=0.0,
            p=1.0,
            expected=expected,
            text=f"{event.entity} has {name} {observed}; usually it has {usually}.",
        )

    def _explain_move(self, entity: str, column: int, fast: Any, slow: Any) -> Finding:
        """What an entity does more or less often than it usually does."""
        difference = np.abs(fast[0] - slow[0])
        changed = [int(i) for i in np.argsort(-difference)[:3] if difference[i] > 0]
        shares = "; ".join(
            f"{self.features.describe(i)} {fast[0][i]:.0%}, usually {slow[0][i]:.0%}"
            for i in changed
        )
        if column == DISTANCE:
            return Finding(
                level=self.name,
                kind="session",
                path="entity",
                observed="recent events",
                bits=0.0,
                p=1.0,
                expected=[
                    (self.features.describe(i), round(float(slow[0][i]), 4)) for i in changed
                ],
                text=f"{entity} does not act as it usually does. Shares of recent events: "
                f"{shares}.",
            )
        place = self._places(fast, slow)[0]
        probabilities = self.clusters.probabilities(self.metric.map(slow.astype(np.float64)))[0]
        order = [int(i) for i in np.argsort(-probabilities)[:3]]
        return Finding(
            level=self.name,
            kind="cluster",
            path="entity",
            observed=f"cluster {place.cluster}",
            bits=0.0,
            p=1.0,
            expected=[(f"cluster {i}", round(float(probabilities[i]), 4)) for i in order],
            text=f"{entity} acts like cluster {place.cluster} ({self.labels[place.cluster]}), "
            f"usually like cluster {place.home} ({self.labels[place.home]}). Shares of recent "
            f"events: {shares}.",
        )

    def places(self, states: Mapping[Key, Any]) -> dict[Key, UserPlace]:
        """Where entities are, given their states."""
        if not states:
            return {}
        counts, fast, slow = self._read_states(list(states.values()))
        places = self._places(fast, slow)
        return {
            key: place._replace(events=int(count))
            for key, place, count in zip(states, places, counts, strict=True)
        }

    def _places(self, fast: Any, slow: Any) -> list[UserPlace]:
        now = self.metric.map(fast.astype(np.float64))
        clusters = self.clusters.squared_distances(now).argmin(1)
        homes = self.clusters.squared_distances(self.metric.map(slow.astype(np.float64))).argmin(1)
        points = (now - self.centre) @ self.axes.T
        return [
            UserPlace(int(cluster), int(home), float(x), float(y), 0)
            for cluster, home, (x, y) in zip(clusters, homes, points, strict=True)
        ]

    def report(self) -> list[str]:
        """What was chosen and why, in lines for people."""
        if not self.metric_scores:
            return [
                f"users: fewer than {MIN_USERS} entities with {MIN_EVENTS} events: the metric is "
                f"{self.metric.name}, not measured"
            ]
        lines = [
            f"users: same-user AUC between halves of {self.metric_scores[0].users:,} users "
            "(0.5 = chance)"
        ]
        for score in self.metric_scores:
            chosen = "  <- chosen" if score.name == self.metric.name else ""
            lines.append(
                f"  {score.name:20} {score.auc:.3f} ± {score.error:.3f}   against {BASELINE} "
                f"{score.gain:+.3f} ± {score.gain_error:.3f}{chosen}"
            )
        tried = ", ".join(f"{n}: {s:.2f}" for n, s in self.clusters.silhouettes.items())
        count = len(self.clusters.centres)
        lines.append(f"users: {count} cluster{'s' * (count > 1)} (silhouettes {tried})")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "features": self.features.to_json(),
            "metric": self.metric.name,
            "metric_scores": [score.to_json() for score in self.metric_scores],
            "labels": self.labels,
            "spread": self.clusters.spread,
            "silhouettes": {str(k): score for k, score in self.clusters.silhouettes.items()},
            "settings": self.settings.model_dump(mode="json"),
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        tensors = {
            "centres": self.clusters.centres,
            "counts": self.clusters.counts,
            "shares": self.shares,
            "map_centre": self.centre,
            "map_axes": self.axes,
            "metric_weights": self.metric.weights,
        }
        if self.metric.whitening is not None:
            tensors["metric_whitening"] = self.metric.whitening
        return tensors

    @classmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> UserLevel:
        level = cls(WatchSettings.model_validate(content["settings"]))
        level.features = UserFeatures.from_json(content["features"])
        level.metric = UserMetric(content["metric"], level.features)
        level.metric.weights = tensors["metric_weights"]
        level.metric.whitening = tensors.get("metric_whitening")
        level.metric_scores = [MetricScore(**score) for score in content["metric_scores"]]
        level.clusters = UserClusters(
            tensors["centres"].copy(),
            tensors["counts"].copy(),
            content["spread"],
            {int(count): score for count, score in content["silhouettes"].items()},
        )
        level.labels = list(content["labels"])
        level.shares = tensors["shares"]
        level.centre, level.axes = tensors["map_centre"], tensors["map_axes"]
        return level


def encode(vector: npt.NDArray[np.float32]) -> str:
    """A vector as text: its bytes in base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def decode(text: str) -> npt.NDArray[np.float32]:
    """The inverse of `encode`."""
    return np.frombuffer(b64decode(text), "<f4")
