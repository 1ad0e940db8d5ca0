"""Checks of a task: all that training, evaluation, comparison and prediction rely on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.models.build import build
from regard.models.config import ModelConfig, TokenInput
from regard.models.model import Model
from regard.tasks.base import MASKS, SPLITS, Batch, Example, ModelNeeds, Task
from regard.tasks.metrics import Metric, UndefinedMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered

EXAMPLES = 5  # of a batch
SAMPLE = 40  # examples of which the classes are counted
TOLERANCE = 1e-3  # relative, of metrics in float32


def check_task(task: Task) -> list[str]:
    """Check a task with a small model that has what the task needs.

    Args:
        task: A task on data with at least a few examples in each split.

    Returns:
        The names of the checks, in order; see `CHECKS`.

    Raises:
        AssertionError: If the task breaks a promise of `Task`; the message names the check.
    """
    for name, check in CHECKS.items():
        try:
            check(task)
        except AssertionError as error:
            message = f"{type(task).__name__} fails the check {name!r}: {error}"
            raise AssertionError(message) from None
        except Exception as error:
            error.add_note(f"in the check {name!r} of {type(task).__name__}")
            raise
    return list(CHECKS)


# ----------------------------------------------------------------------------------------- examples
def needs(task: Task) -> None:
    """The task says which model it needs, and the model can be built."""
    assert isinstance(task.needs, ModelNeeds), (
        f"needs must be a ModelNeeds, not {type(task.needs).__name__}"
    )
    assert task.metrics, "metrics is empty: a task needs at least one"
    names = [metric.name for metric in task.metrics]
    assert len(set(names)) == len(names), f"two metrics have the same name: {names}"
    _build_model(task)


def examples(task: Task) -> None:
    """Every split has examples of named tensors, and example i is always the same."""
    for split in SPLITS:
        size = task.size(split)
        assert isinstance(size, int) and size > 0, (
            f"size({split!r}) must be a positive integer, not {size!r}"
        )
        indices = _indices(task, split)
        first = [task.example(split, index) for index in indices]
        again = [task.example(split, index) for index in reversed(indices)][::-1]
        for index, one, other in zip(indices, first, again, strict=True):
            assert isinstance(one, Example), (
                f"example({split!r}, {index}) must be an Example, not {type(one).__name__}"
            )
            for part, tensors, others in (
                ("inputs", one.inputs, other.inputs),
                ("targets", one.targets, other.targets),
            ):
                assert tensors, f"example({split!r}, {index}) has no {part}"
                for name, tensor in tensors.items():
                    assert isinstance(tensor, Tensor), (
                        f"{part}[{name!r}] must be a tensor, not {type(tensor).__name__}"
                    )
                    assert not tensor.is_floating_point() or tensor.isfinite().all(), (
                        f"example({split!r}, {index}) has NaN or an infinity in {part}[{name!r}]"
                    )
                    assert torch.equal(tensor, others[name]), (
                        f"example({split!r}, {index}) differs from call to call in "
                        f"{part}[{name!r}]: derive random numbers from the split and the index, "
                        "for example with regard.tasks.base.example_rng"
                    )


def inputs(task: Task) -> None:
    """The inputs have the names, types and lengths that the model takes."""
    wanted = {"source", "target"} if task.needs.kind == "seq2seq" else {"x"}
    wanted |= _token_types(task)
    for split in SPLITS:
        for index in _indices(task, split):
            found = task.example(split, index).inputs
            assert set(found) == wanted, (
                f"a model of kind {task.needs.kind!r} has the inputs {sorted(wanted)}, not "
                f"{sorted(found)}"
            )
            for name, tensor in found.items():
                if task.needs.input.fixed_length is not None and name != "target":
                    continue
                length = tensor.shape[0] if tensor.is_floating_point() else tensor.shape[-1]
                assert 1 <= length <= task.needs.length, (
                    f"example({split!r}, {index}) has {length} tokens in {name!r}, but "
                    f"needs.length is {task.needs.length}"
                )


def sample(task: Task) -> None:
    """A sample is always the same, has no example twice, and has all classes in their shares."""
    for split in SPLITS:
        count = min(SAMPLE, task.size(split))
        found = np.asarray(task.sample(split, count))
        assert len(found) == count == len(set(found.tolist())), (
            f"sample({split!r}, {count}) must have {count} different examples"
        )
        assert np.array_equal(found, task.sample(split, count)), (
            f"sample({split!r}, {count}) differs from call to call"
        )
        assert np.array_equal(found[: count // 2], task.sample(split, count // 2)), (
            f"the first half of sample({split!r}, {count}) is not sample({split!r}, {count // 2})"
        )
        classes = task.classes_of(split)
        if classes is None:
            continue
        assert len(classes) == task.size(split), (
            f"classes_of({split!r}) has {len(classes)} classes for {task.size(split)} examples"
        )
        shares = np.bincount(classes) / len(classes)
        counts = np.bincount(np.asarray(classes)[found], minlength=len(shares))
        for number, (share, occurs) in enumerate(zip(shares, counts, strict=True)):
            assert abs(occurs - share * count) <= 2, (
                f"class {number} is {100 * share:.0f} % of the {split} split, but has {occurs} of "
                f"{count} examples of a sample"
            )


# ----------------------------------------------------------------------------------------- learning
def batches(task: Task) -> None:
    """Examples become a batch of their number, with tensors of as many rows."""
    for split in SPLITS:
        indices = _indices(task, split)
        batch = task.batch(split, indices)
        assert isinstance(batch, Batch), f"batch must return a Batch, not {type(batch).__name__}"
        assert batch.size == len(indices), (
            f"a batch of {len(indices)} examples has the size {batch.size}"
        )
        for name, tensor in {**batch.inputs, **batch.targets}.items():
            assert tensor is None or len(tensor) == len(indices), (
                f"{name!r} has {0 if tensor is None else len(tensor)} rows in a batch of "
                f"{len(indices)}"
            )
        known = {*MASKS, *MASKS.values(), *_token_types(task)}
        assert set(batch.inputs) <= known, (
            f"the model has no inputs {sorted(set(batch.inputs) - known)}"
        )
        assert task.count_targets(batch) > 0, "count_targets is 0 for a batch"
        assert task.count_tokens(batch) > 0, "count_tokens is 0 for a batch"


def gradients(task: Task) -> None:
    """The loss is a finite scalar, and its gradients are finite and not all zero."""
    model = _build_model(task).train()
    batch = task.batch("train", _indices(task, "train"))
    loss = task.loss(model(**batch.inputs), batch)
    assert isinstance(loss, Tensor) and loss.dim() == 0, "loss must return a scalar tensor"
    assert loss.isfinite(), f"the loss is {loss.item()}"
    assert loss.requires_grad, "the loss has no gradient: is it computed from the output?"
    loss.backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    assert found and all(grad.isfinite().all() for grad in found), "a gradient is not finite"
    assert any(grad.abs().max() > 0 for grad in found), "all gradients are zero"


# --------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def metrics(task: Task) -> None:
    """Statistics are (b, k) of float64, and a metric has the same value for any batch size."""
    model, indices = _build_model(task), _indices(task, "test")
    whole = _statistics(task, model, [indices])
    single = _statistics(task, model, [[index] for index in indices])
    for metric in task.metrics:
        for parts, sizes in ((whole, [len(indices)]), (single, [1] * len(indices))):
            for part, size in zip(parts[metric.name], sizes, strict=True):
                assert isinstance(part, Tensor) and part.dim() == 2 and len(part) == size, (
                    f"{metric.name}.update must return statistics ({size}, k) for {size} examples, "
                    f"not {_describe(part)}"
                )
                assert part.dtype == torch.float64 and part.device.type == "cpu", (
                    f"the statistics of {metric.name} must be float64 on the CPU, not {part.dtype} "
                    f"on {part.device}"
                )
                assert part.isfinite().all(), f"the statistics of {metric.name} are not finite"
        values = [_compute(metric, parts[metric.name]) for parts in (whole, single)]
        if values[0] is None or values[1] is None:
            assert values[0] is values[1], f"{metric.name} is undefined for some batch sizes only"
            continue
        assert math.isclose(values[0], values[1], rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
            f"{metric.name} depends on the batch size: {values[0]:.6g} for a batch of "
            f"{len(indices)} and {values[1]:.6g} for batches of 1"
        )
        formatted = metric.format_value(values[0])
        assert isinstance(formatted, str), f"{metric.name}.format_value must return a text"


@torch.no_grad()
def predictions(task: Task) -> None:
    """There is a prediction of JSON values for each example."""
    for row in _predict(task):
        assert isinstance(row, dict) and all(isinstance(name, str) for name in row), (
            f"a prediction must be a dictionary of JSON values by name, not {row!r:.80}"
        )
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"a prediction is not JSON: {error}") from None


@torch.no_grad()
def processor(task: Task) -> None:
    """The processor can be saved as JSON and loaded, and then predicts the same."""
    if task.processor is None:
        return
    try:
        content = json.loads(json.dumps(task.processor.to_dict(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"processor.to_dict() is not JSON: {error}") from None
    assert content, "processor.to_dict() is empty"
    loaded = type(task).load_processor(content)
    assert type(loaded) is type(task.processor), (
        f"load_processor returns a {type(loaded).__name__}, but the processor is a "
        f"{type(task.processor).__name__}"
    )
    model, batch = _build_model(task), task.batch("test", _indices(task, "test"))
    pairs = zip(
        loaded.predict(model, batch.inputs),
        task.processor.predict(model, batch.inputs),
        strict=True,
    )
    assert all(one == other for one, other in pairs), (
        "the processor predicts something else after to_dict and load_processor"
    )


def baselines(task: Task) -> None:
    """Baselines return statistics (n, k) of the first metric, or say why they cannot."""
    indices = _indices(task, "test")
    for name, baseline in task.baselines().items():
        try:
            found = baseline(indices)
        except (ImportError, ValueError):  # its message is shown instead of a score
            continue
        assert isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(indices), (
            f"the baseline {name!r} must return statistics ({len(indices)}, k), not "
            f"{_describe(found)}"
        )
        _compute(task.metric, [found.double()])


# ------------------------------------------------------------------------------------- for people
@torch.no_grad()
def rendering(task: Task) -> None:
    """Examples are rendered with and without a prediction, and notes are sentences."""
    index = _indices(task, "test")[0]
    example = task.example("test", index)
    for prediction in (None, _predict(task)[0]):
        rendered = task.render(example, prediction)
        assert isinstance(rendered, Rendered), (
            f"render must return a Rendered, such as RenderedText, not {type(rendered).__name__}"
        )
        assert isinstance(rendered.to_text(), str), "to_text must return a text"
    notes = task.notes()
    assert isinstance(notes, list) and all(isinstance(note, str) for note in notes), (
        f"notes must return a list of sentences, not {notes!r:.80}"
    )


CHECKS: Mapping[str, Callable[[Task], None]] = {
    "needs": needs,
    "examples": examples,
    "inputs": inputs,
    "sample": sample,
    "batches": batches,
    "gradients": gradients,
    "metrics": metrics,
    "predictions": predictions,
    "processor": processor,
    "baselines": baselines,
    "rendering": rendering,
}


# ------------------------------------------------------------------------------------------ helpers
def _indices(task: Task, split: str) -> list[int]:
    """The examples that are looked at."""
    return [int(index) for index in task.sample(split, min(EXAMPLES, task.size(split)))]


def _token_types(task: Task) -> set[str]:
    """The input of token types, if the model has them."""
    source = task.needs.input
    has_types = isinstance(source, TokenInput) and source.type_vocab_size > 0
    return {"token_type_ids"} if has_types else set()


def _build_model(task: Task) -> Model:
    """A small model in evaluation mode, with the same weights each time."""
    found = task.needs
    config = ModelConfig(
        kind=found.kind,
        input=found.input,
        target=found.target,
        head=found.head,
        dim=16,
        heads=2 if found.draw is None else 1,
        layers=1,
        length=None if found.input.fixed_length is not None else found.length,
        draw=found.draw,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def _predict(task: Task) -> list[Prediction]:
    """The predictions of a batch."""
    batch = task.batch("test", _indices(task, "test"))
    found = task.predict(_build_model(task), batch)
    assert len(found) == batch.size, f"{len(found)} predictions for {batch.size} examples"
    return list(found)


def _statistics(
    task: Task, model: Model, batches: Sequence[Sequence[int]]
) -> dict[str, list[Tensor]]:
    """The statistics of each batch by the name of the metric."""
    found: dict[str, list[Tensor]] = {metric.name: [] for metric in task.metrics}
    for indices in batches:
        batch = task.batch("test", indices)
        output = model(**batch.inputs)
        is_needed = any(metric.needs_predictions for metric in task.metrics)
        predicted = task.predict(model, batch) if is_needed else []
        for metric in task.metrics:
            found[metric.name].append(metric.update(output, batch, predicted))
    return found


def _compute(metric: Metric, parts: Sequence[Tensor]) -> float | None:
    """The value of statistics; None if it is undefined."""
    try:
        value = metric.compute(metric.merge(parts))
    except UndefinedMetric:
        return None
    assert isinstance(value, float), (
        f"{metric.name}.compute must return a float, not {type(value).__name__}"
    )
    return value


def _describe(value: Any) -> str:
    """The shape of a tensor, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
