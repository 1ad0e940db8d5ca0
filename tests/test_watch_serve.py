"""The server of `regard watch serve`: who may ask, wrong questions, scoring, judging, metrics."""

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from regard.watch.demo import generate_traffic
from regard.watch.demo.run import FIELDS
from regard.watch.detector import Detector
from regard.watch.events import EventParser
from regard.watch.follow.store import AlertQuery, WatchStore
from regard.watch.page.access import COOKIE, AccessGuard, cookie_value
from regard.watch.serve import MAX_BODY, MAX_EVENTS, Server, Watch, create_app
from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record
from watch_cases import fill_store, make_content

TOKEN = "the token of this server"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def detector():
    """A detector that learned a day of the shop."""
    settings = WatchSettings(**FIELDS, levels=("leaf", "sequence", "path"))
    traffic = generate_traffic(1.0, users=60, attacks=())
    records = [Record(json.dumps(event).encode(), f"a:{i}") for i, event in enumerate(traffic)]
    return Detector.learn(EventParser(settings).parse(records), settings)


@pytest.fixture
def serve(tmp_path):
    """Starts servers, and stops them at the end."""
    running = []

    def start(detector=None, **options):
        watch = Watch(fill_store(tmp_path / "state"), detector, **options)
        server = Server(create_app(watch, TOKEN))
        server.start()
        client = httpx.Client(base_url=server.url, timeout=60)
        running.append((server, client, watch))
        return client

    yield start
    for server, client, watch in running:
        client.close()
        server.stop()
        watch.store.close()


