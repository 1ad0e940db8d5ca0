"""The level "series" and its model: season, components, drift, windows of time."""

import json
import math

import numpy as np
import pytest
from scipy.stats import betabinom

from regard.watch.event import Event
from regard.watch.series import SeriesLevel, SeriesModel
from regard.watch.series.columns import BITS, ResultReader, count_bits, hash_bit
from regard.watch.series.endpoint import choose_window
from regard.watch.series.errors import ErrorShare
from regard.watch.settings import WatchSettings

HOUR, DAY = 3_600.0, 86_400.0


def stored(level):
    """The level after a round trip through JSON and arrays."""
    return type(level).from_json(json.loads(json.dumps(level.to_json())), level.tensors())


# ---------------------------------------------------------------------------------------- model
def correlated_rows(rng, n):
    """Rows (n, 4) with two common factors; the last column is constant."""
    factors = rng.normal(size=(n, 2))
    rows = factors @ np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]]) + 0.1 * rng.normal(size=(n, 3))
    return np.column_stack([rows * [1, 100, 0.01] + [5, 0, 1], np.full(n, 7.0)])


def test_bits_and_expected_values_are_those_of_the_gaussian():
    """Fails if the distance, or the value that the other columns imply, is not that of the
    covariance V (Λ − σ²) Vᵀ + σ² I, computed here by its definition and by linear regression."""
    rng = np.random.default_rng(0)
    model = SeriesModel(lags=1)
    model.fit(correlated_rows(rng, 2_000))
    assert model.components == 2
    variances, vectors = np.linalg.eigh(model.covariance)
    noise = variances[:2].mean()
    rebuilt = vectors[:, 2:] @ np.diag(variances[2:] - noise) @ vectors[:, 2:].T
    rebuilt += max(noise, 0.01) * np.eye(4)
    rows = correlated_rows(rng, 50)
    rows[10, 0] += 2.0  # against its columns' habit
    scores = model.score(rows)
    centred = (rows - model.median) / model.scale - model.mean
    distance = np.einsum("ni,ij,nj->n", centred, np.linalg.inv(rebuilt), centred)
    assert scores.bits == pytest.approx(distance / 2 / math.log(2), rel=0.02)

    others = [1, 2, 3]
    weights = np.linalg.solve(rebuilt[np.ix_(others, others)], rebuilt[others, 0])
    implied = (centred[:, others] @ weights + model.mean[0]) * model.scale[0] + model.median[0]
    assert scores.expected[:, 0] == pytest.approx(implied, abs=0.05)
    assert scores.bits.argmax() == 10
    assert abs(scores.deviations[10]).argmax() == 0

    rows[20, 3] = 7.5  # a constant that changes
    assert model.score(rows).bits[20] > 100


def test_lags_see_an_odd_shape_that_no_single_value_shows():
    """Fails if a window of rows is scored like its rows one by one, or the first windows, whose
    beginning is unknown, are anomalies."""
    times = np.arange(3_000)
    rng = np.random.default_rng(1)
    wave = np.sin(times / 5) + 0.05 * rng.normal(size=3_000)
    wave[2_500:2_530] = np.sin(times[2_500:2_530] / 2)  # within the usual range
    alone, together = SeriesModel(lags=1), SeriesModel()
    alone.fit(wave[:2_000])
    together.fit(wave[:2_000])
    assert together.lags == 100 and together.components == 2
    later = slice(2_000, None)
    assert not 500 <= alone.score(wave[later]).bits.argmax() < 560
    assert 500 <= together.score(wave[later]).bits.argmax() < 640


def test_daily_season_is_found_and_noise_has_none():
    """Fails if busy hours look odd at their own time, or normal at another."""
    rng = np.random.default_rng(2)
    times = np.arange(0, 14 * DAY, HOUR / 4)
    daily = 100 + 80 * np.sin(times * 2 * np.pi / DAY) + rng.normal(size=len(times))
    rows = np.column_stack([daily, rng.normal(size=len(times))])
    model = SeriesModel(lags=1)
    model.fit(rows, times)
    assert model.seasons == ["day", "none"]
    noon_at_night = np.array([[daily[4 * 6], 0.0]])
    assert model.score(noon_at_night, [15 * DAY + 6 * HOUR]).bits[0] < 10
    assert model.score(noon_at_night, [15 * DAY + 18 * HOUR]).bits[0] > 50
    with pytest.raises(ValueError, match="times are missing"):
        model.score(noon_at_night)


