"""The detector as a whole: what it finds, explains, keeps quiet about, and stores."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from regard.json_files import CorruptFile
from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.learning import learn_detector
from regard.watch.planted import LEAF_EDITS, EditPlanter
from regard.watch.settings import WatchSettings

DAY = 86_400.0
PAGES = {"home": "list", "list": "item", "item": "buy", "buy": "home"}


def make_traffic(count, *, seed=0, start=0.0, version="5.2.0", tenant=""):
    """Users who walk from page to page, with drifting prices."""
    rng = random.Random(seed)
    users = [(f"u{i}", ("DE", "FR", "NL")[i % 3], ("web", "app")[i % 2]) for i in range(40)]
    at = dict.fromkeys(range(40), "home")
    events = []
    for i in range(count):
        number = rng.randrange(40)
        user, country, client = users[number]
        at[number] = PAGES[at[number]] if rng.random() < 0.8 else rng.choice(list(PAGES))
        leaves = {
            "user": user,
            "country": country,
            "client": client,
            "version": version,
            "request_id": f"{rng.getrandbits(64):016x}",
            "price": round(20 * (1 + i / count) * rng.lognormvariate(0, 0.3), 2),
            "status": rng.choice((200, 200, 200, 200, 404)),
            "body.item": f"p-{rng.randrange(100)}",
        }
        events.append(
            Event(
                start + i * 20.0,
                user,
                f"GET /{at[number]}",
                list(leaves),
                list(leaves.values()),
                f"traffic:{seed}:{i}",
                tenant,
            )
        )
    return events


def change(event, **values):
    """The event with other values; a new path is added."""
    leaves = dict(zip(event.paths, event.values, strict=True)) | values
    return replace(event, paths=list(leaves), values=list(leaves.values()))


@pytest.fixture(scope="module")
def learned():
    return learn_detector(make_traffic(6_000), WatchSettings())


@pytest.fixture
def detector(learned, tmp_path):
    """A detector that a test may change."""
    learned.detector.save(tmp_path / "model")
    return Detector.load(tmp_path / "model")


def test_planted_leaves_are_named_first(learned):
    planter = EditPlanter(make_traffic(6_000))
    new = make_traffic(1_000, seed=1, start=120_000)
    for kind in LEAF_EDITS:
        edits = planter.plant(new, kind, 40)
        assert len(edits) == 40
        scored = learned.detector.score([edit.event for edit in edits], {})
        alerts = [learned.detector.alert(each) for each in scored]
        named = [
            next((f.path for f in alert.findings if f.level == "leaf"), "") for alert in alerts
        ]
        assert np.mean([n == edit.path for n, edit in zip(named, edits, strict=True)]) >= 0.9
        assert np.mean([each.level_p["leaf"] <= 0.01 for each in scored]) >= 0.9


def test_held_out_p_values_are_calibrated(learned, detector):
    """On traffic that goes on as it was: about 5 % below 0.05, and not more than 2 % below 0.01."""
    states = detector.initial_states()
    new = make_traffic(3_000, seed=2, start=120_000)
    scored = []
    for start in range(0, 3_000, 200):
        scored += detector.score(new[start : start + 200], states)
        detector.update(scored[-200:])
    p = np.array([each.p for each in scored])
    assert 0.01 < (p <= 0.05).mean() < 0.1
    assert (p <= 0.01).mean() < 0.025
    report = learned.report
    assert report.events == 6_000 and report.endpoints == 4 and report.entities == 40
    assert report.volume_per_day == pytest.approx(DAY / 20, rel=0.05)
    assert report.held_out_rates["0.05"] < 0.12
    assert set(report.self_test) >= set(LEAF_EDITS)
    json.dumps(report.to_json())


def test_an_alert_says_what_was_expected_and_what_if(learned):
    event = change(make_traffic(1, seed=3, start=120_000)[0], country="XX")
    scored = learned.detector.score([event], learned.detector.initial_states())[0]
    alert = learned.detector.alert(scored)
    first = next(finding for finding in alert.findings if finding.level == "leaf")
    assert (first.kind, first.path, first.observed) == ("value", "country", "XX")
    assert "country" in alert.findings[0].path  # new for anyone, and for this user
    assert {value for value, _ in first.expected} == {"DE", "FR", "NL"}
    assert 0.9 < sum(share for _, share in first.expected) <= 1
    tried = alert.what_if[0]
    assert tried["path"] == "country" and tried["value"] == first.expected[0][0]
    assert tried["bits_after"] < tried["bits_before"] and tried["p_after"] > 10 * tried["p_before"]
    assert alert.nearest_normal["version"] == "5.2.0"
    leaves = {leaf["path"]: leaf["bits"] for leaf in alert.leaves}
    assert max(leaves, key=leaves.get) == "country"
    json.dumps(alert.to_json())


def test_scoring_changes_nothing_and_is_repeatable(detector):
    new = make_traffic(200, seed=4, start=120_000)
    first = detector.score(new, detector.initial_states())
    again = detector.score(new, detector.initial_states())
    assert [each.p for each in first] == [each.p for each in again]
    one_by_one, states = [], detector.initial_states()
    for event in new:
        one_by_one += detector.score([event], states)
    assert [each.p for each in one_by_one] == pytest.approx([each.p for each in first])


def test_alerts_do_not_teach_until_they_are_accepted(detector):
    detector.change_budget(alerts_per_day=50)
    states = detector.initial_states()
    base = make_traffic(400, seed=5, start=120_000)
    attacks = [change(event, **{"body.item": "p-1' OR '1'='1"}) for event in base]

    def p_of_attack():
        return detector.score(attacks[:1], {})[0].p

    before = p_of_attack()
    for attack in attacks:
        detector.update(detector.score([attack], states))
    assert p_of_attack() < 10 * before
    for start in range(0, 400, 100):
        scored = detector.score(attacks[start : start + 100], {})
        detector.update(scored, accepted=True)
    for level in detector.levels:
        level.update(make_traffic(1, start=200_000))  # the portion is learned
    assert p_of_attack() > 10 * before


def test_the_budget_is_kept_over_drift_and_release(detector):
    """Five days in which the prices double again, and a new version comes on the third."""
    detector.change_budget(alerts_per_day=10)
    states, alerts = detector.initial_states(), Counter()
    for day in range(5):
        version = "5.3.0" if day >= 2 else "5.2.0"
        new = make_traffic(4_320, seed=10 + day, start=120_000 + day * DAY, version=version)
        for start in range(0, len(new), 256):
            scored = detector.score(new[start : start + 256], states)
            detector.update(scored)
            alerts.update(each.status for each in scored)
    assert 25 <= alerts["alert"] <= 100  # of 50


def test_endpoints_learn_before_they_alert(detector):
    """The first events of a new endpoint can be alerts; then it is learned in silence."""
    event = make_traffic(1, seed=6, start=130_000)[0]
    strange = [
        replace(
            change(event, status=500 + i, weight="heavy"),
            endpoint="POST /new",
            source=f"new:{i}",
            time=130_000.0 + i,
        )
        for i in range(200)
    ]
    states, statuses = detector.initial_states(), []
    for each in strange:
        scored = detector.score([each], states)
        statuses.append(scored[0].status)
        detector.update(scored)
    assert set(statuses[3:30]) == {"learning"}
    assert "alert" not in statuses[3:100]


def test_clocks_that_go_back_and_missing_entities(detector):
    new = make_traffic(300, seed=7, start=120_000)
    rng = random.Random(0)
    mixed = [
        replace(event, time=rng.choice((event.time, 0.0, -5.0, 1e12)), entity="")
        if i % 3 == 0
        else replace(event, time=event.time - 50_000 * (i % 2))
        for i, event in enumerate(new)
    ]
    scored = detector.score(mixed, detector.initial_states())
    detector.update(scored)
    assert all(0 < each.p <= 1 for each in scored)
    assert len(detector.alert(scored[0]).leaves) == len(mixed[0].paths)


def test_a_schema_that_changes_overnight_is_reported_a_few_times(detector):
    """Every event has three other keys: a quarter of a day's budget for a kind of finding."""
    states = detector.initial_states()
    renamed = []
    for event in make_traffic(1_000, seed=8, start=120_000):
        paths = [
            {"user": "account", "version": "v", "country": "land"}.get(p, p) for p in event.paths
        ]
        renamed.append(replace(event, paths=paths))
    statuses = Counter()
    for start in range(0, 1_000, 100):
        scored = detector.score(renamed[start : start + 100], states)
        detector.update(scored)
        statuses.update(each.status for each in scored)
    assert statuses["alert"] >= 1
    assert statuses["alert"] <= 20


