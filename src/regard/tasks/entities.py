"""Entities in tag sequences (IOB1, IOB2, BIOES, BILOU), and their F1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import Batch
from regard.tasks.metrics import Metric, UndefinedMetric

OUTSIDE = "O"
TAG = re.compile(r"[BIESLU]-.+")
SAME_AS = {"L": "E", "U": "S"}  # BILOU -> BIOES


class Entity(NamedTuple):
    """Words start .. end - 1 are an entity of this kind."""

    start: int
    end: int
    kind: str


def are_tags(labels: Sequence[str]) -> bool:
    """Whether labels mark entities: "O", "B-person", "I-person", ..."""
    return any(TAG.fullmatch(label) for label in labels) and all(
        label == OUTSIDE or TAG.fullmatch(label) for label in labels
    )


def find_entities(labels: Sequence[str]) -> list[Entity]:
    """The entities in the labels (n) of a sentence.

    An entity starts at B or S, after E or S, after O, and where the kind changes, as in the script
    conlleval; so one rule reads all schemes.
    """
    found: list[Entity] = []
    start, kind, is_ended = 0, "", True  # of the entity in progress
    for place, label in enumerate([*labels, OUTSIDE]):
        prefix, _, name = label.partition("-")
        prefix = SAME_AS.get(prefix, prefix)
        is_outside = label == OUTSIDE
        if not is_ended and (is_outside or prefix in "BS" or name != kind):
            found.append(Entity(start, place, kind))
            is_ended = True
        if is_outside:
            continue
        if is_ended:
            start, kind, is_ended = place, name, False
        if prefix in "ES":
            found.append(Entity(start, place + 1, kind))
            is_ended = True
    return found


class EntityF1(Metric):
    """F1 of entities: right only with the same words and type (micro average, as in conlleval).

    The statistics of an example are its true positives, false positives and false negatives of
    each type.

    Args:
        labels: The tags, by class.
    """

    name = "entity_f1"

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.kinds = sorted({label.partition("-")[2] for label in labels if label != OUTSIDE})

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`: logits (b, n, c), and a target at the first token of each word."""
        targets, chosen = batch.targets["labels"].cpu(), output.argmax(-1).cpu()
        statistics = []
        for target, predicted in zip(targets, chosen, strict=True):
            words = target != IGNORE_INDEX
            tags = ([self.labels[i] for i in row[words].tolist()] for row in (target, predicted))
            statistics.append(self.count(*tags))
        return torch.stack(statistics)

    def count(self, target: Sequence[str], predicted: Sequence[str]) -> Tensor:
        """The statistics (3 · types) of the tags (n) of a sentence."""
        right, found = set(find_entities(target)), set(find_entities(predicted))
        counts = torch.zeros(len(self.kinds), 3, dtype=torch.float64)
        for column, entities in enumerate((right & found, found - right, right - found)):
            for entity in entities:
                counts[self.kinds.index(entity.kind), column] += 1
        return counts.flatten()

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        both, wrong, missed = statistics.view(-1, 3).sum(0).tolist()
        if not both + wrong + missed:
            raise UndefinedMetric(f"{self.name} has no value: there is no entity.")
        return float(2 * both / (2 * both + wrong + missed))

    def breakdown(self, statistics: Tensor) -> dict[str, dict[str, float]]:
        """See `Metric`: precision, recall, F1 and the number of entities of each type."""
        rows = statistics.view(len(statistics), -1, 3).sum(0)
        return {
            name: _precision_and_recall(*counts.tolist())
            for name, counts in zip([*self.kinds, "all types"], [*rows, rows.sum(0)], strict=True)
        }


def _precision_and_recall(both: float, wrong: float, missed: float) -> dict[str, float]:
    """Precision, recall, F1 (0 without entities, as in scikit-learn) and the number of entities."""
    return {
        "precision": both / max(both + wrong, 1),
        "recall": both / max(both + missed, 1),
        "f1": 2 * both / max(2 * both + wrong + missed, 1),
        "support": int(both + missed),
    }