def test_update_follows_drift():
    """Fails if a level that moved for good stays an anomaly, or one outlier moves the level."""
    rng = np.random.default_rng(3)
    model = SeriesModel(lags=2)
    model.fit(rng.normal(size=(500, 2)))
    moved = rng.normal(size=(600, 2)) + np.array([4, 0])
    before = np.median(model.score(moved).bits)
    model.update([[1e6, 0.0]])
    assert np.median(model.score(moved).bits) == pytest.approx(before, rel=0.5)
    for start in range(0, 600, 50):
        model.update(moved[start : start + 50])
    assert np.median(model.score(moved, continues=True).bits) < before / 3


def test_stored_model_and_missing_values():
    """Fails if a stored model scores otherwise, or NaN is an anomaly or spreads."""
    rng = np.random.default_rng(4)
    times = np.arange(0, 10 * DAY, HOUR)
    rows = rng.normal(size=(240, 3)) + np.sin(times * 2 * np.pi / DAY)[:, None] * 5
    rows[rng.random(rows.shape) < 0.1] = np.nan
    model = SeriesModel()
    model.fit(rows, times)
    assert model.seasons == ["day"] * 3
    content = json.loads(json.dumps(model.to_json()))
    other = SeriesModel.from_json(content, model.tensors("m"), "m")
    scores = model.score(rows, times)
    assert np.isfinite(scores.bits).all() and np.isfinite(scores.expected).all()
    assert other.score(rows, times).bits.tolist() == scores.bits.tolist()
    model.update(rows[:10], times[:10])
    other.update(rows[:10], times[:10])
    assert other.score(rows, times).bits == pytest.approx(model.score(rows, times).bits)
    alone = model.score([[np.nan, np.nan, np.nan]], [11 * DAY])
    assert alone.bits[0] < 5


def test_noise_of_a_column_that_did_not_vary():
    """Fails if a column is more precise than its noise, or noise that was not given has an effect
    on other columns."""
    rng = np.random.default_rng(15)
    rows = np.column_stack([rng.normal(size=300), np.full(300, 4.0)])
    model = SeriesModel(lags=1, noise=[0.0, 0.5])
    model.fit(rows)
    assert model.score([[np.nan, 5.0]]).bits[0] == pytest.approx(2 / math.log(2), rel=0.05)
    other = SeriesModel.from_json(model.to_json(), model.tensors("m"), "m")
    model.update(rows[:50])
    other.update(rows[:50])
    assert other.score(rows).bits.tolist() == model.score(rows).bits.tolist()
    assert model.score([[np.nan, 5.0]]).bits[0] == pytest.approx(2 / math.log(2), rel=0.05)
    with pytest.raises(ValueError, match=r"noise is one number or 2, one a column, not \(3,\)"):
        SeriesModel(noise=np.ones(3)).fit(rows)


@pytest.mark.parametrize(
    ("values", "times", "message"),
    [
        ([[1.0]], None, "needs 2 rows and 1 column to learn from, not 1 and 1"),
        (np.zeros((3, 0)), None, "not 3 and 0"),
        (np.zeros((3, 2, 2)), None, r"its shape is \(3, 2, 2\)"),
        ([[1.0], [math.inf]], None, "1 values of the series are infinite"),
        ([1.0, 2.0], [1.0], r"times must be 2 finite numbers.*\(1,\)"),
    ],
)
def test_bad_series(values, times, message):
    """Fails if a series without a meaning gives scores instead of an error."""
    with pytest.raises(ValueError, match=message):
        SeriesModel().fit(values, times)


def test_score_with_other_columns_than_learned():
    """Fails if columns are broadcast."""
    model = SeriesModel()
    model.fit(np.random.default_rng(5).normal(size=(20, 2)))
    with pytest.raises(ValueError, match="the rows have 1 columns, but those learned had 2"):
        model.score([1.0, 2.0])
    with pytest.raises(ValueError, match="lags=5 needs more than 5 rows"):
        SeriesModel(5).fit(np.zeros((5, 1)))
    with pytest.raises(ValueError, match="lags=0 must be at least 1"):
        SeriesModel(0)


