"""How unusual the size of a number, or the length of a string, is for its path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STEPS = 4  # buckets for each doubling
HALF = 160  # buckets of each sign: up to 2**40, then all that is larger
BUCKETS = 2 * HALF
KERNEL = np.array([1, 2, 4, 6, 4, 2, 1]) / 20
PRIOR = 0.5  # weight of the uniform distribution, in observations


def find_buckets(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Bucket of each number: its sign, and the logarithm of its size in steps of 1 / `STEPS`."""
    size = np.log2(1 + np.abs(np.nan_to_num(values, nan=0.0)))
    steps = np.minimum(np.round(size * STEPS), HALF - 1).astype(np.int64)
    return np.where(values < 0, HALF - 1 - steps, HALF + steps)


class MagnitudeModel:
    """A histogram on a logarithmic scale for each row, smoothed."""

    def __init__(self) -> None:
        self.counts = np.zeros((0, BUCKETS), np.float32)
        self._bits: npt.NDArray[np.float32] | None = None

    def add(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Learn numbers, each for its row. Rows are made as needed."""
        if not len(rows):
            return
        missing = int(rows.max()) + 1 - len(self.counts)
        if missing > 0:
            more = np.zeros((missing + len(self.counts) // 2, BUCKETS), np.float32)
            self.counts = np.concatenate([self.counts, more])
        np.add.at(self.counts, (rows, find_buckets(values)), 1)
        self._bits = None

    def bits(
        self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """-log2 of the probability of the bucket of each number."""
        if self._bits is None:
            reach = len(KERNEL) // 2
            padded = np.pad(self.counts, ((0, 0), (reach, reach)))
            smooth = np.zeros_like(self.counts)
            for i, weight in enumerate(KERNEL):
                smooth += weight * padded[:, i : i + BUCKETS]
            total = smooth.sum(axis=1, keepdims=True)
            self._bits = -np.log2((smooth + PRIOR / BUCKETS) / (total + PRIOR))
        known = rows < len(self._bits)
        found = self._bits[np.where(known, rows, 0), find_buckets(values)] if len(self._bits) else 0
        return np.where(known, found, np.log2(BUCKETS)).astype(np.float64)

    def median(self, row: int) -> float | None:
        """The middle of the numbers of a row, to the precision of a bucket; None if there are
        none."""
        if row >= len(self.counts) or not self.counts[row].any():
            return None
        cumulated = np.cumsum(self.counts[row])
        bucket = int(np.searchsorted(cumulated, cumulated[-1] / 2))
        steps = HALF - 1 - bucket if bucket < HALF else bucket - HALF
        return float((2 ** (steps / STEPS) - 1) * (-1 if bucket < HALF else 1))
