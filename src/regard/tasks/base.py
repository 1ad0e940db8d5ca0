"""A task: examples, what is to be predicted, how well it was, and how to look at one.

Examples are numbered.  Number i of a split is always the same, whoever asks and in whatever order: so a run can be resumed
anywhere and spread over any number of processes without a state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.losses import (
    IGNORE_INDEX as IGNORE_INDEX,  # what has no target, here and there
    cross_entropy_loss,
)
from regard.tasks.tokenizers import TextProcessor

SPLITS = ("train", "valid", "test")
OUTPUTS = (
    "sequence",
    "token",
    "pair",
)  # a target for a whole, for each token, or for two sequences side by side


class Example(NamedTuple):
    """tokens (n) of int64, or (2 n) for a pair, the shorter one filled up with 0; target () for a whole or (n) for each token,
    IGNORE where there is none."""

    tokens: Tensor
    target: Tensor


class Batch(NamedTuple):
    """Examples side by side, filled up at the end.

    tokens   (b n) of int64, or (b 2 n) for pairs
    mask     (b n) or (b 2 n), True = a real token; None: all are
    target   (b), or (b n) with IGNORE where there is none
    """

    tokens: Tensor
    mask: Tensor | None
    target: Tensor


class Task(ABC):
    """What a model learns.

    output   one of OUTPUTS
    vocab    kinds of tokens; 0 fills up
    classes  kinds of targets
    length   the longest example
    causal   a target may depend only on tokens up to its own
    metric   "accuracy", or "bits" for each target
    speaks   targets are tokens, so that the model can go on by itself
    widths   (classes), what each target counts as where bits are measured, such as bytes; None: one
    reading  of texts, for tasks that have some: kept beside a trained model, so that it can be used without the data
    """

    output: str = "sequence"
    causal: bool = False
    metric: str = "accuracy"
    is_language_model: bool = False
    widths: Tensor | None = None
    processor: TextProcessor | None = None

    def __init__(self, *, vocab_size: int, classes: int, length: int) -> None:
        check_int(1, vocab_size=vocab_size, classes=classes, length=length)
        check_choice("output", self.output, OUTPUTS)
        self.vocab_size, self.classes, self.length = vocab_size, classes, length

    @abstractmethod
    def size(self, split: str) -> int:
        """How many examples a split has."""

    @abstractmethod
    def example(self, split: str, index: int) -> Example:
        """One of them, the same each time."""

    @abstractmethod
    def show(self, example: Example) -> str:
        """What a person wants to see of it."""

    def batch(self, split: str, indexes: Sequence[int]) -> Batch:
        """Some examples side by side."""
        return collate([self.example(split, index) for index in indexes])

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy in nats, the mean over all targets that are there; logits (b classes) or (b n classes)."""
        return cross_entropy_loss(logits.float(), target)

    def counted(self, target: Tensor) -> int:
        """How many targets there are: what `training_loss` is the mean over."""
        return int((target != IGNORE_INDEX).sum())

    def score(self, logits: Tensor, target: Tensor) -> tuple[float, int]:
        """What the metric sums over the targets that are there, and how many these are."""
        there, count = target != IGNORE_INDEX, self.counted(target)
        if self.metric == "bits":
            bits = float(self.loss(logits, target)) * count / math.log(2)
            return bits, count if self.widths is None else int(self.widths[target[there]].sum())
        return float(((logits.argmax(-1) == target) & there).sum()), count

    def facts(self) -> dict[str, Any]:
        """What has to be kept to use a trained model without the data, as JSON; `regard.tasks.processor_from_dict` reads it."""
        return {} if self.processor is None else self.processor.facts()

    @property
    def larger_is_better(self) -> bool:
        """Of the metric."""
        return self.metric == "accuracy"


def collate(examples: Sequence[Example]) -> Batch:
    """Fill up to the longest: tokens with 0, targets of tokens with IGNORE."""
    if not examples:
        raise ValueError("a batch needs at least one example")
    lengths = torch.tensor([e.tokens.shape[-1] for e in examples])
    longest = int(lengths.max())
    tokens = torch.stack([F.pad(e.tokens, (0, longest - e.tokens.shape[-1])) for e in examples])
    there = (
        tokens != 0 if tokens.dim() == 3 else torch.arange(longest) < lengths[:, None]
    )  # 0 fills up both of a pair
    mask = None if there.all() else there
    each = examples[0].target.dim() > 0
    fill = [
        F.pad(e.target, (0, longest - len(e.target)), value=IGNORE_INDEX) if each else e.target
        for e in examples
    ]
    return Batch(tokens, mask, torch.stack(fill))


def example_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """Random numbers that belong to one example alone."""
    check_choice("split", split, SPLITS)
    return np.random.default_rng([seed, SPLITS.index(split), index])


def to_int64(values: Sequence[int] | np.ndarray) -> Tensor:
    """Whole numbers as a tensor of int64."""
    return torch.as_tensor(np.asarray(values, dtype=np.int64))
