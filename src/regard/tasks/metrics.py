"""Metrics: what is measured on a model's outputs or predictions, how it is named and compared.

A metric describes each example by a few numbers, its *statistics*, and computes its value from the
statistics of many examples. So an evaluation can be spread over processes (concatenate the
statistics), two models can be compared on the same examples (subtract them), and a confidence
interval can be drawn (resample them), for every metric.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.models.losses import IGNORE_INDEX

if TYPE_CHECKING:
    from regard.tasks.base import Batch


class UndefinedMetric(ValueError):
    """A metric has no value on these examples, for example AUROC without a positive example."""


class Metric(ABC):
    """A metric of a task.

    Attributes:
        name: Its name in tables and in JSON, such as "accuracy".
        unit: Unit of the value, "" for none.
        higher_is_better: Direction.
        format: Format specification of the value in tables.
        needs_predictions: Whether it compares predictions (`Task.predict`) instead of the outputs
            of the model.
        margin: Difference between two models that matters in practice; None: 2 % of the value.
        signature: How the value was computed, if there are variants, such as that of sacrebleu.
    """

    name: str
    unit: str = ""
    higher_is_better: bool = True
    format: str = ".3f"
    needs_predictions: bool = False
    margin: float | None = None
    signature: str = ""

    @abstractmethod
    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """Statistics of each example of a batch, (b, k) of float64.

        Args:
            output: What the model returned.
            batch: The examples, with their targets.
            predictions: A prediction for each example, if `needs_predictions` is set.
        """

    @abstractmethod
    def compute(self, statistics: Tensor) -> float:
        """The metric of examples with the statistics (n, k).

        Raises:
            UndefinedMetric: It has no value on these examples.
        """

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The statistics of several batches or processes together."""
        return torch.cat(list(parts))

    def breakdown(self, statistics: Tensor) -> dict[str, dict[str, float]]:
        """Parts of the value, such as those of each type: numbers by name in rows by name; empty:
        there are none."""
        return {}

    def format_value(self, value: float) -> str:
        """The value with its unit: "0.931", "12.3 dB"."""
        return f"{value:{self.format}}{self.unit and ' '}{self.unit}"


class MeanMetric(Metric):
    """A metric that is a sum over examples divided by a count: statistics (b, 2)."""

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        total, count = statistics.sum(0).tolist()
        if not count:
            raise UndefinedMetric(f"{self.name} has no value: no example has a target.")
        return float(total / count)


class Accuracy(MeanMetric):
    """Share of the targets that the largest logit predicts: logits (b, c) or (b, n, c)."""

    name, margin = "accuracy", 0.01

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets["labels"].to(output.device)
        counted = labels != IGNORE_INDEX
        correct = (output.argmax(-1) == labels) & counted
        return torch.stack((_per_example(correct), _per_example(counted)), -1)


class Bits(MeanMetric):
    """Cross-entropy in bits per unit of text: byte, character or token.

    Args:
        unit: "byte", "character" or "token"; the name is "bits_per_byte" and so on.
        target_units: (classes), the units of each target. None: 1.
    """

    higher_is_better = False

    def __init__(self, unit: str = "token", target_units: Tensor | None = None) -> None:
        self.name, self.target_units = f"bits_per_{unit}", target_units

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets["labels"].to(output.device)
        counted = labels != IGNORE_INDEX
        safe = labels.clamp(min=0)
        log_p = output.float().log_softmax(-1).gather(-1, safe[..., None])[..., 0].double()
        bits = -(log_p / math.log(2)).masked_fill(~counted, 0)
        units = counted.double()
        if self.target_units is not None:
            units = self.target_units.to(output.device)[safe].double() * units
        return torch.stack((_per_example(bits), _per_example(units)), -1)


class Perplexity(MeanMetric):
    """exp(mean cross-entropy per target), at most 2^1000, which float64 still represents."""

    name, higher_is_better, format = "perplexity", False, ".4g"

    def __init__(self) -> None:
        self.bits = Bits()

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        return self.bits.update(output, batch, predictions)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        return float(2 ** min(super().compute(statistics), 1000.0))


class MacroF1(Metric):
    """Mean of F1 over the classes that occur as target or prediction.

    The statistics are a target and a prediction: of each token for logits (b, n, c), so they are
    padded with -1 to the longest example.
    """

    name, margin = "macro_f1", 0.01

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets["labels"].to(output.device)
        ignored = labels == IGNORE_INDEX
        predicted = output.argmax(-1).masked_fill(ignored, -1)
        pairs = torch.stack((labels.masked_fill(ignored, -1), predicted), -1)
        return pairs.reshape(len(labels), -1).double().cpu()

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Metric`."""
        width = max(part.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, width - part.shape[1]), value=-1) for part in parts])

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        target, predicted = statistics.reshape(-1, 2).long().unbind(1)
        counted = target >= 0
        target, predicted = target[counted], predicted[counted]
        correct, actual, chosen = (
            torch.bincount(each, minlength=self.classes)
            for each in (target[target == predicted], target, predicted)
        )
        occurs = actual + chosen > 0
        if not occurs.any():
            raise UndefinedMetric(f"{self.name} has no value: no example has a target.")
        return float((2 * correct[occurs] / (actual + chosen)[occurs]).mean())


class MeanAbsoluteError(MeanMetric):
    """Mean absolute error of numbers (b, o), in the units of the data.

    Args:
        std: (o). Targets and outputs are (value - mean) / std; the error is in values.
        unit: Unit of the values.
    """

    name, higher_is_better, format = "mae", False, ".4g"

    def __init__(self, std: Tensor, unit: str = "") -> None:
        self.std, self.unit = std, unit

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        error = self.error(output, batch).abs()
        return torch.stack((error.sum(1), torch.full_like(error[:, 0], error.shape[1])), -1)

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        """Output minus target (b, o), in the units of the data, of float64 on the CPU."""
        difference = output.double().cpu() - batch.targets["labels"].double().cpu()
        return difference * self.std.double()


class RootMeanSquaredError(MeanAbsoluteError):
    """Root of the mean squared error of numbers (b, o), in the units of the data."""

    name = "rmse"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        squares = self.error(output, batch) ** 2
        return torch.stack((squares.sum(1), torch.full_like(squares[:, 0], squares.shape[1])), -1)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        return math.sqrt(super().compute(statistics))


class R2(Metric):
    """Coefficient of determination, 1 - (squared error) / (variance of the targets), as a mean over
    the outputs. Undefined if a target is constant."""

    name, margin = "r2", 0.01

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        return torch.cat((output.double().cpu(), batch.targets["labels"].double().cpu()), 1)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        predicted, target = statistics.chunk(2, 1)
        if not len(target) or (target == target[0]).all(0).any():
            raise UndefinedMetric("r2 has no value: all targets of these examples are equal.")
        variance = ((target - target.mean(0)) ** 2).sum(0)
        return float((1 - ((predicted - target) ** 2).sum(0) / variance).mean())


def _per_example(values: Tensor) -> Tensor:
    """Sums (b) over all dimensions but the first, of float64 on the CPU."""
    return values.reshape(len(values), -1).double().sum(1).cpu()
