"""Outputs of alerts: schemas, masking, files, signed webhooks, and a queue that loses nothing."""

import base64
import hashlib
import hmac
import http.server
import json
import threading
import time

import pytest

from regard.watch.outputs import Deliveries, create_output, mask_alert, mask_value, to_ecs, to_ocsf
from regard.watch.outputs.masking import is_sensitive_path
from regard.watch.outputs.webhook import decode_secret, sign


def make_alert(id="0123456789abcdef", **changes):
    """An alert as `Alert.to_json` returns it."""
    finding = {
        "level": "leaf",
        "kind": "value",
        "path": "request.query.limit",
        "observed": 50000,
        "bits": 18.2,
        "p": 1e-6,
        "expected": [[24, 0.51], [20, 0.26]],
        "text": "request.query.limit is 50000; usual is 24 (51 %).",
        "context": [["traffic.jsonl:11", 0.4]],
    }
    return {
        "id": id,
        "time": 1788800000.25,
        "source": "traffic.jsonl:17",
        "tenant": "acme",
        "entity": "u1042",
        "endpoint": "GET /v2/products",
        "p": 2e-6,
        "extrapolated": True,
        "severity": "high",
        "kind": "value",
        "findings": [finding],
        "nearest_normal": {"request.query.limit": 24},
        "what_if": [{"path": "request.query.limit", "value": 24, "bits_before": 30.0}],
        "leaves": [{"path": "request.query.limit", "value": 50000, "bits": 18.2}],
        "baseline": 5000,
        "model": "8f3a",
        "status": "alert",
    } | changes


# ----------------------------------------------------------------------------------- schemas
# Names and requirements of https://schema.ocsf.io/1.5.0/classes/detection_finding
OCSF_REQUIRED = {
    "activity_id",
    "category_uid",
    "class_uid",
    "finding_info",
    "metadata",
    "severity_id",
    "time",
    "type_uid",
}
OCSF_OTHER = {
    "activity_name",
    "anomaly_analyses",
    "category_name",
    "class_name",
    "end_time",
    "evidences",
    "is_alert",
    "message",
    "observables",
    "severity",
    "start_time",
    "status",
    "status_id",
    "type_name",
    "unmapped",
}


def test_ocsf_detection_finding():
    """Fails if a document lacks what class 2004 requires, or has a name that the class lacks."""
    document = to_ocsf(make_alert(), created=1788800001.0)
    assert set(document) >= OCSF_REQUIRED and set(document) <= OCSF_REQUIRED | OCSF_OTHER
    assert document["class_uid"] == 2004 and document["type_uid"] == 2004 * 100 + 1
    assert (document["severity_id"], document["severity"]) == (4, "High")
    assert document["time"] == 1788800001000 and document["start_time"] == 1788800000250
    assert document["metadata"]["product"]["name"] and document["metadata"]["version"] == "1.5.0"
    assert document["finding_info"]["uid"] == document["metadata"]["uid"] == "0123456789abcdef"
    (analysis,) = document["anomaly_analyses"]
    assert analysis["analysis_target"]["name"] == "u1042"
    (anomaly,) = analysis["anomalies"]
    assert anomaly["observed_attribute"] == "request.query.limit"
    assert anomaly["observations"] == [{"value": "50000"}]
    (evidence,) = document["evidences"]
    assert evidence["actor"]["user"]["name"] == "u1042"
    by_address = to_ocsf(make_alert(entity="203.0.113.9"))
    assert by_address["evidences"][0]["src_endpoint"] == {"ip": "203.0.113.9"}


def test_ecs_alert():
    """Fails if categories are not of ECS, or a field may have values of several types."""
    document = to_ecs(make_alert())
    event = document["event"]
    assert (event["kind"], event["category"], event["type"]) == (
        "alert",
        ["intrusion_detection"],
        ["info"],
    )
    assert document["@timestamp"] == "2026-09-07T16:53:20.250Z" and event["severity"] == 73
    assert document["user"] == {"name": "u1042"} and document["organization"] == {"id": "acme"}
    (finding,) = document["regard"]["findings"]
    assert finding["observed"] == "50000"
    assert finding["expected"][0] == {"value": "24", "probability": 0.51}
    assert document["regard"]["nearest_normal"] == [{"path": "request.query.limit", "value": "24"}]
    assert to_ecs(make_alert(entity="2001:db8::1"))["source"] == {"ip": "2001:db8::1"}
    # an event's own clock may say anything
    assert to_ecs(make_alert(time=1e300))["@timestamp"].startswith("1970")


