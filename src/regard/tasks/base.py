"""The base class of tasks.

A task is all that an application is, beside the mixer: examples, what it asks of a model, a loss,
metrics, predictions, baselines, and how a person sees an example.

Examples are numbered, and number i of a split is always the same example. So a run can resume
anywhere, and on any number of processes, without saving the state of a data loader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import (
    DRAWConfig,
    HeadConfig,
    InputConfig,
    LMHeadConfig,
    MatchingHeadConfig,
    SequenceClassificationHeadConfig,
    StrictModel,
    TokenClassificationHeadConfig,
    TokenInput,
)
from regard.models.losses import IGNORE_INDEX as IGNORE_INDEX
from regard.tasks.baselines import CONSTANT, Baseline, constant
from regard.tasks.metrics import Accuracy, Bits, MacroF1, Metric, Perplexity
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedText

if TYPE_CHECKING:
    from regard.models import Model

SPLITS = ("train", "valid", "test")
OUTPUTS = ("sequence", "token", "pair")
LABELS = "labels"  # the name of the target of the default losses and metrics
MAX_PERMUTED = 1 << 20  # examples; a permutation of more would take long
MASKS = {"x": "mask", "source": "mask", "target": "target_mask"}  # of the inputs that have one


class Example(NamedTuple):
    """One example.

    Attributes:
        inputs: Tensors by the names of the arguments of the model: `x` with tokens (n) of int64,
            feature ids (k, n) with k > 2, vectors (n, width), an image (channels, height, width) or
            a pair (2, n), padded with 0; or `source` and `target` with tokens (m) and (n). Models
            with token types also take `token_type_ids` (n).
        targets: Tensors by name. The default losses and metrics read `labels`: a class, (n) classes
            with IGNORE_INDEX where there is none, or numbers (o).
    """

    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Several examples.

    Attributes:
        inputs: Keyword arguments of the model, with a mask (True = keep) for each sequence that is
            padded in some example, else None.
        targets: The targets of the examples.
    """

    inputs: dict[str, Tensor | None]
    targets: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Number of examples."""
        return next(len(each) for each in self.inputs.values() if each is not None)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next(each.device for each in self.inputs.values() if each is not None)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; copied to CUDA without waiting, from pinned memory."""

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        inputs = {name: None if each is None else move(each) for name, each in self.inputs.items()}
        return Batch(inputs, {name: move(each) for name, each in self.targets.items()})


class ModelNeeds(StrictModel):
    """What a task asks of a model.

    Attributes:
        kind: Kind of model; see `regard.models.ModelConfig`.
        input: What the model reads.
        head: What it returns. None: the tokens (b, n, d).
        length: Maximum number of tokens.
        target: seq2seq only: input of the decoder. None: shares the embedding of the encoder.
        draw: draw only: the glimpses of the model.
    """

    kind: Literal["encoder", "decoder", "seq2seq", "dual_encoder", "draw"]
    input: InputConfig
    head: HeadConfig | None
    length: int
    target: TokenInput | None = None
    draw: DRAWConfig | None = None


