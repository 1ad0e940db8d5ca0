"""Counts of endlessly many values in constant memory."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from regard.watch.event import Value

Keys = npt.NDArray[np.uint64]

MOST_USED = 0.4  # of the cells of a row
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix_keys(keys: Keys) -> Keys:
    """Spread the bits of 64-bit keys (the finaliser of SplitMix64; Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        keys = (keys ^ (keys >> np.uint64(30))) * _FIRST
        keys = (keys ^ (keys >> np.uint64(27))) * _SECOND
        return keys ^ (keys >> np.uint64(31))


def combine_keys(first: Keys, second: Keys) -> Keys:
    """A key for each pair; the order matters."""
    with np.errstate(over="ignore"):
        return mix_keys(first * _SPREAD + second)


def hash_value(value: Value, secret: bytes = b"") -> int:
    """A 64-bit hash of a value and its type that is the same in every process.

    Args:
        secret: Key of the hash, so that nobody without it can test which values were counted.
    """
    if isinstance(value, str):
        content = b"s" + value.encode("utf-8", "surrogatepass")
    else:
        content = f"{type(value).__name__}:{value!r}".encode()
    digest = hashlib.blake2b(content, digest_size=8, key=secret[:64])
    return int.from_bytes(digest.digest(), "little")


class CountSketch:
    """Approximate counts of 64-bit keys: a count-min sketch with conservative updates (Cormode and
    Muthukrishnan 2005; Estan and Varghese 2002) behind a doorkeeper (Einziger et al. 2017).

    The doorkeeper remembers the first sighting of a key in a Bloom filter, and only the second
    enters the sketch. So identifiers that occur once do not crowd out values that return. A full
    doorkeeper is emptied; a full sketch is aged: all counts are halved.

    Args:
        width: Cells of a row, a power of two.
    """

    ROWS = 3
    PROBES = 2  # bits of the doorkeeper for each key

    def __init__(self, width: int = 1 << 19) -> None:
        self.width = width
        self.counts = np.zeros((self.ROWS, width), np.uint32)
        self.seen = np.zeros(4 * width, np.bool_)
        self.seen_keys = 0

    def estimate(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The count of each key: rarely too high, and too low by one if the doorkeeper was emptied
        since, and by more only after ageing."""
        counted = self._read_counts(self._cells(keys))
        return counted + self.seen[self._probes(keys)].all(axis=0)

    def add(self, keys: Keys, amounts: npt.NDArray[np.int64]) -> None:
        """Count keys, which must differ from each other."""
        counted = self._read_counts(self._cells(keys))
        probes = self._probes(keys)
        first = (counted == 0) & ~self.seen[probes].all(axis=0)
        self.seen[probes[:, first]] = True  # the doorkeeper keeps the first sighting
        self.seen_keys += int(first.sum())

        left = amounts - first
        again = left > 0
        target = (counted + left)[again].astype(np.uint32)
        for row, places in zip(self.counts, self._cells(keys[again]), strict=True):
            np.maximum.at(row, places, target)

        if self.seen_keys > len(self.seen) // 8:
            self.seen[:] = False
            self.seen_keys = 0
        if np.count_nonzero(self.counts[0, ::64]) > self.width // 64 * MOST_USED:
            self.counts >>= np.uint32(1)

    def _cells(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The cell of each key in each row: (rows, keys)."""
        spread = [mix_keys(keys + np.uint64(row)) for row in range(self.ROWS)]
        return (np.stack(spread) & np.uint64(self.width - 1)).astype(np.int64)

    def _probes(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The bits of each key in the doorkeeper: (probes, keys)."""
        spread = [mix_keys(keys ^ np.uint64(probe + 101)) for probe in range(self.PROBES)]
        return (np.stack(spread) & np.uint64(len(self.seen) - 1)).astype(np.int64)

    def _read_counts(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = np.arange(self.ROWS)[:, None]
        return self.counts[rows, cells].min(axis=0).astype(np.int64)