# --------------------------------------------------------------------------------------- results
def test_results_are_read_by_general_rules():
    """Fails if a status, an error code, a size, a time or an id is missed in a usual format."""
    paths = ["response.statusCode", "response.body_bytes_sent", "duration_ms", "errorCode", "ok"]
    reader = ResultReader()
    for values, expected in (
        ([200, 512, 1.5, None, True], (False, 512.0, 1.5)),
        (["404", "10", "0.2", None, True], (True, 10.0, 0.2)),
        ([200, 0, 0, "AccessDenied", False], (True, 0.0, 0.0)),
        (["-", "-", True, "", None], (False, 0.0, math.nan)),
        ([10**400, "x" * 99, float("inf"), "\ud800", 1], (True, 0.0, math.nan)),
    ):
        result = reader.read(Event(0.0, "u", "GET /", paths, values, "s"))
        assert tuple(result[:3]) == pytest.approx(expected, nan_ok=True)


def test_id_paths_are_neither_constant_nor_unique():
    """Fails if a request id, a word or a price is taken for the id of an object."""
    rng = np.random.default_rng(6)
    events = [
        Event(
            float(i),
            "u",
            "GET /orders/{id}",
            ["path", "order.id", "request_id", "word", "price"],
            [f"/orders/{n}", int(n), f"r-{i:08d}", "red", float(n)],
            f"s{i}",
        )
        for i, n in enumerate(rng.integers(100, 200, 500))
    ]
    reader = ResultReader()
    reader.fit(events)
    assert set(reader.id_paths) == {"path", "order.id"}
    assert [id_bit.bit_count() for id_bit in reader.read(events[0]).ids] == [1, 1]


def test_distinct_values_are_counted_within_a_fifth():
    """Fails if the estimate of linear counting is off, or the same value counts twice."""
    for n in (1, 10, 100, 400):
        bitmap = 0
        for i in [*range(n), *range(n)]:
            bitmap |= hash_bit(f"order-{i}")
        assert bitmap < 2**BITS
        assert count_bits(bitmap) == pytest.approx(n, rel=0.2)


# ----------------------------------------------------------------------------------------- level
def shop_events(rng, users, hours, start=0.0):
    """Each user reads an order of their own every few minutes; one answer in fifty fails."""
    events = []
    for user in range(users):
        own = rng.integers(0, 10_000, 3)
        time = start + rng.exponential(600)
        while time < start + hours * HOUR:
            status = 404 if rng.random() < 0.02 else 200
            order = int(rng.choice(own))
            events.append(read_order(time, f"u{user}", order, status, rng.lognormal(3, 0.3)))
            time += rng.exponential(300)
    return sorted(events, key=lambda event: event.time)


def read_order(time, user, order, status=200, duration=20.0):
    return Event(
        time,
        user,
        "GET /orders/{id}",
        ["path", "response.status", "response.bytes", "duration_ms"],
        [f"/orders/{order}", status, 500, duration],
        f"{user}:{time}",
    )


def table(level, surprise):
    """Bits (events, groups); 0 for a part that an event does not have."""
    bits = np.zeros((len(surprise.offsets) - 1, len(level.group_names())))
    rows = np.repeat(np.arange(len(bits)), np.diff(surprise.offsets))
    bits[rows, surprise.groups] = surprise.bits
    return bits


@pytest.fixture(scope="module")
def level():
    level = SeriesLevel(WatchSettings())
    level.fit(shop_events(np.random.default_rng(7), 30, 72))
    return level


def test_walking_over_ids_and_failed_guesses_are_unusual_columns(level):
    """Fails if many distinct ids, or many errors, of one entity in a minute do not stand out in
    the column that is theirs, or a usual hour does."""
    later = 73 * HOUR
    usual = shop_events(np.random.default_rng(8), 5, 3, start=later)
    quiet = table(level, level.score(usual, {}))
    names = list(level.group_names())

    walk = [read_order(later + i, "u3", 500 + i) for i in range(50)]
    states = {}
    bits = table(level, level.score(walk[:-1], states))[:, :-1]
    column = names.index("distinct path in a minute")
    assert bits[-1, column] > quiet[:, column].max() + 20
    assert bits[-1, names.index("errors in a minute")] < 5
    finding = level.explain(walk[-1], column, states["", "u3"])
    assert finding.kind == "series" and finding.observed == pytest.approx(50, rel=0.2)
    assert "u3: " in finding.text and "distinct path in a minute; usual" in finding.text

    guesses = [read_order(later + i, "u4", 7, status=401) for i in range(20)]
    bits = table(level, level.score(guesses, {}))
    assert bits[-1, names.index("errors in a minute")] > 20
    assert bits[-1, names.index("distinct path in a minute")] < 5


