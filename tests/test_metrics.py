"""Metrics against calculations by hand and scikit-learn."""

import math

import numpy as np
import pytest
import torch

from regard.tasks import IGNORE_INDEX, Batch, UndefinedMetric
from regard.tasks.metrics import (
    R2,
    Accuracy,
    Bits,
    MacroF1,
    MeanAbsoluteError,
    Perplexity,
    RootMeanSquaredError,
)


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randint(low, high, shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def update(metric, output, labels):
    return metric.update(output, Batch({"x": output}, {"labels": labels}), [])


def value(metric, output, labels):
    return metric.compute(update(metric, output, labels))


MEAN, STD = torch.tensor([5.0, -2.0]), torch.tensor([3.0, 0.5])
TOKENS = randint(0, 4, (12, 5)).masked_fill(randint(0, 2, (12, 5), seed=1) > 0, IGNORE_INDEX)
CASES = {
    "accuracy": (Accuracy(), rand(12, 4), randint(0, 4, (12,))),
    "accuracy of tokens": (Accuracy(), rand(12, 5, 4), TOKENS),
    "bits": (Bits("byte", torch.tensor([1.0, 2.0, 3.0, 4.0])), rand(12, 5, 4), TOKENS),
    "perplexity": (Perplexity(), rand(12, 5, 4), TOKENS),
    "macro F1": (MacroF1(4), rand(12, 4), randint(0, 4, (12,))),
    "macro F1 of tokens": (MacroF1(4), rand(12, 5, 4), TOKENS),
    "MAE": (MeanAbsoluteError(STD), rand(12, 2), rand(12, 2, seed=1)),
    "RMSE": (RootMeanSquaredError(STD), rand(12, 2), rand(12, 2, seed=1)),
    "R2": (R2(), rand(12, 2), rand(12, 2, seed=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_per_example_and_in_any_order(name):
    """Fails if a value depends on how examples are spread over batches, or on their order; or if
    resampled examples have other statistics than their own."""
    metric, output, labels = CASES[name]
    whole = update(metric, output, labels)
    assert whole.dtype == torch.float64 and whole.device.type == "cpu" and len(whole) == 12
    expected = metric.compute(whole)
    for sizes in ([1] * 12, [5, 7], [3, 1, 8]):
        pairs = zip(output.split(sizes), labels.split(sizes), strict=True)
        parts = [update(metric, one, other) for one, other in pairs]
        torch.testing.assert_close(metric.merge(parts), whole)
        assert metric.compute(metric.merge(parts[::-1])) == pytest.approx(expected, rel=1e-12)
    chosen = torch.tensor([3, 3, 0, 7, 11])
    again = metric.compute(whole[chosen])
    assert again == pytest.approx(value(metric, output[chosen], labels[chosen]), rel=1e-12)


def test_accuracy():
    """Fails if ignored targets count, or examples with many targets do not count more."""
    output = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2], [2, 2, 2]]), 3).float()
    labels = torch.tensor([[0, 1, 0], [2, IGNORE_INDEX, IGNORE_INDEX]])
    assert update(Accuracy(), output, labels).tolist() == [[2, 3], [1, 1]]
    assert value(Accuracy(), output, labels) == 3 / 4
    assert Accuracy().higher_is_better and Accuracy().format_value(0.5) == "0.500"


def test_bits_and_perplexity():
    """Fails if bits are nats, are not divided by the units of the targets, or perplexity is not
    that of a target."""
    output, labels = rand(2, 3, 4), torch.tensor([[0, 1, 3], [2, IGNORE_INDEX, IGNORE_INDEX]])
    log_p = output.double().log_softmax(-1)
    nats = -float(log_p[0, 0, 0] + log_p[0, 1, 1] + log_p[0, 2, 3] + log_p[1, 0, 2])
    units = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert value(Bits(), output, labels) == pytest.approx(nats / math.log(2) / 4, rel=1e-6)
    per_byte = Bits("byte", units)
    assert update(per_byte, output, labels)[:, 1].tolist() == [1 + 2 + 4, 3]
    assert value(per_byte, output, labels) == pytest.approx(nats / math.log(2) / 10, rel=1e-6)
    assert (Bits().name, per_byte.name) == ("bits_per_token", "bits_per_byte")
    assert value(Perplexity(), output, labels) == pytest.approx(math.exp(nats / 4), rel=1e-6)
    assert value(Perplexity(), torch.zeros(1, 4), torch.tensor([2])) == pytest.approx(4)
    hopeless = value(Perplexity(), torch.tensor([[1e6, 0.0]]), torch.tensor([1]))
    assert math.isfinite(hopeless) and hopeless == 2.0**1000
    assert not (per_byte.higher_is_better or Perplexity().higher_is_better)


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_is_that_of_scikit_learn(seed):
    """Fails if a class that occurs only as a prediction, or only as a target, is left out; or if
    padding and ignored targets count."""
    sklearn = pytest.importorskip("sklearn.metrics")
    output, labels = rand(8, 6, 9, seed=seed), randint(0, 7, (8, 6), seed=seed)
    ignored = randint(0, 3, (8, 6), seed=seed + 9) > 0
    expected = sklearn.f1_score(labels[~ignored], output.argmax(-1)[~ignored], average="macro")
    labels = labels.masked_fill(ignored, IGNORE_INDEX)
    assert value(MacroF1(9), output, labels) == pytest.approx(expected)


