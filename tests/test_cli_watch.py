"""`regard watch learn`, `score` and `explain`: what they print, write and refuse."""

import json
import random

import pytest
from typer.testing import CliRunner

from regard.cli import app


def run(*arguments, code=0, **more):
    result = CliRunner().invoke(
        app, ["watch", *map(str, arguments)], env={"COLUMNS": "120"}, **more
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def write_requests(path, count, *, seed=0, user=True, **strange):
    """Requests of ten users, the last one with other values."""
    rng = random.Random(seed)
    rows = [
        {
            "time": 1_790_000_000 + 1_000_000 * seed + 10 * i,
            "method": "GET",
            "path": rng.choice(("/orders", "/items")) + f"/{rng.randrange(100)}",
            "user": f"u{rng.randrange(10)}",
            "country": "DE",
            "password": "hunter2",
        }
        for i in range(count)
    ]
    rows[-1] |= strange
    if not user:
        rows = [{key: value for key, value in row.items() if key != "user"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    traffic = write_requests(folder / "traffic.jsonl", 1_500)
    options = ("--entity", "user", "--endpoint", "method path", "--levels", "leaf,sequence")
    result = run("learn", traffic, *options, "-o", folder / "shop.watch", "--json")
    report = json.loads(result.stdout)
    assert report["events"] == 1_500 and report["entities"] == 10 and report["endpoints"] == 2
    return folder / "shop.watch"


def test_an_alert_is_found_explained_and_masked(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = write_requests(tmp_path / "new.jsonl", 60, seed=1, password="' OR 1=1 --", country="X")
    result = run("score", new, "--model", model)
    assert "60 events:" in result.stdout
    alerts = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert 1 <= len(alerts) <= 4
    alert = min(alerts, key=lambda each: each["p"])
    assert alert["source"].endswith(":60")
    assert {"country", "password"} <= {finding["path"] for finding in alert["findings"]}
    assert "OR 1=1" not in json.dumps(alert)

    shown = run("explain", alert["id"][:6]).stdout
    assert "country is 'X'; usually 'DE' (100%)" in shown and "What if" in shown
    assert json.loads(run("explain", alert["id"], "--json").stdout) == alert
    line = run("explain", f"{new}:60", "--model", model, "--show-values", "--json")
    again = json.loads(line.stdout)
    assert again["id"] == alert["id"] and "OR 1=1" in line.stdout


def test_exit_codes_and_outputs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = write_requests(tmp_path / "good.jsonl", 50, seed=2)
    bad = write_requests(tmp_path / "bad.jsonl", 50, seed=3, country=17, admin=True)
    few = ("--alerts-per-day", "0.5", "--fail-on-alert")
    assert "50 normal" in run("score", good, "--model", model, *few).stdout
    (tmp_path / "alerts.jsonl").unlink()
    options = ("--output", "ocsf:out.json", "--fail-on-alert", "--json")
    result = json.loads(run("score", bad, "--model", model, *options, code=1).stdout)
    assert len(result["alerts"]) == result["statuses"]["alert"] >= 1
    stored = [json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines()]
    assert {each["class_uid"] for each in stored} == {2004}
    assert not (tmp_path / "alerts.jsonl").exists()
    top = json.loads(run("score", good, "--model", model, "--top", 3, "--json").stdout)
    assert len(top["most_unusual"]) == 3


def test_learn_prints_what_it_is_worth(tmp_path):
    traffic = write_requests(tmp_path / "traffic.jsonl", 400, user=False)
    result = run("learn", traffic, "--endpoint", "method path", "-o", tmp_path / "m.watch")
    for text in (
        "held-out events",
        "Edits planted",
        "No event has an entity",
        "regard watch score",
    ):
        assert text in result.stdout


def test_lines_that_are_no_events_are_kept(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = write_requests(tmp_path / "new.jsonl", 50, seed=4)
    new.write_text(new.read_text() + "{broken\n[1, 2]\n")
    result = run("score", new, "--model", model, "--dead-letters", "dead.jsonl")
    assert "50 events" in result.stdout and "lines are no events" in result.stderr
    assert len((tmp_path / "dead.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("learn", "missing.jsonl"), "There is no file missing.jsonl."),
        (("learn", "empty.jsonl"), "There are 0 events to learn from"),
        (("learn", "some.jsonl", "--levels", "leaf,sequenc"), "did you mean 'sequence'"),
        (("learn", "some.jsonl", "-o", "some.jsonl"), "some.jsonl is a file"),
        (("learn", "some.jsonl", "--format", "csv"), "There is no format 'csv'"),
        (("learn", "some.jsonl", "--secret-file", "empty.jsonl"), "empty.jsonl is empty"),
        (("score", "some.jsonl", "--model", "missing.watch"), "There is no model at missing.watch"),
        (("score", "some.jsonl", "--model", "."), "is not a model of regard watch"),
        (("explain", "abc", "--alerts", "missing", "--state", "missing"), "give --alerts or"),
        (("explain", "abc", "--alerts", "some.jsonl"), "is no alert of"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    write_requests(tmp_path / "some.jsonl", 50)
    result = run(*arguments, code=1)
    error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and message in error[0]
    assert result.stdout == ""