def test_an_endpoint_that_fails_for_all_is_reported_once_and_not_for_each_user():
    """Every answer of one endpoint fails for a while: a finding about it, not about its users."""
    settings = WatchSettings(levels=("series",))
    busy = [
        replace(event, time=5.0 * i, endpoint="GET /home", source=f"busy:{i}")
        for i, event in enumerate(make_traffic(6_000))
    ]
    detector = Detector.learn(busy, settings)
    states, reports, texts = detector.initial_states(), [], []
    for i, event in enumerate(busy[:600]):
        failed = 60 <= i < 360
        later = change(event, status=500) if failed else event
        later = replace(later, entity=f"v{i}", time=event.time + 30_000, source=f"later:{i}")
        scored = detector.score([later], states)
        texts += [
            detector.alert(each).findings[0].text for each in scored if each.status == "alert"
        ]
        detector.update(scored)
        reports += [each for each in scored if each.status in ("alert", "repeated")]
    about_endpoint = [each for each in reports if each.finding[0] == "/endpoint/GET /home"]
    alerts = [each for each in about_endpoint if each.status == "alert"]
    assert 1 <= len(alerts) <= settings.repeats_per_day
    assert alerts[0].finding[1] == "/series/window of the endpoint"
    assert len(about_endpoint) <= 300 * 5 / 60 + 5  # at most one in a minute
    assert any("share of errors 1 where" in text for text in texts)