# ----------------------------------------------------------------------------------- masking
@pytest.mark.parametrize(
    ("path", "sensitive"),
    [
        ("request.body.password", True),
        ("request.headers.Set-Cookie", True),
        ("request.headers.X-Api-Key", True),
        ("accessToken.value", True),
        ("user.firstName", True),
        ("payment.cardNumber", True),
        ("SESSION_ID", True),
        ("request.query.limit", False),
        ("items[].product_key", False),
        ("company", False),
        ("request.body.shipping", False),
        ("tokenizer", False),
    ],
)
def test_sensitive_paths(path, sensitive):
    assert is_sensitive_path(path) == sensitive


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "[masked: token, 41 characters]"),
        ("Bearer abcdefghijkl", "[masked: token, 19 characters]"),
        ("anna@mail.example", "[masked: email, 17 characters]"),
        ("4111 1111 1111 1111", "[masked: card, 19 characters]"),
        (4111111111111111, "[masked: card, a number]"),
        ("DE89370400440532013000", "[masked: iban, 22 characters]"),
        ("-----BEGIN PRIVATE KEY-----MII", "[masked: key, 30 characters]"),
        (4111111111111112, 4111111111111112),
        ("x' OR '1'='1", "x' OR '1'='1"),
        ("2026-09-07T08:00:00.000Z", "2026-09-07T08:00:00.000Z"),
        (True, True),
        (None, None),
    ],
)
def test_secrets_are_masked_wherever_they_are(value, masked):
    assert mask_value(value, "request.body.comment") == masked


def test_masked_alert_contains_no_sensitive_value():
    """Fails if a sensitive value is left anywhere in an alert, or others are taken away."""
    alert = make_alert(
        nearest_normal={"request.body.pin": 4711, "request.query.limit": 24},
        what_if=[{"path": "request.body.pin", "value": 4712, "bits_before": 9.0}],
        leaves=[{"path": "request.body.pin", "value": 4713, "bits": 9.0}],
    )
    secret = dict(alert["findings"][0])
    secret |= {"path": "request.body.pin", "observed": 4714, "expected": [[4715, 0.1]]}
    secret |= {"text": "request.body.pin is 4714; usual is 4715."}
    quoted = dict(alert["findings"][0], text="limit of anna@mail.example is 50000")
    alert["findings"] += [secret, quoted]
    masked = mask_alert(alert)
    text = json.dumps(masked)
    assert "471" not in text and "anna@" not in text
    assert masked["findings"][0] == alert["findings"][0]
    assert masked["nearest_normal"]["request.query.limit"] == 24
    assert mask_alert(masked) == masked


def test_masking_takes_linear_time():
    """Fails if a long value that resembles a secret takes quadratic time."""

    def seconds(count):
        start = time.process_time()
        for text in ("eyJ" * count, "a." * count, "A" * count, "1" * count, "bearer " * count):
            mask_value(text)
        return time.process_time() - start

    seconds(1000)
    assert seconds(200_000) < 100 * max(seconds(10_000), 1e-3)  # linear: 20, quadratic: 400


# ------------------------------------------------------------------------------------- files
def test_files(tmp_path, capfdbinary):
    """Fails if alerts are not one line each, or a line that a crash cut off swallows the next."""
    path = tmp_path / "alerts.jsonl"
    output = create_output(str(path))
    output.send([make_alert("a1"), make_alert("a2", entity="half \ud800 pair")])
    path.write_bytes(path.read_bytes() + b'{"id":"cut')
    output.send([make_alert("a3")])
    lines = path.read_bytes().splitlines()
    assert [json.loads(lines[i])["id"] for i in (0, 1, 3)] == ["a1", "a2", "a3"]
    create_output("ocsf:-").send([make_alert()])
    assert json.loads(capfdbinary.readouterr().out)["class_uid"] == 2004


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ocfs:-", "ocsf"),
        ("ecs:", "names no file"),
        ("https://host/x", "Write webhook:https://host/x"),
        ("webhook:ftp://host/x", "URL such as https://host/path"),
        ("webhook:https://user:word@host/", "must not contain a password"),
        ("jsonl:missing/folder/alerts.jsonl", "does not exist"),
        ("jsonl:.", "is a folder"),
    ],
)
def test_wrong_outputs(spec, message):
    with pytest.raises(ValueError, match=message):
        create_output(spec)