def test_entity_is_compared_with_its_own_past(level):
    """Fails if a program that is always busy stays unusual."""
    states = {}
    column = list(level.group_names()).index("events in a minute")
    busy = [read_order(80 * HOUR + 2.0 * i, "robot", i % 3) for i in range(3_000)]
    bits = table(level, level.score(busy, states))[:, column]
    assert bits[25] > 10
    assert bits[-100:].max() < 5


def test_batches_and_a_stored_level_give_the_same_bits(level):
    """Fails if state is lost between batches, something learned is not stored, or windows of
    endpoints depend on where batches end."""
    events = shop_events(np.random.default_rng(9), 20, 0.5, start=100 * HOUR)
    at_once = table(level, level.score(events, {}))
    windows = {event.time // 60 for event in events}
    assert len(windows) - 1 <= (at_once[:, -1] > 0).sum() <= len(windows)
    other, states, bits = stored(level), {}, []
    for event in events:
        bits.append(table(other, other.score([event], states))[0])
        states = {key: json.loads(json.dumps(state)) for key, state in states.items()}
    assert np.array(bits)[:, :-1].tolist() == at_once[:, :-1].tolist()

    other, series = stored(level), []
    for start in range(0, 70, 7):  # before the model of the endpoint learns
        batch = events[start : start + 7]
        series += table(other, other.score(batch, {}))[:, -1].tolist()
        other.update(batch)
    assert series == at_once[:70, -1].tolist()
    assert list(other.group_names()) == list(level.group_names())
    size = max(len(json.dumps(state)) for state in states.values())
    assert size < 3_000


def test_window_of_an_endpoint():
    """Fails if an endpoint that is slow, or fails, for everyone is not seen in its own series."""
    rng = np.random.default_rng(10)
    events = shop_events(rng, 30, 72)
    level = SeriesLevel(WatchSettings())
    level.fit(events)
    assert level.endpoints["", "GET /orders/{id}"].seconds == 60.0
    slow = shop_events(rng, 30, 1, start=72 * HOUR)
    for event in slow:
        if event.time > 72.5 * HOUR:
            event.values[-1] *= 10
    series = []
    for event in slow:
        series.append(table(level, level.score([event], {}))[0, -1])
        level.update([event])
    times, series = np.array([event.time for event in slow]), np.array(series)
    before = series[(times < 72.5 * HOUR) & (series > 0)]
    after = series[(times > 72.55 * HOUR) & (series > 0)]
    assert np.median(after) > before.max() + 10
    finding = level.explain(slow[np.flatnonzero(series)[-1]], len(level.group_names()) - 1, None)
    assert "GET /orders/{id} in the last 1 min: " in finding.text
    assert "time" in finding.path and finding.observed > 100


def test_errors_in_a_window_are_beta_binomial():
    """Fails if the tail, or the posterior mean after no errors, is not the exact one, or errors
    that come in bursts are as surprising as single ones."""
    for counts, errors, events in (([(0, 10)] * 100, 1, 10), ([(3, 10), (0, 9)] * 50, 6, 12)):
        share = ErrorShare()
        share.fit(counts)
        total = sum(n for _, n in counts)
        failed = sum(k for k, _ in counts)
        assert share.mean == pytest.approx((failed + 0.5) / (total + 1))
        spread = sum((k - n * share.mean) ** 2 for k, n in counts)
        spread -= total * share.mean * (1 - share.mean)
        pairs = sum(n * (n - 1) for _, n in counts) * share.mean * (1 - share.mean)
        known = 1 / max(spread / pairs, 1 / (total + 2)) - 1
        exact = betabinom(events, share.mean * known, (1 - share.mean) * known)
        assert share.bits(errors, events) == pytest.approx(-np.log2(exact.sf(errors - 1)))
        assert share.bits(0, events) == share.bits(0, 0) == 0
    single, bursts = ErrorShare(), ErrorShare()
    single.fit([(1, 20)] * 100)
    bursts.fit([(0, 20)] * 90 + [(10, 20)] * 10)
    assert single.bits(10, 20) > bursts.bits(10, 20) + 15
    for _ in range(10):
        single.update([(5, 20)] * 64)
    assert single.bits(6, 20) < 5


def quiet_endpoint(rng, hours):
    """A check every 6 s, whose bytes and time hardly vary, and which never fails."""
    times = np.arange(0, hours * HOUR, 6.0) + rng.random(int(hours * HOUR / 6))
    return [read_order(t, f"u{i % 5}", 1, 200, 20.0) for i, t in enumerate(times)]


def test_one_error_is_little_and_an_outage_is_one_finding():
    """Fails if a single error where there was none, or one check less, is an alarm; if 40 of 50
    errors are none; or if a window is charged to more than one event."""
    level = SeriesLevel(WatchSettings())
    level.fit(quiet_endpoint(np.random.default_rng(13), 3))
    assert level.endpoints["", "GET /orders/{id}"].seconds == 60.0
    end = 3 * HOUR

    def window_bits(failed, events):
        now = [
            read_order(end + 60 * i / events, f"u{i}", 1, 500 if i < failed else 200)
            for i in range(events)
        ]
        after = [read_order(end + 60 + i, f"v{i}", 1) for i in range(10)]
        fresh = stored(level)
        bits = table(fresh, fresh.score([*now, *after], {}))[:, -1]
        assert np.flatnonzero(bits[1:]).tolist() == [events - 1]  # after[0]; now[0] closes another
        assert table(fresh, fresh.score(after[:1], {}))[0, -1] == bits[events]
        assert len(fresh.score(after[1:2], {}).bits) == len(level.group_names()) - 1
        return bits[events]

    assert window_bits(0, 9) < 10
    assert window_bits(1, 10) < 15
    assert window_bits(40, 50) > 100
    assert window_bits(8, 10) > 40


def test_window_of_an_endpoint_before_a_pause_is_scored_after_it():
    """Fails if errors just before an endpoint falls silent are never charged, or a restart charges
    them a second time."""
    level = SeriesLevel(WatchSettings())
    level.fit(quiet_endpoint(np.random.default_rng(14), 3))
    end = 3 * HOUR
    failed = [read_order(end + i, "u", 1, 500) for i in range(10)]
    level.score(failed, {})
    level.update(failed)
    late = [read_order(end + 300.0 + i, "u", 1) for i in range(2)]
    bits = table(level, level.score(late, {}))[:, -1]
    assert bits[0] > 50 and bits[1] == 0
    assert (
        "share of errors 1 where" in level.explain(late[0], len(level.group_names()) - 1, {}).text
    )
    again = stored(level)
    assert table(again, again.score(late[1:], {}))[0, -1] == 0


def test_one_event_from_the_future_does_not_stop_time():
    """Fails if a wrong clock in one event leaves all later events in one window without an end."""
    rng = np.random.default_rng(12)
    level = SeriesLevel(WatchSettings())
    level.fit(shop_events(rng, 30, 72))
    names = list(level.group_names())
    future = [read_order(1e10, "u1", 1)]
    later = shop_events(rng, 30, 2, start=73 * HOUR)
    states = {}
    level.score(future, states)
    level.update(future)
    bits = []
    for start in range(0, len(later), 16):
        bits.append(table(level, level.score(later[start : start + 16], states)))
        level.update(later[start : start + 16])
    rows = np.concatenate(bits)
    assert rows[:, names.index("events in a minute")].max() < 20
    windows = {event.time // 60 for event in later[-300:]}
    closed = (rows[-300:, -1] > 0).sum()
    assert closed > 0.9 * len(windows)  # windows of the endpoint are closed and scored


def test_little_data_and_odd_events():
    """Fails if too few events, missing entities, or a clock that goes back raise."""
    for learned in ([], [read_order(0.0, "u", 1)], shop_events(np.random.default_rng(11), 2, 1)):
        level = SeriesLevel(WatchSettings())
        level.fit(learned)
        odd = [read_order(50.0, "", 1), read_order(-5.0, "u", 2), read_order(20.0, "u", 3)]
        surprise = level.score(odd, {})
        assert np.isfinite(surprise.bits).all() and (surprise.bits >= 0).all()
        level.update(odd)
        assert level.explain(odd[0], len(level.group_names()) - 1, None).bits == 0
    assert choose_window(10_000, 3 * DAY) == 300.0
    assert choose_window(10, 3 * DAY) is None
    assert choose_window(10_000, 60.0) is None