def test_nothing_without_the_token(serve):
    """Fails if data are given to someone who does not know the token, in any of the ways in which a
    browser could be made to ask."""
    client = serve()
    assert client.get("/health").json()["status"] == "ok"
    for path in (
        "/v1/alerts",
        "/v1/filters",
        "/v1/series",
        "/metrics",
        "/v1/mutes",
        "/openapi.json",
    ):
        answer = client.get(path)
        assert answer.status_code == 401 and "token" in answer.json()["error"], path
    assert client.get("/v1/alerts", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/v1/alerts", headers=BEARER).status_code == 200
    # the page itself has no data; nothing else beside the assets is open
    assert client.get("/").status_code == 200
    assert client.get("/assets/main.js").status_code == 200
    for path in ("/assets/../access.py", "/assets/..%2faccess.py", "/assets/page.html"):
        assert client.get(path, headers=BEARER).status_code == 404, path
    # another name of this machine, as in DNS rebinding
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert client.get("/health", headers={"Host": host}).status_code == 421, host


def test_browsers_sign_in_and_other_sites_cannot_act(serve):
    """Fails if the cookie alone lets a form of another site change something."""
    client = serve()
    assert client.post("/sign-in", json={"token": "wrong"}).status_code == 401
    answer = client.post("/sign-in", json={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    assert client.get("/v1/alerts").status_code == 200
    path, body = f"/v1/alerts/{make_content(0)['id']}/label", {"label": "attack"}
    assert client.post(path, json=body).status_code == 403
    own = {"X-Regard": "page"}
    foreign = {**own, "Origin": "https://evil.example"}
    assert client.post(path, json=body, headers=foreign).status_code == 403
    assert client.delete("/v1/mutes/1", headers={"Origin": "null"}).status_code == 403
    same = {**own, "Origin": str(client.base_url).rstrip("/")}
    assert client.post(path, json=body, headers=same).status_code == 200
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    client.cookies.clear()
    for wrong in ("x" * 5000, cookie_value("another token of a server"), '"\\'):
        headers = {"Cookie": f"{COOKIE}={wrong}"}
        assert client.get("/v1/alerts", headers=headers).status_code == 401


def test_short_tokens_are_refused():
    with pytest.raises(ValueError, match="at least 16"):
        AccessGuard(lambda *arguments: None, token="short")


def test_alerts_are_listed_masked_and_judged(serve, tmp_path):
    """Fails if a filter is ignored, a secret is shown, or a judgement does not reach the store."""
    client = serve()
    client.headers.update(BEARER)
    found = client.get("/v1/alerts", params={"entity": "u10001", "order": "time"}).json()
    assert found["total"] == 4 and {each["entity"] for each in found["alerts"]} == {"u10001"}
    times = [each["time"] for each in found["alerts"]]
    assert times == sorted(times, reverse=True)
    assert client.get("/v1/filters").json()["kind"] == {"value": 11, "path": 1}
    first = make_content(0)["id"]
    alert = client.get(f"/v1/alerts/{first}").json()
    shown = {leaf["path"]: leaf["value"] for leaf in alert["leaves"]}
    assert shown["request.headers.Authorization"].startswith("[masked")
    assert shown["request.query.limit"] == 50000
    assert client.get(f"/v1/alerts/{first}?format=ocsf").json()["class_uid"] == 2004
    assert client.get(f"/v1/alerts/{first}?format=ecs").json()["event"]["kind"] == "alert"
    assert client.get(f"/v1/alerts/{make_content(10)['id']}").json()["steps"] == [
        "GET /v2/basket",
        "POST /v2/checkout",
        "POST /v2/orders/{id}/confirm",
    ]

    client.post(f"/v1/alerts/{first}/label", json={"label": "attack", "note": "tried it"})
    client.post(f"/v1/alerts/{make_content(1)['id']}/accept")
    mute = client.post("/v1/mutes", json={"endpoint": "GET /x", "hours": 2}).json()["id"]
    client.post("/v1/shapes/5hape1/accept")
    store = WatchStore(tmp_path / "state")
    assert store.alert(first).label == "attack" and store.alert(first).note == "tried it"
    assert len(store.accepted_to_learn()) == 1
    assert store.shapes()[0].status == "accepted"
    expires = next(each.expires for each in store.mutes() if each.id == mute)
    assert 7000 < expires - time.time() < 7300
    assert client.delete(f"/v1/mutes/{mute}").status_code == 200
    assert mute not in [each.id for each in store.mutes()]
    store.close()
    assert client.get("/v1/graph").json() == {"nodes": [], "edges": []}  # no model
    assert len(client.get("/v1/series", params={"subject": "all"}).json()["points"]) == 192


def test_values_are_shown_on_request(serve):
    """Fails if --show-values has no effect."""
    client = serve(show_values=True)
    alert = client.get(f"/v1/alerts/{make_content(0)['id']}", headers=BEARER).json()
    assert any(leaf["value"] == "Bearer abcdefghijkl" for leaf in alert["leaves"])


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/v1/alerts/ffff0000", None, 422, "There is no alert"),
        ("GET", "/v1/alerts?status=alarm", None, 422, "alert"),
        ("GET", "/v1/alerts?limit=0", None, 422, "greater than or equal to 1"),
        ("GET", "/v1/alerts?since=now", None, 422, "number"),
        ("POST", "/v1/mutes", {}, 422, "needs an endpoint"),
        ("POST", "/v1/mutes", {"endpoint": "GET /", "hours": -1}, 422, "greater than 0"),
        ("POST", "/v1/mutes", {"endpont": "GET /"}, 422, "endpont"),
        ("POST", "/v1/alerts/0000000000000001/label", {"label": "evil"}, 422, "attack"),
        ("DELETE", "/v1/mutes/99", None, 422, "There is no mute 99"),
        ("POST", "/v1/shapes/zzzz/accept", None, 422, "There is no shape"),
        ("POST", "/v1/score", {"a": 1}, 409, "--model"),
        ("GET", "/v1/nothing", None, 404, "Not Found"),
    ],
)
def test_wrong_questions_are_answered_with_the_reason(serve, method, path, body, status, message):
    answer = serve().request(method, path, json=body, headers=BEARER)
    assert answer.status_code == status, answer.text
    assert message in answer.text


def test_score(serve, detector, tmp_path):
    """Fails if events are lost, an attack gets no alert, or the same request makes it twice."""
    client = serve(detector)
    client.headers.update(BEARER)
    traffic = list(generate_traffic(1.4, users=60, attacks=()))
    lines = "\n".join(map(json.dumps, traffic[-40:]))
    answer = client.post("/v1/score", content=lines).json()
    assert len(answer["events"]) == 40 and not answer["rejected"]
    assert sum(each["status"] == "alert" for each in answer["events"]) <= 4

    listing = next(each for each in traffic[::-1] if each["request"]["path"] == "/v2/products")
    listing["request"]["query"]["limit"] = "1 UNION SELECT email, hash FROM users"
    listing["request"]["headers"]["Authorization"] = "Bearer abcdefghijkl"
    for body in (listing, [listing]):
        answer = client.post("/v1/score", json=body, headers={"Idempotency-Key": "one"}).json()
        (event,) = answer["events"]
        assert event["alert"]["findings"] and "abcdefghijkl" not in json.dumps(answer)
    store = WatchStore(tmp_path / "state")
    scored = store.alerts(AlertQuery(statuses=None, endpoint="GET /v2/products"))
    assert sum(each.content["source"].startswith("http:one") for each in scored) == 1
    store.close()

    mixed = client.post("/v1/score", content=b'{"a": 1}\n{"a": \nnothing\n').json()
    assert len(mixed["events"]) == 1 and sum(mixed["rejected"].values()) >= 1
    assert client.post("/v1/score", content=b"").status_code == 422
    assert client.post("/v1/score", content=b"{}" * (MAX_EVENTS + 1)).status_code == 413
    assert client.post("/v1/score", content=b" " * (MAX_BODY + 1)).status_code == 413

    def chunks():
        for _ in range(MAX_BODY // 100_000 + 2):
            yield b" " * 100_000

    assert client.post("/v1/score", content=chunks()).status_code == 413
    deep = b'{"request":' * 5000 + b"1" + b"}" * 5000
    assert client.post("/v1/score", content=deep).status_code == 200

    graph = client.get("/v1/graph").json()
    assert "GET /v2/products" in {node["name"] for node in graph["nodes"]}
    assert all(0 < edge["share"] <= 1 for edge in graph["edges"]) and graph["edges"]
    metrics = client.get("/metrics").text
    assert "regard_watch_events_total" in metrics and "regard_watch_stored_alerts" in metrics
    assert 'regard_watch_waiting_deliveries{output="jsonl:alerts.jsonl"} 12.0' in metrics


def test_command(tmp_path):
    """Fails if `regard watch serve` does not print its address, answer, and end on SIGTERM."""
    fill_store(tmp_path / "state").close()
    command = [sys.executable, "-m", "regard", "watch", "serve", "--port", "0"]
    environment = os.environ | {"REGARD_WATCH_TOKEN": TOKEN}
    process = subprocess.Popen(
        [*command, "--state", str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        url, _, token = line.removeprefix("page: ").strip().partition("/sign-in#")
        assert token == TOKEN and url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/v1/alerts", headers=BEARER).json()["total"] == 12
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM) and "Traceback" not in errors, errors

    missing = subprocess.run(
        [*command, "--state", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert missing.returncode == 1 and "There is no" in missing.stderr
