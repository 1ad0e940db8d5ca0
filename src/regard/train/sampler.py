"""Which examples stand in which batch: a function of the step, so that there is no state to lose."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

DRAWN = (
    1 << 30
)  # splits larger than this are drawn as they are asked for, and so in random order already


def batch_indices(
    size: int, batch: int, step: int, *, seed: int, rank: int = 0, world: int = 1
) -> list[int]:
    """The numbers of the examples of batch `step`, in an order that is new in each epoch; of them the share of one process.

    All processes together have the same examples, however many there are; every example is seen once in each epoch.
    """
    if size < 1:
        raise ValueError("there are no examples to train on")
    if batch % world:
        raise ValueError(f"a batch of {batch} does not divide among {world} processes")
    share = batch // world
    first = step * batch + rank * share
    return [_at(size, place, seed) for place in range(first, first + share)]


def _at(size: int, place: int, seed: int) -> int:
    if size > DRAWN:
        return place % size
    epoch, within = divmod(place, size)
    return int(_order(size, epoch, seed)[within])


@lru_cache(2)
def _order(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
