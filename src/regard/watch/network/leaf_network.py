"""A network over the leaves of one event, mixed with the level that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.models import Model
from regard.models.embeddings import FeatureEmbedding
from regard.models.heads import PredictionHead
from regard.models.model import SingleStackModel
from regard.tasks.event_splits import split_by_time
from regard.tasks.masked_leaves import MaskedLeaves
from regard.watch.event import Event
from regard.watch.leaves import LeafLevel
from regard.watch.leaves.count_sketch import hash_value
from regard.watch.level import Finding, Surprise
from regard.watch.network.cascade import Cascade
from regard.watch.network.cell_frequencies import CellFrequencies
from regard.watch.network.leaf_vocabulary import EncodedLeaves, LeafVocabulary, parse_time
from regard.watch.network.mixture import Gain, fit_weights, measure_gain, saved_bits
from regard.watch.network.network_level import NetworkLevel
from regard.watch.network.settings import NetworkSettings
from regard.watch.network.training import OnStep, build_network, takes_mask, train_network
from regard.watch.network.weights import (
    load_model,
    load_settings,
    model_json,
    with_prefix,
)

TOKENS = 8192  # tokens that the network reads at a time
EXPECTED = 3  # values in an explanation

Floats = npt.NDArray[np.float64]


class LeafScorer:
    """Predicts each leaf of events from the other leaves.

    Args:
        model: A trained model of the task `MaskedLeaves`.
        vocabulary: Encodes events.
        length: Maximum number of tokens of an event.
        groups: Passes, each of which hides one part of the leaves.
    """

    def __init__(self, model: Model, vocabulary: LeafVocabulary, length: int, groups: int) -> None:
        assert isinstance(model, SingleStackModel)
        assert isinstance(model.backbone.embed, FeatureEmbedding)
        assert isinstance(model.head, PredictionHead)
        self.model, self.vocabulary = model.eval(), vocabulary
        self.backbone, self.length, self.groups = model.backbone, length, groups
        self.embed, self.head = model.backbone.embed, model.head.out
        self.takes_mask = takes_mask(model)
        self._embedded = torch.empty(0)
        self._memo_number = -1

    @torch.no_grad()
    def outputs(self, leaves: EncodedLeaves) -> Tensor:
        """The output of the layers at each leaf while it is hidden, (n, d); zero for endpoints."""
        embedded = self._embed()
        sizes = np.diff(leaves.offsets)
        found = torch.zeros(len(leaves.rows), embedded.shape[1])
        by_size = np.argsort(sizes, kind="stable")
        start = 0
        while start < len(by_size):
            longest = max(int(sizes[by_size[start]]), 1)
            count = max(1, TOKENS // (longest * self.groups))
            chosen = by_size[start : start + count]
            start += len(chosen)
            self._run(leaves, chosen, embedded, found)
        return found

    def _run(
        self, leaves: EncodedLeaves, chosen: npt.NDArray[np.int64], embedded: Tensor, out: Tensor
    ) -> None:
        """Run the passes over some events, and write the outputs at their leaves."""
        starts, sizes = leaves.offsets[chosen], leaves.offsets[chosen + 1] - leaves.offsets[chosen]
        longest = int(sizes.max()) if self.takes_mask else self.length
        ranks = np.arange(longest)
        is_leaf = ranks < sizes[:, None]
        place = np.where(is_leaf, starts[:, None] + ranks, 0)
        rows = np.where(is_leaf, leaves.rows[place], 0)
        hidden = ranks % self.groups == np.arange(self.groups)[:, None]  # (groups, longest)
        hidden = hidden & (leaves.leaves[place] >= 0)[:, None] & is_leaf[:, None]
        masked = np.where(is_leaf, leaves.masked_rows[place], 0)
        tokens = np.where(hidden, masked[:, None], rows[:, None]).reshape(-1, longest)
        x = self.embed.position(embedded[torch.from_numpy(tokens)], 0)
        mask = None
        if self.takes_mask and not is_leaf.all():
            mask = torch.from_numpy(is_leaf).repeat_interleave(self.groups, 0)
        y = self.backbone.stack(x, mask=mask)
        where = torch.from_numpy(hidden.reshape(-1, longest))
        y = y[where]
        if self.backbone.norm is not None:
            y = self.backbone.norm(y[None], None)[0]
        out[torch.from_numpy(np.broadcast_to(place[:, None], hidden.shape)[hidden])] = y

    def _embed(self) -> Tensor:
        """Embeddings of all rows of the vocabulary, (rows, d), without positions."""
        if self._memo_number != self.vocabulary.memo_number:
            self._embedded = torch.empty(0)
            self._memo_number = self.vocabulary.memo_number
        features = self.vocabulary.features
        known = len(self._embedded)
        if known < len(features):
            new = torch.from_numpy(features[known:])
            summed = torch.nn.functional.embedding_bag(
                new, self.embed.tokens.weight, mode="sum", padding_idx=0
            )
            added = self.embed.norm(summed[None], None)[0]
            self._embedded = added if not known else torch.cat((self._embedded, added))
        return self._embedded

    @torch.no_grad()
    def log_probabilities(self, leaves: EncodedLeaves) -> Floats:
        """log2 p of the cell of each leaf given the other leaves, (n); 0 where it has none."""
        y, result = self.outputs(leaves), np.zeros(len(leaves.cells))
        weight, bias = self.head.weight, self.head.bias
        paths = np.where(leaves.cells >= 0, self.vocabulary.cell_path[leaves.cells], -1)
        order = np.argsort(paths, kind="stable")
        starts = np.flatnonzero(np.diff(paths[order], prepend=-2))
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            members = order[start:end]
            path = int(paths[members[0]])
            if path < 0:
                continue
            first, last = self.vocabulary.path_starts[path : path + 2].tolist()
            if last - first == 1:
                continue
            rows = torch.from_numpy(members)
            logits = torch.addmm(bias[first:last], y[rows], weight[first:last].T)
            wanted = torch.from_numpy(leaves.cells[members] - first)
            log_p = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            result[members] = log_p.double().numpy() / np.log(2)
        return result

    @torch.no_grad()
    def cell_distribution(self, leaves: EncodedLeaves, leaf: int) -> Floats:
        """The probabilities of all cells of the path of one encoded leaf, (cells of the path)."""
        path = int(self.vocabulary.cell_path[leaves.cells[leaf]])
        first, last = self.vocabulary.path_starts[path : path + 2].tolist()
        y = self.outputs(leaves)[leaf]
        p = (self.head.weight[first:last] @ y + self.head.bias[first:last]).softmax(0)
        distribution: Floats = p.double().numpy()
        return distribution


class ScoredLeaves(NamedTuple):
    """p_network / p_floor of the cells of leaves, with what is needed to mix them."""

    leaves: EncodedLeaves
    paths: npt.NDArray[np.int64]
    floor: Floats
    ratios: Floats


class LeafNetwork(NetworkLevel[LeafLevel]):
    """The level of leaves with a network: -log2 of a mixture of network and floor.

    The network predicts the cell c of a value v, from the other leaves of the event. The floor
    knows the path and the endpoint. Within a cell the network knows nothing and leaves the
    probability to the floor:

        p(v) = p_floor(v) (w p_network(c) / q(c) + 1 - w)

    with q(c) the frequency of the cell at the endpoint (`CellFrequencies`), for which the floor's
    own probability of the cell stands, and w the weight of the path, fitted on held-out events.

    The network reads the events that the floor finds least likely; see `Cascade`. The bits of the
    others are those of the floor. Calibration must therefore be done on what `score` returns.

    Args:
        floor: The level without a network. The last parts of an event are its leaves, in order.
        settings: How to build and train the network.
    """

    bits_bound_p = True  # as those of the floor

    def __init__(self, floor: LeafLevel, settings: NetworkSettings) -> None:
        super().__init__(floor, settings)
        self.scorer: LeafScorer | None = None

    @property
    def model(self) -> Model:
        """See `NetworkLevel`."""
        assert self.scorer is not None
        return self.scorer.model

    def fit_network(
        self,
        events: Sequence[Event],
        *,
        folder: Path | None = None,
        on_step: OnStep = lambda progress: None,
    ) -> Gain:
        """See `NetworkLevel`."""
        plain = split_by_time(events, "the traffic")
        splits = {split: self._hide_strings(each) for split, each in plain.items()}
        s = self.settings
        task = MaskedLeaves(splits, length=s.length, mask_groups=s.mask_groups, seed=s.seed)
        model = build_network(task, s, position="none", length=task.length)
        if not takes_mask(model):
            task.padding = "tokens"
        train_network(model, task, s, folder=folder, on_step=on_step)
        self.vocabulary, self.frequencies = task.vocabulary, task.frequencies
        self.scorer = LeafScorer(model, self.vocabulary, task.length, s.mask_groups)
        self.weights = np.zeros(len(self.vocabulary.paths))
        valid = self._score_leaves(splits["valid"])
        known = valid.paths >= 0
        self.weights = fit_weights(valid.paths[known], valid.ratios[known], len(self.weights))
        test = self._score_leaves(splits["test"])
        owner = np.repeat(np.arange(len(splits["test"])), np.diff(test.leaves.offsets))
        self.gain = measure_gain(
            owner, -np.log2(test.floor), self._saved(test), len(splits["test"])
        )
        held_out = self.floor.score(plain["valid"], {})
        self.cascade = Cascade.fit(held_out, s.cascade, s.audit)
        return self.gain

    def score(self, events: Sequence[Event], states: dict[tuple[str, str], Any]) -> Surprise:
        """See `Level`: the floor, and for some events the network."""
        if self.scorer is None:
            raise ValueError("The network of the level 'leaf' has not been trained: call fit.")
        surprise = self.floor.score(events, states)
        chosen = self.cascade.select(surprise, events)
        if not len(chosen):
            return surprise
        scored = self._score_leaves(self._hide_strings([events[i] for i in chosen]))
        saved = self._saved(scored)
        owner = np.repeat(chosen, np.diff(scored.leaves.offsets))
        is_leaf = scored.leaves.leaves >= 0
        sizes = np.array([len(event.paths) for event in events])
        first = surprise.offsets[1:] - sizes
        parts = first[owner[is_leaf]] + scored.leaves.leaves[is_leaf]
        bits = surprise.bits.copy()
        bits[parts] -= saved[is_leaf]
        return surprise._replace(bits=bits)

    @property
    def secret(self) -> bytes:
        """Key of the hashes of strings, if the settings of the floor ask for hashes."""
        return self.floor.secret

    @secret.setter
    def secret(self, secret: bytes) -> None:
        self.floor.secret = secret

    def _hide_strings(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events with hashes in place of strings, if the settings of the floor say so. Times
        stay."""
        if not self.floor.settings.hash_values:
            return events
        return [
            replace(
                event,
                values=[
                    f"hash:{hash_value(value, self.secret):016x}"
                    if isinstance(value, str) and parse_time(value) is None
                    else value
                    for value in event.values
                ],
            )
            for event in events
        ]

    def _score_leaves(self, events: Sequence[Event]) -> ScoredLeaves:
        assert self.scorer is not None
        leaves = self.vocabulary.encode(events, self.scorer.length)
        floor = self.frequencies.probabilities(events, leaves)
        log_p = self.scorer.log_probabilities(leaves)
        known = leaves.cells >= 0
        paths = np.where(known, self.vocabulary.cell_path[leaves.cells], -1)
        ratios = np.where(known, 2.0**log_p / floor, 1.0)
        return ScoredLeaves(leaves, paths, floor, ratios)

    def _saved(self, scored: ScoredLeaves) -> Floats:
        weights = np.where(scored.paths >= 0, self.weights[scored.paths], 0.0)
        return saved_bits(weights, scored.ratios)

    def update(self, events: Sequence[Event]) -> None:
        """See `Level`: the floor and the cascade learn; the network is trained anew by `regard
        watch learn`."""
        self.cascade.learn(self.floor.score(events, {}))
        self.floor.update(events)

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        """See `Level`: the finding of the floor, with what the network expected."""
        finding = self.floor.explain(event, part, state)
        surprise = self.floor.score([event], {(event.tenant, event.entity): state})
        if self.scorer is None or not len(self.cascade.select(surprise, [event])):
            return finding
        scored = self._score_leaves(self._hide_strings([event]))
        leaf = np.flatnonzero(scored.leaves.leaves == part - len(surprise.bits) + len(event.paths))
        if part < len(surprise.bits) - len(event.paths) or not len(leaf):
            return finding
        place = int(leaf[0])
        path = int(scored.paths[place])
        w = float(self.weights[path]) if path >= 0 else 0.0
        if not w:
            return finding
        first = int(self.vocabulary.path_starts[path])
        p = self.scorer.cell_distribution(scored.leaves, place)
        endpoint = np.full(len(p), self.frequencies.endpoint_index.get(event.endpoint, -1))
        floor = self.frequencies.of_cells(endpoint, first + np.arange(len(p)))
        mixed = w * p + (1 - w) * floor
        best = np.argsort(-mixed, kind="stable")[:EXPECTED]
        finding.bits -= float(self._saved(scored)[place])
        finding.expected = [
            (self.vocabulary.describe_cell(first + int(i)), float(mixed[i])) for i in best
        ]
        return finding

    # ---------------------------------------------------------------------------------- saving
    def to_json(self) -> dict[str, Any]:
        """See `Level`."""
        assert self.scorer is not None
        assert self.gain is not None
        return {
            "floor": self.floor.to_json(),
            "settings": self.settings.model_dump(mode="json"),
            "model": model_json(self.scorer.model),
            "vocabulary": self.vocabulary.to_json(),
            "frequencies": self.frequencies.to_json(),
            "length": self.scorer.length,
            "weights": self.weights.tolist(),
            "cascade": self.cascade.to_json(),
            "gain": self.gain._asdict(),
        }

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """See `NetworkLevel`: also the counts of cells."""
        return {**super().tensors(), **self.frequencies.tensors()}

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
    ) -> LeafNetwork:
        """See `Level`."""
        floor = LeafLevel.from_json(content["floor"], with_prefix("floor.", tensors))
        level = cls(floor, load_settings(content["settings"]))
        model = load_model(content["model"], with_prefix("model.", tensors))
        level.vocabulary = LeafVocabulary.from_json(content["vocabulary"])
        level.frequencies = CellFrequencies.from_json(
            level.vocabulary, content["frequencies"], tensors
        )
        level.scorer = LeafScorer(
            model, level.vocabulary, content["length"], level.settings.mask_groups
        )
        level.weights = np.array(content["weights"])
        level.cascade = Cascade.from_json(content["cascade"])
        level.gain = Gain(**content["gain"])
        return level
