"""Forecasting: predict the next values of a multivariate series."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int
from regard.models import Model
from regard.models.config import RegressionHeadConfig, VectorInput
from regard.tasks.base import LABELS, SPLITS, Batch, Example, ModelNeeds, Task, check_index
from regard.tasks.baselines import Baseline
from regard.tasks.metrics import MeanMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedCurve
from regard.tasks.rows import Rows, get_column, read_rows

MAX_DEVIATIONS = 10.0  # standardised values are cut to this
TRAIN, VALID = 0.7, 0.1  # shares of the steps
MEAN, LAST, SAME_PHASE, RIDGE = "mean", "last value", "last patch", "ridge on the last patch"
RIDGE_PENALTY = 1.0  # per training row, of standardised values

Series = Mapping[str, np.ndarray]


class Forecast(Task):
    """Forecast the next patch of a multivariate series from the patches before, which is the
    network of series in `regard watch` (patches as in Nie et al. 2023, arXiv 2211.14730).

    A token is a patch: `patch` steps of all columns, standardised with the mean and the standard
    deviation of the training steps. The metric is the mean squared error of standardised values.

    Args:
        data: CSV, JSON lines or Parquet with a row for each step, in order of time: 70 % for
            training, 10 % for valid, 20 % for test. Or the steps (n, columns) of each split.
        columns: The columns, separated by commas. None: all whose values are numbers.
        patch: Steps of a patch.
        length: Patches that the model reads.
    """

    def __init__(
        self,
        data: str | Path | Series,
        *,
        columns: str | None = None,
        patch: int = 8,
        length: int = 16,
    ) -> None:
        check_int(1, patch=patch, length=length)
        if isinstance(data, Mapping):
            steps = {split: np.asarray(data[split], dtype=np.float64) for split in SPLITS}
            self.columns = [str(i) for i in range(steps["train"].shape[1])]
        else:
            steps, self.columns = _read_steps(data, columns)
        self.patch, self._length = patch, length
        window = patch * (length + 1)
        for split, values in steps.items():
            if len(values) < window:
                raise ValueError(
                    f"The {split} split has {len(values)} steps, and an example needs {window}: "
                    "give a smaller patch or length."
                )
        self.mean = np.nan_to_num(np.nanmean(steps["train"], 0))
        std = np.nan_to_num(np.nanstd(steps["train"], 0))
        self.std = np.where(std > 0, std, 1.0)
        self.steps = {split: self.standardize(values) for split, values in steps.items()}
        self.metrics = (ForecastError(),)

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """Values (..., columns) as the model reads them."""
        scaled = (values - self.mean) / self.std
        return np.nan_to_num(scaled).clip(-MAX_DEVIATIONS, MAX_DEVIATIONS)

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: a decoder of patches with an output for each value of the next patch."""
        width = self.patch * len(self.columns)
        return ModelNeeds(
            kind="decoder",
            input=VectorInput(width=width),
            head=RegressionHeadConfig(num_outputs=width, pooling="none"),
            length=self._length,
        )

    def size(self, split: str) -> int:
        """See `Task`: windows, one from each step of train, and one per half window of others."""
        starts = len(self.steps[split]) - self.patch * (self._length + 1) + 1
        return starts if split == "train" else 1 + (starts - 1) // self._stride

    @property
    def _stride(self) -> int:
        return max(1, self.patch * self._length // 2)

    def example(self, split: str, index: int) -> Example:
        """See `Task`: patches (length, patch * columns), each with the patch after it."""
        check_index(split, index, self.size(split))
        start = index if split == "train" else index * self._stride
        end = start + self.patch * (self._length + 1)
        patches = self.steps[split][start:end].reshape(self._length + 1, -1)
        tensor = torch.from_numpy(patches).float()
        return Example({"x": tensor[:-1]}, {LABELS: tensor[1:].clone()})

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`: the values of the next patch in the units of the data, by column."""
        output = model(**batch.inputs).detach()[:, -1].double().numpy()
        values = output.reshape(len(output), self.patch, -1) * self.std + self.mean
        return [dict(zip(self.columns, each.T.tolist(), strict=True)) for each in values]

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The first column with the patch after the last, and what a model predicts for it."""
        known = example.inputs["x"].reshape(-1, len(self.columns))[:, 0]
        after = example.targets[LABELS][-1].reshape(self.patch, -1)[:, 0]
        values = torch.cat((known, after)).double().numpy() * self.std[0] + self.mean[0]
        curves = {self.columns[0]: values.tolist()}
        if prediction is not None:
            guess = [*values[: len(known)].tolist(), *prediction[self.columns[0]]]
            curves[f"{self.columns[0]}, predicted"] = guess
        return RenderedCurve(curves)

    # ------------------------------------------------------------------------------- baselines
    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the mean, the last value, the last patch again, and ridge regression from one
        patch to the next."""

        def last_value(x: Tensor) -> Tensor:
            return x[..., -len(self.columns) :].repeat(1, 1, self.patch)

        return {
            MEAN: lambda test: self._score(test, torch.zeros_like),
            LAST: lambda test: self._score(test, last_value),
            SAME_PHASE: lambda test: self._score(test, lambda x: x),
            RIDGE: lambda test: self._score(test, self.fit_ridge()),
        }

    def fit_ridge(self) -> Callable[[Tensor], Tensor]:
        """Ridge regression from each training patch to the next: patches (..., patch * columns) to
        those after them."""
        width = self.patch * len(self.columns)
        rows = np.lib.stride_tricks.sliding_window_view(self.steps["train"], 2 * self.patch, axis=0)
        pairs = rows.transpose(0, 2, 1).reshape(len(rows), -1).copy()
        x, y = torch.from_numpy(pairs[:, :width]), torch.from_numpy(pairs[:, width:])
        gram = x.T @ x + RIDGE_PENALTY * torch.eye(width, dtype=x.dtype)
        weight = torch.linalg.solve(gram, x.T @ y).float()

        def forecast(patches: Tensor) -> Tensor:
            return patches @ weight

        return forecast

    def _score(self, test: Sequence[int], forecast: Callable[[Tensor], Tensor]) -> Tensor:
        batch = self.batch("test", test)
        patches = batch.inputs["x"]
        assert patches is not None
        return self.metric.update(forecast(patches), batch, [])


class ForecastError(MeanMetric):
    """Mean squared error of all values (b, n, o)."""

    name, higher_is_better, format = "mse", False, ".4g"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        error = (output.double().cpu() - batch.targets[LABELS].double().cpu()) ** 2
        count = torch.full((len(error),), float(error[0].numel()), dtype=torch.float64)
        return torch.stack((error.flatten(1).sum(1), count), -1)


def _read_steps(data: str | Path, columns: str | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """The steps of each split, and the columns."""
    files = read_rows(data)
    first = next((row for rows in files.values() for _, row in rows), None)
    if first is None:
        raise ValueError(f"{data} has no rows.")
    if columns is None:
        names = [name for name, value in first.items() if _to_number(value) is not None]
    else:
        names = [name.strip() for name in columns.split(",")]
    if not names:
        raise ValueError(f"{data} has no column of numbers.")

    def read(rows: Rows) -> np.ndarray:
        steps = []
        for where, row in rows:
            numbers = [_to_number(get_column(row, name, where)) for name in names]
            if None in numbers:
                wrong = names[numbers.index(None)]
                raise ValueError(f"{where}: {wrong!r} is {row[wrong]!r}, which is no number.")
            steps.append(numbers)
        return np.array(steps, dtype=np.float64).reshape(-1, len(names))

    if "all" not in files:
        missing = [split for split in SPLITS if split not in files]
        if missing:
            raise ValueError(f"{data} has no file for {' and '.join(missing)}.")
        return {split: read(files[split]) for split in SPLITS}, names
    steps = read(files["all"])
    first_end, second_end = round(TRAIN * len(steps)), round((TRAIN + VALID) * len(steps))
    parts = np.split(steps, [first_end, second_end])
    return dict(zip(SPLITS, parts, strict=True)), names


def _to_number(value: Any) -> float | None:
    """A number, NaN for one that is not finite, None for what is no number."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is None or math.isfinite(number) else math.nan
