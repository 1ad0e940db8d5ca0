"""Use a finished run: evaluate it, predict, or generate text."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.device import autocast, resolve_device, resolve_dtype
from regard.errors import check_choice, check_int
from regard.models import Decoder, DecodingStep, EncoderDecoder, Model, load as load_model
from regard.models.model import SingleStackModel, outer_mixers
from regard.plugins import load_plugins
from regard.state import JoinedState, run_by_group
from regard.tasks import (
    Batch,
    Example,
    Prediction,
    Processor,
    Task,
    TextProcessor,
    find_task,
)
from regard.tasks.base import SPLITS, collate
from regard.train.evaluation import evaluate_examples
from regard.train.run import MODEL_DIR, TASK_FILE, RunSpec, read_finished_spec, read_processor


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, to use its model on raw inputs.

    Attributes:
        processor: Turns raw inputs into those of the model; None if the task generates its inputs.
        device: Device of the model.
        dtype: float32, or the dtype of autocast for `predict`, `embed` and `generation_step`.
    """

    folder: Path
    spec: RunSpec
    model: Model
    processor: Processor | None
    device: torch.device
    dtype: torch.dtype

    def predict(self, raw_inputs: Iterable[Any], *, batch_size: int = 32) -> list[Prediction]:
        """A prediction for each raw input, in order: a dict of JSON values, such as the label and
        its probability.

        Args:
            raw_inputs: Texts, rows (column name -> value) or paths, as the task takes them.
            batch_size: Inputs per batch.

        Raises:
            InputError: An input cannot be encoded: a value is missing, or a file is damaged.
        """
        return list(predict(self, raw_inputs, batch_size=batch_size))

    def embed(self, raw_inputs: Iterable[Any], *, batch_size: int = 32) -> Tensor:
        """A vector for each raw input, (n, d) of float32 on the CPU: the mean of its tokens after
        the last layer, before the head. For an encoder-decoder those of the encoder.

        Args:
            raw_inputs: As in `predict`; for masked language models also texts without a mask.
            batch_size: Inputs per batch.
        """
        assert self.model.config is not None
        parts = []
        for chunk in encode_chunks(self, raw_inputs, batch_size, for_embedding=True):
            for each in chunk:
                if isinstance(each, InputError):
                    raise each
            batch = collate(cast(list[Example], chunk)).to(self.device)
            parts.append(mean_tokens(*self._hidden_tokens(batch)))
        return torch.cat(parts) if parts else torch.empty(0, self.model.config.dim)

    @torch.no_grad()
    def _hidden_tokens(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The tokens (b, n, d) before the head, and their mask."""
        mask, model = batch.inputs.get("mask"), self.model
        with autocast(self.device, self.dtype):
            if isinstance(model, EncoderDecoder):
                return model.encode(cast(Tensor, batch.inputs["source"]), mask)
            if isinstance(model, SingleStackModel):
                hidden: tuple[Tensor, Tensor | None] = model.backbone(
                    batch.inputs["x"], mask, token_type_ids=batch.inputs.get("token_type_ids")
                )
                return hidden
        raise ValueError(
            f"A {type(model).__name__} reads pairs of sequences and has no vector for each input."
        )


def mean_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens (b, n, d) -> their mean over the mask, (b, d) of float32 on the CPU."""
    x = x.float().cpu()
    weight = torch.ones(x.shape[:2]) if mask is None else mask.float().cpu()
    return (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True).clamp(min=1)


def load_run(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    plugins: Iterable[str | Path] = (),
    on_warning: Callable[[str], None] = warnings.warn,
) -> TrainedRun:
    """Load the model and the processor of a finished run, to use it on raw inputs.

    Args:
        folder: Folder of the run, which may have been trained on another device.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        dtype: "float32", or "bfloat16" or "float16" for mixed precision.
        plugins: The Python files that the run was trained with; they are executed.
        on_warning: Called with a text if a plugin has changed since then.
    """
    folder, device = Path(folder), resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    load_plugins(plugins)
    spec = read_finished_spec(folder, on_warning)
    content = read_processor(folder)
    processor = None
    if content:
        try:
            processor = find_task(spec.task.name).load_processor(content)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / TASK_FILE} was written by another version of Regard, or edited: {error}"
            ) from error
    model = load_model(folder / MODEL_DIR, device=device)
    return TrainedRun(folder, spec, model, processor, device, dtype)


load = load_run  # as `regard.load`


# ---------------------------------------------------------------------------------------- evaluate
def evaluate(
    model: Model,
    task: Task,
    split: str,
    *,
    examples: int | None = None,
    batch_size: int = 32,
    dtype: str | torch.dtype = "float32",
) -> dict[str, Any]:
    """Evaluate a model, on the device of its weights: all metrics of the task, and the loss; under
    "breakdown" the tables of metrics that have one, such as F1 by type.

    Args:
        split: "train", "valid" or "test".
        examples: Number of examples, a random sample (`Task.sample`). None: all.
        dtype: "float32", or "bfloat16" or "float16" for mixed precision.
    """
    device = next(model.parameters()).device
    chosen = resolve_dtype(dtype, device)
    check_choice("split", split, SPLITS)
    check_int(1, batch_size=batch_size, examples=1 if examples is None else examples)
    if split == "train" and examples is None:
        raise ValueError("The training split may be endless: give the number of examples.")
    wanted = task.size(split) if examples is None else min(examples, task.size(split))

    def forward(batch: Batch) -> Tensor:
        with autocast(device, chosen):
            return model(**batch.inputs)

    evaluation = evaluate_examples(
        task,
        model,
        task.sample(split, wanted).tolist(),
        split,
        forward=forward,
        batch_size=batch_size,
        device=device,
    )
    values = {
        "split": split,
        "examples": wanted,
        task.metric.name: evaluation.value,
        **evaluation.values(),
        "loss": evaluation.loss,
    }
    tables = evaluation.breakdowns()
    return {**values, "breakdown": tables} if tables else values