def test_tenants_have_vocabularies_of_their_own():
    events = make_traffic(2_000, tenant="a") + make_traffic(2_000, version="9.9", tenant="b")
    detector = Detector.learn(events, WatchSettings(levels=("leaf",)))
    swapped = replace(make_traffic(1, start=1e5, version="9.9")[0], tenant="a")
    own = replace(swapped, tenant="b")
    low, high = detector.score([swapped, own], {})
    assert low.p < 0.02 < high.p
    assert detector.alert(low).findings[0].path == "version"


@pytest.mark.parametrize("count", [0, 1, 39])
def test_too_few_events_are_refused(count):
    with pytest.raises(ValueError, match=f"There are {count} events to learn from: at least 40"):
        Detector.learn(make_traffic(count), WatchSettings())


@pytest.mark.parametrize("count", [40, 90])
def test_few_events_are_enough_to_start(count, tmp_path):
    detector = Detector.learn(make_traffic(count), WatchSettings())
    detector.save(tmp_path / "m")
    scored = Detector.load(tmp_path / "m").score(make_traffic(20, seed=1), {})
    assert all(0 < each.p <= 1 for each in scored)


def test_events_without_clocks_and_one_busy_entity():
    events = [replace(event, time=5.0, entity="bot") for event in make_traffic(500)]
    events[:50] = [replace(event, entity=f"u{i}") for i, event in enumerate(events[:50])]
    report = learn_detector(events, WatchSettings()).report
    assert report.volume_per_day == 500 and report.busiest == 0.9
    assert any("One entity has 90% of the events" in note for note in report.notes)


def test_a_model_is_the_same_after_a_round_trip(learned, detector):
    new = make_traffic(300, seed=9, start=120_000)
    before = learned.detector.score(new, learned.detector.initial_states())
    after = detector.score(new, detector.initial_states())
    assert [each.p for each in before] == pytest.approx([each.p for each in after])
    assert detector.model_id == learned.detector.model_id
    assert detector.alert(after[0]).to_json()["id"] == learned.detector.alert(before[0]).id


def test_damaged_models_are_refused(learned, tmp_path):
    folder = tmp_path / "shop.watch"
    with pytest.raises(CorruptFile, match="There is no model at"):
        Detector.load(folder)
    folder.mkdir()
    with pytest.raises(CorruptFile, match=r"is not a model of regard watch: it has no manifest"):
        Detector.load(folder)
    learned.detector.save(folder)
    learned.detector.save(folder)  # over an old one

    file = folder / "level-leaf.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFile, match=r"is damaged: level-leaf\.safetensors"):
        Detector.load(folder)
    file.unlink()
    with pytest.raises(CorruptFile, match="No such file"):
        Detector.load(folder)
    file.write_bytes(content)
    Detector.load(folder)

    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(CorruptFile, match="has version 99 of the format"):
        Detector.load(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(CorruptFile, match="is not a model of regard watch"):
        Detector.load(folder)


def test_hashed_values_need_their_secret(tmp_path):
    settings = WatchSettings(levels=("leaf",), hash_values=True)
    Detector.learn(make_traffic(500), settings, secret=b"key").save(tmp_path / "m")
    stored = b"".join(file.read_bytes() for file in (tmp_path / "m").iterdir())
    assert b"5.2.0" not in stored and b"p-17" not in stored
    with pytest.raises(ValueError, match="has hashed values: give the --secret-file"):
        Detector.load(tmp_path / "m")
    with pytest.raises(ValueError, match="was learned with another secret"):
        Detector.load(tmp_path / "m", secret=b"other")
    detector = Detector.load(tmp_path / "m", secret=b"key")
    scored = detector.score([change(make_traffic(1, seed=1)[0], version="6.6")], {})
    finding = detector.alert(scored[0]).findings[0]
    assert finding.path == "version" and finding.expected[0][0].startswith("hash:")
