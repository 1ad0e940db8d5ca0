"""Which events a network reads: those that the floor finds least likely, and a few others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.level import Surprise

BISECTIONS = 30
RECENT = 4096  # events whose surprise moves the thresholds
HASH_RANGE = 1 << 32


class Cascade:
    """Selects an event if any of its parts is unusual for its calibration group, or by a hash of
    its source.

    The selection is a function of the event and the floor alone, so an event has the same score
    in any batch. `learn` moves the thresholds with the traffic.

    Args:
        thresholds: For each group the bits above which a part is unusual, (groups).
        other: The threshold of groups that are not there.
        share: Share of the events that is selected as unusual.
        audit: Share of the other events that is selected as well.
    """

    def __init__(
        self, thresholds: npt.NDArray[np.float64], other: float, share: float, audit: float
    ) -> None:
        self.thresholds, self.other = thresholds, other
        self.share, self.audit = share, audit
        self._recent: list[Surprise] = []

    @classmethod
    def fit(cls, held_out: Surprise, share: float, audit: float) -> Cascade:
        """The thresholds with which `share` of the held-out events are selected.

        All groups have the same share of unusual parts.
        """
        groups, bits = held_out.groups, held_out.bits
        count = int(groups.max(initial=-1)) + 1
        if share >= 1 or not count:
            return cls(np.full(count, -np.inf), -np.inf, share, audit)
        if share <= 0:
            return cls(np.full(count, np.inf), np.inf, share, audit)
        ordered = bits[np.lexsort((bits, groups))]
        sizes = np.bincount(groups, minlength=count)
        lasts = np.cumsum(sizes) - 1

        def thresholds_of(tail: float) -> npt.NDArray[np.float64]:
            ranks = np.minimum((tail * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
            return np.where(sizes > 0, ordered[np.maximum(lasts - ranks, 0)], np.inf)

        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            selected = _any_part(held_out, bits > thresholds_of(middle)[groups])
            low, high = (middle, high) if selected.mean() <= share else (low, middle)
        thresholds = thresholds_of(low)
        pooled = np.sort(bits)[-1 - min(int(low * len(bits)), len(bits) - 1)]
        return cls(np.where(sizes > 0, thresholds, pooled), float(pooled), share, audit)

    def learn(self, surprise: Surprise) -> None:
        """Collect the floor's surprise of normal events, and fit the thresholds anew to the last
        `RECENT` of them each time that half as many came."""
        self._recent.append(surprise)
        if sum(len(each.offsets) - 1 for each in self._recent) < RECENT:
            return
        latest = Cascade.fit(join_surprises(self._recent), self.share, self.audit)
        self.thresholds, self.other = latest.thresholds, latest.other
        while sum(len(each.offsets) - 1 for each in self._recent) > RECENT // 2:
            del self._recent[0]

    def select(self, surprise: Surprise, events: Sequence[Event]) -> npt.NDArray[np.int64]:
        """Indices of the events that the network reads."""
        known = surprise.groups < len(self.thresholds)
        thresholds = np.full(len(surprise.groups), self.other)
        thresholds[known] = self.thresholds[surprise.groups[known]]
        selected = _any_part(surprise, surprise.bits > thresholds)
        if self.audit:
            limit = self.audit * HASH_RANGE
            selected |= np.array([crc32(event.source.encode()) < limit for event in events], bool)
        return np.flatnonzero(selected)

    def to_json(self) -> dict[str, Any]:
        """The cascade as JSON values; infinite thresholds are texts."""
        return {
            "thresholds": [_to_json(each) for each in self.thresholds.tolist()],
            "other": _to_json(self.other),
            "share": self.share,
            "audit": self.audit,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Cascade:
        """The inverse of `to_json`."""
        thresholds = np.array([float(each) for each in content["thresholds"]], dtype=np.float64)
        return cls(thresholds, float(content["other"]), content["share"], content["audit"])


def join_surprises(parts: Sequence[Surprise]) -> Surprise:
    """The surprise of several batches of events as one."""
    lengths = [np.diff(each.offsets) for each in parts]
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int64)
    groups = np.concatenate([each.groups for each in parts])
    return Surprise(offsets, groups, np.concatenate([each.bits for each in parts]))


def _any_part(surprise: Surprise, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether any part of each event has a flag."""
    counts = np.concatenate(([0], np.cumsum(flags)))
    return np.diff(counts[surprise.offsets]) > 0


def _to_json(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)
