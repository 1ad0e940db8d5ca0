"""The level "leaf": counts, characters, magnitudes, keys; what is unusual is what it names."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from regard.watch.event import Event, Signal
from regard.watch.leaves import LeafLevel, level as leaf_level
from regard.watch.leaves.characters import CharacterModel
from regard.watch.leaves.count_sketch import CountSketch, hash_value
from regard.watch.leaves.level import HEAD
from regard.watch.leaves.magnitudes import BUCKETS, HALF, STEPS, MagnitudeModel
from regard.watch.settings import WatchSettings

METHODS = ("GET", "POST")


def make_events(count, seed=0, endpoints=3):
    """Requests: a constant, few values, identifiers, numbers, an optional key, an array."""
    rng = random.Random(seed)
    events = []
    for i in range(count):
        endpoint = f"GET /e{rng.randrange(endpoints)}"
        leaves = [
            ("version", "1.08"),
            ("country", rng.choice(("DE", "DE", "DE", "FR", "NL"))),
            ("id", f"{rng.getrandbits(64):016x}"),
            ("amount", round(rng.lognormvariate(3, 0.5), 2)),
            ("ok", True),
            ("count", rng.randrange(1, 5)),
            *[("tags[]", rng.choice("abc")) for _ in range(rng.randrange(1, 4))],
        ]
        if rng.random() < 0.5:
            leaves.append(("note", "hello there"))
        paths, values = map(list, zip(*leaves, strict=True))
        events.append(Event(60.0 * i, "", endpoint, paths, values, f"t:{i}"))
    return events


@pytest.fixture(scope="module")
def learned():
    level = LeafLevel(WatchSettings())
    level.fit(make_events(3_000))
    return level


def with_leaf(path, value):
    event = make_events(1, seed=5)[0]
    return replace(
        event,
        values=[value if p == path else v for p, v in zip(event.paths, event.values, strict=True)],
    )


def bits_of(level, event):
    """Bits of each path, and of the parts of the head."""
    bits = level.score([event], {}).bits
    return dict(zip([*HEAD, *event.paths], bits.tolist(), strict=True))


def test_a_sketch_never_counts_too_little():
    rng = np.random.default_rng(0)
    sketch = CountSketch(1 << 12)
    keys = rng.integers(0, 1 << 63, 3_000).astype(np.uint64)
    amounts = rng.integers(1, 50, 3_000)
    sketch.add(keys[:2_000], amounts[:2_000])
    sketch.add(keys[:2_000], amounts[:2_000])
    found = sketch.estimate(keys)
    assert (found[:2_000] >= 2 * amounts[:2_000]).all()
    assert (found[:2_000] == 2 * amounts[:2_000]).mean() > 0.8
    assert (found[2_000:] == 0).mean() > 0.8


def test_values_that_occur_once_do_not_fill_a_sketch():
    sketch = CountSketch(1 << 13)
    often = np.array([7], np.uint64)
    for i in range(200):
        sketch.add(often, np.array([5]))
        sketch.add(np.arange(1_000 + 500 * i, 1_500 + 500 * i).astype(np.uint64), np.ones(500, int))
    assert 999 <= sketch.estimate(often)[0] <= 1_010
    assert (sketch.counts > 0).mean() < 0.2


def test_types_are_different_values():
    hashes = {hash_value(value) for value in (1, True, 1.0, "1", None, "None", "True", 0, False)}
    assert len(hashes) == 9
    assert hash_value("a", b"key") != hash_value("a")


def test_character_probabilities_sum_to_one():
    """Over all symbols after a context; digits are one symbol, and the start cannot follow."""
    model, path = CharacterModel(), np.array([3], np.uint64)
    model.add(path.repeat(3), ["GET /a", "GET /b", "POST /a/17"])
    symbols = [bytes([code]) for code in range(256) if not 48 < code <= 57 and code != 2]
    grams = np.frombuffer(b"".join(b"GE" + each for each in symbols), np.uint8)
    bits = model._symbol_bits(path.repeat(3 * len(symbols) - 2), grams)
    after = 2.0 ** -bits[::3]  # the symbol after "GE"
    assert after.sum() == pytest.approx(1, abs=0.05)
    assert after[symbols.index(b"T")] > 0.5


def test_unusual_characters_are_found_where_they_are():
    model, path = CharacterModel(1 << 18), np.uint64(9)
    rng = random.Random(0)
    names = ["".join(rng.choice("abcdefgh ") for _ in range(30)) for _ in range(300)]
    model.add(np.full(len(names), path), names)
    attack = names[0] + "${jndi:ldap://x}" + names[1] * 20
    usual, unusual = model.bits(np.full(2, path), [names[2] * 20, attack])
    assert unusual > usual + 4  # however long the string is
    assert model.unusual_fragment(path, attack) in attack[28:50]


def test_magnitudes_are_a_distribution():
    model = MagnitudeModel()
    model.add(np.zeros(100, np.int64), np.random.default_rng(0).lognormal(3, 1, 100))
    steps = np.arange(HALF) / STEPS
    every = np.concatenate([2**steps - 1, -(2 ** steps[1:] - 1)])
    assert (2 ** -model.bits(np.zeros(len(every), np.int64), every)).sum() == pytest.approx(
        1, abs=0.01
    )
    near, far = model.bits(np.zeros(2, np.int64), np.array([20.0, 1e9]))
    assert far > near + 5
    assert model.bits(np.array([5]), np.array([1.0]))[0] == np.log2(BUCKETS)  # an unknown row


@pytest.mark.parametrize(
    ("path", "value", "usual"),
    [
        ("version", "1.09", "1.08"),
        ("version", 1.08, "1.08"),
        ("country", "XX", "FR"),
        ("country", None, "FR"),
        ("ok", 1, True),
        ("ok", "true", True),
        ("count", 3.0, 3),
        ("count", 70_000, 3),
        ("amount", 1e9, 20.5),
        ("amount", -20.5, 20.5),
        ("id", "' OR '1'='1", "0123456789abcdef"),
    ],
)
def test_what_is_unusual_has_more_bits(learned, path, value, usual):
    changed, same = with_leaf(path, value), with_leaf(path, usual)
    assert bits_of(learned, changed)[path] > bits_of(learned, same)[path] + 5
    part = int(np.argmax(learned.score([changed], {}).bits))
    finding = learned.explain(changed, part, None)
    assert finding.path == path and finding.observed == value
    assert finding.kind in ("value", "type")


def test_identifiers_are_not_unusual(learned):
    """Every event has another one."""
    assert bits_of(learned, with_leaf("id", "fedcba9876543210"))["id"] < 2


def test_keys_and_signals(learned):
    event = make_events(1, seed=5)[0]
    more = replace(event, paths=[*event.paths, "isAdmin"], values=[*event.values, True])
    less = replace(event, paths=event.paths[1:], values=event.values[1:])
    many = replace(event, paths=event.paths + ["tags[]"] * 500, values=event.values + ["a"] * 500)
    twice = replace(event, signals=(Signal("duplicate_key", "country"),))
    for changed, part, path in (
        (more, "unseen_key", "isAdmin"),
        (less, "missing_key", "version"),
        (many, "size", "tags[]"),
        (twice, "signal", "country"),
    ):
        assert bits_of(learned, changed)[part] > bits_of(learned, event)[part] + 6
        finding = learned.explain(changed, HEAD.index(part), None)
        assert finding.path == path
        assert finding.text and finding.bits > 6
    assert learned.explain(less, HEAD.index("missing_key"), None).expected[0] == ("1.08", 1.0)
    assert learned.explain(twice, HEAD.index("signal"), None).kind == "duplicate_key"


def test_a_value_is_expected_at_its_own_endpoint():
    """`POST` is usual at one endpoint and unusual at the other."""
    events = [
        Event(float(i), "", f"/{i % 2}", ["method"], [METHODS[i % 2]], f"t:{i}") for i in range(800)
    ]
    level = LeafLevel(WatchSettings())
    level.fit(events)
    swapped = replace(events[0], values=["POST"])
    assert bits_of(level, swapped)["method"] > 6 > bits_of(level, events[1])["method"] + 5


def test_bits_do_not_depend_on_the_batch(learned):
    events = make_events(64, seed=8)
    together = learned.score(events, {}).bits
    fresh = LeafLevel.from_json(learned.to_json(), learned.tensors())
    alone = np.concatenate([fresh.score([event], {}).bits for event in events])
    assert together == pytest.approx(alone)


def test_a_level_is_the_same_after_a_round_trip(learned):
    content = json.loads(json.dumps(learned.to_json()))
    again = LeafLevel.from_json(content, {name: a.copy() for name, a in learned.tensors().items()})
    events = make_events(300, seed=3)
    assert learned.score(events, {}).bits == pytest.approx(again.score(events, {}).bits)
    assert again.group_names() == learned.group_names()
    again.update(events)
    again.flush()
    assert again.events == learned.events + 300


def test_memory_is_bounded(monkeypatch):
    """Endless endpoints, paths, values and combinations of keys."""
    for name in ("MAX_ENDPOINTS", "MAX_PATHS", "MAX_CONTEXTS", "MAX_MEMO", "MAX_SHAPE_MEMO"):
        monkeypatch.setattr(leaf_level, name, 100)
    level = LeafLevel(WatchSettings(max_groups=32))
    rng = random.Random(0)
    for start in range(0, 4_000, 500):
        events = [
            Event(
                60.0 * i,
                "",
                f"/{rng.random()}",
                [f"k{rng.randrange(10**6)}", "id"],
                [f"{rng.random()}", i],
                f"t:{i}",
            )
            for i in range(start, start + 500)
        ]
        assert np.isfinite(level.score(events, {}).bits).all()
        level.update(events)
        level.flush()
    assert level.events == 4_000
    assert max(len(level.schemas), len(level.path_names)) <= 100
    assert len(level.top_values) <= 200  # the contexts, and one of each endpoint for all others
    assert len(level.group_names()) <= 32
    assert max(map(len, level.top_values)) <= leaf_level.TOP_VALUES


def test_strange_values_have_bits(learned):
    event = make_events(1)[0]
    paths = ["a", "b", "version", "id", "amount", "count"]
    values = ["\ud800", "\x02\x00" * 50, "", "x" * 5_000, float("inf"), 10**400]
    strange = replace(event, paths=paths, values=values)
    level = LeafLevel.from_json(learned.to_json(), learned.tensors())
    for _ in range(2):
        assert np.isfinite(level.score([strange], {}).bits).all()
        level.update([strange])
        level.flush()
    empty = replace(event, paths=[], values=[])
    assert np.isfinite(level.score([empty], {}).bits).all()


def test_hashed_values_are_not_stored():
    settings = WatchSettings(hash_values=True)
    level = LeafLevel(settings)
    level.secret = b"secret"
    level.fit(make_events(200))
    stored = json.dumps(level.to_json())
    assert "hello there" not in stored and '"DE"' not in stored and "hash:" in stored