def test_macro_f1_of_batches_of_different_lengths():
    """Fails if batches with shorter examples cannot be merged, or their padding is a class."""
    metric = MacroF1(3)
    output, labels = rand(4, 7, 3), randint(0, 3, (4, 7))
    labels[2:, 4:] = IGNORE_INDEX
    parts = [
        update(metric, output[:2], labels[:2]),
        update(metric, output[2:, :4], labels[2:, :4]),
    ]
    assert [part.shape[1] for part in parts] == [14, 8]
    torch.testing.assert_close(metric.merge(parts), update(metric, output, labels))
    torch.testing.assert_close(metric.merge(parts[::-1])[2:], metric.merge(parts)[:2])


def test_errors_are_in_the_units_of_the_data():
    """Fails if errors are of normalized values, of one output, or RMSE is a mean of roots."""
    data, predicted = rand(20, 2) * STD + MEAN, rand(20, 2, seed=1) * STD + MEAN
    normalized = [(each - MEAN) / STD for each in (predicted, data)]
    error = (predicted - data).double()
    mae, rmse = MeanAbsoluteError(STD, "kg"), RootMeanSquaredError(STD, "kg")
    assert value(mae, *normalized) == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert value(rmse, *normalized) == pytest.approx(float((error**2).mean().sqrt()), rel=1e-5)
    assert rmse.format_value(12.3456) == "12.35 kg" and rmse.name == "rmse" and mae.name == "mae"
    assert not (mae.higher_is_better or rmse.higher_is_better)


def test_r2_is_that_of_scikit_learn():
    """Fails if it is not the mean over outputs of 1 - (squared error) / variance."""
    sklearn = pytest.importorskip("sklearn.metrics")
    target, predicted = rand(30, 3), rand(30, 3) + 0.5 * rand(30, 3, seed=1)
    assert value(R2(), predicted, target) == pytest.approx(sklearn.r2_score(target, predicted))
    assert value(R2(), target, target) == 1 and R2().higher_is_better
    mean = target.double().mean(0).expand(30, -1)
    assert value(R2(), mean, target.double()) == pytest.approx(0, abs=1e-12)


def test_metrics_without_a_value_say_so():
    """Fails if nothing to measure is 0 or NaN."""
    nothing = torch.full((2, 3), IGNORE_INDEX)
    for metric in (Accuracy(), Bits(), Perplexity(), MacroF1(4)):
        with pytest.raises(UndefinedMetric, match=f"{metric.name} has no value: no example has"):
            value(metric, rand(2, 3, 4), nothing)
    same = torch.cat((rand(7, 1), torch.full((7, 1), 0.1)), 1)  # 0.1 is not its own mean
    for target in (same, same[:1], same[:0]):
        with pytest.raises(UndefinedMetric, match="r2 has no value: all targets"):
            value(R2(), rand(len(target), 2), target)
    assert issubclass(UndefinedMetric, ValueError)


def test_confidence_from_resampled_statistics():
    """Fails if statistics cannot be resampled: the bootstrap of an accuracy is binomial."""
    labels = torch.zeros(400, dtype=torch.int64)
    output = torch.tensor([[1.0, 0.0]] * 280 + [[0.0, 1.0]] * 120)
    statistics, rng = update(Accuracy(), output, labels), np.random.default_rng(0)
    values = [Accuracy().compute(statistics[rng.integers(0, 400, 400)]) for _ in range(500)]
    assert np.std(values) == pytest.approx(math.sqrt(0.7 * 0.3 / 400), rel=0.15)
