"""How many of the events in a window fail, beside the share that failed before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST_CORRELATION = 0.5  # between the events of a window
FEWEST_REMEMBERED = 200  # windows


class ErrorShare:
    """The number of errors in a window, as a beta-binomial variable.

    A share of errors has no standard deviation that holds for all windows: one error in ten events
    is ordinary where one in a thousand fails, and forty in fifty are not. So the surprise of k
    errors in n events is −log2 P(X >= k). X is binomial, with a probability that varies from window
    to window by a beta distribution. Its mean is the share of errors so far, and its width follows
    from ρ, the correlation of the events of a window (Williams, 1975, by moments). ρ is at least
    1 / (N + 2) after N events, for which the mean itself is not known better.

    Attributes:
        sums: Over windows: of k, n, k², k · n and n².
        memory: Windows after which older ones have been forgotten.
    """

    def __init__(self) -> None:
        self.sums: npt.NDArray[np.float64] = np.zeros(5)
        self.memory = FEWEST_REMEMBERED

    def fit(self, counts: Sequence[tuple[int, int]]) -> None:
        """Learn from the (errors, events) of windows."""
        self.memory = max(len(counts), FEWEST_REMEMBERED)
        self.sums = _products(counts).sum(axis=0)

    def update(self, counts: Sequence[tuple[int, int]]) -> None:
        """Learn from more windows; older ones count less and less."""
        kept = max(1 - len(counts) / self.memory, 0.0)
        self.sums = kept * self.sums + _products(counts).sum(axis=0)

    @property
    def mean(self) -> float:
        """The share of errors that is expected."""
        errors, events = self.sums[:2].tolist()
        return float((errors + 0.5) / (events + 1))

    def bits(self, errors: int, events: int) -> float:
        """Surprise of so many errors, or more, among events."""
        share = self.mean
        if errors <= share * events:
            return 0.0
        known = 1 / self._correlation() - 1
        a, b = share * known, (1 - share) * known
        # P(X = k), and from it P(X = k + 1), P(X = k + 2) ... by their ratios.
        first = _log_choose(events, errors)
        first += _log_beta(errors + a, events - errors + b) - _log_beta(a, b)
        k = np.arange(errors, events)
        ratios = np.log((events - k) * (k + a) / ((k + 1) * (events - k - 1 + b)))
        logs = first + np.concatenate([[0.0], np.cumsum(ratios)])
        tail = logs.max() + math.log(np.exp(logs - logs.max()).sum())
        return max(-float(tail) / math.log(2), 0.0)

    def _correlation(self) -> float:
        """ρ: by how much the errors of a window vary more than binomial ones."""
        share = self.mean
        _, events, squares, mixed, event_squares = self.sums.tolist()
        least = 1 / (events + 2)
        pairs = (event_squares - events) * share * (1 - share)
        if pairs <= 0:
            return float(least)
        spread = squares - 2 * share * mixed + share**2 * event_squares
        found = (spread - events * share * (1 - share)) / pairs
        return float(min(max(found, least), MOST_CORRELATION))


def _products(counts: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Rows of k, n, k², k · n and n²."""
    k, n = np.array(counts, dtype=np.float64).reshape(-1, 2).T
    return np.column_stack([k, n, k * k, k * n, n * n])


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
