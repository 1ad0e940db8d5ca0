"""Use a finished run: evaluate it, classify texts, or generate text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.device import autocast, resolve_device, resolve_dtype
from regard.errors import check_choice, check_int
from regard.json_files import read_json
from regard.models import Decoder, DecodingStep, Model, load
from regard.models.model import outer_mixers
from regard.state import JoinedState, run_by_group
from regard.tasks import Example, Task, TextProcessor, processor_from_dict
from regard.tasks.base import IGNORE_INDEX, SPLITS, collate, to_int64
from regard.train.run import MODEL_DIR, TASK_FILE, RunSpec, read_spec


class TrainedRun(NamedTuple):
    """A finished run.

    Attributes:
        processor: Turns texts into tokens; None if the task has no texts.
        device: Device of the model.
        dtype: float32, or the dtype of autocast for `predict` and `generation_step`.
    """

    folder: Path
    spec: RunSpec
    model: Model
    processor: TextProcessor | None
    device: torch.device
    dtype: torch.dtype


def load_run(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
) -> TrainedRun:
    """Load the model and the text processor of a finished run.

    Args:
        folder: Folder of the run, which may have been trained on another device.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        dtype: "float32", or "bfloat16" or "float16" for mixed precision.
    """
    folder, device = Path(folder), resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    spec = read_spec(folder)
    if not (folder / MODEL_DIR).is_dir():
        raise ValueError(
            f"Run {folder} is not finished. Resume it with: regard train --resume {folder}"
        )
    content = read_json(folder / TASK_FILE)["processor"] if (folder / TASK_FILE).exists() else {}
    processor = processor_from_dict(content) if content else None
    model = load(folder / MODEL_DIR, device=device)
    return TrainedRun(folder, spec, model, processor, device, dtype)


# ---------------------------------------------------------------------------------------- evaluate
class MetricAccumulator:
    """Accumulates the metric, the loss and the counts for F1 over batches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.metric_sum, self.count, self.loss_sum, self.targets = 0.0, 0, 0.0, 0
        self.correct, self.predicted, self.actual = torch.zeros(3, task.classes, dtype=torch.long)

    def add(self, logits: Tensor, target: Tensor) -> None:
        """Add one batch."""
        logits, target = logits.cpu(), target.cpu()
        metric_sum, count = self.task.score(logits, target)
        has_target = target != IGNORE_INDEX
        actual, predicted = target[has_target], logits.argmax(-1)[has_target]
        self.metric_sum, self.count = self.metric_sum + metric_sum, self.count + count
        self.loss_sum += float(self.task.loss(logits, target)) * len(actual)
        self.targets += len(actual)
        for counts, labels in (
            (self.correct, actual[actual == predicted]),
            (self.predicted, predicted),
            (self.actual, actual),
        ):
            counts += torch.bincount(labels, minlength=self.task.classes)

    def compute(self) -> dict[str, float]:
        """The metric, the loss in nats per target, and macro-F1 (accuracy) or perplexity (bits)."""
        loss = self.loss_sum / self.targets
        result = {self.task.metric: self.metric_sum / self.count, "loss": loss}
        if self.task.metric != "accuracy":
            return result | {"perplexity": math.exp(min(loss, 700))}
        occurs = self.predicted + self.actual > 0
        f1 = 2 * self.correct[occurs] / (self.predicted + self.actual)[occurs]
        return result | {"macro_f1": float(f1.mean())}


@torch.no_grad()
def evaluate(
    model: Model,
    task: Task,
    split: str,
    *,
    examples: int | None = None,
    batch_size: int = 32,
    dtype: str | torch.dtype = "float32",
) -> dict[str, Any]:
    """Evaluate a model, on the device of its weights.

    Args:
        split: "train", "valid" or "test".
        examples: Number of examples, from the first. None: all.
        dtype: "float32", or "bfloat16" or "float16" for mixed precision.
    """
    device = next(model.parameters()).device
    dtype = resolve_dtype(dtype, device)
    check_choice("split", split, SPLITS)
    check_int(1, batch_size=batch_size, examples=1 if examples is None else examples)
    if split == "train" and examples is None:
        raise ValueError("The training split may be endless: give the number of examples.")
    wanted = task.size(split) if examples is None else min(examples, task.size(split))
    metrics = MetricAccumulator(task)
    for first in range(0, wanted, batch_size):
        batch = task.batch(split, range(first, min(first + batch_size, wanted)))
        moved = batch.to(device)
        with autocast(device, dtype):
            logits = model(moved.tokens, mask=moved.mask)
        metrics.add(logits, batch.target)
    return {"split": split, "examples": wanted, **metrics.compute()}


# ----------------------------------------------------------------------------------------- predict
class Prediction(NamedTuple):
    """The most probable label of a text, and the probabilities of all labels."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]


@torch.no_grad()
def predict(run: TrainedRun, texts: Iterable[str], *, batch_size: int = 32) -> Iterator[Prediction]:
    """Predict the label of each text, in order."""
    processor = run.processor
    if processor is None or not processor.labels:
        raise ValueError(
            f"Task {run.spec.task.name!r} does not predict labels of texts: "
            "predict works with runs of the task 'classify'."
        )
    remaining = iter(texts)
    while chunk := list(itertools.islice(remaining, batch_size)):
        no_target = torch.tensor(0)
        batch = collate([Example(to_int64(processor.encode(text)), no_target) for text in chunk])
        batch = batch.to(run.device)
        with autocast(run.device, run.dtype):
            logits = run.model(batch.tokens, mask=batch.mask)
        rows = logits.cpu().double().softmax(-1).tolist()
        for text, row in zip(chunk, rows, strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            probabilities = dict(zip(processor.labels, row, strict=True))
            yield Prediction(text, processor.labels[best], row[best], probabilities)


# ---------------------------------------------------------------------------------------- generate
class GenerationState(NamedTuple):
    """The tokens (b, n) that the model still sees, and its stream state after them."""

    tokens: Tensor
    stream: Any


def generation_step(run: TrainedRun) -> DecodingStep:
    """A step for `regard.models.generate` that continues texts of any length.

    The model sees at most as many tokens as it was trained with. When this context is full, the
    model reads its second half again and continues from there. Mixers that do not support
    streaming read the whole context for every token. Tokens must be on the device of the run.
    """
    model, processor = run.model, run.processor
    if processor is None or processor.labels or not isinstance(model, Decoder):
        raise ValueError(
            f"Task {run.spec.task.name!r} does not generate text: "
            "generate works with runs of the task 'lm'."
        )
    can_stream = all(mixer.can.stream for mixer in outer_mixers(model))
    excluded = torch.tensor(processor.tokenizer.special_tokens(), device=run.device)

    def step(tokens: Tensor, state: GenerationState | None) -> tuple[Tensor, GenerationState]:
        if isinstance(state, JoinedState):
            return run_by_group(lambda group, tokens: step(tokens, group), state, tokens)
        before = tokens[:, :0] if state is None else state.tokens
        context, stream = torch.cat((before, tokens), 1), None if state is None else state.stream
        if context.shape[1] > processor.length:
            context = context[:, -max(1, processor.length // 2) :]
            stream, tokens = None, context
        with autocast(run.device, run.dtype):
            logits, stream = model.stream(tokens, stream) if can_stream else (model(context), None)
        logits = logits[:, -1:].index_fill(-1, excluded, -math.inf)
        return logits, GenerationState(context, stream)

    return step