# ----------------------------------------------------------------------------------------- predict
class InputError(ValueError):
    """A raw input that cannot be encoded; `reason` is the message without its number."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"Input {number}: {reason}")
        self.reason = reason


def describe_error(error: Exception) -> str:
    """The message of an error, without the number that the system gives to it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def encode_chunks(
    run: TrainedRun, raw_inputs: Iterable[Any], batch_size: int, *, for_embedding: bool = False
) -> Iterator[list[Example | InputError]]:
    """The examples of raw inputs in chunks for batches, with errors in the place of inputs."""
    check_int(1, batch_size=batch_size)
    processor = run.processor
    if processor is None:
        raise ValueError(
            f"Task {run.spec.task.name!r} takes no raw inputs: its examples are generated, or "
            "it has no processor. Evaluate it with: regard eval"
        )
    if isinstance(raw_inputs, str | Mapping | Path):
        raise TypeError(
            f"Expected a list of raw inputs, not one {type(raw_inputs).__name__}: "
            "write [...] around it."
        )
    encode = processor.encode_for_embedding if for_embedding else processor.encode
    numbered = enumerate(raw_inputs, 1)
    while chunk := list(itertools.islice(numbered, batch_size)):
        encoded: list[Example | InputError] = []
        for number, raw in chunk:
            try:
                encoded.append(Example(encode(raw), {}))
            except (TypeError, ValueError, OSError) as error:
                encoded.append(InputError(number, describe_error(error)))
        yield encoded


def predict(
    run: TrainedRun, raw_inputs: Iterable[Any], *, batch_size: int = 32
) -> Iterator[Prediction]:
    """Like `TrainedRun.predict`, one batch after the other."""
    for prediction in predict_each(run, raw_inputs, batch_size=batch_size):
        if isinstance(prediction, InputError):
            raise prediction
        yield prediction


@torch.no_grad()
def predict_each(
    run: TrainedRun, raw_inputs: Iterable[Any], *, batch_size: int = 32
) -> Iterator[Prediction | InputError]:
    """Like `predict`, with the error of an input in the place of its prediction."""
    for chunk in encode_chunks(run, raw_inputs, batch_size):
        assert run.processor is not None
        predictions: list[Prediction] = []
        if examples := [each for each in chunk if isinstance(each, Example)]:
            batch = collate(examples).to(run.device)
            with autocast(run.device, run.dtype):
                predictions = run.processor.predict(run.model, batch.inputs)
        remaining = iter(predictions)
        yield from (each if isinstance(each, InputError) else next(remaining) for each in chunk)


# ---------------------------------------------------------------------------------------- generate
class GenerationState(NamedTuple):
    """The tokens (b, n) that the model still sees, the position of the first of them, and its
    stream state after them."""

    tokens: Tensor
    start: int
    stream: Any


def context_start(position: int, length: int) -> int:
    """Where the context of a text of `position` tokens starts. It moves when it is full, and half
    of it is kept: it depends on nothing else, so a text continues alone as in a batch."""
    stride = length + 1 - max(1, length // 2)
    return max(0, math.ceil((position - length) / stride)) * stride


def generation_step(run: TrainedRun) -> DecodingStep:
    """A step for `regard.models.generate` that continues texts of any length.

    The model sees at most as many tokens as it was trained with. When this context is full, the
    model reads its second half again and continues from there. Mixers that do not support
    streaming read the whole context for every token. Tokens must be on the device of the run.
    """
    model, processor = run.model, run.processor
    if (
        not isinstance(processor, TextProcessor)
        or processor.labels
        or not isinstance(model, Decoder)
    ):
        raise ValueError(
            f"Task {run.spec.task.name!r} does not generate text: "
            "generate works with runs of the task 'lm'."
        )
    can_stream = all(mixer.can.stream for mixer in outer_mixers(model))
    excluded = torch.tensor(processor.tokenizer.special_tokens(), device=run.device)

    def step(tokens: Tensor, state: GenerationState | None) -> tuple[Tensor, GenerationState]:
        if isinstance(state, JoinedState):
            return run_by_group(lambda group, tokens: step(tokens, group), state, tokens)
        before, start, stream = (tokens[:, :0], 0, None) if state is None else state
        context = torch.cat((before, tokens), 1)
        new_start = context_start(start + context.shape[1], processor.length)
        if new_start > start:
            context = context[:, new_start - start :]
            stream, tokens, start = None, context, new_start
        with autocast(run.device, run.dtype):
            logits, stream = model.stream(tokens, stream) if can_stream else (model(context), None)
        logits = logits[:, -1:].index_fill(-1, excluded, -math.inf)
        return logits, GenerationState(context, start, stream)

    return step
