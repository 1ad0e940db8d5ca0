"""The examples of each batch, as a function of the step: there is no sampler state to save."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MAX_SHUFFLED = 1 << 30  # larger splits are generated on demand and already in random order
BATCHES_PER_GROUP = 64  # batches whose examples are sorted by length together


def batch_indices(
    size: int,
    batch_size: int,
    step: int,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    lengths: np.ndarray | None = None,
) -> list[int]:
    """Indices of the examples that process `rank` reads at a step.

    The order is reshuffled every epoch, and every example occurs once per epoch. The union over all
    processes does not depend on their number.

    Args:
        lengths: Number of tokens of each example, (size), or of each of its k sequences, (size, k).
            The examples of a batch then have similar lengths, so that little is padded. None: they
            are drawn independently of their lengths.
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
    orders: dict[int, np.ndarray] = {}
    for epoch in range(positions[0] // size, positions[-1] // size + 1):
        if lengths is None:
            orders[epoch] = _epoch_order(size, epoch, seed)
        else:
            orders[epoch] = _grouped_order(_SharedArray(lengths), batch_size, epoch, seed)
    return [int(orders[position // size][position % size]) for position in positions]


@lru_cache(2)
def _epoch_order(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


class _SharedArray:
    """An array as an argument of a cached function: the same array has the same hash."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SharedArray) and self.array is other.array


@lru_cache(2)
def _grouped_order(lengths: _SharedArray, batch_size: int, epoch: int, seed: int) -> np.ndarray:
    """The order of an epoch with examples of similar lengths in each batch.

    Groups of random examples are sorted by length (by the last sequence first) and cut into
    batches, which are shuffled. Only the batches that an epoch shares with its neighbours are not
    sorted.
    """
    size = len(lengths.array)
    order, rng = _epoch_order(size, epoch, seed), np.random.default_rng([seed, epoch, 1])
    first = -epoch * size % batch_size  # these belong to the last batch of the epoch before
    last = first + max(size - first, 0) // batch_size * batch_size
    parts = [order[:first]]
    group_size = BATCHES_PER_GROUP * batch_size
    for start in range(first, last, group_size):
        group = order[start : min(start + group_size, last)]
        keys = lengths.array[group].reshape(len(group), -1)
        batches = group[np.lexsort(keys.T)].reshape(-1, batch_size)
        parts.append(batches[rng.permutation(len(batches))].ravel())
    return np.concatenate((*parts, order[last:]))
