"""`regard.testing.check_task`: every task passes it, and a task that breaks a promise does not."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from regard.models.config import RegressionHeadConfig, VectorInput
from regard.tasks import Example, ModelNeeds, Processor, Task, create_task, list_tasks
from regard.tasks.check import CHECKS
from regard.tasks.metrics import MeanMetric
from regard.tasks.rendering import RenderedText
from regard.testing import check_task
from test_file_folders import write_images, write_sounds
from test_ner import write_entities
from test_regression import write_houses
from test_summarisation import write_dialogues
from test_tagging import write_conll
from test_translation import write_rows
from test_watch_network import ORDERS, write_orders, write_steps


def arguments(name, folder):
    """Small arguments for the tasks that need some."""
    small = {
        "listops": {"length": 40},
        "pathfinder": {"side": 16, "contour": 4, "examples": 20},
        "image": {"side": 8},
        "text": {"length": 192},
        "retrieval": {"length": 320},
        "lm": {"length": 16, "tokenizer": "byte"},
        "mlm": {"length": 16, "tokenizer": "byte"},
        "classify": {"length": 48, "tokenizer": "byte"},
    }
    if name in small:
        return small[name]
    files = {
        "seq2seq": lambda: {
            "data": write_rows(folder / "pairs.jsonl"),
            **{"source": "de", "target": "en", "length": 12, "tokenizer": "byte"},
        },
        "translate": lambda: {
            "data": write_rows(folder / "pairs.jsonl"),
            **{"source": "de", "target": "en", "length": 12, "tokenizer": "byte", "beams": 2},
        },
        "regress": lambda: {"data": write_houses(folder / "a.csv"), "target": "price"},
        "tag": lambda: {"data": write_conll(folder / "a.conll"), "tokenizer": "byte"},
        "ner": lambda: {"data": write_entities(folder / "a.jsonl")},
        "summarise": lambda: {
            "data": write_dialogues(folder / "a.jsonl"),
            **{"source_length": 24, "target_length": 12, "tokenizer": "byte"},
        },
        "masked_leaves": lambda: {"data": write_orders(folder / "a.jsonl"), **ORDERS, "length": 8},
        "next_event": lambda: {"data": write_orders(folder / "a.jsonl"), **ORDERS, "length": 8},
        "forecast": lambda: {"data": write_steps(folder / "a.csv"), "patch": 2, "length": 4},
        "image_folder": lambda: {"data": write_images(folder / "images"), "size": 8},
        "sound_folder": lambda: {"data": write_sounds(folder / "sounds"), "mels": 16},
    }
    return files[name]() if name in files else {}


@pytest.mark.parametrize("name", list_tasks())
def test_every_task_passes(tmp_path, name):
    assert check_task(create_task(name, **arguments(name, tmp_path))) == list(CHECKS)


class Error(MeanMetric):
    """Mean absolute error."""

    name, higher_is_better = "error", False

    def update(self, output, batch, predictions):
        """See `Metric`."""
        error = (output - batch.targets["labels"]).abs().sum(1).double()
        return torch.stack((error, torch.ones_like(error)), 1)


class SumProcessor(Processor):
    """The sum of a list of numbers."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def encode(self, raw):
        """See `Processor`."""
        return {"x": torch.tensor(raw)[:, None]}

    def decode(self, output, inputs):
        """See `Processor`."""
        return [{"sum": self.scale * value} for value in output[:, 0].tolist()]

    def to_dict(self):
        """See `Processor`."""
        return {"scale": self.scale}


class Toy(Task):
    """The sum of one to four numbers."""

    def __init__(self):
        self.metrics, self.processor = (Error(),), SumProcessor(2.0)
        self.values = np.random.default_rng(0).normal(size=(60, 4))

    @property
    def needs(self):
        """See `Task`."""
        return ModelNeeds(
            kind="encoder", input=VectorInput(width=1), head=RegressionHeadConfig(), length=4
        )

    def size(self, split):
        """See `Task`."""
        return 20

    def example(self, split, index):
        """See `Task`."""
        number = 20 * ("train", "valid", "test").index(split) + index
        values = torch.tensor(self.values[number][: 1 + index % 4]).float()
        return Example({"x": values[:, None]}, {"labels": values.sum()[None]})

    def render(self, example, prediction=None):
        """See `Task`."""
        return RenderedText(str(example.targets["labels"].item()))

    @classmethod
    def load_processor(cls, content):
        """See `Task`."""
        return SumProcessor(content["scale"])


def test_the_toy_passes():
    check_task(Toy())


class UnknownNeeds(Toy):
    @property
    def needs(self):
        return {"kind": "encoder"}


class TwoMetrics(Toy):
    def __init__(self):
        super().__init__()
        self.metrics = (Error(), Error())


class RandomExamples(Toy):
    def example(self, split, index):
        example = super().example(split, index)
        return Example({"x": example.inputs["x"] + torch.rand(1)}, example.targets)


class NotANumber(Toy):
    def example(self, split, index):
        example = super().example(split, index)
        return Example({"x": example.inputs["x"] * float("nan")}, example.targets)


class EmptySplit(Toy):
    def size(self, split):
        return 0 if split == "valid" else 20


class WrongInput(Toy):
    def example(self, split, index):
        example = super().example(split, index)
        return Example({"tokens": example.inputs["x"]}, example.targets)


