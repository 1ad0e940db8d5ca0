"""What people say about alerts: mutes, labels and what is accepted, and the commands for it."""

import json
import time

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.watch.alert import Alert
from regard.watch.follow.feedback import rank_alerts
from regard.watch.follow.store import AlertEntry, Mute, Shape, WatchStore
from regard.watch.level import Finding
from regard.watch.users.mutes import find_mute, is_about_shape, value_class
from regard.watch.users.ranking import priority, train_ranking


def make_finding(path="request.q", observed="abc", p=1e-6, kind="value", level="leaf"):
    return Finding(level, kind, path, observed, 9.0, p)


def make_alert(id="a1b2c3", findings=None, endpoint="GET /search", p=1e-5):
    findings = [make_finding()] if findings is None else findings
    return Alert(
        id=id,
        time=1.0,
        source=f"x:{id}",
        tenant="",
        entity="u1",
        endpoint=endpoint,
        p=p,
        extrapolated=False,
        severity="high",
        kind=findings[0].kind if findings else "value",
        findings=findings,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-11-18", "0-0-0"),
        ("ShopApp/5.2", "a/0.0"),
        ("é汉字", "a"),
        ("3f9a", "x"),
        ("", ""),
        ("-" * 50, "-" * 23 + "…"),
        (True, "boolean"),
        (1.5, "number"),
        (3, "number"),
        (None, "null"),
        ([1], "other"),
    ],
)
def test_value_class(value, expected):
    """Fails if two values that are written alike have different classes."""
    assert value_class(value) == expected


def test_mute_needs_all_relevant_findings():
    """Fails if a mute of one finding hides another one, or an irrelevant one keeps an alert."""
    mute = Mute(path="request.q", value_class="a")
    assert find_mute(make_alert(), [mute]) == mute
    assert find_mute(make_alert(findings=[make_finding(observed="1")]), [mute]) is None
    two = [make_finding(), make_finding("request.country", "KP")]
    assert find_mute(make_alert(findings=two), [mute]) is None
    assert find_mute(make_alert(findings=two), [mute, Mute(path="request.c*")]) == mute
    usual = [make_finding(), make_finding("request.country", "KP", p=0.3)]
    assert find_mute(make_alert(findings=usual), [mute]) == mute
    assert find_mute(make_alert(findings=[]), [mute]) is None
    assert find_mute(make_alert(), []) is None


def test_mute_patterns():
    """Fails if "*" does not match, or another character of a name is taken as a pattern."""
    alert = make_alert(endpoint="GET /orders/{id}")
    assert find_mute(alert, [Mute(endpoint="GET /orders/*")])
    assert not find_mute(alert, [Mute(endpoint="GET /order?/{id}")])
    listed = make_alert(findings=[make_finding("items[].price")])
    assert find_mute(listed, [Mute(path="items[].price")])
    assert find_mute(listed, [Mute(path="items[].*")])
    assert not find_mute(alert, [Mute(tenant="other", endpoint="GET /orders/*")])


def test_alert_about_a_shape():
    """Fails if an alert about more than the new keys is put down to them."""
    new = make_finding("request.new", kind="unseen_key")
    assert is_about_shape(make_alert(findings=[new]), {"request.new"})
    assert not is_about_shape(make_alert(findings=[new, make_finding()]), {"request.new"})
    moved = make_finding("request.new", level="sequence")
    assert not is_about_shape(make_alert(findings=[moved]), {"request.new"})


