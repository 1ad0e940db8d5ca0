"""How often each cell occurs at an endpoint: what a network of leaves has to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event
from regard.watch.network.leaf_vocabulary import EncodedLeaves, LeafVocabulary

MAX_ENDPOINTS = 4096

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CellFrequencies:
    """The probability of a cell given endpoint and path, with Witten-Bell smoothing.

    q(c | endpoint, path) = (count(endpoint, c) + kinds q(c | path)) / (count(endpoint, path) +
    kinds), where kinds is the number of different cells of the path at the endpoint.
    """

    def __init__(
        self, vocabulary: LeafVocabulary, endpoints: Sequence[str], keys: Ints, counts: Ints
    ) -> None:
        self.vocabulary, self.endpoints = vocabulary, list(endpoints)
        self.endpoint_index = {name: i for i, name in enumerate(self.endpoints)}
        self.keys, self.counts = keys, counts  # endpoint * cells + cell, sorted
        self.prior = vocabulary.frequencies()
        cells, paths = len(self.prior), len(vocabulary.paths)
        of_path = keys // max(cells, 1) * paths + vocabulary.cell_path[keys % max(cells, 1)]
        self._path_keys, where = np.unique(of_path, return_inverse=True)
        self._path_counts = np.bincount(where, counts, len(self._path_keys))
        self._path_kinds = np.bincount(where, minlength=len(self._path_keys))

    @classmethod
    def learn(
        cls, vocabulary: LeafVocabulary, events: Sequence[Event], leaves: EncodedLeaves
    ) -> CellFrequencies:
        """Count the cells of the leaves of events; `leaves` is their encoding."""
        endpoints = list(dict.fromkeys(event.endpoint for event in events))[:MAX_ENDPOINTS]
        index = {name: i for i, name in enumerate(endpoints)}
        of_event = np.array([index.get(event.endpoint, -1) for event in events], dtype=np.int64)
        endpoint = np.repeat(of_event, np.diff(leaves.offsets))
        known = (leaves.cells >= 0) & (endpoint >= 0)
        keys = endpoint[known] * len(vocabulary.cell_counts) + leaves.cells[known]
        unique, counts = np.unique(keys, return_counts=True)
        return cls(vocabulary, endpoints, unique, counts)

    def probabilities(self, events: Sequence[Event], leaves: EncodedLeaves) -> Floats:
        """The probability of the cell of each leaf, 1 where the path is unknown."""
        of_event = [self.endpoint_index.get(event.endpoint, -1) for event in events]
        endpoint = np.repeat(np.array(of_event, dtype=np.int64), np.diff(leaves.offsets))
        return self.of_cells(endpoint, leaves.cells)

    def of_cells(self, endpoint: Ints, cells: Ints) -> Floats:
        """The probability of cells at endpoints, both as indices; -1 is unknown."""
        known = np.maximum(cells, 0)
        prior = np.where(cells >= 0, self.prior[known], 1.0)
        paths = self.vocabulary.cell_path[known]
        is_known = (cells >= 0) & (endpoint >= 0)
        count = look_up(self.keys, self.counts, endpoint * len(self.prior) + known)
        place = endpoint * len(self.vocabulary.paths) + paths
        total = look_up(self._path_keys, self._path_counts, place)
        kinds = look_up(self._path_keys, self._path_kinds, place)
        smoothed = (count + kinds * prior) / np.maximum(total + kinds, 1)
        return np.where(is_known & (total > 0), smoothed, prior)

    def to_json(self) -> dict[str, Any]:
        """The endpoints; see `tensors`."""
        return {"endpoints": self.endpoints}

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The counts, as arrays."""
        return {"cell_keys": self.keys, "cell_counts": self.counts}

    @classmethod
    def from_json(
        cls,
        vocabulary: LeafVocabulary,
        content: Mapping[str, Any],
        tensors: Mapping[str, npt.NDArray[Any]],
    ) -> CellFrequencies:
        """The inverse of `to_json` and `tensors`."""
        keys, counts = tensors["cell_keys"], tensors["cell_counts"]
        return cls(vocabulary, content["endpoints"], keys, counts)


def look_up(keys: Ints, values: npt.NDArray[Any], wanted: Ints) -> npt.NDArray[Any]:
    """The values of wanted keys, 0 for keys that are not there; `keys` are sorted."""
    if not len(keys):
        return np.zeros(len(wanted), dtype=values.dtype)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
