"""Statistics of comparisons: intervals, p-values, Holm's correction, and their error rates."""

import math

import numpy as np
import pytest
import torch

from regard.compare.statistics import (
    holm,
    incomplete_beta,
    mixed_cdf,
    mixed_quantile,
    paired_difference,
    t_cdf,
)
from regard.tasks.metrics import Accuracy, MacroF1, MeanMetric, Perplexity, UndefinedMetric


class PlainMean(Accuracy):
    """The same metric, computed by another method: it is bootstrapped."""

    def compute(self, statistics):
        return MeanMetric.compute(self, statistics)


def correct(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    return torch.stack((values, torch.ones_like(values)), -1)


def test_student_t_agrees_with_scipy():
    """Fails if the distribution is approximated, or the fraction stops too early."""
    stats = pytest.importorskip("scipy.stats")
    for dof in (1, 1.7, 4, 33, 1e4, 1e7):
        for t in (-3.0, 0.01, 0.5, 1.96, 12.7, 300.0):
            assert t_cdf(t, dof) == pytest.approx(stats.t.cdf(t, dof), abs=1e-9)
        for p in (0.9, 0.975, 0.999):
            assert mixed_quantile(p, 1.0, dof) == pytest.approx(stats.t.ppf(p, dof), rel=1e-6)
    assert mixed_cdf(1.96, 0.0, 1) == pytest.approx(stats.norm.cdf(1.96))
    assert mixed_quantile(0.975, 0.0, 1) == pytest.approx(1.959964)
    assert incomplete_beta(2, 3, 0) == 0 and incomplete_beta(2, 3, 1) == 1


def test_holm_adjusts_by_rank():
    """Fails if p-values are multiplied by the same number, lose their order, or NaN counts."""
    adjusted = holm([0.01, 0.04, 0.03, math.nan, 0.005])
    assert adjusted[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(adjusted[3]) and adjusted[4] == pytest.approx(0.02)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_delta_method_agrees_with_the_bootstrap():
    """Fails if examples of different weight, or the pairing, are left out of the variance."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 400)
    shared = rng.binomial(counts, 0.6)
    ours, theirs = (
        torch.tensor(np.stack((np.minimum(shared + rng.integers(0, 2, 400), counts), counts), 1))
        for _ in range(2)
    )
    delta = paired_difference(Accuracy(), [ours.double()], [theirs.double()])
    boot = paired_difference(PlainMean(), [ours.double()], [theirs.double()])
    assert delta.value == boot.value
    assert delta.example_error == pytest.approx(boot.example_error, rel=0.15)


def test_one_seed_proves_nothing():
    """Fails if a single run has an interval: the variance between seeds is unknown."""
    found = paired_difference(Accuracy(), [correct([1] * 90 + [0] * 10)], [correct([0] * 100)])
    assert found.value == pytest.approx(0.9) and math.isnan(found.p) and math.isnan(found.low)
    assert found.example_error > 0


def test_equal_predictions_do_not_differ():
    """Fails if a variance of zero is divided by."""
    same = [correct([1, 0, 1, 1])] * 3
    assert paired_difference(Accuracy(), same, same)[:4] == (0.0, 0.0, 0.0, 1.0)


def test_metrics_that_are_no_means_have_intervals():
    """Fails if perplexity or F1 is treated as a mean, or an undefined draw ends the bootstrap."""
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(rng.integers(0, 3, 200)).double()

    def predicted(error):
        wrong = torch.from_numpy(rng.random(200) < error)
        return torch.stack((labels, torch.where(wrong, (labels + 1) % 3, labels)), -1)

    good, bad = ([predicted(error) for _ in range(3)] for error in (0.1, 0.5))
    f1 = paired_difference(MacroF1(3), good, bad)
    assert 0.2 < f1.low < f1.value < f1.high < 0.6 and f1.p < 0.01
    bits = [torch.stack((x[:, 0] + i, torch.ones(200).double()), -1) for i, x in enumerate(good)]
    more = [x + torch.tensor([1.0, 0.0]) for x in bits]
    perplexity = paired_difference(Perplexity(), more, bits)
    factor = np.mean([Perplexity().compute(x) for x in bits])
    assert perplexity.value == pytest.approx(factor)  # one bit more doubles it
    with pytest.raises(UndefinedMetric):
        paired_difference(Accuracy(), [correct([1.0]) * 0], [correct([1.0]) * 0])


def simulate(rng, seeds, examples, *, seed_sd, gap=0.0):
    """Outcomes of a mechanism: a random effect of the seed, and one of each example."""
    difficulty = rng.normal(size=examples)
    return [
        [
            correct(difficulty + rng.normal(size=examples) < 0.5 + shift + rng.normal() * seed_sd)
            for _ in range(seeds)
        ]
        for shift in (0.0, gap)
    ]


@pytest.mark.parametrize("seed_sd", [0.0, 0.2])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_mechanisms_are_rarely_called_different(seeds, seed_sd):
    """Fails if more than 5 % of 1,000 pairs of copies differ (with the error of the simulation),
    with and without a random effect of the seed."""
    rng = np.random.default_rng(seeds)
    pairs = [simulate(rng, seeds, 100, seed_sd=seed_sd) for _ in range(1000)]
    rate = np.mean([paired_difference(Accuracy(), *pair).p < 0.05 for pair in pairs])
    assert rate <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)


def test_real_differences_are_found():
    """Fails if the interval is so wide that nothing is ever significant, or misses the truth."""
    rng = np.random.default_rng(0)
    found = [
        paired_difference(Accuracy(), *reversed(simulate(rng, 3, 500, seed_sd=0.05, gap=0.5)))
        for _ in range(200)
    ]
    assert np.mean([each.p < 0.05 and each.value > 0 for each in found]) > 0.8
    truth = np.mean([each.value for each in found])
    assert np.mean([each.low <= truth <= each.high for each in found]) > 0.9