class TooLong(Toy):
    def example(self, split, index):
        example = super().example(split, index)
        return Example({"x": torch.zeros(5, 1)}, example.targets)


class OneClass(Toy):
    """Takes the first examples, which are all of class 0."""

    def classes_of(self, split):
        return np.repeat([0, 1], 10)

    def sample(self, split, count):
        return np.arange(count)

    def size(self, split):
        return 20


class SampleOfPart(OneClass):
    def sample(self, split, count):
        return super().sample(split, min(count, 20)) % 10


class LostExample(Toy):
    def batch(self, split, indices):
        return super().batch(split, list(indices)[:1] if len(indices) > 1 else indices)


class NoGradient(Toy):
    def loss(self, output, batch, *, label_smoothing=0.0):
        return batch.targets["labels"].mean()


class VectorLoss(Toy):
    def loss(self, output, batch, *, label_smoothing=0.0):
        return output[:, 0]


class SingleRow(Error):
    def update(self, output, batch, predictions):
        return super().update(output, batch, predictions).sum(0, keepdim=True)


class HalfPrecision(Error):
    def update(self, output, batch, predictions):
        return super().update(output, batch, predictions).float()


class PerBatch(Error):
    def update(self, output, batch, predictions):
        return super().update(output, batch, predictions) * torch.tensor([len(output), 1.0])


class TensorValue(Error):
    def compute(self, statistics):
        return statistics.sum()


def with_metric(metric):
    class Other(Toy):
        def __init__(self):
            super().__init__()
            self.metrics = (metric(),)

    return Other


class OnePrediction(Toy):
    def predict(self, model, batch):
        return super().predict(model, batch)[:1]


class TensorPrediction(Toy):
    def predict(self, model, batch):
        return [{"sum": torch.zeros(1)} for _ in range(batch.size)]


class ForgetsTheScale(Toy):
    @classmethod
    def load_processor(cls, content):
        return SumProcessor()


class OneBaselineRow(Toy):
    def baselines(self):
        return {"zero": lambda test: torch.zeros(1, 2, dtype=torch.float64)}


class TextInPlaceOfRendered(Toy):
    def render(self, example, prediction=None):
        return "a text"


BROKEN = [
    (UnknownNeeds, "needs", "must be a ModelNeeds, not dict"),
    (TwoMetrics, "needs", "two metrics have the same name"),
    (EmptySplit, "examples", r"size\('valid'\) must be a positive integer, not 0"),
    (RandomExamples, "examples", r"differs from call to call in inputs\['x'\]"),
    (NotANumber, "examples", "has NaN or an infinity"),
    (WrongInput, "inputs", r"has the inputs \['x'\], not \['tokens'\]"),
    (TooLong, "inputs", "has 5 tokens in 'x', but needs.length is 4"),
    (SampleOfPart, "sample", "must have 20 different examples"),
    (LostExample, "batches", "a batch of 5 examples has the size 1"),
    (VectorLoss, "gradients", "must return a scalar"),
    (NoGradient, "gradients", "the loss has no gradient"),
    (with_metric(SingleRow), "metrics", r"statistics \(5, k\) for 5 examples, not \(1, 2\)"),
    (with_metric(HalfPrecision), "metrics", "must be float64 on the CPU, not torch.float32"),
    (with_metric(PerBatch), "metrics", "error depends on the batch size"),
    (with_metric(TensorValue), "metrics", "compute must return a float, not Tensor"),
    (OnePrediction, "predictions", "1 predictions for 5 examples"),
    (TensorPrediction, "predictions", "a prediction is not JSON"),
    (ForgetsTheScale, "processor", "predicts something else after to_dict and load_processor"),
    (OneBaselineRow, "baselines", r"must return statistics \(5, k\), not \(1, 2\)"),
    (TextInPlaceOfRendered, "rendering", "must return a Rendered, such as RenderedText, not str"),
]


@pytest.mark.parametrize(("broken", "check", "words"), BROKEN)
def test_a_broken_promise_is_found(broken, check, words):
    with pytest.raises(AssertionError, match=f"fails the check '{check}': .*{words}"):
        check_task(broken())


def test_a_sample_without_the_classes_is_found(monkeypatch):
    monkeypatch.setattr("regard.tasks.check.SAMPLE", 10)
    with pytest.raises(AssertionError, match="class 0 is 50 % of the train split, but has 10 of"):
        check_task(OneClass())


def test_every_check_is_failed_by_some_task():
    assert {check for _, check, _ in BROKEN} == set(CHECKS)


def test_another_error_names_the_check():
    class Broken(Toy):
        def notes(self):
            raise KeyError("oops")

    with pytest.raises(KeyError) as caught:
        check_task(Broken())
    assert caught.value.__notes__ == ["in the check 'rendering' of Broken"]


@pytest.mark.parametrize("size", [50, 1 << 40])
def test_the_first_part_of_a_sample_is_a_sample(size):
    task = create_task("parity")
    task.size = lambda split: size
    found = task.sample("train", 40).tolist()
    assert len(set(found)) == 40 and found[:7] == task.sample("train", 7).tolist()
    assert max(Counter(np.array(found) * 4 // size).values()) < 25  # from all parts
    assert json.dumps(found)
