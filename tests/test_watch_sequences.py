"""The levels "sequence" and "path": against naive formulas, in batches, stored, on bad input."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from regard.watch.event import Event
from regard.watch.sequences import PathLevel, SequenceLevel
from regard.watch.sequences.endpoints import PAUSE, EndpointVocabulary
from regard.watch.sequences.hypergeometric import hypergeometric_log_cdf
from regard.watch.sequences.level import OWN_ENDPOINTS, gap_class
from regard.watch.sequences.markov import BackoffMarkov
from regard.watch.sequences.paths import PathEnsemble
from regard.watch.settings import WatchSettings

stats = pytest.importorskip("scipy.stats", reason="scipy comes with the extra `watch`")


def make_events(sequences, start=0.0, step=10.0):
    """Events of {entity: endpoints}, entities in turn."""
    events = [
        Event(start + step * i, entity, endpoint, [], [], f"{entity}:{start}:{i}")
        for entity, endpoints in sequences.items()
        for i, endpoint in enumerate(endpoints)
    ]
    return sorted(events, key=lambda event: event.time)


def shop_visits(rng, visits, pages=("list", "item", "cart", "pay")):
    """Sequences of a small shop: list, some items, perhaps cart and pay."""
    sequences = {}
    for i in range(visits):
        endpoints = []
        for _ in range(rng.integers(2, 5)):
            endpoints += [pages[0]] + [pages[1]] * int(rng.integers(1, 4))
            endpoints += [pages[2], pages[3]] if rng.random() < 0.5 else []
        sequences[f"u{i}"] = endpoints
    return sequences


@pytest.fixture(scope="module")
def events():
    return make_events(shop_visits(np.random.default_rng(0), 120))


def stored(level):
    """The level after a round trip through JSON and arrays."""
    return type(level).from_json(json.loads(json.dumps(level.to_json())), level.tensors())


# --------------------------------------------------------------------------------------- Markov
def test_probability_is_the_formula_of_the_docstring():
    """Fails if counts, totals, types or the order of backing off are wrong."""
    rng = np.random.default_rng(1)
    sequence = rng.integers(0, 4, size=300).tolist()
    model = BackoffMarkov(2, 4)
    contexts = [sequence[i - 2] * 4 + sequence[i - 1] for i in range(2, 300)]
    model.add(np.array(contexts), np.array(sequence[2:]))

    def naive(context, x, k):
        if k < 0:
            return 1 / 4
        suffix = context[len(context) - k :]
        following = Counter(
            sequence[i] for i in range(2, 300) if tuple(sequence[i - k : i]) == suffix
        )
        d, a = model.smoothing[k]
        spare = a + d * len(following)
        counted = max(following[x] - d, 0) + spare * naive(context, x, k - 1)
        return counted / (following.total() + a)

    for context in ((0, 1), (3, 3), (2, 0)):
        found = [model.probability(context[0] * 4 + context[1], x) for x in range(4)]
        assert found == pytest.approx([naive(context, x, 2) for x in range(4)])
        assert sum(found) == pytest.approx(1)


def test_order_and_smoothing_are_chosen_on_held_out_data():
    """Fails if a chain of order 2 is not found to be one, or white noise is given a context."""
    rng = np.random.default_rng(2)
    chain = [0, 1]
    for _ in range(4_000):
        usual = (chain[-2] + chain[-1]) % 5
        chain.append(int(rng.integers(5)) if rng.random() < 0.2 else usual)
    for sequence, order in ((chain, 2), (rng.integers(0, 5, 4_000).tolist(), 0)):
        contexts = [0]
        for x in sequence[:-1]:
            contexts.append((contexts[-1] * 5 + x) % 5**4)
        model = BackoffMarkov(4, 5)
        held_out = model.fit(np.array(contexts), np.array(sequence))
        assert model.order == order
        assert -np.log(held_out).mean() == pytest.approx(model.held_out_nats[order])


def test_counts_are_bounded_and_forgotten():
    """Fails if a stream of ever new contexts takes ever more memory, or halving loses totals."""
    model = BackoffMarkov(3, 64, max_counts=2_000)
    rng = np.random.default_rng(3)
    for _ in range(20):
        model.add(rng.integers(0, 64**3, 500), rng.integers(0, 64, 500))
        assert sum(map(len, model.counts)) <= 2_000
    model.halve()
    for k in range(model.order + 1):
        totals = Counter()
        for key, n in model.counts[k].items():
            totals[key // 64] += n
        assert totals == model.totals[k]
    with pytest.raises(ValueError, match="order=8 with 4096 symbols does not fit in 63 bits"):
        BackoffMarkov(8, 4096)


# -------------------------------------------------------------------------------- sequence level
def test_one_batch_or_many_and_a_stored_level_give_the_same_bits(events):
    """Fails if state is lost between batches, or something learned is not stored."""
    level = SequenceLevel(WatchSettings(order=3))
    level.fit(events[:-100])
    at_once = level.score(events[-100:], {})
    other, states, bits = stored(level), {}, []
    for event in events[-100:]:
        before = json.dumps(states.get(("", event.entity)))
        kept = states.get(("", event.entity))
        bits += other.score([event], states).bits.tolist()
        assert json.dumps(kept) == before  # the state before the batch is not changed in place
        states = {key: json.loads(json.dumps(state)) for key, state in states.items()}
    assert bits == at_once.bits.tolist()
    assert at_once.offsets.tolist() == list(range(0, 301, 3))
    assert len(level.group_names()) == 3 and set(at_once.groups.tolist()) == {0, 1, 2}


def test_odd_step_and_odd_gap_are_surprising_and_explained(events):
    """Fails if a step that no one takes, or a pause that no one makes, looks normal."""
    level = SequenceLevel(WatchSettings())
    level.fit(events)
    visit = make_events({"new": ["list", "item", "pay"]}, step=10.0)
    odd = level.score(visit, {}).bits.reshape(-1, 3)
    usual = make_events({"new": ["list", "item", "item"]})
    normal = level.score(usual, {}).bits.reshape(-1, 3)
    assert odd[2, 0] > normal[2, 0] + 5

    states = {}
    level.score(visit[:2], states)
    finding = level.explain(visit[2], 0, states["", "new"])
    assert finding.kind == "transition" and finding.bits == pytest.approx(odd[2, 0])
    assert [name for name, _ in finding.expected] == ["item", "list", "cart"]
    assert "pay after item; usual: item (" in finding.text

    visit[2].time = visit[1].time + 0.02
    fast = level.score(visit[2:], {("", "new"): states["", "new"]}).bits
    assert fast[1] > odd[2, 1] + 5
    assert level.explain(visit[2], 1, states["", "new"]).observed == "0.02 s"


def test_session_of_another_user():
    """Fails if a sequence that is normal for others raises no doubt about an entity that never
    acted like that."""
    rng = np.random.default_rng(4)
    shops = {f"a{i}": s for i, s in enumerate(shop_visits(rng, 60).values())}
    admin = shop_visits(rng, 60, pages=("users", "user", "edit", "save"))
    admins = {f"b{i}": s for i, s in enumerate(admin.values())}
    level = SequenceLevel(WatchSettings())
    level.fit(make_events(shops | admins))
    assert level.session_test.strength < 100

    mine = make_events({"alice": ["list", "item", "item"] * 10})
    theirs = make_events({"alice": ["users", "user", "edit", "save"] * 2}, start=400.0)
    states = {}
    own = level.score(mine, states).bits.reshape(-1, 3)
    foreign = level.score(theirs, states).bits.reshape(-1, 3)
    assert own[:, 2].max() < 3
    assert foreign[-1, 2] > 10
    finding = level.explain(theirs[-1], 2, states["", "alice"])
    assert finding.kind == "session"
    assert "history of alice" in finding.text and "item (" in finding.text


def test_update_learns_new_endpoints_and_steps(events):
    """Fails if accepted behaviour stays surprising."""
    level = SequenceLevel(WatchSettings())
    level.fit(events)
    later = PAUSE + events[-1].time
    refund = ["list", "refund"] * 4
    new = make_events({f"v{i}": refund for i in range(30)}, start=later)
    before = level.score(new, {}).bits[0::3].mean()
    level.update(new[: len(new) // 2])
    level.update(new[len(new) // 2 :])
    assert level.score(new, {}).bits[0::3].mean() < before - 2


def test_state_is_bounded_and_events_without_entity_are_scored():
    """Fails if an entity that calls everything has a state that grows, or a missing entity, an
    unknown endpoint or a clock that goes back is an error."""
    rng = np.random.default_rng(5)
    endpoints = [f"e{i}" for i in rng.integers(0, 300, 2_000)]
    level = SequenceLevel(WatchSettings(order=8))
    level.fit(make_events({"u": endpoints}))
    states = {}
    level.score(make_events({"crawler": endpoints}), states)
    assert len(states["", "crawler"]["own"]) <= OWN_ENDPOINTS
    odd = [Event(5.0, "", "e1", [], [], "a"), Event(1.0, "crawler", "unknown", [], [], "b")]
    assert np.isfinite(level.score(odd, states).bits).all()
    assert len(level.score([], states).bits) == 0
    assert gap_class(-1.0) == 1 and gap_class(math.nan) == 0 and gap_class(1e12) == 63


def test_fit_on_nothing_and_on_one_event():
    """Fails if a level that saw no event cannot score one."""
    for learned in ([], make_events({"u": ["a"]})):
        for level in (SequenceLevel(WatchSettings()), PathLevel(WatchSettings())):
            level.fit(learned)
            surprise = level.score(make_events({"u": ["a", "b", "a", "b"]}), {})
            assert np.isfinite(surprise.bits).all() and (surprise.bits >= 0).all()
            level.update(make_events({"u": ["a", "b"]}))


def test_independent_endpoints_have_no_context_but_gaps_do():
    """Fails if the model of gaps loses the endpoint before where the next one does not depend on
    it, in the level that was fitted or in the stored one."""
    rng = np.random.default_rng(9)
    events, times = [], dict.fromkeys("abcdefgh", 0.0)
    for i in range(2_000):
        user = "abcdefgh"[i % 8]
        endpoint = ("quick", "slow")[int(rng.integers(2))]
        events.append(Event(times[user], user, endpoint, [], [], str(i)))
        times[user] += {"quick": 1.0, "slow": 100.0}[endpoint]
    events.sort(key=lambda event: event.time)
    level = SequenceLevel(WatchSettings())
    level.fit(events)
    assert level.transitions.order == 0
    for each in (level, stored(level)):
        after_quick = make_events({"new": ["quick", "quick"]}, step=1.0)
        after_slow = make_events({"new": ["slow", "quick"]}, step=1.0)
        assert each.score(after_quick, {}).bits[4] < 1
        assert each.score(after_slow, {}).bits[4] > 5


def test_vocabulary_has_room_and_an_end():
    """Fails if an endless list of endpoints grows the vocabulary, or tenants share endpoints."""
    vocabulary = EndpointVocabulary()
    vocabulary.fit(make_events({"u": [f"e{i}" for i in range(50)]}))
    assert vocabulary.size == 128 and vocabulary.longest_context(8) == 7
    numbers = [vocabulary.add("other tenant", f"e{i}") for i in range(200)]
    assert len(set(numbers)) == 128 - 2 - 50 + 1 and numbers[-1] == 0


# ------------------------------------------------------------------------------------ path level
def test_hypergeometric_tail_equals_that_of_scipy():
    """Fails if the tail is wrong on either side of the mean, or at its ends."""
    rng = np.random.default_rng(6)
    for _ in range(300):
        population = int(rng.integers(2, 3_000))
        marked, draws = rng.integers(0, population + 1, 2).tolist()
        x = int(rng.integers(0, min(marked, draws) + 1))
        expected = stats.hypergeom.cdf(x, population, marked, draws)
        found = math.exp(hypergeometric_log_cdf(x, marked, population, draws))
        assert found == pytest.approx(expected, abs=1e-11)
    # P(X = 0) has a closed form where gammas of 10¹² lose nine digits.
    exact = sum(math.log1p(-3e7 / (1e12 - i)) for i in range(10_000))
    assert hypergeometric_log_cdf(0, 3e7, 1e12, 1e4) == pytest.approx(exact, rel=1e-10)


def test_path_scores_equal_an_independent_computation():
    """Fails if degrees, the correction of Ξ or the tail differ from HYPA's, computed by its own
    steps: Ξ = s_out s_in on the edges that can exist, fitted by iteration until the expected
    degrees are those that were observed, then rounded and put into scipy's distribution."""
    rng = np.random.default_rng(7)
    walks = [[int(x) for x in rng.choice(4, p=(0.4, 0.3, 0.2, 0.1), size=6)] for _ in range(300)]
    paths = Counter(
        tuple(walk[i : i + 3]) for walk in walks for i in range(4) if walk[i : i + 3] != [0, 1, 2]
    )
    ensemble = PathEnsemble(2, 4)
    ensemble.add(np.array([a * 16 + b * 4 + c for a, b, c in paths.elements()]))

    m = paths.total()
    out_strength, in_strength = Counter(), Counter()
    for (a, b, c), n in paths.items():
        out_strength[a, b] += n
        in_strength[b, c] += n
    sources, targets = list(out_strength), list(in_strength)
    allowed = np.array([[float(v[1] == w[0]) for w in targets] for v in sources])
    wanted_out = np.array([out_strength[v] for v in sources]) / m
    wanted_in = np.array([in_strength[w] for w in targets]) / m
    xi = allowed * np.outer(wanted_out, wanted_in)
    for _ in range(200):
        xi *= (wanted_out / xi.sum(axis=1))[:, None]
        xi *= wanted_in / xi.sum(axis=0)
    xi = np.round(xi * m * m).astype(int)

    checked = 0
    for i, (a, b) in enumerate(sources):
        for j, (first, c) in enumerate(targets):
            if first != b:
                continue
            expected = stats.hypergeom.cdf(paths[a, b, c], xi.sum(), xi[i, j], m)
            found = math.exp(ensemble.log_cdf(a * 16 + b * 4 + c))
            assert found == pytest.approx(expected, abs=2e-3)  # Ξ of scipy is rounded
            checked += 1
    assert checked >= 30
    assert ensemble.log_cdf(1 * 4 + 2) < math.log(0.01)  # 0 → 1 → 2 was left out above