def test_labels_rerank(tmp_path):
    """Fails if labels of one kind of alert do not move the others of this kind, or move an alert
    further than a factor of 1,000 in p."""
    store = WatchStore(tmp_path, create=True)
    noisy = [make_finding("response.bytes", 99)]
    attacks = [make_alert(f"a{i:05}", p=1e-5) for i in range(10)]
    normals = [make_alert(f"b{i:05}", noisy, "GET /export", p=1e-6) for i in range(10)]
    entries = [AlertEntry(each.to_json()) for each in (*attacks, *normals)]
    for entry in entries:
        entry.priority = priority(entry.content, None)
    store.add_alerts(entries)
    assert store.alerts()[0].content["id"].startswith("b")
    for i in range(3):
        store.set_label(f"a{i:05}", "attack")
        assert rank_alerts(store).head is None
        store.set_label(f"b{i:05}", "normal")
    ranking = rank_alerts(store)
    assert ranking.alerts == 20 and ranking.head.accuracy > 0.9
    assert [each.content["id"][0] for each in store.alerts()] == ["a"] * 10 + ["b"] * 10
    for entry in store.alerts():
        plain = priority(entry.content, None)
        assert abs(entry.priority - plain) <= 3
    assert train_ranking([], []) is None
    store.close()


# -------------------------------------------------------------------------------------- commands
@pytest.fixture
def run(tmp_path):
    """Runs a command on a store with two alerts and a shape; fails unless it ends as expected."""
    folder = tmp_path / "state"
    store = WatchStore(folder, create=True)
    event = {"time": 1.0, "entity": "u1", "endpoint": "GET /search", "paths": [], "values": []}
    alerts = [make_alert("a1b2c3"), make_alert("d4e5f6", [])]
    store.add_alerts([AlertEntry(each.to_json(), event=event) for each in alerts])
    store.add_alerts([AlertEntry(make_alert("777777").to_json())])
    store.add_shape_events(Shape("77c1d2e3", "", "GET /", [("k", "string")], [], events=1), ["u"])

    def run(*arguments, code=0):
        done = CliRunner().invoke(app, ["watch", *arguments, "--state", str(folder)])
        assert done.exit_code == code, done.output
        return done.output

    run.store = store
    yield run
    store.close()


def test_mute_command(run):
    """Fails if a mute of an alert is about something else, or lasts for another time."""
    output = run("mute", "a1b2", "--value-class", "same", "--for", "2d", "--reason", "load test")
    assert "endpoint GET /search, path request.q, values a, until" in output
    (mute,) = run.store.mutes()
    assert mute.expires - time.time() == pytest.approx(2 * 86_400, abs=60)
    assert "load test" in run("mute", "--list")
    assert json.loads(run("mute", "--list", "--json"))[0]["value_class"] == "a"
    run("mute", "--delete", str(mute.id))
    run("mute", "--path", "request.x", "--for", "never")
    assert run.store.mutes()[0].expires is None
    assert "has no findings: give --endpoint" in run("mute", "d4e5", code=1)
    assert "There is no mute 9" in run("mute", "--delete", "9", code=1)
    assert "--for takes a duration such as 12h" in run("mute", "a1b2", "--for", "soon", code=1)
    assert "needs an endpoint, a path" in run("mute", code=1)


def test_label_and_accept_commands(run):
    """Fails if a label or an acceptance is not stored, or a wrong id is taken."""
    assert "1 labelled attack and 0 normal" in run("label", "a1b2", "attack", "--note", "sqlmap")
    assert run.store.alert("a1b2c3").note == "sqlmap"
    assert "is labelled attack" in run("accept", "a1b2", code=1)
    run("label", "a1b2", "none")
    assert run.store.labelled_alerts() == []
    assert "did you mean 'normal'" in run("label", "a1b2", "normall", code=1)
    assert "Accepted alert a1b2c3" in run("accept", "a1b2")
    assert [each.alert for each in run.store.accepted_to_learn()] == ["a1b2c3"]
    assert "Accepted shape 77c1d2e3" in run("accept", "77c1")
    assert "There is no alert 'zzzz'" in run("accept", "zzzz", code=1)
    assert "was not kept" in run("accept", "777777", code=1)


def test_drift_command(run, tmp_path):
    """Fails if what has changed is not listed, or a folder without a store gives no clear error."""
    output = run("drift")
    assert "1 new shapes of requests" in output and "GET /: new key k (string)" in output
    assert json.loads(run("drift", "--json"))["shapes"][0]["id"] == "77c1d2e3"
    done = CliRunner().invoke(app, ["watch", "drift", "--state", str(tmp_path / "none")])
    assert done.exit_code == 1 and "start `regard watch follow`" in done.output
