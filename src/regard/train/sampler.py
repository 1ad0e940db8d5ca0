"""The examples of each batch, as a function of the step: there is no sampler state to save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MAX_SHUFFLED = 1 << 30  # larger splits are generated on demand and already in random order


def batch_indices(
    size: int, batch_size: int, step: int, *, seed: int, rank: int = 0, world_size: int = 1
) -> list[int]:
    """Indices of the examples that process `rank` reads at a step.

    The order is reshuffled every epoch, and every example occurs once per epoch. The union over all
    processes does not depend on their number.
    """
    if size < 1:
        raise ValueError("There are no examples to train on.")
    if batch_size % world_size:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by the number of processes, {world_size}."
        )
    local_size = batch_size // world_size
    first = step * batch_size + rank * local_size
    positions = range(first, first + local_size)
    if size > MAX_SHUFFLED:
        return [position % size for position in positions]
    return [
        int(_epoch_order(size, position // size, seed)[position % size]) for position in positions
    ]


@lru_cache(2)
def _epoch_order(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