def test_common_steps_in_an_odd_order():
    """Fails if a path of common steps that no one takes is not found by the path level, or the
    level does not say so."""
    # Both steps of cart → item → cart are common, but who came from "cart" goes on to "list".
    rng = np.random.default_rng(8)
    sequences = {
        f"u{i}": ["list", "item", "cart"] * 3
        if rng.random() < 0.5
        else ["cart", "item", "list"] * 3
        for i in range(100)
    }
    level = PathLevel(WatchSettings())
    level.fit(make_events(sequences))
    odd_path = ["cart", "item", "cart"]
    odd = make_events({"new": odd_path})
    usual = make_events({"new": ["list", "item", "cart"]})
    states = {}
    assert level.score(usual, {}).bits.max() < 1
    assert level.score(odd[:2], states).bits.max() == 0
    before = states["", "new"]
    bits = level.score(odd[2:], states).bits
    assert bits[0] > 7
    assert -level.ensembles[0].log_cdf(level._paths(before["context"], 3)[0]) > 50
    finding = level.explain(odd[2], 0, before)
    assert finding.bits == bits[0] and finding.observed == "cart → item → cart"
    assert finding.expected == [("list", 1.0)] and "taken 0 times, and" in finding.text

    steps = {pair for walk in sequences.values() for pair in pairwise(walk)}
    assert set(pairwise(odd_path)) <= steps
    other = stored(level)
    assert other.score(odd[2:], {("", "new"): before}).bits.tolist() == bits.tolist()
    level.update(make_events({f"v{i}": odd_path for i in range(90)}, start=9_000.0))
    assert level.score(odd[2:], {("", "new"): before}).bits[0] < bits[0] / 2
    assert odd_path in [each.endpoints for each in level.avoided_paths(2)]


def test_pauses_and_unknown_endpoints_end_a_path(events):
    """Fails if steps on both sides of a pause, or of an unknown endpoint, are one path."""
    level = PathLevel(WatchSettings())
    level.fit(events)
    broken = make_events({"u": ["item", "item", "pay"]}, step=PAUSE + 1)
    broken += make_events({"u": ["list", "nowhere", "pay"]}, start=broken[-1].time + 1)
    bits = level.score(broken, {}).bits
    assert not bits.any()
    assert "fewer than 2 steps" in level.explain(broken[0], 0, None).text