class Task(ABC):
    """Examples, what the model reads and answers, how well it did, and how a person sees it.

    Attributes:
        needs: What the task asks of a model.
        metrics: What is measured. The first decides which model is better.
        processor: Turns raw inputs into those of the model, and its outputs into predictions; saved
            with a trained model. None: the inputs exist only in the task.
    """

    metrics: tuple[Metric, ...]
    processor: Processor | None = None

    @property
    @abstractmethod
    def needs(self) -> ModelNeeds:
        """What the task asks of a model."""

    @abstractmethod
    def size(self, split: str) -> int:
        """Number of examples in a split."""

    @abstractmethod
    def example(self, split: str, index: int) -> Example:
        """Example `index` of a split; always the same."""

    # ------------------------------------------------------------------------------- learning
    @property
    def length(self) -> int:
        """Maximum number of tokens of an example."""
        return self.needs.length

    @property
    def metric(self) -> Metric:
        """The metric that decides."""
        return self.metrics[0]

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Combine examples into a batch; see `collate`."""
        return collate(examples)

    def batch(self, split: str, indices: Sequence[int]) -> Batch:
        """Several examples of a split as a batch."""
        return self.collate([self.example(split, index) for index in indices])

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss over all targets of a batch.

        By default that of the head: the cross-entropy in nats, or the mean squared error.

        Args:
            output: What the model returned.
            label_smoothing: Probability that is spread over all classes; of the cross-entropy only.
        """
        head = self.needs.head
        if head is None:
            raise ValueError("A task without a head needs a loss of its own.")
        return head.loss(output, batch.targets[LABELS], label_smoothing)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Change the examples of a training batch at random, such as crops of images; by default
        not at all.

        Args:
            batch: Examples of the train split, on the CPU.
            generator: The only source of random numbers, so that runs resume.
        """
        return batch

    def training_batch(self, batch: Batch) -> Batch:
        """The batch as it is given to the model and to `loss` in training; by default the same.

        A task with targets at few tokens selects them here, with the input `output_mask`, so that
        no head is computed for the others.
        """
        return batch

    def count_targets(self, batch: Batch) -> int:
        """Number of targets that `loss` is the mean of."""
        labels = batch.targets[LABELS]
        return int((labels != IGNORE_INDEX).sum()) if labels.dtype == torch.int64 else len(labels)

    def count_tokens(self, batch: Batch) -> int:
        """Number of tokens that the model reads, without padding; of an image, its patches."""
        total = 0
        for name, mask_name in MASKS.items():
            x, mask = batch.inputs.get(name), batch.inputs.get(mask_name)
            if x is None:
                continue
            if mask is not None:
                total += int(mask.sum())
            else:
                source = self.needs.target if name == "target" else None
                total += (source or self.needs.input).count_tokens(x)
        return total

    def lengths_of(self, split: str) -> np.ndarray | None:
        """Number of tokens of each example, (size), or of each of its k sequences, (size, k), to
        train on batches of similar lengths; None: not known without reading all examples.
        """
        return None

    # ----------------------------------------------------------------------------- evaluation
    def classes_of(self, split: str) -> np.ndarray | None:
        """The class of each example, (size), to sample all classes alike; None: there are none, or
        the examples are generated."""
        return None

    def sample(self, split: str, count: int) -> np.ndarray:
        """`count` random examples of a split, always the same: their indices (count).

        Every class has its share (`classes_of`), and the first part of a sample is a sample.
        """
        size = self.size(split)
        rng, count = np.random.default_rng([SPLITS.index(split), size]), min(count, size)
        classes = self.classes_of(split)
        if classes is None and size > max(MAX_PERMUTED, 4 * count):
            drawn = rng.integers(size, size=2 * count)  # with few copies, of which enough remain
            return np.array(list(dict.fromkeys(drawn.tolist()))[:count])
        if classes is None:
            return rng.permutation(size)[:count]
        shuffled = rng.permutation(size)
        by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
        sizes = np.bincount(classes)
        rank = np.arange(size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        # example r of a class with s examples comes after the fraction (r + u) / s of the others
        offset = rng.random(len(sizes))
        place = (rank + np.repeat(offset, sizes)) / np.repeat(sizes, sizes)
        return by_class[np.argsort(place, kind="stable")][:count]

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """A prediction for each example, of JSON values.

        By default that of the processor, or else the class with the largest logit.
        """
        if self.processor is not None:
            return self.processor.predict(model, batch.inputs)
        chosen = model(**batch.inputs).argmax(-1).tolist()
        name = "label" if batch.targets[LABELS].dim() == 1 else "labels"
        return [{name: each} for each in chosen]

    def predict_in_training(self, model: Model, batch: Batch) -> list[Prediction]:
        """Predictions for the evaluations while a model trains: by default those of `predict`; a
        task that searches may search less."""
        return self.predict(model, batch)

    def baselines(self) -> Mapping[str, Baseline]:
        """Models without a network that a user would take instead, by name.

        Each maps indices of test examples to the statistics of the first metric. It may raise an
        ImportError or a ValueError, whose message is shown instead of a score.
        """
        return {CONSTANT: partial(constant, self)}

    # ----------------------------------------------------------------------------- for people
    def notes(self) -> list[str]:
        """Sentences about the data for the user: rows left out, copies across splits."""
        return []

    @abstractmethod
    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """An example, and what a model predicts for it, for a person."""

    # --------------------------------------------------------------------------------- saving
    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> Processor:
        """The processor whose `to_dict` was saved with a trained model."""
        raise ValueError("This task has no processor: its inputs exist only in the task.")


class TokenTask(Task):
    """A task on token ids with classes as targets.

    Args:
        vocab_size: Number of different tokens; token 0 is padding.
        classes: Number of different targets.
        length: Maximum length of an example.

    Attributes:
        output: What has a target: "sequence", "token" (each), or "pair" (of sequences).
        causal: Whether a target may only depend on tokens up to its own position.
        is_language_model: Whether targets are tokens, so that the model can generate.
    """

    output: str = "sequence"
    causal: bool = False
    is_language_model: bool = False

    def __init__(self, *, vocab_size: int, classes: int, length: int) -> None:
        check_int(1, vocab_size=vocab_size, classes=classes, length=length)
        check_choice("output", self.output, OUTPUTS)
        self.vocab_size, self.classes, self._length = vocab_size, classes, length
        self.metrics = (Accuracy(), MacroF1(classes))
        if self.is_language_model:
            self.metrics = (Bits(), Perplexity())

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder, a decoder or a dual encoder with the head of the output."""
        head: HeadConfig
        kind: Literal["encoder", "decoder", "dual_encoder"]
        kind = "decoder" if self.causal else "encoder"
        if self.output == "pair":
            kind, head = "dual_encoder", MatchingHeadConfig(num_classes=self.classes)
        elif self.output == "sequence":
            pooling = "last" if self.causal else "mean"
            head = SequenceClassificationHeadConfig(num_classes=self.classes, pooling=pooling)
        elif self.is_language_model:
            head = LMHeadConfig()
        else:
            head = TokenClassificationHeadConfig(num_classes=self.classes)
        tokens = TokenInput(vocab_size=self.vocab_size)
        return ModelNeeds(kind=kind, input=tokens, head=head, length=self._length)

    @property
    def length(self) -> int:
        """See `Task`."""
        return self._length


