"""From bits to p-values: how many normal values are at least as surprising?

Conformal p-values (Vovk et al. 2005): p = (1 + number of calibration values >= bits) / (n + 1). If
normal events are exchangeable, P(p <= a) <= a, whatever the bits mean. Beyond the largest
calibration value, an exponential tail is fitted to the excesses (Balkema and de Haan 1974), and the
p-value is marked as extrapolated.

Traffic drifts, so events are not exchangeable. Reservoirs forget, and each group has a correction:
the more often normal values have p <= 0.01, the larger is a factor that all its p-values get, and
it falls again when they are rarer (adaptive conformal inference, Gibbs and Candès 2021). So a
header that changes with a release soon has less weight, and others keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SPAN = 4_096.0  # bits are cut to -SPAN / 2 ... SPAN / 2
GRID = 1_024  # bits are rounded to 1 / GRID, so that equal values stay equal in any batch
COLD = 50  # a group with fewer values leans on its pool
TAIL_POWER = 0.6  # the n ** 0.6 largest values are the tail
LEAST_MEAN = 1 / np.log(2)  # P(bits > b) = 2 ** -b, as for code lengths: no tail is shorter
HORIZON = 5  # a reservoir forgets: its values come from the last HORIZON * size ones, about
RESORT = 0.02  # share of new values at which a reservoir is sorted again
SMALLEST_P = 1e-300
CORRECTION_P = 0.01  # the p-value whose frequency is watched
CORRECTION_STEP = 0.005  # change of the logarithm of a correction for each value
MAX_CORRECTION = 5.0


class PValues(NamedTuple):
    """p-values, and which of them are beyond what the calibration sample can show."""

    p: npt.NDArray[np.float64]
    extrapolated: npt.NDArray[np.bool_]


class Calibrator:
    """Conformal p-values for groups, each with a reservoir of normal values (Vitter 1985).

    A group with fewer than `COLD` values is mixed with its pool: all groups whose names start with
    the same text before the first ":".

    Args:
        size: Values kept for each group.
        seed: Seed of the reservoirs.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.rng = size, np.random.default_rng(seed)
        self.pool_names: dict[str, int] = {}
        self.pools = np.zeros(0, np.int64)  # row of the pool of each group
        self.rows = np.zeros(0, np.int64)  # row of each group
        self.corrections = np.zeros(0)  # of each group, logarithm of a factor
        self.values = np.zeros((0, size), np.float32)
        self.seen = np.zeros(0, np.int64)  # of each row, values kept or not
        self._added = np.zeros(0, np.int64)  # of each row, values that came since it was sorted
        self._counts = np.zeros(0, np.int64)  # of each row, values when it was sorted
        self._sorted = np.zeros((0, size))
        self._tails = np.zeros((0, 4))  # threshold, share above it, mean excess, maximum

    def extend(self, names: Sequence[str]) -> None:
        """Make room for groups that were added.

        Args:
            names: Names of all groups.
        """
        for group in range(len(self.rows), len(names)):
            pool = names[group].partition(":")[0]
            new = 1 if pool in self.pool_names else 2
            self._add_rows(new)
            if new == 2:
                self.pool_names[pool] = len(self.seen) - 2
            self.pools = np.append(self.pools, self.pool_names[pool])
            self.rows = np.append(self.rows, len(self.seen) - 1)
            self.corrections = np.append(self.corrections, 0.0)

    def _add_rows(self, count: int) -> None:
        used = len(self.seen)
        self.seen, self._added = np.pad(self.seen, (0, count)), np.pad(self._added, (0, count))
        self._counts = np.pad(self._counts, (0, count))
        if used + count > len(self.values):
            room = ((0, count + used // 2), (0, 0))
            self.values, self._sorted = np.pad(self.values, room), np.pad(self._sorted, room)
            self._tails = np.pad(self._tails, room)
        new = np.arange(used, used + count)
        self._sort(new)

    def add(self, groups: npt.NDArray[np.integer[Any]], bits: npt.NDArray[np.float64]) -> None:
        """Add normal values."""
        if not len(groups):
            return
        rows = np.concatenate([self.rows[groups], self.pools[groups]])
        values = np.tile(_round_bits(bits), 2)
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
        first = np.searchsorted(rows, rows, side="left")
        number = self.seen[rows] + np.arange(len(rows)) - first  # of the value in its row
        kept = number < self.size
        recent = np.minimum(number + 1, HORIZON * self.size)
        replaces = self.rng.random(len(rows)) * recent < self.size
        slots = np.where(kept, number, self.rng.integers(0, self.size, len(rows)))
        chosen = kept | replaces
        self.values[rows[chosen], slots[chosen]] = values[chosen]
        np.add.at(self.seen, rows, 1)
        np.add.at(self._added, rows[chosen], 1)

    def correct(self, groups: npt.NDArray[np.integer[Any]], p: npt.NDArray[np.float64]) -> None:
        """Adapt the corrections of groups to p-values of normal events."""
        steps = CORRECTION_STEP * ((p <= CORRECTION_P) / CORRECTION_P - 1)
        np.add.at(self.corrections, groups, steps)
        np.clip(self.corrections, 0.0, MAX_CORRECTION, out=self.corrections)

    def p_values(
        self, groups: npt.NDArray[np.integer[Any]], bits: npt.NDArray[np.float64]
    ) -> PValues:
        """The p-value of each value in its group."""
        if not len(groups):
            return PValues(np.zeros(0), np.zeros(0, np.bool_))
        self._sort(np.flatnonzero(self._added > RESORT * np.minimum(self.seen, self.size)))
        values = _round_bits(bits)
        own, total, tail = self._compare(self.rows[groups], values)
        p, extrapolated = (own + tail) / (total + 1), own == 0
        cold = np.flatnonzero(total < COLD)
        if len(cold):
            pooled, pool_total, pool_tail = self._compare(self.pools[groups[cold]], values[cold])
            p_pool = (pooled + pool_tail) / (pool_total + 1)
            weight = COLD - total[cold]
            p[cold] = (own[cold] + weight * p_pool) / COLD
            extrapolated[cold] = (own[cold] == 0) & (pooled == 0)
        p *= np.exp(self.corrections[groups])
        return PValues(np.clip(p, SMALLEST_P, 1.0), extrapolated)

    def quantiles(self, p: float) -> npt.NDArray[np.float64]:
        """For each group the value that has the p-value p, or its largest value if p is smaller
        than the sample can show."""
        self._sort(np.flatnonzero(self._added))
        counts = self._counts[self.rows]
        places = np.clip(np.ceil(counts * (1 - p)).astype(np.int64), 0, np.maximum(counts - 1, 0))
        found = self._sorted[self.rows, places] - self.rows * SPAN
        return np.where(counts > 0, found, SPAN / 2)

    def sizes(self, groups: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Number of calibration values of each group."""
        return np.minimum(self.seen[self.rows[groups]], self.size)

    def _compare(
        self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """For values in rows: how many calibration values are as large, of how many; and what
        counts for the value itself: 1, or less beyond the largest calibration value."""
        total = self._counts[rows]
        keys = rows * SPAN + values
        ordered = self._sorted[: len(self.seen)].reshape(-1)
        smaller = np.searchsorted(ordered, keys, side="left") - rows * self.size
        larger = np.maximum(total - smaller, 0)

        threshold, share, mean, maximum = self._tails[rows].T
        beyond = larger == 0
        fitted = (total + 1) * share * np.exp(-np.maximum(values - threshold, 0) / mean)
        from_maximum = np.exp(-np.maximum(values - maximum, 0) / mean)
        tail = np.where(beyond, np.maximum(np.minimum(fitted, 1.0), from_maximum), 1.0)
        return larger, total, tail

    def _sort(self, rows: npt.NDArray[np.int64]) -> None:
        """Sort reservoirs, and fit their tails."""
        for row in rows:
            count = int(min(self.seen[row], self.size))
            ordered = np.sort(self.values[row, :count]).astype(np.float64)
            self._sorted[row, :count] = row * SPAN + ordered
            self._sorted[row, count:] = row * SPAN + SPAN / 2
            self._tails[row] = _fit_tail(ordered)
            self._counts[row], self._added[row] = count, 0

    def to_json(self) -> dict[str, Any]:
        """What is not in `tensors`."""
        return {
            "size": self.size,
            "pool_names": self.pool_names,
            "rng": self.rng.bit_generator.state,
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The reservoirs. What was added is sorted first: a copy gives the same p-values."""
        self._sort(np.flatnonzero(self._added))
        rows = len(self.seen)
        used = int(min(self.seen.max(initial=0), self.size))
        return {
            "values": self.values[:rows, :used],
            "seen": self.seen,
            "pools": self.pools,
            "rows": self.rows,
            "corrections": self.corrections,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> Calibrator:
        """The inverse of `to_json` and `tensors`."""
        calibrator = cls(content["size"])
        calibrator.rng.bit_generator.state = content["rng"]
        calibrator.pool_names = content["pool_names"]
        calibrator.pools, calibrator.rows = tensors["pools"].copy(), tensors["rows"].copy()
        calibrator.corrections = tensors["corrections"].copy()
        calibrator._add_rows(len(tensors["seen"]))
        stored = tensors["values"]
        calibrator.values[: len(stored), : stored.shape[1]] = stored
        calibrator.seen = tensors["seen"].copy()
        calibrator._sort(np.arange(len(calibrator.seen)))
        return calibrator


def harmonic_mean_p(
    p: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Harmonic mean of the p-values from `offsets[i]` to `offsets[i + 1]`, 1 for none (Wilson
    2019). It is close to n times the smallest, and lower if several are small."""
    counts = np.diff(offsets)
    sums = np.zeros(len(counts))
    filled = np.flatnonzero(counts)
    if len(filled):
        sums[filled] = np.add.reduceat(1 / p, offsets[filled])
    return np.where(counts > 0, counts / np.maximum(sums, 1e-300), 1.0)


def fisher_p(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """p-value of the product of independent p-values (Fisher 1925), over the last axis: the tail of
    a chi-squared distribution with an even number of degrees of freedom, which is a sum."""
    total = -np.log(p).sum(axis=-1)
    term, tail = np.ones_like(total), np.ones_like(total)
    for k in range(1, p.shape[-1]):
        term = term * total / k
        tail = tail + term
    return np.asarray(np.clip(np.exp(-total) * tail, SMALLEST_P, 1.0), np.float64)


def _round_bits(bits: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Bits on a grid, and not too large."""
    limit = SPAN / 2 - 1
    return np.round(np.clip(bits, -limit, limit) * GRID).astype(np.float32) / np.float32(GRID)


def _fit_tail(ordered: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    """The exponential tail of sorted values: threshold, share above it, mean excess, maximum."""
    if not len(ordered):
        return 0.0, 1.0, LEAST_MEAN, 0.0
    count = min(int(np.ceil(len(ordered) ** TAIL_POWER)), len(ordered))
    threshold = float(ordered[-count])
    mean = max(float((ordered[-count:] - threshold).mean()), LEAST_MEAN)
    return threshold, count / len(ordered), mean, float(ordered[-1])
