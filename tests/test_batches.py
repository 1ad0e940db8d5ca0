"""Batches of examples of every kind, and evaluations that do not depend on their batches."""

import re

import numpy as np
import pytest
import torch

from regard.models import ModelConfig, ModuleSpec, build
from regard.models.config import (
    LMHeadConfig,
    PatchInput,
    RegressionHeadConfig,
    SequenceClassificationHeadConfig,
    TokenInput,
    VectorInput,
)
from regard.tasks import IGNORE_INDEX, Example, ModelNeeds, Task, create_task
from regard.tasks.base import collate, token_example
from regard.tasks.metrics import Accuracy, MacroF1, MeanAbsoluteError, Metric
from regard.tasks.rendering import RenderedText
from regard.train import Trainer, TrainSettings
from regard.train.evaluation import describe_values, evaluate_examples
from regard.train.inference import evaluate


def vector_example(n, width=3, labels=0.0):
    x = torch.arange(1.0, 1 + n * width).reshape(n, width)
    return Example({"x": x}, {"labels": torch.tensor([labels, -labels])})


def translation_example(m, n):
    target = torch.arange(1, n + 1)
    return Example({"source": torch.arange(2, m + 2), "target": target}, {"labels": target + 1})


class Stored(Task):
    """Given examples, the same in all splits."""

    def __init__(self, examples, needs, *metrics):
        self.examples, self.needed, self.metrics = examples, needs, metrics

    @property
    def needs(self):
        return self.needed

    def size(self, split):
        return len(self.examples)

    def example(self, split, index):
        return self.examples[index]

    def render(self, example, prediction=None):
        return RenderedText(str(example))


SIZE = {"dim": 8, "heads": 2, "layers": 1}


def model_of(needs):
    torch.manual_seed(0)
    fields = dict(needs)
    if isinstance(needs.input, PatchInput):
        fields["length"] = None
    return build(ModelConfig(**fields, **SIZE, mixer=[ModuleSpec(name="vanilla")])).eval()


LABELS = SequenceClassificationHeadConfig(num_classes=3, pooling="mean")
NEEDS = {
    "vectors": ModelNeeds(
        kind="encoder",
        input=VectorInput(width=3),
        head=RegressionHeadConfig(num_outputs=2),
        length=9,
    ),
    "images": ModelNeeds(
        kind="encoder",
        input=PatchInput(height=8, width=8, patch_size=4, channels=1),
        head=LABELS,
        length=5,
    ),
    "translation": ModelNeeds(
        kind="seq2seq",
        input=TokenInput(vocab_size=20),
        target=TokenInput(vocab_size=20),
        head=LMHeadConfig(),
        length=9,
    ),
}
TASKS = {
    "vectors": Stored(
        [vector_example(1 + i % 7, labels=i / 7) for i in range(33)],
        NEEDS["vectors"],
        MeanAbsoluteError(torch.ones(2)),
    ),
    "images": Stored(
        [
            Example({"x": torch.full((1, 8, 8), i / 33)}, {"labels": torch.tensor(i % 3)})
            for i in range(33)
        ],
        NEEDS["images"],
        Accuracy(),
        MacroF1(3),
    ),
    "translation": Stored(
        [translation_example(1 + i % 5, 1 + i % 7) for i in range(33)],
        NEEDS["translation"],
        Accuracy(),
        MacroF1(20),
    ),
}


# ------------------------------------------------------------------------------------------ collate
def test_vectors_of_different_lengths():
    """Fails if padding is not zero, not masked, or put at the start."""
    batch = collate([vector_example(2), vector_example(4), vector_example(1)])
    x, mask = batch.inputs["x"], batch.inputs["mask"]
    assert x.shape == (3, 4, 3) and batch.size == 3
    assert mask.tolist() == [[True] * n + [False] * (4 - n) for n in (2, 4, 1)]
    for row, n in zip(x, (2, 4, 1), strict=True):
        assert torch.equal(row[:n], vector_example(n).inputs["x"]) and not row[n:].any()
    assert batch.targets["labels"].shape == (3, 2)
    assert collate([vector_example(2), vector_example(2)]).inputs["mask"] is None
    task = TASKS["vectors"]
    assert task.count_tokens(batch) == 7 and task.count_targets(batch) == 3
    assert task.count_tokens(collate([vector_example(2)] * 3)) == 6


def test_vectors_of_different_widths_are_refused():
    """Fails if the message does not name the input and both shapes."""
    with pytest.raises(
        ValueError, match=re.escape("Input 'x' has examples of shapes (2, 3) and (4, 5): sequences")
    ):
        collate([vector_example(2), vector_example(4, width=5)])


