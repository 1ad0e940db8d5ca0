"""Mixing a network with its floor: how much weight the network gets, and whether it is worth it.

log p = log p_floor + log(w r + 1 - w), r = p_network / p_floor

Both are probabilities of the same outcome, so the mixture is one too for every w from 0 to 1. The
weight is fitted on held-out events for each group by likelihood, which is concave in w. A group for
which the network knows nothing gets w = 0 and keeps the bits of the floor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ITERATIONS = 200  # of expectation maximisation
MIN_HELD_OUT = 20  # parts of a group; groups with fewer share one weight
Z = 1.645  # standard errors below the mean: one-sided, 95 %

Floats = npt.NDArray[np.float64]


class Gain(NamedTuple):
    """What a network saves on held-out events.

    Attributes:
        floor: Bits of the floor per event.
        saved: Bits saved per event.
        lower: Lower end of the 95 % confidence interval of `saved`, one-sided.
        events: Number of events.
    """

    floor: float
    saved: float
    lower: float
    events: int

    def suffices(self, min_gain: float) -> bool:
        """Whether the floor suffices: surely less than `min_gain` of its bits were saved."""
        return not self.lower > min_gain * self.floor


def fit_weights(groups: npt.NDArray[np.int64], ratios: Floats, count: int) -> Floats:
    """The weight of the network in each of `count` groups, (count).

    Args:
        groups: Group of each held-out part, (n).
        ratios: p_network / p_floor of each part, (n).
    """
    sizes = np.bincount(groups, minlength=count)
    shared = _fit(np.zeros(len(groups), dtype=np.int64), ratios, 1)[0] if len(groups) else 0.0
    weights = _fit(groups, ratios, count)
    return np.where(sizes >= MIN_HELD_OUT, weights, shared)


def _fit(groups: npt.NDArray[np.int64], ratios: Floats, count: int) -> Floats:
    """Expectation maximisation, with half a part that the floor explains in each group."""
    sizes, weights = np.bincount(groups, minlength=count), np.full(count, 0.5)
    for _ in range(ITERATIONS):
        w = weights[groups]
        share = w * ratios / (w * ratios + 1 - w)
        weights = np.bincount(groups, share, count) / (sizes + 0.5)
    w = weights[groups]
    saved = np.bincount(groups, np.log2(w * ratios + 1 - w), count)
    return np.where(saved > 0, weights, 0.0)


def saved_bits(weights: Floats, ratios: Floats) -> Floats:
    """log2(w r + 1 - w): what the mixture saves of the bits of the floor; negative if it costs."""
    saved: Floats = np.log2(weights * ratios + 1 - weights)
    return saved


def measure_gain(owner: npt.NDArray[np.int64], floor: Floats, saved: Floats, events: int) -> Gain:
    """The gain on held-out events.

    Args:
        owner: Event of each part, (n).
        floor: Bits of the floor of each part, (n).
        saved: Bits saved of each part, (n).
        events: Number of events.
    """
    per_event = np.bincount(owner, saved, events)
    mean, error = per_event.mean(), per_event.std() / np.sqrt(max(events, 1))
    return Gain(float(floor.sum() / events), float(mean), float(mean - Z * error), events)
