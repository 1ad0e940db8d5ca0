"""Evaluate a model on examples of a task: the statistics of every metric, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from regard.tasks.base import Batch, Task
from regard.tasks.metrics import UndefinedMetric
from regard.tasks.rendering import RenderedTable
from regard.train.distributed import WorkerGroup

if TYPE_CHECKING:
    from regard.models import Model


@dataclass(frozen=True)
class Evaluation:
    """The outcome of an evaluation.

    Attributes:
        indices: The examples (n).
        statistics: Statistics of these examples by the name of the metric, (n, k).
        loss: Mean loss over all targets.
        split: The split of the examples, for error messages.
    """

    task: Task
    indices: list[int]
    statistics: dict[str, Tensor]
    loss: float
    split: str = ""

    @property
    def value(self) -> float:
        """The metric that decides; `UndefinedMetric` if it has no value."""
        try:
            return self.task.metric.compute(self.statistics[self.task.metric.name])
        except UndefinedMetric as error:
            size = len(self.indices)
            where = f"In {size:,} examples of the {self.split} split: " if self.split else ""
            raise UndefinedMetric(f"{where}{error}") from None

    def values(self) -> dict[str, float]:
        """Every metric that has a value, by name."""
        found = {}
        for metric in self.task.metrics:
            try:
                found[metric.name] = metric.compute(self.statistics[metric.name])
            except UndefinedMetric:
                continue
        return found

    def breakdowns(self) -> dict[str, dict[str, dict[str, float]]]:
        """The tables of the metrics that have one, by name."""
        tables = {
            metric.name: metric.breakdown(self.statistics[metric.name])
            for metric in self.task.metrics
        }
        return {name: table for name, table in tables.items() if table}


@torch.no_grad()
def evaluate_examples(
    task: Task,
    model: nn.Module,
    indices: Sequence[int],
    split: str,
    *,
    forward: Callable[[Batch], Any],
    batch_size: int,
    device: torch.device,
    group: WorkerGroup | None = None,
    is_late: Callable[[int], bool] = lambda done: False,
    in_training: bool = False,
) -> Evaluation:
    """Evaluate a model, on all processes of a group.

    Args:
        forward: Returns the output of the model for a batch on the device.
        is_late: Called in all processes with the number of examples done; True ends the evaluation.
        in_training: Use `Task.predict_in_training`.
    """
    rank, world_size = (0, 1) if group is None else (group.rank, group.world_size)
    needs_predictions = any(metric.needs_predictions for metric in task.metrics)
    rows: list[tuple[int, list[int], dict[str, Tensor], float, int]] = []
    for first in range(0, len(indices), batch_size):
        own = list(indices[first : first + batch_size])[rank::world_size]
        # a process without examples takes part, because FSDP gathers weights from all
        batch = task.batch(split, own or [indices[first]]).to(device)
        output = forward(batch)
        predict = task.predict_in_training if in_training else task.predict
        predictions = predict(cast("Model", model), batch) if needs_predictions else []
        statistics = {
            metric.name: metric.update(output, batch, predictions) for metric in task.metrics
        }
        targets = task.count_targets(batch)
        loss = float(task.loss(output, batch)) * targets
        if own:
            rows.append((first + rank, own, statistics, loss, targets))
        if is_late(min(first + batch_size, len(indices))):
            break
    if group is not None and world_size > 1:
        rows = [row for part in group.all_gather_object(rows) for row in part]
    rows.sort(key=lambda row: row[0])
    merged = {
        metric.name: metric.merge([row[2][metric.name] for row in rows]) for metric in task.metrics
    }
    targets = sum(row[4] for row in rows)
    return Evaluation(
        task,
        [index for row in rows for index in row[1]],
        merged,
        sum(row[3] for row in rows) / max(targets, 1),
        split,
    )


def breakdown_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> RenderedTable:
    """A breakdown of a metric as a table: counts as they are, shares with three digits."""
    columns = list(next(iter(rows.values())))
    cells = [
        [name, *(str(v) if isinstance(v, int) else f"{v:.3f}" for v in row.values())]
        for name, row in rows.items()
    ]
    return RenderedTable([title, *columns], cells)


def describe_values(task: Task, values: dict[str, Any]) -> str:
    """Metrics in words: "accuracy 0.931, macro_f1 0.902, loss 0.213"."""
    metrics = {metric.name: metric for metric in task.metrics}
    return ", ".join(
        f"{name} {metrics[name].format_value(value) if name in metrics else format(value, '.4f')}"
        for name, value in values.items()
    )
