"""A run that is over, put to use: measured again, asked for labels, or made to speak."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.json_files import read_json
from regard.models import Decoder, DecodingStep, Model, load
from regard.models.model import StreamState, outer_mixers
from regard.tasks import Example, Task, TextProcessor, processor_from_dict
from regard.tasks.base import IGNORE_INDEX, SPLITS, collate, to_int64
from regard.train.run import MODEL_DIR, TASK_FILE, RunSpec, read_spec


class TrainedRun(NamedTuple):
    """The words of a run and its model; `reading` is None where the task reads no texts."""

    folder: Path
    spec: RunSpec
    model: Model
    processor: TextProcessor | None


def load_run(folder: Path) -> TrainedRun:
    """What a run left in its folder."""
    spec = read_spec(folder)
    if not (folder / MODEL_DIR).is_dir():
        raise ValueError(f"the run in {folder} is not over: regard train --resume {folder}")
    facts = read_json(folder / TASK_FILE)["facts"] if (folder / TASK_FILE).exists() else {}
    return TrainedRun(
        folder, spec, load(folder / MODEL_DIR), processor_from_dict(facts) if facts else None
    )


# ---------------------------------------------------------------------------------------------- measured again
class MetricAccumulator:
    """Counts over batches: the metric, the loss, and for classes how often each was said, meant, and both."""

    def __init__(self, made: Task) -> None:
        self.made, self.summed, self.count, self.loss, self.targets = made, 0.0, 0, 0.0, 0
        self.both, self.said, self.meant = (
            torch.zeros(made.classes, dtype=torch.long) for _ in range(3)
        )

    def add(self, logits: Tensor, target: Tensor) -> None:
        """One batch more."""
        summed, count = self.made.score(logits, target)
        there = target != IGNORE_INDEX
        meant, said = target[there], logits.argmax(-1)[there]
        self.summed, self.count = self.summed + summed, self.count + count
        self.loss += float(self.made.loss(logits, target)) * len(meant)
        self.targets += len(meant)
        for counts, which in (
            (self.both, meant[meant == said]),
            (self.said, said),
            (self.meant, meant),
        ):
            counts += torch.bincount(which, minlength=self.made.classes)

    def found(self) -> dict[str, float]:
        """The metric, the loss in nats for each target, and beside accuracy macro-F1, beside bits the perplexity of a token."""
        loss = self.loss / self.targets
        beside = (
            ("macro_f1", self.macro_f1())
            if self.made.metric == "accuracy"
            else ("perplexity", math.exp(min(loss, 700)))
        )
        return {self.made.metric: self.summed / self.count, "loss": loss, beside[0]: beside[1]}

    def macro_f1(self) -> float:
        """The mean over classes, that were said or meant at all, of 2 both / (said + meant)."""
        either = self.said + self.meant
        return float((2 * self.both[either > 0] / either[either > 0]).mean())


@torch.no_grad()
def evaluate(
    model: Model, made: Task, split: str, *, examples: int | None = None, batch: int = 32
) -> dict[str, Any]:
    """The metric over the first examples of a split; None: over all of them."""
    check_choice("split", split, SPLITS)
    check_int(1, batch=batch, examples=1 if examples is None else examples)
    most = made.size(split) if examples is None else min(examples, made.size(split))
    if split == "train" and examples is None:
        raise ValueError("the training split may be endless: say how many examples of it")
    tally = MetricAccumulator(made)
    for first in range(0, most, batch):
        given = made.batch(split, range(first, min(first + batch, most)))
        tally.add(model(given.tokens, mask=given.mask), given.target)
    unit = (
        {}
        if made.metric != "bits" or made.processor is None
        else {"unit": made.processor.codec.unit}
    )
    return {"split": split, "examples": most, **tally.found(), **unit}


# ---------------------------------------------------------------------------------------------- asked for labels
class Prediction(NamedTuple):
    """The most probable label of a text, and the probabilities of all."""

    text: str
    label: str
    probability: float
    all: dict[str, float]


def predict(run: TrainedRun, texts: Iterable[str], *, batch: int = 32) -> Iterator[Prediction]:
    """A label for each text, in order, a batch at a time."""
    if run.processor is None or not run.processor.labels:
        raise ValueError(
            f"the task {run.spec.task.name!r} gives no labels to texts: predict is for the task 'classify'"
        )
    rest = iter(texts)
    while some := list(itertools.islice(rest, batch)):
        yield from _labelled(run.model, run.processor, some)


@torch.no_grad()
def _labelled(model: Model, processor: TextProcessor, texts: list[str]) -> list[Prediction]:
    given = collate([Example(to_int64(processor.encode(text)), torch.tensor(0)) for text in texts])
    shares = model(given.tokens, mask=given.mask).double().softmax(-1)
    best = shares.argmax(-1).tolist()
    return [
        Prediction(
            text,
            processor.decode(top),
            float(row[top]),
            dict(zip(processor.labels, row.tolist(), strict=True)),
        )
        for text, top, row in zip(texts, best, shares, strict=True)
    ]


# ---------------------------------------------------------------------------------------------- made to speak
class GenerationState(NamedTuple):
    """Where a speaker stands: the tokens that it still sees (b n), and the state after them."""

    tokens: Tensor
    reached: StreamState | None


def generation_step(run: TrainedRun) -> DecodingStep:
    """A step for `regard.models.generate`, over texts of any length.

    The model sees at most as many tokens as it was trained with.  When they are full, it reads their last half again and goes
    on from there.  Mixers that cannot stream read all that they see for each token.
    """
    model, processor = run.model, run.processor
    if processor is None or processor.labels or not isinstance(model, Decoder):
        raise ValueError(
            f"the task {run.spec.task.name!r} gives labels, and says no texts: generate is for the task 'lm'"
        )
    streams = all(mixer.can.stream for mixer in outer_mixers(model))
    silent = torch.tensor(processor.codec.silent())

    def step(tokens: Tensor, state: GenerationState | None) -> tuple[Tensor, GenerationState]:
        before = tokens[:, :0] if state is None else state.tokens
        seen, reached = torch.cat((before, tokens), 1), None if state is None else state.reached
        if seen.shape[1] > processor.length:
            seen = seen[:, -max(1, processor.length // 2) :]
            reached, tokens = None, seen
        logits, reached = model.stream(tokens, reached) if streams else (model(seen), None)
        return logits[:, -1:].index_fill(-1, silent, -math.inf), GenerationState(seen, reached)

    return step
