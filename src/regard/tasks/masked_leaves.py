"""Masked leaves: find the hidden values of a JSON event from its other values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import FeatureInput, TokenClassificationHeadConfig
from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import (
    LABELS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    example_rng,
    to_int64,
)
from regard.tasks.baselines import Baseline
from regard.tasks.event_splits import EventSplits, read_event_splits
from regard.tasks.metrics import MeanMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedText

if TYPE_CHECKING:
    from regard.models import Model
    from regard.watch.network.leaf_vocabulary import EncodedLeaves

CHUNK = 4096  # events encoded at a time
MASKS = 64  # of each training event
PADDINGS = ("mask", "tokens")
FREQUENCIES, OTHER_LEAF = "frequencies at the endpoint", "best other leaf"
MAX_CANDIDATES = 8  # other leaves to which the baseline looks
UNCERTAIN = 1e-4  # of all bits; leaves with a smaller share are as good as constant
MAX_COUNTED = 20_000  # events from which it learns


class MaskedLeaves(Task):
    """Predict hidden leaves of an event from the others, which is the network of leaves in
    `regard watch`.

    A leaf is a token: the sum of features of its path, the keys of the path, its type and its
    value. What is predicted is the cell of the value: a frequent value, a quantile of numbers, or
    "other"; see `regard.watch.network.leaf_vocabulary`. A quarter of the leaves is hidden at a
    time. In valid and test, each event occurs once for each quarter, so every leaf is predicted
    once. The metric is bits per leaf.

    Args:
        data: JSON lines or any format of `regard watch`, split in order of time; or the events of
            each split.
        entity: Path of who acted.
        endpoint: Paths of what was called.
        time: Path of the time.
        format: Format of the file, or "auto".
        length: Maximum number of tokens of an event; one is for the endpoint.
        mask_groups: Parts of the leaves, one of which is hidden at a time.
        padding: "mask", or "tokens": all events are filled up to `length` with empty tokens, for
            mixers that take no padding mask.
        seed: Seed of masks and hashes.
    """

    def __init__(
        self,
        data: str | Path | EventSplits,
        *,
        entity: str = "",
        endpoint: str = "",
        time: str = "",
        format: str = "auto",
        length: int = 64,
        mask_groups: int = 4,
        padding: str = "mask",
        seed: int = 0,
    ) -> None:
        from regard.watch.network.cell_frequencies import CellFrequencies
        from regard.watch.network.leaf_vocabulary import LeafVocabulary

        check_choice("padding", padding, PADDINGS)
        check_int(2, length=length, mask_groups=mask_groups)
        check_int(0, seed=seed)
        self.events = read_event_splits(
            data, entity=entity, endpoint=endpoint, time=time, format=format
        )
        train = self.events["train"]
        self.seed, self.groups, self.padding = seed, mask_groups, padding
        self._length = min(length, 1 + max(len(e.paths) for e in train))
        self.vocabulary = LeafVocabulary.learn(train, seed=seed)
        self.leaves = {split: self._encode(split) for split in self.events}
        self.vocabulary.count_cells(self.leaves["train"].encoded)
        self.frequencies = CellFrequencies.learn(
            self.vocabulary, train, self.leaves["train"].encoded
        )
        self.cell_path = torch.from_numpy(self.vocabulary.cell_path)
        self.metrics = (LeafBits(self.cell_path), LeafAccuracy(self.cell_path))

    def _encode(self, split: str) -> SplitLeaves:
        """Encode the events of a split, a chunk at a time: the rows of a chunk are not kept."""
        from regard.watch.network.leaf_vocabulary import EncodedLeaves

        parts: list[EncodedLeaves] = []
        features, masked, events = [], [], self.events[split]
        for start in range(0, len(events), CHUNK):
            part = self.vocabulary.encode(events[start : start + CHUNK], self._length)
            features.append(self.vocabulary.features[part.rows].astype(np.int16))
            masked.append(self.vocabulary.features[part.masked_rows].astype(np.int16))
            parts.append(part)
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        rows, masked_rows, cells, leaves = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "masked_rows", "cells", "leaves")
        )
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        encoded = EncodedLeaves(offsets, rows, masked_rows, cells, leaves)
        return SplitLeaves(encoded, np.concatenate(features), np.concatenate(masked))

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of features with an output for each cell."""
        from regard.watch.network.leaf_vocabulary import BUCKETS, WIDTH

        return ModelNeeds(
            kind="encoder",
            input=FeatureInput(num_features=BUCKETS, features_per_token=WIDTH),
            head=TokenClassificationHeadConfig(num_classes=len(self.cell_path)),
            length=self._length,
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.events[split]) * (MASKS if split == "train" else self.groups)

    def example(self, split: str, index: int) -> Example:
        """See `Task`: an event with some leaves hidden."""
        check_index(split, index, self.size(split))
        count, leaves = len(self.events[split]), self.leaves[split]
        number = index % count if split == "train" else index // self.groups
        start, end = leaves.encoded.offsets[number : number + 2]
        ranks = np.arange(end - start)
        group = index % self.groups
        if split == "train":
            ranks, group = example_rng(self.seed, split, index).permutation(ranks), 0
        hidden = (ranks % self.groups == group) & (leaves.encoded.leaves[start:end] >= 0)
        cells = leaves.encoded.cells[start:end]
        x = np.where(hidden[:, None], leaves.masked[start:end], leaves.features[start:end]).T
        labels = np.where(hidden & (cells >= 0), cells, IGNORE_INDEX)
        missing = (0, self._length - len(labels) if self.padding == "tokens" else 0)
        inputs, targets = F.pad(to_int64(x), missing), to_int64(labels)
        return Example({"x": inputs}, {LABELS: F.pad(targets, missing, value=IGNORE_INDEX)})

    def lengths_of(self, split: str) -> np.ndarray | None:
        """See `Task`."""
        if self.padding == "tokens":
            return None
        sizes = np.diff(self.leaves[split].encoded.offsets)
        return np.tile(sizes, MASKS) if split == "train" else np.repeat(sizes, self.groups)

    def training_batch(self, batch: Batch) -> Batch:
        """See `Task`: the head is computed at the hidden leaves only."""
        labels = batch.targets[LABELS]
        selected = labels != IGNORE_INDEX
        inputs = {**batch.inputs, "output_mask": selected}
        return Batch(inputs, {**batch.targets, LABELS: labels[selected][None]})

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """See `Task`: the cross-entropy over the cells of the path of each hidden leaf."""
        if label_smoothing:
            raise ValueError("label_smoothing would put probability on cells of other paths.")
        labels = batch.targets[LABELS]
        log_p = cell_log_probabilities(output, labels, self.cell_path)
        return -log_p.sum() / max(1, int((labels != IGNORE_INDEX).sum()))

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`: for each hidden leaf its most probable value and the probability."""
        labels, output = batch.targets[LABELS], model(**batch.inputs).detach()
        predictions: list[Prediction] = []
        for logits, row in zip(output, labels, strict=True):
            guesses = []
            for place in (row != IGNORE_INDEX).nonzero()[:, 0].tolist():
                path = int(self.cell_path[row[place]])
                first, last = self.vocabulary.path_starts[path : path + 2].tolist()
                p = logits[place, first:last].softmax(-1)
                best = int(p.argmax())
                value = self.vocabulary.describe_cell(first + best)
                guesses.append([self.vocabulary.paths[path], value, round(float(p[best]), 4)])
            predictions.append({"leaves": guesses})
        return predictions

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The hidden leaves with their values, and with the guesses of a model."""
        guesses = [] if prediction is None else prediction["leaves"]
        lines = []
        for number, cell in enumerate(
            cell for cell in example.targets[LABELS].tolist() if cell != IGNORE_INDEX
        ):
            path = self.vocabulary.paths[int(self.cell_path[cell])]
            line = f"{path}: {self.vocabulary.describe_cell(cell)}"
            if number < len(guesses):
                line += f"  predicted: {guesses[number][1]} ({guesses[number][2]:.3f})"
            lines.append(line)
        shown = int((example.inputs["x"] != 0).any(0).sum())
        return RenderedText("\n".join([f"{shown} tokens, {len(lines)} hidden", *lines]))

    def notes(self) -> list[str]:
        """See `Task`: how many test events are copies of training events."""
        copies = count_copies(self.leaves["train"], self.leaves["test"])
        total = len(self.events["test"])
        return [f"{copies:,} of {total:,} test events have the same features as a training event."]

    # ------------------------------------------------------------------------------- baselines
    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the frequencies at the endpoint, which is the floor of `regard watch`; and
        those given one other leaf of the event, the best one for each path."""
        return {FREQUENCIES: self._frequency_score, OTHER_LEAF: self._other_leaf_score}

    def _frequency_score(self, test: Sequence[int]) -> Tensor:
        leaves = self.leaves["test"].encoded
        p = self.frequencies.probabilities(self.events["test"], leaves)
        return self._statistics(test, -np.log2(p))

    def _other_leaf_score(self, test: Sequence[int]) -> Tensor:
        model = OtherLeafModel(self)
        return self._statistics(test, -np.log2(model.probabilities("test")))

    def _statistics(self, test: Sequence[int], bits: np.ndarray) -> Tensor:
        """Statistics of `LeafBits` of test examples from the bits of each leaf."""
        encoded, statistics = self.leaves["test"].encoded, []
        for index in test:
            number, group = divmod(index, self.groups)
            start, end = encoded.offsets[number : number + 2]
            hidden = np.arange(end - start) % self.groups == group
            hidden &= encoded.cells[start:end] >= 0
            statistics.append((bits[start:end][hidden].sum(), float(hidden.sum())))
        return torch.tensor(statistics, dtype=torch.float64)


class SplitLeaves:
    """The leaves of a split, with their features (n, `WIDTH`), as they are and with the value
    hidden."""

    def __init__(self, encoded: EncodedLeaves, features: np.ndarray, masked: np.ndarray) -> None:
        self.encoded, self.features, self.masked = encoded, features, masked


class OtherLeafModel:
    """The probability of a cell given one other leaf of the event: for each path the leaf that
    predicts it best on the last fifth of the training events, of those that are not hidden with it.

    p(cell | other cell) is smoothed like `CellFrequencies`, towards the frequencies at the
    endpoint. It is a tree of dependencies without the tree (Chow & Liu 1968).
    """

    def __init__(self, task: MaskedLeaves) -> None:
        self.task, self.paths = task, len(task.vocabulary.paths)
        cells = len(task.cell_path)
        train = self._first_cells("train")[-MAX_COUNTED:]
        bits = -np.log2(self._base("train")[-MAX_COUNTED:])
        cut = len(train) - len(train) // 5
        varied = [p for p in range(self.paths) if len(np.unique(train[:cut, p])) > 1]
        uncertain = [p for p in varied if bits[cut:, p].sum() > UNCERTAIN * bits[cut:].sum()]
        self.pairs: dict[tuple[int, int], PairCounts] = {}
        self.candidates: dict[int, list[int]] = {}
        for path in uncertain:
            target, held = train[:cut, path], train[cut:, path]
            rows = held >= 0
            base = 2.0 ** -bits[cut:, path][rows]
            scores = []
            for other in varied:
                if other == path:
                    continue
                counts = PairCounts(train[:cut, other], target, cells)
                p = counts.probabilities(train[cut:, other][rows], held[rows], base)
                scores.append((float(-np.log2(p).sum()), other))
                self.pairs[path, other] = counts
            best = [other for _, other in sorted(scores)[:MAX_CANDIDATES]]
            self.candidates[path] = best
            for other in {*varied} - {*best, path}:
                del self.pairs[path, other]

    def _first_cells(self, split: str) -> np.ndarray:
        """Cell of the first leaf of each path in each event, (events, paths), -1 for none."""
        encoded = self.task.leaves[split].encoded
        table = np.full((len(encoded.offsets) - 1, self.paths), -1)
        owner = np.repeat(np.arange(len(table)), np.diff(encoded.offsets))
        known = np.flatnonzero(encoded.cells >= 0)[::-1]
        paths = self.task.vocabulary.cell_path[encoded.cells[known]]
        table[owner[known], paths] = encoded.cells[known]
        return table

    def _base(self, split: str) -> np.ndarray:
        """Frequencies at the endpoint of these cells, (events, paths), 1 for none."""
        encoded, events = self.task.leaves[split].encoded, self.task.events[split]
        p = self.task.frequencies.probabilities(events, encoded)
        table = np.ones((len(events), self.paths))
        owner = np.repeat(np.arange(len(table)), np.diff(encoded.offsets))
        known = np.flatnonzero(encoded.cells >= 0)[::-1]
        table[owner[known], self.task.vocabulary.cell_path[encoded.cells[known]]] = p[known]
        return table

    def probabilities(self, split: str) -> np.ndarray:
        """The probability of the cell of each leaf of a split, (n)."""
        encoded, task = self.task.leaves[split].encoded, self.task
        p = task.frequencies.probabilities(task.events[split], encoded)
        firsts = self._first_cells(split)
        sizes = np.diff(encoded.offsets)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        groups = (np.arange(len(owner)) - encoded.offsets[owner]) % task.groups
        group_of = np.full(firsts.shape, -1)  # of the first leaf of each path
        known = np.flatnonzero(encoded.cells >= 0)[::-1]
        paths = task.vocabulary.cell_path[np.maximum(encoded.cells, 0)]
        group_of[owner[known], paths[known]] = groups[known]
        result = p.copy()
        for path, candidates in self.candidates.items():
            todo = np.flatnonzero((paths == path) & (encoded.cells >= 0))
            for other in candidates:
                seen = firsts[owner[todo], other] >= 0
                seen &= group_of[owner[todo], other] != groups[todo]
                now, todo = todo[seen], todo[~seen]
                given = firsts[owner[now], other]
                counts = self.pairs[path, other]
                result[now] = counts.probabilities(given, encoded.cells[now], p[now])
        return result


class PairCounts:
    """p(target | given) of cells by their counts (n each, -1 for none), with Witten-Bell
    smoothing."""

    def __init__(self, given: np.ndarray, target: np.ndarray, cells: int) -> None:
        both = (given >= 0) & (target >= 0)
        self.cells = cells
        self.keys, self.counts = np.unique(given[both] * cells + target[both], return_counts=True)
        self.given, where = np.unique(self.keys // cells, return_inverse=True)
        self.totals = np.bincount(where, self.counts, len(self.given))
        self.kinds = np.bincount(where, minlength=len(self.given))

    def probabilities(self, given: np.ndarray, target: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """p(target | given), (n); `prior` (n) where the given cell was not seen."""
        from regard.watch.network.cell_frequencies import look_up

        count = look_up(self.keys, self.counts, given * self.cells + target)
        total = look_up(self.given, self.totals, given)
        kinds = look_up(self.given, self.kinds, given)
        known = (count + kinds * prior) / np.maximum(total + kinds, 1)
        return np.where(total > 0, known, prior)


def count_copies(train: SplitLeaves, test: SplitLeaves) -> int:
    """Number of test events whose features are those of some training event."""

    def texts(leaves: SplitLeaves) -> list[bytes]:
        ends = leaves.encoded.offsets.tolist()
        return [leaves.features[a:b].tobytes() for a, b in pairwise(ends)]

    known = set(texts(train))
    return sum(text in known for text in texts(test))


def cell_log_probabilities(logits: Tensor, labels: Tensor, cell_path: Tensor) -> Tensor:
    """log p of each label among the cells of its path; 0 where there is no label.

    Args:
        logits: (..., c).
        labels: (...), cells or `IGNORE_INDEX`.
        cell_path: (c), the path of each cell.
    """
    counted = labels != IGNORE_INDEX
    wanted, cell_path = labels[counted], cell_path.to(labels.device)
    allowed = cell_path[wanted][:, None] == cell_path
    log_p = logits[counted].float().masked_fill(~allowed, -math.inf).log_softmax(-1)
    chosen = log_p.gather(1, wanted[:, None])[:, 0]
    return torch.zeros_like(labels, dtype=chosen.dtype).masked_scatter(counted, chosen)


class LeafBits(MeanMetric):
    """Bits per hidden leaf: -log2 of the probability of its cell among those of its path."""

    name, higher_is_better = "bits_per_leaf", False

    def __init__(self, cell_path: Tensor) -> None:
        self.cell_path = cell_path

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets[LABELS].to(output.device)
        log_p = cell_log_probabilities(output, labels, self.cell_path)
        bits = -log_p.double().sum(1) / math.log(2)
        return torch.stack((bits, (labels != IGNORE_INDEX).sum(1).double()), -1).cpu()


class LeafAccuracy(MeanMetric):
    """Share of the hidden leaves whose most probable cell is right."""

    name, margin = "accuracy", 0.01

    def __init__(self, cell_path: Tensor) -> None:
        self.cell_path = cell_path

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets[LABELS].to(output.device)
        counted, cell_path = labels != IGNORE_INDEX, self.cell_path.to(output.device)
        wanted = labels[counted]
        allowed = cell_path[wanted][:, None] == cell_path
        best = output[counted].masked_fill(~allowed, -math.inf).argmax(-1)
        right = torch.zeros_like(counted).masked_scatter(counted, best == wanted)
        return torch.stack((right.sum(1), counted.sum(1)), -1).double().cpu()
