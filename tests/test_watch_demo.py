"""Traffic of the demo shop: seeded, in order, with labels apart, and without keys that give attacks
away."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections import Counter
from datetime import datetime

import httpx
import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.watch.demo import ATTACKS, generate_labelled_traffic, generate_traffic


def paths(value, prefix=""):
    """The paths of all leaves of a JSON value."""
    if isinstance(value, dict):
        return {leaf for key, each in value.items() for leaf in paths(each, f"{prefix}.{key}")}
    if isinstance(value, list):
        return {leaf for each in value for leaf in paths(each, f"{prefix}[]")}
    return {prefix}


def test_traffic_is_seeded_and_in_order():
    """Fails if the same seed gives other events, or time goes back."""
    first, again = (list(generate_traffic(2, users=30, seed=1)) for _ in range(2))
    assert first == again
    assert first != list(generate_traffic(2, users=30, seed=2))
    times = [datetime.fromisoformat(event["time"]) for event in first]
    assert times == sorted(times)
    assert len({event["request_id"] for event in first}) == len(first)


def test_before_the_attacks_traffic_is_the_same():
    """Fails if a detector could tell from clean days that attacks will follow."""
    clean = list(generate_traffic(1, users=30, attacks=()))
    attacked = generate_labelled_traffic(2, users=30, attacks_from=1.0)
    assert [event for event, _ in itertools.islice(attacked, len(clean))] == clean


def test_every_kind_is_labelled_apart_from_the_events():
    """Fails if a kind is missing, if an event says that it is an attack, or if most kinds could be
    found by keys alone."""
    seen, incidents, normal_paths = Counter(), {}, set()
    attack_paths = {kind: set() for kind in ATTACKS}
    for event, label in generate_labelled_traffic(8, users=120, seed=3, attacks_from=4.0):
        text = json.dumps(event)
        assert not any(word in text for word in ("attack", "label", "incident", *ATTACKS))
        if label is None:
            normal_paths |= paths(event)
        else:
            seen[label.kind] += 1
            incidents.setdefault(label.kind, set()).add(label.incident)
            attack_paths[label.kind] |= paths(event)
    assert set(seen) == set(ATTACKS)
    assert all(len(each) == 4 for each in incidents.values())
    new = {kind for kind, found in attack_paths.items() if found - normal_paths}
    assert new == {"mass_assignment"}, new
    assert 0.5 * 120 * 16 * 8 < sum(1 for _ in generate_traffic(8, users=120)) < 40 * 120 * 8


def test_drift():
    """Fails if the shop stays the same over weeks, or changes without drift."""

    def summary(drift, days):
        first, last = days
        prices, versions, routes = [], set(), set()
        for event in generate_traffic(last + 1, 40, attacks=(), drift=drift):
            day = (datetime.fromisoformat(event["time"]).timestamp() - START) / 86400
            if not first <= day < last:
                continue
            request = event["request"]
            prices += [each["price"] for each in request.get("body", {}).get("prices", ())]
            versions.add(request["headers"].get("X-App-Version"))
            routes.add(request["path"].split("/")[2])
        return sum(prices) / len(prices), versions, routes

    START = datetime.fromisoformat(next(generate_traffic(1, 1))["time"]).timestamp() // 86400
    START *= 86400
    early, late, still = summary(True, (0, 4)), summary(True, (17, 21)), summary(False, (17, 21))
    assert "5.4.0" in late[1] - early[1] and "recommendations" in late[2] - early[2]
    assert still[1:] == early[1:]


def test_traffic_without_end():
    """Fails if events are only given when all are made."""
    endless = generate_traffic(math.inf, users=5, attacks=())
    assert len(list(itertools.islice(endless, 2000))) == 2000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 1, "attacks": ("scrapping",)}, "scraping"),
        ({"days": 0}, "days must be positive"),
        ({"days": 1, "users": 0}, "users must be at least 1"),
        ({"days": 1, "attacks_from": 1.5}, "attacks_from must be between 0 and 1"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        next(generate_traffic(**options))


def test_demo_from_end_to_end(tmp_path):
    """Fails if the demo does not learn, follow every event, serve its page, say what was found and
    missed, and end when it is told to."""
    command = [sys.executable, "-m", "regard", "watch", "demo", "--out", str(tmp_path / "demo")]
    command += ["--users", "25", "--learn-days", "2", "--days", "1", "--seconds", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not (lines and "stays open" in lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        url, token = re.search(r"(http://\S+)/sign-in#(\S+)", lines[-1]).groups()
        headers = {"Authorization": f"Bearer {token}"}
        statuses = {"status": ["alert", "shadow", "repeated"]}  # most endpoints are new
        alerts = httpx.get(f"{url}/v1/alerts", params=statuses, headers=headers).json()
        graph = httpx.get(f"{url}/v1/graph", headers=headers).json()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in errors, errors
    assert re.search(r"\d+ of 13 incidents were found", " ".join(output.split())), output
    assert "API7 server side request forgery" in output
    assert alerts["total"] > 0 and graph["edges"]


def test_demo_in_a_folder_of_others(tmp_path):
    """Fails if the demo deletes or mixes with files of somebody else."""
    (tmp_path / "thesis.txt").write_text("x")
    result = CliRunner().invoke(app, ["watch", "demo", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "thesis.txt" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
