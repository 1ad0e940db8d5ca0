"""The base class of tasks.

Examples are numbered, and number i of a split is always the same example. So a run can resume
anywhere, and on any number of processes, without saving the state of a data loader.
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
from regard.models.losses import IGNORE_INDEX as IGNORE_INDEX, cross_entropy_loss
from regard.tasks.tokenizers import TextProcessor

SPLITS = ("train", "valid", "test")
OUTPUTS = ("sequence", "token", "pair")


class Example(NamedTuple):
    """One example.

    Attributes:
        tokens: (n) of int64, or (2, n) for a pair, the shorter sequence padded with 0.
        target: A scalar, or (n) for a target per token with IGNORE_INDEX where there is none.
    """

    tokens: Tensor
    target: Tensor


class Batch(NamedTuple):
    """Examples padded at the end to the same length.

    Attributes:
        tokens: (b, n) of int64, or (b, 2, n) for pairs.
        mask: Same shape as tokens, True = real token, False = padding. None: no padding.
        target: (b), or (b, n) with IGNORE_INDEX where there is no target.
    """

    tokens: Tensor
    mask: Tensor | None
    target: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; copied to CUDA without waiting, from pinned memory."""

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        mask = None if self.mask is None else move(self.mask)
        return Batch(move(self.tokens), mask, move(self.target))

    def count_tokens(self) -> int:
        """Number of tokens without padding."""
        return self.tokens.numel() if self.mask is None else int(self.mask.sum())


class Task(ABC):
    """What a model learns: numbered examples, a loss and a metric.

    Args:
        vocab_size: Number of different tokens; token 0 is padding.
        classes: Number of different targets.
        length: Maximum length of an example.

    Attributes:
        output: What has a target: "sequence", "token" (each), or "pair" (of sequences).
        causal: Whether a target may only depend on tokens up to its own position.
        metric: "accuracy", or "bits_per_token", "bits_per_byte", "bits_per_character".
        is_language_model: Whether targets are tokens, so that the model can generate.
        target_units: (classes), the bytes or characters of each target; None: 1.
        processor: Turns texts into tokens; saved with a trained model. None: no texts.
    """

    output: str = "sequence"
    causal: bool = False
    metric: str = "accuracy"
    is_language_model: bool = False
    target_units: Tensor | None = None
    processor: TextProcessor | None = None

    def __init__(self, *, vocab_size: int, classes: int, length: int) -> None:
        check_int(1, vocab_size=vocab_size, classes=classes, length=length)
        check_choice("output", self.output, OUTPUTS)
        self.vocab_size, self.classes, self.length = vocab_size, classes, length

    @abstractmethod
    def size(self, split: str) -> int:
        """Number of examples in a split."""

    @abstractmethod
    def example(self, split: str, index: int) -> Example:
        """Example `index` of a split; always the same."""

    @abstractmethod
    def show(self, example: Example) -> str:
        """An example as text for the terminal."""

    def batch(self, split: str, indices: Sequence[int]) -> Batch:
        """Several examples as a batch."""
        return collate([self.example(split, index) for index in indices])

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats over all targets; logits (b, classes) or (b, n, classes)."""
        return cross_entropy_loss(logits.float(), target)

    def count_targets(self, target: Tensor) -> int:
        """Number of targets that `loss` is the mean of."""
        return int((target != IGNORE_INDEX).sum())

    def score(self, logits: Tensor, target: Tensor) -> tuple[float, int]:
        """Sum of the metric over a batch, and the count to divide it by."""
        has_target, count = target != IGNORE_INDEX, self.count_targets(target)
        if self.metric == "accuracy":
            return float(((logits.argmax(-1) == target) & has_target).sum()), count
        bits = float(self.loss(logits, target)) * count / math.log(2)
        if self.target_units is not None:
            units = self.target_units.to(target.device)[target.clamp(min=0)]
            count = int(units.masked_fill(~has_target, 0).sum())
        return bits, count

    def processor_dict(self) -> dict[str, Any]:
        """The text processor as JSON, for `regard.tasks.processor_from_dict`; empty without one."""
        return {} if self.processor is None else self.processor.to_dict()

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger metric is better."""
        return self.metric == "accuracy"


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to the longest: tokens with 0, per-token targets with IGNORE_INDEX."""
    if not examples:
        raise ValueError("A batch needs at least one example.")
    lengths = torch.tensor([e.tokens.shape[-1] for e in examples])
    longest = int(lengths.max())
    tokens = torch.stack([F.pad(e.tokens, (0, longest - e.tokens.shape[-1])) for e in examples])
    is_pair = tokens.dim() == 3  # each sequence of a pair has its own padding
    mask = tokens != 0 if is_pair else torch.arange(longest) < lengths[:, None]
    targets = [e.target for e in examples]
    if targets[0].dim():
        targets = [F.pad(t, (0, longest - len(t)), value=IGNORE_INDEX) for t in targets]
    return Batch(tokens, None if mask.all() else mask, torch.stack(targets))


def check_index(split: str, index: int, size: int) -> None:
    """Raise an IndexError for an example that does not exist."""
    if not 0 <= index < size:
        raise IndexError(f"The {split} split has {size} examples; there is no example {index}.")


def example_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """The random number generator of one example."""
    check_choice("split", split, SPLITS)
    return np.random.default_rng([seed, SPLITS.index(split), index])


def to_int64(values: Sequence[int] | np.ndarray) -> Tensor:
    """Integers as a tensor of int64."""
    return torch.as_tensor(np.asarray(values, dtype=np.int64))
