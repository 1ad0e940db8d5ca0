"""The networks of `regard watch`: proper probabilities, masks that hide, states that are the same
in any batch, and floors that stay where a network does not help."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from regard.errors import Unsupported
from regard.models import ModelConfig, build
from regard.models.spec import ModuleSpec
from regard.tasks import IGNORE_INDEX, create_task
from regard.tasks.event_splits import split_by_time
from regard.tasks.masked_leaves import OtherLeafModel
from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.learning import learn_detector
from regard.watch.leaves import LeafLevel
from regard.watch.level import Surprise
from regard.watch.network import (
    NetworkSettings,
    fit_network_levels,
    load_network_level,
    parse_mixers,
)
from regard.watch.network.cascade import Cascade
from regard.watch.network.cell_frequencies import CellFrequencies
from regard.watch.network.leaf_network import LeafNetwork
from regard.watch.network.leaf_vocabulary import (
    ENDPOINT,
    MASK,
    TENANT_END,
    WIDTH,
    LeafVocabulary,
)
from regard.watch.network.mixture import fit_weights, measure_gain, saved_bits
from regard.watch.network.sequence_network import SequenceNetwork
from regard.watch.network.stream_states import StreamStateCodec
from regard.watch.sequences import SequenceLevel
from regard.watch.settings import WatchSettings

ORDERS = {"entity": "user", "endpoint": "method path", "time": "time"}
COUNTRIES = {"anna": "DE", "ben": "FR", "cleo": "ES"}
ROUND = ("GET /cart", "POST /cart", "POST /pay", "GET /orders")  # each user goes round
SMALL = NetworkSettings(dim=16, heads=2, layers=1, steps=120, batch_size=16, lr=5e-3, window=8)


def orders(count, seed=0):
    """JSON events of three users who go round; the country follows from the user, and the total
    from nothing."""
    rng, place = random.Random(seed), dict.fromkeys(COUNTRIES, 0)
    for number in range(count):
        user = rng.choice(list(COUNTRIES))
        method, path = ROUND[place[user] % len(ROUND)].split()
        place[user] += 1
        yield {
            "time": f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z",
            "user": user,
            "method": method,
            "path": path,
            "country": COUNTRIES[user],
            "total": round(rng.lognormvariate(3, 1), 2),
            "id": f"{rng.getrandbits(40):x}",
        }


def write_orders(path):
    """A JSON lines file of `orders`."""
    path.write_text("".join(json.dumps(order) + "\n" for order in orders(60)))
    return path


def write_steps(path):
    """A CSV file with two waves."""
    rows = [f"{math.sin(i / 3):.4f},{math.cos(i / 5):.4f}" for i in range(200)]
    path.write_text("\n".join(["a,b", *rows]))
    return path


def to_events(contents):
    """Events of JSON objects."""
    events = []
    for number, content in enumerate(contents):
        endpoint = f"{content['method']} {content['path']}"
        paths, values = list(content), list(content.values())
        time = 1_767_225_600.0 + number
        events.append(Event(time, content["user"], endpoint, paths, values, f"a.jsonl:{number}"))
    return events


@pytest.fixture(scope="module")
def events():
    return to_events(orders(900))


@pytest.fixture(scope="module")
def leaf(events):
    floor = LeafLevel(WatchSettings())
    floor.fit(events)
    level = LeafNetwork(floor, SMALL.model_copy(update={"cascade": 1.0}))
    level.fit_network(events)
    return level


def fit_sequence(events, mixer):
    """A trained network of events."""
    floor = SequenceLevel(WatchSettings(order=1))
    floor.fit(events)
    level = SequenceNetwork(floor, SMALL.model_copy(update={"mixer": ModuleSpec(name=mixer)}))
    level.fit_network(events)
    return level


# --------------------------------------------------------------------------------- vocabulary
def test_cells_partition_the_values_of_a_path(events):
    """Fails if a value has no cell, or shares that of another frequent value."""
    vocabulary = LeafVocabulary.learn(events)
    cells = {value: vocabulary.cell_of("country", value, 0.0) for value in COUNTRIES.values()}
    other = vocabulary.cell_of("country", "XX", 0.0)
    assert len({*cells.values(), other}) == 4
    assert {vocabulary.describe_cell(cell) for cell in cells.values()} == set(COUNTRIES.values())
    assert vocabulary.describe_cell(other) == "another value"
    numbers = [vocabulary.cell_of("total", x, 0.0) for x in (-1e9, 8, 20.1, 40, 1e12, math.inf)]
    assert numbers == sorted(numbers) and len(set(numbers)) >= 4
    assert vocabulary.cell_of("total", 10**400, 0.0) == numbers[-1]
    different = [vocabulary.cell_of("total", value, 0.0) for value in (True, "5", None)]
    assert set(different) == {vocabulary.cell_of("total", "x", 0.0)}
    assert vocabulary.cell_of("nowhere", 1, 0.0) == -1
    for path, cells_of in zip(vocabulary.paths, vocabulary.cells, strict=True):
        assert cells_of.size == (vocabulary.cell_path == vocabulary.path_index[path]).sum()


def test_times_are_gaps_to_the_event(events):
    """Fails if a time that is never the same is predicted as a text."""
    vocabulary = LeafVocabulary.learn(events)
    known = vocabulary.cells[vocabulary.path_index["time"]]
    event = events[5]
    here = vocabulary.cell_of("time", event.values[0], event.time)
    assert known.is_time and not known.values
    assert here != vocabulary.cell_of("time", event.values[0], event.time - 86_400)


def test_encoding_is_sorted_and_the_order_of_keys_does_not_matter(events):
    """Fails if the network could see in which order a producer writes its keys."""
    vocabulary = LeafVocabulary.learn(events)
    event = events[0]
    turned = Event(
        event.time, event.entity, event.endpoint, event.paths[::-1], event.values[::-1], "b"
    )
    one, other = (vocabulary.encode([each], 64) for each in (event, turned))
    assert np.array_equal(one.rows, other.rows) and np.array_equal(one.cells, other.cells)
    assert one.leaves[0] == -1  # the endpoint
    assert [event.paths[i] for i in one.leaves[1:]] == sorted(event.paths)
    short = vocabulary.encode([event], 3)
    assert len(short.rows) == 3 and np.array_equal(short.rows, one.rows[:3])
    hidden = vocabulary.features[one.masked_rows[1:]]
    assert (hidden[:, 5] == MASK).all() and not hidden[:, 6:].any()


def test_vocabulary_survives_its_memo_and_json(events):
    """Fails if features change when the memo is full, or when the vocabulary was saved."""
    vocabulary = LeafVocabulary.learn(events)

    def features(vocabulary):
        rows = vocabulary.encode(events[:5], 64).rows
        return vocabulary.features[rows]

    before = features(vocabulary)
    vocabulary._rows = 1 << 20
    after = features(vocabulary)
    loaded = LeafVocabulary.from_json(json.loads(json.dumps(vocabulary.to_json())))
    saved = features(loaded)
    assert vocabulary.memo_number == 1
    assert np.array_equal(before, after) and np.array_equal(before, saved)
    assert before.shape[1] == WIDTH and (ENDPOINT, events[0].endpoint) in loaded._memo


def test_frequencies_sum_to_one_at_every_endpoint(events):
    """Fails if the floor of the cells is no probability."""
    vocabulary = LeafVocabulary.learn(events)
    leaves = vocabulary.encode(events, 64)
    vocabulary.count_cells(leaves)
    frequencies = CellFrequencies.learn(vocabulary, events, leaves)
    cells = np.arange(len(vocabulary.cell_path))
    for endpoint in (-1, 0, 3):
        p = frequencies.of_cells(np.full(len(cells), endpoint), cells)
        totals = np.bincount(vocabulary.cell_path, p)
        assert np.allclose(totals, 1) and (p > 0).all()
    index = frequencies.endpoint_index["POST /pay"]
    path_cell = vocabulary.cell_of("path", "/pay", 0.0)
    of_pay = frequencies.of_cells(np.array([index, -1]), np.array([path_cell, path_cell]))
    assert of_pay[0] > 0.98 and of_pay[1] < 0.4


# ------------------------------------------------------------------------------ mixture, cascade
def test_weights_are_the_maximum_of_the_likelihood():
    """Fails if expectation maximisation stops elsewhere, or a useless network gets a weight."""
    rng = np.random.default_rng(0)
    ratios = np.concatenate((rng.lognormal(0.5, 1, 400), np.full(400, 0.3), np.ones(4)))
    groups = np.repeat([0, 1, 2], [400, 400, 4])
    weights = fit_weights(groups, ratios, 4)
    grid = np.linspace(0, 0.999, 1000)[:, None]
    best = saved_bits(grid, ratios[:400]).sum(1).max()
    assert best > 50 and saved_bits(weights[0], ratios[:400]).sum() > best - 0.5
    assert weights[1] == 0
    assert weights[2] == weights[3]  # too few: the weight of all
    saved = saved_bits(weights[groups], ratios)
    assert saved[:400].sum() > 0 and not saved[400:800].any()


def test_gain_needs_to_be_certain():
    """Fails if a gain that could be chance counts."""
    owner, floor = np.arange(50), np.full(50, 10.0)
    noisy = measure_gain(owner, floor, np.where(owner == 0, 100.0, -1.0), 50)
    steady = measure_gain(owner, floor, np.full(50, 1.0), 50)
    assert noisy.saved > 0.9 and noisy.suffices(0.02)
    assert not steady.suffices(0.02) and steady.suffices(0.2)


def test_cascade_selects_its_share_whatever_the_batch():
    """Fails if the share is wrong, if groups differ in what is unusual, or if the selection
    depends on the other events of a batch."""
    rng = np.random.default_rng(0)
    events = [Event(0.0, "", "", [], [], f"s:{i}") for i in range(2000)]
    groups = np.tile([0, 1], 2000).astype(np.int32)
    bits = np.where(groups == 0, rng.normal(size=4000), rng.normal(50, 10, size=4000))
    surprise = Surprise(np.arange(0, 4001, 2), groups, bits)
    cascade = Cascade.fit(surprise, 0.15, 0.0)
    chosen = cascade.select(surprise, events)
    assert 0.13 * 2000 < len(chosen) <= 0.15 * 2000
    unusual = bits > cascade.thresholds[groups]
    assert abs(unusual[0::2].sum() - unusual[1::2].sum()) < 20
    one = [
        len(cascade.select(Surprise(np.array([0, 2]), groups[:2], bits[2 * i : 2 * i + 2]), [e]))
        for i, e in enumerate(events)
    ]
    assert np.array_equal(np.flatnonzero(one), chosen)
    audited = Cascade(np.full(2, np.inf), np.inf, 0.0, 0.1).select(surprise, events)
    assert 120 < len(audited) < 280
    drifted = surprise._replace(bits=bits + 5)
    assert len(cascade.select(drifted, events)) > 1000
    for _ in range(3):
        cascade.learn(drifted)
    assert 0.13 * 2000 < len(cascade.select(drifted, events)) <= 0.15 * 2000
    cascade = Cascade.fit(surprise, 0.15, 0.0)
    loaded = Cascade.from_json(json.loads(json.dumps(cascade.to_json())))
    new_group = Surprise(np.array([0, 1]), np.array([9], dtype=np.int32), np.array([1e9]))
    assert np.array_equal(loaded.select(surprise, events), chosen)
    assert len(loaded.select(new_group, events[:1])) == 1


# ------------------------------------------------------------------------------------- leaves
def test_a_leaf_does_not_see_itself(leaf, events):
    """Fails if the network reads the value that it predicts."""
    event = events[700]
    at = event.paths.index("country")
    rows = []
    for value in ("DE", "FR", "never seen"):
        values = [value if i == at else each for i, each in enumerate(event.values)]
        changed = Event(event.time, event.entity, event.endpoint, event.paths, values, "x")
        encoded = leaf.vocabulary.encode([changed], 64)
        place = int(np.flatnonzero(encoded.leaves == at)[0])
        rows.append(leaf.scorer.cell_distribution(encoded, place))
    assert np.allclose(rows[0], rows[1]) and np.allclose(rows[0], rows[2])
    assert math.isclose(rows[0].sum(), 1, rel_tol=1e-6)


def test_scores_equal_the_task_and_any_batch(leaf, events):
    """Fails if scoring and training disagree on what is hidden, or padding has an influence."""
    task = create_task("masked_leaves", data=split_by_time(events, "events"), seed=SMALL.seed)
    test = list(task.events["test"])
    long = [*test[:5], Event(0.0, "", "?", ["a"] * 20, ["b"] * 20, "y")]
    alone = np.concatenate([leaf.score([event], {}).bits for event in long])
    assert np.allclose(leaf.score(long, {}).bits, alone, atol=1e-4)
    indices = list(range(task.size("test")))
    model = leaf.scorer.model
    batch = task.batch("test", indices)
    with torch.no_grad():
        statistics = task.metric.update(model(**batch.inputs), batch, [])
    encoded = leaf.vocabulary.encode(test, task.length)
    bits = -leaf.scorer.log_probabilities(encoded)
    assert math.isclose(statistics[:, 0].sum(), bits.sum(), rel_tol=1e-4)
    assert statistics[:, 1].sum() == (encoded.cells >= 0).sum()


def test_leaf_network_finds_what_belongs_together(leaf, events):
    """Fails if a country that is frequent, but not that of the user, is as probable as before; or
    if the explanation does not name the right one."""
    event = next(event for event in events[800:] if event.entity == "anna")
    at = event.paths.index("country")
    values = ["ES" if i == at else each for i, each in enumerate(event.values)]
    wrong = Event(event.time, "anna", event.endpoint, event.paths, values, "z")
    mixed, floor = leaf.score([event, wrong], {}), leaf.floor.score([event, wrong], {})
    first = len(mixed.bits) // 2 - len(event.paths) + at
    second = len(mixed.bits) - len(event.paths) + at
    assert mixed.bits[first] < floor.bits[first] - 1
    assert mixed.bits[second] > floor.bits[second] + 2
    part = first
    finding = leaf.explain(wrong, part, None)
    assert finding.expected[0][0] == "DE" and finding.expected[0][1] > 0.8
    assert math.isclose(finding.bits, mixed.bits[second], abs_tol=1e-3)
    assert leaf.gain.saved > 0 and not leaf.gain.suffices(0.02)


def test_leaf_network_is_saved(leaf, events):
    """Fails if a saved network scores differently, or weights of another shape are taken."""
    content = json.loads(json.dumps(leaf.to_json()))
    tensors = leaf.tensors()
    loaded = load_network_level("leaf", content, tensors)
    assert np.allclose(loaded.score(events[:50], {}).bits, leaf.score(events[:50], {}).bits)
    name = next(name for name in tensors if name.endswith("head.out.weight"))
    with pytest.raises(ValueError, match="does not fit the model"):
        load_network_level("leaf", content, {**tensors, name: tensors[name][:2]})
    assert load_network_level("leaf", content["floor"], tensors) is None


def test_hashed_values_and_tenants_stay_apart(events):
    """Fails if a string is stored although values are to be hashed, or if the values of one tenant
    are expected of another."""
    floor = LeafLevel(WatchSettings(hash_values=True))
    floor.secret = b"key"
    tenants = [
        replace(event, tenant=f"t{i % 2}", values=[f"{i % 2}-{value}" for value in event.values])
        for i, event in enumerate(events[:300])
    ]
    floor.fit(tenants)
    level = LeafNetwork(floor, SMALL.model_copy(update={"steps": 5, "cascade": 1.0}))
    level.fit_network(tenants)
    text = json.dumps(level.to_json()["vocabulary"])
    assert "anna" not in text and "hash:" in text
    paths = {path.partition(TENANT_END)[0] for path in level.vocabulary.paths}
    assert paths == {"t0", "t1"}
    country = tenants[0].paths.index("country")
    level.weights[:] = 0.5
    part = len(level.score(tenants[:1], {}).bits) - len(tenants[0].paths) + country
    expected = [value for value, _ in level.explain(tenants[0], part, None).expected]
    assert all(value == "another value" or value.startswith("hash:") for value in expected)
    own = level.vocabulary.cells[level.vocabulary.path_index[f"t0{TENANT_END}country"]]
    assert len(own.values) == 3


def test_mixers_without_masks_read_events_of_different_lengths(events):
    """Fails if a mixer that takes no mask sees other events of a batch."""
    short = [
        Event(e.time, e.entity, e.endpoint, e.paths[:5], e.values[:5], e.source) if i % 2 else e
        for i, e in enumerate(events[:400])
    ]
    floor = LeafLevel(WatchSettings())
    floor.fit(short)
    settings = {"mixer": ModuleSpec(name="fnet"), "steps": 5, "cascade": 1.0}
    level = LeafNetwork(floor, SMALL.model_copy(update=settings))
    level.fit_network(short)
    level.weights[:] = 0.5
    alone = np.concatenate([level.score([event], {}).bits for event in short[:6]])
    assert np.allclose(level.score(short[:6], {}).bits, alone, atol=1e-4)


# ------------------------------------------------------------------------------------ sequences
@pytest.mark.parametrize("mixer", ["linear", "vanilla"])
def test_states_are_the_same_in_any_batch(events, mixer):
    """Fails if a score depends on the micro-batch, or on whether states were stored as text."""
    level = fit_sequence(events, mixer)
    assert level.scorer.streams == (mixer == "linear")
    level.weights[:] = 0.5
    if mixer == "vanilla":
        assert "grows" in level.window_reason
        level.cascade = Cascade(np.full(3, -np.inf), -np.inf, 1.0, 0.0)
    test = events[800:]
    together, states = level.score(test, {}), {}
    pieces = []
    for start in range(0, len(test), 7):
        pieces.append(level.score(test[start : start + 7], states).bits)
        states = {key: json.loads(json.dumps(state)) for key, state in states.items()}
    assert np.allclose(np.concatenate(pieces), together.bits, atol=1e-4)
    assert all(len(json.dumps(state)) < 20_000 for state in states.values())
    loaded = load_network_level(
        "sequence", json.loads(json.dumps(level.to_json())), level.tensors()
    )
    assert np.allclose(loaded.score(test, {}).bits, together.bits, atol=1e-4)


@pytest.mark.parametrize("mixer", ["average_pool", "hard_gaussian", "dynamic_conv", "local"])
def test_stream_states_survive_json(mixer):
    """Fails if a state is not the same after JSON, which some mixers keep as arrays or windows; or
    if what is no state is accepted."""
    spec = {"name": mixer, "arguments": {"window": 4} if mixer == "local" else {}}
    model = build(
        ModelConfig(
            kind="decoder",
            input={"kind": "features", "num_features": 50, "features_per_token": 3},
            head={"kind": "token_classification", "num_classes": 5},
            dim=16,
            heads=2,
            layers=2,
            mixer=spec,
            position="none",
        )
    ).eval()
    codec = StreamStateCodec(model, 3)
    assert codec.reason is None
    x = torch.randint(1, 50, (1, 3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = model.stream(x[..., :5])
        loaded = codec.decode(json.loads(json.dumps(codec.encode(state))))
        one, other = (model.stream(x[..., 5:], each)[0] for each in (state, loaded))
    assert torch.equal(one, other)
    for wrong in (
        {"structure": ["eval", []], "tensors": ""},
        {},
        {"structure": 1, "tensors": "??"},
    ):
        with pytest.raises(ValueError, match="not the state of an entity"):
            codec.decode(wrong)


def test_sequence_network_knows_the_round(events):
    """Fails if the mixture is no probability, if the next endpoint is not learned, or if states
    that the caller holds are changed."""
    level = fit_sequence(events, "delta_rule")
    states = {}
    level.score(events[:700], states)
    event = next(e for e in events[700:] if e.entity == "anna")
    key = ("", "anna")
    before = json.dumps(states[key])
    total = 0.0
    for endpoint in ROUND:
        other = Event(event.time, "anna", endpoint, event.paths, event.values, "q")
        total += 2.0 ** -level.score([other], dict(states)).bits[0]
    new = Event(event.time, "anna", "GET /new", event.paths, event.values, "q")
    assert 0.9 < total < 1.001 and level.score([new], dict(states)).bits[0] > 3
    assert json.dumps(states[key]) == before
    finding = level.explain(event, 0, states[key])
    assert finding.expected[0][0] == event.endpoint and finding.expected[0][1] > 0.5
    assert level.explain(event, 2, states[key]).kind == "session"
    nobody = Event(event.time, "", event.endpoint, event.paths, event.values, "q")
    assert level.score([nobody], states).bits[0] == level.floor.score([nobody], {}).bits[0]


# ---------------------------------------------------------------------------------------- fitting
def test_networks_are_kept_where_they_help(events):
    """Fails if a network stays that saves nothing, or a mixer that does not fit ends the learning
    although nobody asked for it at that level."""
    rng = random.Random(1)
    noise = [
        Event(e.time, e.entity, rng.choice(ROUND), ["x"], [rng.randrange(5)], e.source)
        for e in events
    ]
    floors = [LeafLevel(WatchSettings()), SequenceLevel(WatchSettings())]
    for floor in floors:
        floor.fit(noise)
    steps = Counter()
    levels, reports = fit_network_levels(
        floors,
        noise,
        SMALL.model_copy(update={"steps": 30}),
        on_progress=lambda stage, done, total: steps.update([stage]),
    )
    assert levels == floors and not any(report.kept for report in reports)
    assert all("The floor suffices" in report.reason for report in reports)
    assert steps == {"network of the level leaf": 30, "network of the level sequence": 30}
    fnet = SMALL.model_copy(update={"mixer": ModuleSpec(name="fnet"), "steps": 5})
    levels, reports = fit_network_levels(floors, noise, fnet)
    assert levels[1] is floors[1] and "does not support causal=True" in reports[1].reason
    by_name = fnet.model_copy(update={"mixers": {"sequence": ModuleSpec(name="fnet")}})
    with pytest.raises(Unsupported, match="causal"):
        fit_network_levels(floors[1:], noise, by_name)
    for changes, message in (
        ({"mixer": ModuleSpec(name="vanila")}, "did you mean 'vanilla'"),
        ({"mixers": {"leav": ModuleSpec(name="linear")}}, "did you mean 'leaf'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_network_levels(floors, noise, SMALL.model_copy(update=changes))
    few, reports = fit_network_levels(floors, noise[:5], SMALL)
    assert few == floors and "10 are needed" in reports[0].reason


def test_mixers_are_named_by_level():
    """Fails if an argument of a recipe is taken for a level, or a wrong text is accepted."""
    found = parse_mixers("local:window=16, sequence=delta_rule:chunk=4")
    assert found["mixer"] == ModuleSpec(name="local", arguments={"window": 16})
    assert found["mixers"] == {"sequence": ModuleSpec(name="delta_rule", arguments={"chunk": 4})}
    for wrong in ("", "linear,performer", "=linear", "leaf=", "local:window"):
        with pytest.raises(ValueError, match="Write a mixer as"):
            parse_mixers(wrong)


def test_a_detector_learns_with_networks(events, tmp_path, monkeypatch):
    """Fails if `learn` drops its networks, does not say what they save, or loads them as floors."""
    small = partial(NetworkSettings, **SMALL.model_dump(exclude={"mixer", "mixers", "seed"}))
    monkeypatch.setattr("regard.watch.network.NetworkSettings", small)
    settings = WatchSettings(levels=("leaf", "sequence"), mixer="average,leaf=linear")
    detector, report = learn_detector(events, settings)
    assert report.levels["leaf"]["network"].startswith("linear, ")
    assert report.levels["sequence"]["network"].startswith("average, ")
    assert isinstance(detector.levels[0], LeafNetwork)
    detector.save(tmp_path / "a.watch")
    loaded = Detector.load(tmp_path / "a.watch")
    one, other = (
        [each.p for each in d.score(events[-40:], d.initial_states())] for d in (detector, loaded)
    )
    assert np.allclose(one, other)


def test_training_is_reproducible(events):
    """Fails if the same seed gives other weights."""
    one, other = (fit_sequence(events[:300], "average") for _ in range(2))
    assert all(np.array_equal(one.tensors()[n], other.tensors()[n]) for n in one.tensors())


# ------------------------------------------------------------------------------------------ tasks
def test_masked_leaves_hides_every_leaf_once(events):
    """Fails if a leaf of a test event is never predicted, or twice."""
    task = create_task("masked_leaves", data=split_by_time(events, "events"))
    counted = Counter()
    for index in range(4 * task.groups):
        labels = task.example("test", index).targets["labels"]
        counted[index // task.groups] += int((labels != IGNORE_INDEX).sum())
    assert set(counted.values()) == {7}
    padded = create_task(
        "masked_leaves", data=split_by_time(events, "events"), padding="tokens", length=16
    )
    assert padded.batch("test", range(9)).inputs["mask"] is None


def test_baselines_of_masked_leaves(events):
    """Fails if the best other leaf does not find that the country follows from the user."""
    task = create_task("masked_leaves", data=split_by_time(events, "events"))
    indices = range(task.size("test"))
    bits = {n: task.metric.compute(b(list(indices))) for n, b in task.baselines().items()}
    assert bits["best other leaf"] < bits["frequencies at the endpoint"] - 0.2
    model = OtherLeafModel(task)
    country, user = (task.vocabulary.path_index[name] for name in ("country", "user"))
    assert model.candidates[country][0] == user


def test_next_event_baselines_and_first_events(events):
    """Fails if first events are measured, or a Markov model does not learn the round."""
    task = create_task("next_event", data=split_by_time(events, "events"), length=8)
    assert sum(not history.context for history in task.histories["train"]) == 3
    start = next(i for i, each in enumerate(task.histories["train"]) if not each.context)
    example = task.example("train", start)
    assert example.targets["next"][0] == IGNORE_INDEX != example.targets["labels"][0]
    indices = list(range(task.size("test")))
    nats = {n: task.metric.compute(b(indices)) for n, b in task.baselines().items()}
    assert nats["order-0 Markov"] > 1.3 > 0.2 > nats["order-1 Markov"]
    assert nats["back-off Markov"] < 0.1
    nobody = [Event(e.time, "", e.endpoint, [], [], "") for e in events]
    with pytest.raises(ValueError, match="no event with an entity"):
        create_task("next_event", data=split_by_time(nobody, "events"))


def test_forecast_reads_files_and_says_what_is_wrong(tmp_path):
    """Fails if a column that is no number is taken, or too short a series."""
    path = write_steps(tmp_path / "a.csv")
    task = create_task("forecast", data=path, patch=2, length=4)
    assert task.columns == ["a", "b"] and task.needs.input.width == 4
    x, labels = task.example("test", 0).inputs["x"], task.example("test", 0).targets["labels"]
    assert torch.equal(x[1:], labels[:-1])
    scores = {n: task.metric.compute(b([0, 1])) for n, b in task.baselines().items()}
    assert scores["ridge on the last patch"] < 0.02 < scores["mean"]
    with pytest.raises(ValueError, match="smaller patch or length"):
        create_task("forecast", data=path, patch=20, length=20)
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3,x\n")
    with pytest.raises(ValueError, match=r"'b' is 'x', which is no number"):
        create_task("forecast", data=tmp_path / "b.csv", columns="a,b")