def test_images_of_different_sizes_are_refused():
    """Fails if the message does not name the input and the sizes; images of one size have no
    mask."""
    images = [
        Example({"x": torch.zeros(1, 4, side)}, {"labels": torch.tensor(1)}) for side in (4, 4, 6)
    ]
    batch = collate(images[:2])
    assert batch.inputs["x"].shape == (2, 1, 4, 4) and batch.inputs["mask"] is None
    with pytest.raises(
        ValueError,
        match=re.escape("Input 'x' has examples of different sizes, (1, 4, 4) and (1, 4, 6)"),
    ):
        collate(images)
    task = TASKS["images"]
    assert task.count_tokens(task.batch("test", range(3))) == 3 * NEEDS["images"].input.length


def test_source_and_target_have_their_own_masks():
    """Fails if a mask is of the other sequence, or padding of the target has a label."""
    batch = collate([translation_example(3, 1), translation_example(2, 4)])
    assert batch.inputs["source"].tolist() == [[2, 3, 4], [2, 3, 0]]
    assert batch.inputs["mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch.inputs["target"].tolist() == [[1, 0, 0, 0], [1, 2, 3, 4]]
    assert batch.inputs["target_mask"].tolist() == [[True] + [False] * 3, [True] * 4]
    assert batch.targets["labels"].tolist() == [[2] + [IGNORE_INDEX] * 3, [2, 3, 4, 5]]
    task = TASKS["translation"]
    assert task.count_tokens(batch) == 3 + 2 + 1 + 4 and task.count_targets(batch) == 5
    only_source = collate([translation_example(3, 4), translation_example(2, 4)])
    assert only_source.inputs["target_mask"] is None and only_source.inputs["mask"] is not None
    assert task.count_tokens(only_source) == 3 + 2 + 4 + 4


def test_pairs_have_a_mask_for_each_text():
    """Fails if a shorter text of a pair is not masked, or a pair is padded before its end."""
    pairs = [
        token_example(np.array(rows), 1)
        for rows in ([[1, 2, 3], [4, 0, 0]], [[5, 6, 0], [7, 8, 9]], [[1], [2]])
    ]
    batch = collate(pairs)
    assert batch.inputs["x"].tolist() == [
        [[1, 2, 3], [4, 0, 0]],
        [[5, 6, 0], [7, 8, 9]],
        [[1, 0, 0], [2, 0, 0]],
    ]
    assert torch.equal(batch.inputs["mask"], batch.inputs["x"] != 0)
    assert batch.targets["labels"].tolist() == [1, 1, 1]


def test_labels_of_tokens_are_padded_and_others_are_not():
    """Fails if padding has a class, or numbers are padded."""
    tokens = [token_example([1] * n, np.arange(n)) for n in (2, 3)]
    assert collate(tokens).targets["labels"].tolist() == [[0, 1, IGNORE_INDEX], [0, 1, 2]]
    with pytest.raises(ValueError, match="at least one example"):
        collate([])


@pytest.mark.parametrize("name", TASKS)
def test_padding_does_not_change_what_a_model_says(name):
    """Fails if the names of inputs are not those of the model, or a mask does not hide padding."""
    task = TASKS[name]
    model = model_of(task.needs)
    together = model(**task.batch("test", range(7)).inputs)
    for i in range(7):
        alone = model(**task.batch("test", [i]).inputs)[0]
        part = together[i, : len(alone)] if alone.dim() > 1 else together[i]
        torch.testing.assert_close(part, alone)


# --------------------------------------------------------------------------------------- evaluation
def evaluation(task, model, batch_size, indices=None):
    return evaluate_examples(
        task,
        model,
        list(range(33)) if indices is None else indices,
        "test",
        forward=lambda batch: model(**batch.inputs),
        batch_size=batch_size,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("name", [*TASKS, "parity", "classify", "lm"])
def test_evaluations_do_not_depend_on_the_batch_size(name):
    """Fails if statistics, their order or the loss depend on how examples are batched."""
    task = TASKS.get(name) or create_task(name, length=16)
    model = model_of(task.needs)
    indices = task.sample("test", 33).tolist()
    one, three, many = (evaluation(task, model, size, indices) for size in (1, 3, 32))
    assert one.indices == three.indices == many.indices == indices
    for metric in task.metrics:
        for other in (three, many):
            statistics = one.statistics[metric.name]
            torch.testing.assert_close(
                statistics, other.statistics[metric.name], rtol=1e-5, atol=1e-5
            )
            assert len(statistics) == 33 and metric.compute(statistics) == pytest.approx(
                metric.compute(other.statistics[metric.name]), rel=1e-5
            )
    assert one.loss == pytest.approx(three.loss, rel=1e-5) == pytest.approx(many.loss, rel=1e-5)
    whole = task.batch("test", indices)
    expected = float(task.loss(model(**whole.inputs), whole).detach())
    assert one.loss == pytest.approx(expected, rel=1e-5)
    assert list(one.values()) == [metric.name for metric in task.metrics]
    assert one.value == one.values()[task.metric.name]


class AsWritten(Metric):
    """Share of predictions that are the label; it needs predictions."""

    name, needs_predictions, format = "as_written", True, ".1%"

    def update(self, output, batch, predictions):
        labels = batch.targets["labels"].tolist()
        found = [p["label"] == label for p, label in zip(predictions, labels, strict=True)]
        return torch.tensor(found).double()[:, None]

    def compute(self, statistics):
        return float(statistics.mean())


def test_metrics_of_predictions_get_them():
    """Fails if predictions are not those of the examples of a batch."""
    task = TASKS["images"]
    judged = Stored(task.examples, task.needs, Accuracy(), AsWritten())
    found = evaluation(judged, model_of(task.needs), 5).values()
    assert found["accuracy"] == found["as_written"]
    assert (
        describe_values(judged, {"as_written": 0.25, "loss": 1}) == "as_written 25.0%, loss 1.0000"
    )
    with pytest.raises(ValueError, match="as_written is computed from predictions"):
        Stored(task.examples, task.needs, AsWritten()).baselines()["constant"]([0])


def test_an_undefined_second_metric_is_left_out():
    """Fails if it is an error, or has a value that it has not."""
    examples = [token_example([1, 2], np.array([0, IGNORE_INDEX]))] * 3
    found = Stored(examples, create_task("parity", length=2).needs, Accuracy(), NoValue())
    assert list(evaluation(found, model_of(found.needs), 2, [0, 1, 2]).values()) == ["accuracy"]


class NoValue(MacroF1):
    """A metric without a value."""

    name = "no_value"

    def __init__(self):
        super().__init__(2)

    def update(self, output, batch, predictions):
        return torch.full((batch.size, 2), -1.0, dtype=torch.float64)


@pytest.mark.parametrize("name", TASKS)
def test_every_kind_of_task_is_trained_and_evaluated(name):
    """Fails if a kind of inputs cannot be trained on, or its baseline has no value."""
    task = TASKS[name]
    model = model_of(task.needs)
    settings = TrainSettings(steps=3, batch_size=4, eval_every=3, eval_examples=9, lr=1e-2)
    result = Trainer(model, task, settings).run()
    assert np.isfinite(result.loss) and result.metric == task.metric.name
    assert list(result.metrics) == [metric.name for metric in task.metrics]
    assert result.higher_is_better == task.metric.higher_is_better
    assert result.metrics[result.metric] == result.test and result.examples == 9
    found = evaluate(model.eval(), task, "test", examples=9)
    assert found[result.metric] == pytest.approx(result.test, rel=1e-5)
    statistics = task.baselines()["constant"](range(9))
    assert len(statistics) == 9 and np.isfinite(task.metric.compute(statistics))


def test_the_constant_baseline_of_numbers_is_their_mean():
    """Fails if it is not the mean of the training targets."""
    task = TASKS["vectors"]
    labels = torch.stack([each.targets["labels"] for each in task.examples])
    expected = float((labels - labels.mean(0)).abs()[:9].mean())
    assert task.metric.compute(task.baselines()["constant"](range(9))) == pytest.approx(
        expected, rel=1e-5
    )


def test_label_smoothing_is_of_classes():
    """Fails if it is ignored for numbers, or not that of cross-entropy."""
    images, vectors = TASKS["images"], TASKS["vectors"]
    batch, logits = images.batch("test", [0, 1]), torch.tensor([[2.0, 0, 0], [0, 1, 0]])
    expected = torch.nn.functional.cross_entropy(
        logits, batch.targets["labels"], label_smoothing=0.1
    )
    torch.testing.assert_close(images.loss(logits, batch, label_smoothing=0.1), expected)
    batch = vectors.batch("test", [0, 1])
    with pytest.raises(ValueError, match="label_smoothing applies to classes"):
        vectors.loss(torch.zeros(2, 2), batch, label_smoothing=0.1)
    torch.testing.assert_close(
        vectors.loss(torch.ones(2, 2), batch), ((1 - batch.targets["labels"]) ** 2).mean()
    )


def test_a_language_model_predicts_after_the_last_token():
    """Fails if the next token is read from the padding of a shorter text."""
    task = create_task("lm", length=16)
    processor, model = task.processor, model_of(task.needs)
    texts = ["the dog sees", "the", "the cat and the"]
    batch = collate([Example(processor.encode(text), {}) for text in texts])
    together = processor.predict(model, batch.inputs)
    alone = [
        processor.predict(model, collate([Example(processor.encode(text), {})]).inputs)[0]
        for text in texts
    ]
    assert together == alone and len({each["next"] for each in together}) > 1