# ---------------------------------------------------------------------------------- webhooks
class Receiver:
    """A server that records requests, and answers with the statuses that it is given."""

    def __init__(self):
        self.requests, self.statuses = [], []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, dict(self.headers), body))
                status = receiver.statuses.pop(0) if receiver.statuses else 204
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=k1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def test_signature_of_the_specification():
    """Fails if signatures differ from the test vector of Standard Webhooks libraries."""
    key = decode_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    found = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    for wrong, message in (("short", "5 bytes"), ("whsec_!!", "not base64")):
        with pytest.raises(ValueError, match=message):
            decode_secret(wrong)


class Queue:
    """The deliveries of one output, as the store keeps them."""

    def __init__(self, alerts):
        self.waiting = list(alerts)

    def next_deliveries(self, output, limit):
        return [type("Entry", (), {"content": alert}) for alert in self.waiting[:limit]]

    def finish_deliveries(self, output, ids):
        self.waiting = [alert for alert in self.waiting if alert["id"] not in ids]


def test_webhook_signs_and_retries(receiver):
    """Fails if a receiver cannot verify an alert, if a failure loses one, if one that is refused
    holds up the others, or if a secret is sent that was to be masked."""
    secret = "a secret of more than 16 bytes"
    output = create_output(f"webhook:{receiver.url}", webhook_secret=secret)
    assert "k1" not in output.name
    alerts = [make_alert(f"a{i}") for i in range(4)]
    alerts[0]["nearest_normal"]["request.body.password"] = "hunter22"
    queue, now, lines = Queue(alerts), [0.0], []
    deliveries = Deliveries(queue, [output], report=lines.append, clock=lambda: now[0])

    receiver.statuses = [204, 503, 400]
    assert deliveries.send_pending() == 1 and len(queue.waiting) == 3
    assert deliveries.send_pending() == 0 and len(receiver.requests) == 2  # it waits
    now[0] = 1.0
    assert deliveries.send_pending() == 2 and not queue.waiting
    ids = [headers["webhook-id"] for _, headers, _ in receiver.requests]
    assert ids == ["a0", "a1", "a1", "a2", "a3"]
    assert "answers 503" in lines[0] and "not sent again: a1" in lines[1] and len(lines) == 2
    state = deliveries.states[output.name]
    assert (state.sent, state.refused, state.failures) == (3, 1, 0)

    path, headers, body = receiver.requests[0]
    assert path == "/hook?key=k1" and b"hunter22" not in body
    content = f"a0.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(secret.encode(), content, hashlib.sha256).digest())
    assert headers["webhook-signature"] == "v1," + expected.decode()
    assert json.loads(body)["id"] == "a0"


def test_delays_double_and_redirects_are_not_followed(receiver):
    """Fails if a receiver that is down is asked ever more often, or another address gets alerts."""
    output = create_output(f"webhook+ecs:{receiver.url}")
    queue, now = Queue([make_alert("a1")]), [0.0]
    deliveries = Deliveries(queue, [output], clock=lambda: now[0])
    receiver.statuses = [500] * 12
    delays = []
    for _ in range(12):
        deliveries.send_pending()
        delays.append(deliveries.states[output.name].next_attempt - now[0])
        now[0] += delays[-1]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0] and delays[-1] == 300.0
    receiver.statuses = [302, 404]
    for _ in range(2):
        assert deliveries.send_pending() == 0 and queue.waiting
        now[0] += 300.0
    assert deliveries.send_pending() == 1 and len(receiver.requests) == 15
    assert {path for path, _, _ in receiver.requests} == {"/hook?key=k1"}
    receiver.server.shutdown()
    receiver.server.server_close()
    queue.waiting, lines = [make_alert("a2")], []
    deliveries.report = lines.append
    assert deliveries.send_pending() == 0 and "does not answer" in lines[0] and queue.waiting
