"""Users of `regard watch`: embeddings, the measured metric, clusters, drift and new shapes."""

import json
import random

import numpy as np
import pytest

from regard.watch.detector import ScoredEvent
from regard.watch.event import Event
from regard.watch.follow.store import Shape
from regard.watch.leaves.schema import EndpointSchema
from regard.watch.settings import WatchSettings
from regard.watch.users import UserLevel
from regard.watch.users.clusters import UserClusters
from regard.watch.users.drift import DriftMonitor
from regard.watch.users.features import UserFeatures
from regard.watch.users.metrics import choose_metric, same_user_comparisons
from regard.watch.users.shapes import MAX_SHAPES, ShapeMonitor, describe_shape

ENDPOINTS = [f"GET /{name}" for name in "abcdefgh"]


def make_event(i, user, endpoint, country="DE", time=None):
    paths = ["request.country", "request.id", "response.bytes"]
    values = [country, f"id-{i}", 100 + i % 50]
    return Event(1e9 + 60 * i if time is None else time, user, endpoint, paths, values, f"x:{i}")


def make_events(users=40, each=60, seed=0):
    """Two groups of users with other endpoints; a user has a country of its own choice."""
    rng, events = random.Random(seed), []
    for i in range(users * each):
        user = rng.randrange(users)
        half = ENDPOINTS[:4] if user % 2 else ENDPOINTS[4:]
        country = ["DE", "FR", "US", "NL"][user // 2 % 4]
        events.append(make_event(i, f"u{user}", rng.choice(half), country))
    return events


@pytest.fixture(scope="module")
def level():
    level = UserLevel(WatchSettings())
    level.fit(make_events())
    return level


def score(level, events, states):
    """Bits by event and group; None for a part that an event does not have."""
    surprise = level.score(events, states)
    names = level.group_names()
    rows = []
    for start, end in zip(surprise.offsets[:-1], surprise.offsets[1:], strict=True):
        groups, bits = surprise.groups[start:end], surprise.bits[start:end]
        rows.append({names[g]: b for g, b in zip(groups, bits, strict=True)})
    return rows


def test_same_user_comparisons_by_hand():
    """Fails if the AUC is not the share of other users that are farther away than oneself."""
    first = np.array([[0.0], [1.0], [5.0]])
    second = np.array([[0.4], [0.2], [5.0]])
    # user 0: own .4, others .2 and 5; user 1: own .8, others .6 and 4; user 2: own 0, others more
    assert same_user_comparisons(first, second).tolist() == [0.5, 0.5, 1.0]
    assert same_user_comparisons(np.zeros((3, 2)), np.zeros((3, 2))).tolist() == [0.5] * 3


def test_metric_is_chosen_by_what_tells_users_apart(level):
    """Fails if a metric that sees the country does not win where only the country differs, or the
    baseline gives way to one that is no better."""
    assert level.metric.name != "hellinger_endpoints"
    names = {each.name: each for each in level.metric_scores}
    assert names[level.metric.name].gain > 0.1 and names["hellinger_endpoints"].gain == 0
    assert any("<- chosen" in line and level.metric.name in line for line in level.report())
    features = UserFeatures()
    features.fit(make_events(4))
    noise = np.random.default_rng(0).random((2, 60, features.size))
    metric, scores = choose_metric(noise[0], noise[1], features, seed=0)
    assert metric.name == "hellinger_endpoints" and len(scores) == 5
    metric, scores = choose_metric(noise[0, :5], noise[1, :5], features, seed=0)
    assert metric.name == "hellinger_endpoints" and scores == []


def test_features_leave_out_identifiers(level):
    """Fails if a value that only one user has says who it is, or a number is taken as a name."""
    names = [name for name, _ in level.features.blocks]
    assert "request.country" in names and "request.id" not in names
    labels = dict(level.features.blocks)
    assert labels.get("response.bytes", ["quartile 1"])[0].startswith("quartile")


def test_habit_and_move_are_surprising(level):
    """Fails if a user's token from another country is not surprising at its first event, a change
    of what a user does is not at some later one, or someone else's is."""
    states = {}
    for event in make_events(seed=1):
        level.score([event], states)
    usual = [make_event(i, "u0", ENDPOINTS[4 + i % 4], "DE") for i in range(5000, 5010)]
    stolen = make_event(5010, "u0", ENDPOINTS[4], "US")
    bits = score(level, usual, states)
    assert max(row["habit: request.country"] for row in bits) < 0.3
    before = dict(states)
    (row,) = score(level, [stolen], dict(states))
    assert row["habit: request.country"] > 5
    part = [*row].index("habit: request.country")
    finding = level.explain(stolen, part, before["", "u0"])
    assert (finding.kind, finding.path, finding.observed) == ("habit", "request.country", "US")
    assert finding.expected[0][0] == "DE" and finding.bits == row["habit: request.country"]

    others = [make_event(i, "u0", ENDPOINTS[i % 4], "US") for i in range(6000, 6060)]
    rows = score(level, others, states)
    assert rows[40]["move between clusters"] > 8 * max(b["move between clusters"] for b in bits)
    finding = level.explain(others[-1], 0, states["", "u0"])
    assert finding.kind == "cluster" and "usually like cluster" in finding.text


def test_batches_are_as_good_as_single_events(level):
    """Fails if what is scored depends on how events are cut into batches, or an event without an
    entity has a part."""
    events = [*make_events(5, 12, seed=2), make_event(99, "", ENDPOINTS[0])]
    one, all_at_once = {}, {}
    single = [row for event in events for row in score(level, [event], one)]
    batch = score(level, events, all_at_once)
    assert single[-1] == batch[-1] == {} and ("", "") not in one
    for a, b in zip(single, batch, strict=True):
        assert a.keys() == b.keys() and np.allclose([*a.values()], [*b.values()], atol=1e-5)
    assert one.keys() == all_at_once.keys()


def test_level_is_the_same_after_saving(level):
    """Fails if a level that was read scores otherwise, or its state is no JSON."""
    content = json.loads(json.dumps(level.to_json()))
    again = UserLevel.from_json(content, {k: v.copy() for k, v in level.tensors().items()})
    states, other = {}, {}
    events = make_events(5, 30, seed=3)
    assert score(level, events, states) == score(again, events, other)
    assert json.loads(json.dumps(list(states.values()))) == list(other.values())
    assert level.places(states) == again.places(other)


def test_no_users():
    """Fails if traffic without entities, or with few, cannot be learned."""
    for events in ([make_event(0, "", "GET /a")], make_events(2, 5), []):
        level = UserLevel(WatchSettings())
        level.fit(events)
        level.score(make_events(3, 30), {})
        assert level.metric.name == "hellinger_endpoints" and "not measured" in level.report()[0]


def test_centres_follow_slowly(level):
    """Fails if centres do not follow normal users, or jump."""
    clusters = UserClusters(np.zeros((1, 2)), np.array([10.0]), 1.0, {})
    for _ in range(30):
        clusters.update(np.array([[1.0, 0.0]]))
    assert clusters.centres[0].tolist() == pytest.approx([0.75, 0.0])
    clusters = UserClusters.fit(np.random.default_rng(0).normal(size=(200, 8)), seed=0)
    assert len(clusters.centres) == 1  # one cloud


# ----------------------------------------------------------------------------------------- drift
def scored(i, p, endpoint="GET /a"):
    return ScoredEvent(make_event(i, "u", endpoint), p, False, "normal")


def test_drift_is_found_once():
    """Fails if ADWIN misses a change, or reports one where there is none."""
    rng, monitor = np.random.default_rng(0), DriftMonitor()
    p = rng.random(4000)
    assert monitor.add([scored(i, each) for i, each in enumerate(p)]) == []
    drifts = monitor.add([scored(i, each / 16) for i, each in enumerate(p[:1000], 4000)])
    assert 1 <= len(drifts) <= 3 and drifts[0].endpoint == "GET /a"
    assert 1.2 < drifts[0].before < 1.8 and drifts[0].after - drifts[0].before > 1
    quiet = monitor.add([scored(i, each, "GET /b") for i, each in enumerate(p)])
    assert quiet == []


# ---------------------------------------------------------------------------------------- shapes
def schema(events, **presence):
    contexts = {path: i for i, path in enumerate(presence)}
    return EndpointSchema(events, contexts, {contexts[path]: n for path, n in presence.items()})


def shaped(i, user, endpoint, *paths):
    return Event(float(i), user, endpoint, list(paths), ["x"] * len(paths), f"x:{i}")


def test_shapes_are_counted_until_accepted():
    """Fails if a new key is not reported, is reported as several shapes, or stays new once it was
    accepted; if a missing key is not found; if a new endpoint has no time to learn."""
    known = {("", "GET /a"): schema(500, a=500, b=500, c=3), ("", "GET /b"): schema(9, a=9)}
    monitor = ShapeMonitor(known, learning_events=2)
    events = [shaped(i, f"u{i % 3}", "GET /a", "a", "b", "new") for i in range(7)]
    events += [shaped(8, "u", "GET /a", "b"), shaped(9, "u", "GET /a", "a", "b", "c")]
    events += [shaped(10, "u", "GET /b", "a"), shaped(11, "u", "GET /b", "x")]
    counted, ids = monitor.add(events)
    texts = {describe_shape(each.shape): each for each in counted.values()}
    assert set(texts) == {
        "GET /a: new key new (string)",
        "GET /a: without a",
        "GET /b: new key x (string)",
    }
    new = texts["GET /a: new key new (string)"]
    assert (new.shape.events, len(new.entities), new.shape.example) == (7, 3, "x:0")
    assert ids[0] == new.shape.id and ids[8] is ids[9] is None

    monitor.accept(new.shape)
    assert monitor.add(events[:7]) == ({}, [None] * 7)
    again = ShapeMonitor(known, learning_events=2, reported=[_accepted(new.shape)])
    assert again.add(events[:7])[0] == {}

    fresh = [shaped(i, "u", "PUT /c", "a", f"k{i}") for i in range(5)]
    counted, ids = monitor.add(fresh)
    assert next(describe_shape(each.shape) for each in counted.values()) == "PUT /c: new endpoint"
    assert ids[1] is None and ids[2] is not None  # it learns from two events


def _accepted(shape):
    return Shape(**(vars(shape) | {"status": "accepted"}))


def test_shapes_are_bounded():
    """Fails if random keys or random endpoints make the list of shapes grow for ever."""
    monitor = ShapeMonitor({("", "GET /a"): schema(500, a=500)}, learning_events=0)
    counted, _ = monitor.add(shaped(i, "u", "GET /a", "a", f"k{i}") for i in range(1000))
    assert len(counted) == MAX_SHAPES + 1
    counted, _ = monitor.add(shaped(i, "u", f"GET /{i}", "a") for i in range(3000))
    assert len(counted) < 1000