def with_prediction(text: str, prediction: Prediction | None) -> RenderedText:
    """A text, with a prediction in a line below."""
    if prediction is None:
        return RenderedText(text)
    shown = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in prediction.items()
        if not isinstance(value, Mapping)
    )
    return RenderedText(f"{text}\npredicted: {shown}")


def collate(examples: Sequence[Example]) -> Batch:
    """Combine examples into a batch.

    Sequences are padded at the end to the longest: tokens (n), pairs (2, n), feature ids (k, n) and
    vectors (n, width) with 0, targets per token with IGNORE_INDEX. Images must have equal sizes.
    """
    if not examples:
        raise ValueError("A batch needs at least one example.")
    inputs: dict[str, Tensor | None] = {}
    for name in examples[0].inputs:
        tensors = [example.inputs[name] for example in examples]
        padded, mask = pad_sequences(name, tensors)
        inputs[name] = padded
        if name in MASKS:
            inputs[MASKS[name]] = mask
    targets = {}
    for name in examples[0].targets:
        tensors = [example.targets[name] for example in examples]
        longest = max(each.shape[0] if each.dim() else 0 for each in tensors)
        if tensors[0].dim() == 1 and not tensors[0].is_floating_point():
            tensors = [
                F.pad(each, (0, longest - len(each)), value=IGNORE_INDEX) for each in tensors
            ]
        targets[name] = torch.stack(tensors)
    return Batch(inputs, targets)


def pad_sequences(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack inputs, padded to the longest sequence, and their mask; None if nothing is padded."""
    first = tensors[0]
    if first.is_floating_point() and first.dim() != 2:
        if any(each.shape != first.shape for each in tensors):
            shapes = sorted({tuple(each.shape) for each in tensors})
            raise ValueError(
                f"Input {name!r} has examples of different sizes, {shapes[0]} and {shapes[1]}: "
                "resize them to one size."
            )
        return torch.stack(list(tensors)), None
    axis, before = (0, (0, 0, 0)) if first.is_floating_point() else (-1, (0,))
    lengths = torch.tensor([each.shape[axis] for each in tensors])
    longest = int(lengths.max())
    rows = [F.pad(each, (*before, longest - each.shape[axis])) for each in tensors]
    if len({row.shape for row in rows}) > 1:
        widths = sorted({tuple(each.shape) for each in tensors})
        raise ValueError(
            f"Input {name!r} has examples of shapes {widths[0]} and {widths[-1]}: sequences may "
            "differ in length only."
        )
    padded = torch.stack(rows)
    # each sequence of a pair has its own padding; more rows are the features of one sequence
    is_pair = axis == -1 and padded.dim() == 3 and padded.shape[1] == 2
    mask = padded != 0 if is_pair else torch.arange(longest) < lengths[:, None]
    return padded, None if mask.all() else mask


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


def token_example(tokens: Sequence[int] | np.ndarray, labels: int | np.ndarray) -> Example:
    """An example of a `TokenTask`."""
    return Example({"x": to_int64(tokens)}, {LABELS: to_int64(np.asarray(labels))})
