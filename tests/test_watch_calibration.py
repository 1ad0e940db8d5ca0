"""Calibration and budget: p-values are uniform, tails honest, and alerts as many as asked for."""

import numpy as np
import pytest
from scipy.stats import chi2

from regard.watch.budget import DAY, AlertBudget
from regard.watch.calibration import Calibrator, fisher_p, harmonic_mean_p
from regard.watch.settings import WatchSettings


def calibrated(values, size=1_000, name="string:a"):
    calibrator = Calibrator(size)
    calibrator.extend([name])
    calibrator.add(np.zeros(len(values), np.int64), np.asarray(values, float))
    return calibrator


def p_of(calibrator, values, group=0):
    return calibrator.p_values(np.full(len(values), group), np.asarray(values, float))


@pytest.mark.parametrize("sample", ["exponential", "normal", "geometric"])
def test_p_values_of_held_out_values_are_uniform(sample):
    """P(p <= a) is a; with ties, as of counts, at most a."""
    rng = np.random.default_rng(0)
    draw = {"exponential": rng.exponential, "normal": rng.normal, "geometric": rng.geometric}
    arguments = (0.3,) if sample == "geometric" else ()
    rates = []
    for _ in range(20):
        calibrator = calibrated(draw[sample](*arguments, size=1_000))
        p = p_of(calibrator, draw[sample](*arguments, size=5_000)).p
        rates.append([(p <= level).mean() for level in (0.5, 0.1, 0.01)])
    shares = np.mean(rates, axis=0) / (0.5, 0.1, 0.01)
    assert (shares < 1.15).all()
    if sample != "geometric":
        assert (shares > 0.85).all()


def test_beyond_the_sample_the_tail_is_extrapolated_and_says_so():
    rng = np.random.default_rng(1)
    scale = 3.0  # of an exponential distribution: P(x > t) = exp(-t / 3)
    calibrator = calibrated(rng.exponential(scale, 50_000), size=50_000)
    far = scale * np.log(1 / np.array([1e-5, 1e-6, 1e-7]))
    found = p_of(calibrator, far)
    assert np.abs(np.log10(found.p) - (-5, -6, -7)).max() < 0.7
    inside = p_of(calibrator, [scale * np.log(100)])
    assert found.extrapolated[1:].all() and not inside.extrapolated[0]
    every = p_of(calibrator, np.linspace(0, 60, 500)).p
    assert (np.diff(every) <= 0).all()


def test_a_tail_is_never_shorter_than_that_of_code_lengths():
    """1,000 zeros do not show that 10 bits are impossible."""
    p = p_of(calibrated(np.zeros(1_000)), [10.0]).p[0]
    assert 2.0**-10 / 1_001 <= p <= 1 / 1_001


def test_a_cold_group_leans_on_its_pool():
    calibrator = Calibrator(100)
    calibrator.extend(["string:warm", "string:cold", "number:other"])
    calibrator.add(np.zeros(100, np.int64), np.linspace(0, 10, 100))
    assert p_of(calibrator, [5.0], group=1).p[0] == pytest.approx(0.5, abs=0.05)
    assert p_of(calibrator, [5.0], group=2).p[0] == pytest.approx(2.0**-5, rel=0.01)
    calibrator.add(np.ones(60, np.int64), np.full(60, 6.0))
    assert p_of(calibrator, [5.0], group=1).p[0] == 1.0


def test_a_reservoir_forgets():
    calibrator = calibrated(np.zeros(20_000), size=200)
    calibrator.add(np.zeros(5_000, np.int64), np.full(5_000, 8.0))
    assert p_of(calibrator, [8.0]).p[0] > 0.9


def test_a_group_that_drifts_loses_weight_and_gets_it_back():
    calibrator = calibrated(np.random.default_rng(0).exponential(size=1_000))
    before = p_of(calibrator, [9.0]).p[0]
    group = np.zeros(100, np.int64)
    calibrator.correct(group, np.full(100, 0.001))
    assert p_of(calibrator, [9.0]).p[0] > 20 * before
    for _ in range(20):
        calibrator.correct(group, np.full(100, 0.5))
    assert p_of(calibrator, [9.0]).p[0] == pytest.approx(before)


def test_a_calibrator_is_the_same_after_a_round_trip():
    rng = np.random.default_rng(2)
    calibrator = Calibrator(300)
    calibrator.extend(["string:a", "string:b", "number:c"])
    calibrator.add(rng.integers(0, 3, 5_000), rng.exponential(4, 5_000))
    again = Calibrator.from_json(calibrator.to_json(), calibrator.tensors())
    groups, bits = rng.integers(0, 3, 1_000), rng.exponential(6, 1_000)
    calibrator.quantiles(0.1)  # sorts what is new
    assert np.array_equal(calibrator.p_values(groups, bits).p, again.p_values(groups, bits).p)


def test_combinations_of_p_values():
    p = np.array([0.5, 0.01, 0.2, 0.3])
    means = harmonic_mean_p(p, np.array([0, 2, 2, 4]))
    assert means == pytest.approx([2 / (2 + 100), 1.0, 2 / (5 + 1 / 0.3)])
    table = np.random.default_rng(0).random((50, 5))
    assert fisher_p(table) == pytest.approx(chi2.sf(-2 * np.log(table).sum(axis=1), 10))


def test_the_budget_is_kept_when_scores_drift():
    """Normal p-values become 30 times smaller over 20 days: the alerts stay near 20 a day."""
    rng = np.random.default_rng(3)
    budget = AlertBudget(WatchSettings(alerts_per_day=20), 10_000)
    alerts = []
    for day in range(20):
        shrink = 30 ** (-day / 20)
        for hour in range(24):
            times = (day * 24 + hour) * 3_600 + np.sort(rng.random(417)) * 3_600
            p = rng.random(417) * shrink
            found = int((p <= budget.threshold).sum())
            budget.observe(times.tolist(), found)
            alerts.append(found)
    per_day = np.reshape(alerts, (20, 24)).sum(axis=1)
    assert 10 <= per_day.mean() <= 40
    assert (per_day[2:] <= 60).all()


def test_the_volume_is_measured_by_the_clocks_of_the_events():
    budget = AlertBudget(WatchSettings(alerts_per_day=10), 1_000)
    for i in range(5 * 96):  # five days of twice the traffic, by quarters of an hour
        budget.observe([i * DAY / 96] * 21, 0)
    assert budget.volume == pytest.approx(2_016, rel=0.05)
    budget.observe([5.0], 0)  # a clock that goes back
    assert budget.volume == pytest.approx(2_016, rel=0.05)
    assert AlertBudget(WatchSettings(volume_per_day=7.0), 3.0).volume == 7


def test_a_finding_is_reported_a_few_times_a_day():
    settings = WatchSettings(alerts_per_day=20, repeats_per_day=3)
    budget = AlertBudget(settings, 1_000)
    names = ("entity/bob", "leaf/string:q")
    for _ in range(3):
        assert not budget.is_repeated(names, 100.0, (0, 0))
        budget.observe_alert(names, 100.0)
    assert budget.is_repeated(names, 100.0, (0, 0))
    assert not budget.is_repeated(("entity/eve", names[1]), 100.0, (0, 0))
    assert budget.is_repeated(("entity/eve", names[1]), 100.0, (0, 2))  # a quarter of 20 a day
    assert not budget.is_repeated(names, 100.0 + DAY, (0, 0))
