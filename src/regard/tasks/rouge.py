"""ROUGE (Lin 2004) of texts with one or several references, by the package rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import check_choice
from regard.tasks.base import Batch
from regard.tasks.metrics import MeanMetric
from regard.tasks.text_codes import texts_of_codes

REFERENCES = "references"  # the target with the reference texts of an example
ROUGE_TYPES = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
CHOICES = ("mean", "best")


class Rouge(MeanMetric):
    """F1 of the words (rouge_1), word pairs (rouge_2) or the longest common subsequence (rouge_l)
    that a text shares with its references, from 0 to 100, as a mean over the examples.

    Words are lower-cased and stemmed (Porter), as usual for English.

    Args:
        name: rouge_1, rouge_2 or rouge_l.
        references: Of several references, the "mean" score or the "best".
    """

    format, margin, needs_predictions = ".2f", 0.5, True

    def __init__(self, name: str, references: str = "mean") -> None:
        check_choice("references", references, CHOICES)
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise ImportError(
                "ROUGE needs the package rouge-score: pip install 'regard[text]'"
            ) from None
        self.name, self.references = name, references
        self.kind = ROUGE_TYPES[name]
        self.scorer = RougeScorer([self.kind], use_stemmer=True)

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        rows = (texts_of_codes(row) for row in batch.targets[REFERENCES])
        return self.score_texts([each["text"] for each in predictions], list(rows))

    def score_texts(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> Tensor:
        """The statistics (n, 2) of texts with their references."""
        values = []
        for text, targets in zip(texts, references, strict=True):
            scores = [self.scorer.score(each, text)[self.kind].fmeasure for each in targets]
            best = max(scores) if self.references == "best" else sum(scores) / len(scores)
            values.append((100 * best, 1.0))
        return torch.tensor(values, dtype=torch.float64)
