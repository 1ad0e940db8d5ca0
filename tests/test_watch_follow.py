"""`regard watch follow`: nothing is lost and nothing counts twice, whatever fails."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.watch_running import parse_days, parse_port, parse_share
from regard.folder_lock import lock_folder
from regard.watch.demo.traffic import generate_traffic
from regard.watch.detector import Detector
from regard.watch.events import EventParser, read_events
from regard.watch.follow import follower as follower_module
from regard.watch.follow.bench import measure_stages
from regard.watch.follow.follower import Follower, FollowSettings, entity_share
from regard.watch.follow.metrics import serve_metrics
from regard.watch.follow.reader import ReadAhead
from regard.watch.follow.state_folder import load_detector, name_consumer, prepare_folder
from regard.watch.follow.store import STATUSES, AlertQuery, Mute, WatchStore
from regard.watch.outputs import create_output
from regard.watch.settings import WatchSettings
from regard.watch.sources import Record, Source, SourceError

SETTINGS = WatchSettings(
    entity="request.user",
    endpoint="request.method request.path",
    time="time",
    ignore=("request_id",),
    levels=("leaf", "sequence", "user"),
    format="jsonl",
    learning_events=0,
    shadow_events=0,
    volume_per_day=250.0,  # as if this were less: alerts are frequent
)
ANY = AlertQuery(statuses=None, limit=10_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of three days of a small shop."""
    folder = tmp_path_factory.mktemp("model")
    lines = [json.dumps(event) for event in generate_traffic(3, 12, 0, ())]
    (folder / "train.jsonl").write_text("\n".join(lines))
    detector = Detector.learn(read_events(folder / "train.jsonl", SETTINGS), SETTINGS)
    detector.save(folder / "shop.watch")
    return folder / "shop.watch"


@pytest.fixture(scope="module")
def lines():
    """Lines of another day, every 40th with an attack that nobody could miss."""
    events = list(generate_traffic(4, 12, 0, ()))[-600:]
    for event in events[20::40]:
        event["request"]["body"] = {"role": "root", "is_admin": True, "q": "' OR 1=1; -- <script>"}
        event["request"]["country"] = "KP"
    return [json.dumps(event).encode() for event in events]


class MemorySource(Source):
    """Delivers lines until they are acknowledged; `reopen` is what a broker does after a crash."""

    name = "memory"

    def __init__(self, lines):
        self.records = [Record(line, f"memory:{i}") for i, line in enumerate(lines)]
        self.waiting, self.acknowledged = list(self.records), set()

    def reopen(self):
        self.waiting = [each for each in self.records if each.id not in self.acknowledged]
        return self

    def read(self, max_events, timeout):
        taken, self.waiting = self.waiting[:max_events], self.waiting[max_events:]
        return taken

    def acknowledge(self, ids):
        self.acknowledged |= set(ids)

    def close(self):
        pass

    @property
    def exhausted(self):
        return not self.waiting


def build(model, source, folder, *, outputs=(), said=None, **settings):
    """A follower in this process that does not learn, so that runs can be compared."""
    folder.mkdir(exist_ok=True)
    given = {"batch_size": 32, "queue_size": 64, "learn": False, "commit_seconds": 0.01}
    return Follower(
        Detector.load(model),
        source.reopen,
        folder,
        FollowSettings(**(given | settings)),
        outputs=outputs,
        report=(said if said is not None else []).append,
    )


def stored(folder):
    """(ids of alerts, how many events each entity has counted)."""
    store = WatchStore(folder)
    rows = store.database.rows("SELECT entity, state FROM entities")
    counts = {entity: json.loads(state).get("user", [0])[0] for entity, state in rows}
    ids = store.alert_ids()
    store.close()
    return ids, counts


@pytest.fixture(scope="module")
def reference(model, lines, tmp_path_factory):
    """What a run without a fault stores."""
    folder = tmp_path_factory.mktemp("reference") / "state"
    source = MemorySource(lines)
    follower = build(model, source, folder)
    follower.run()
    assert follower.events == 600 and source.acknowledged == {each.id for each in source.records}
    ids, counts = stored(folder)
    detector = Detector.load(model)
    (first,) = EventParser(SETTINGS).parse(source.records[20:21])
    assert detector.alert_id(first) in ids and len(ids) < 300
    return ids, counts


class Crash(BaseException):
    """The process ends here."""


def test_crash_at_every_step(model, lines, reference, tmp_path, monkeypatch):
    """Fails if an alert is lost, or an event counts twice in a state or a file, when the process
    ends between any two steps: before, in and after the transaction, and before and after the
    acknowledgement."""
    rng, source = random.Random(0), MemorySource(lines)
    plan = {"left": 0}

    def crash_sometimes(where, run):
        def wrapped(*given):
            before = rng.random() < 0.5
            if before and plan["left"] <= 0:
                raise Crash(where)
            result = run(*given)
            plan["left"] -= 1
            if plan["left"] < 0:
                raise Crash(where)
            return result

        return wrapped

    crashes = []
    output = tmp_path / "out.jsonl"
    while True:
        follower = build(
            model, source, tmp_path / "state", outputs=[create_output(f"jsonl:{output}")]
        )
        plan["left"] = rng.randrange(12)
        if len(crashes) < 25:
            for owner, name in (
                (follower, "_write"),
                (follower.states, "write"),
                (follower.states, "evict"),
                (follower.processed, "write"),
                (follower.processed, "remember"),
                (follower.store, "add_alerts"),
            ):
                setattr(owner, name, crash_sometimes(name, getattr(owner, name)))
        try:
            follower.run()
        except Crash as crash:
            crashes.append(str(crash))
        else:
            break
    assert len(set(crashes)) >= 5, crashes
    assert stored(tmp_path / "state") == reference
    sent = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    assert set(sent) <= reference[0]
    store = WatchStore(tmp_path / "state")
    assert {each.content["id"] for each in store.alerts(AlertQuery(limit=10_000))} == set(sent)
    store.close()


def test_second_delivery_counts_once(model, lines, reference, tmp_path):
    """Fails if records that come again, in the same run or in the next one, count twice."""
    source = MemorySource(lines)
    source.records = [each for each in source.records for _ in range(2)]
    follower = build(model, source, tmp_path / "state")
    follower.run()
    source.acknowledged.clear()
    again = build(model, source, tmp_path / "state")
    again.run()
    assert again.events == 0 and again.metrics.duplicates._value.get() == 1200
    assert stored(tmp_path / "state") == reference


def test_full_disk_waits(model, lines, reference, tmp_path, monkeypatch):
    """Fails if a commit that fails loses records, acknowledges them, or ends the process; if it is
    not said; or if a stop while the disk is full acknowledges anything."""
    monkeypatch.setattr(follower_module, "RETRY_SECONDS", 0.05)
    said, source = [], MemorySource(lines)
    follower = build(model, source, tmp_path / "state", said=said)
    write, failures = follower._write, [3, 0, 2, 0]

    def fail_sometimes():
        if failures and failures[0] > 0:
            failures[0] -= 1
            assert not source.acknowledged or len(failures) < 3
            raise OSError(28, "No space left on device", "watch.db")
        if failures:
            failures.pop(0)
        write()

    follower._write = fail_sometimes
    follower.run()
    assert stored(tmp_path / "state") == reference
    assert [line for line in said if "disk is full" in line and "Trying again" in line]
    assert sum("can be written again" in line for line in said) == 2

    source = MemorySource(lines)
    stuck = build(model, source, tmp_path / "other", said=said)
    stuck._write = lambda: (_ for _ in ()).throw(OSError(28, "No space", "watch.db"))
    threading.Timer(0.5, stuck.stopping.set).start()
    stuck.run()
    assert not source.acknowledged and "could not be stored" in said[-1]


def test_event_that_cannot_be_scored(model, lines, tmp_path, monkeypatch):
    """Fails if one event that breaks a level stops the others, counts them twice, or is lost."""
    source = MemorySource(lines[:100])
    source.records[7] = source.records[7]._replace(data=lines[7].replace(b'"GET"', b'"BOOM"'))
    follower = build(model, source, tmp_path / "state")
    score = follower.detector.score

    def fragile(events, states):
        scored = score(events, states)
        if any("BOOM" in event.endpoint for event in events):
            raise KeyError("boom")
        return scored

    follower.detector.score = fragile
    follower.run()
    has_boom = b"BOOM" in source.records[7].data
    assert has_boom and follower.events == 99
    (letter,) = (tmp_path / "state" / "dead-letters.jsonl").read_text().splitlines()
    assert "cannot be scored: KeyError" in json.loads(letter)["reason"]
    whole = build(model, MemorySource(lines[:7] + lines[8:100]), tmp_path / "whole")
    whole.run()
    assert stored(tmp_path / "state")[1] == stored(tmp_path / "whole")[1]


def test_odd_events(model, lines, tmp_path):
    """Fails if clocks that go back or far ahead, missing entities, one busy entity, or lines that
    are no events stop the process or are lost."""
    odd = [json.loads(line) for line in lines[:300]]
    for i, event in enumerate(odd):
        if i % 3 == 0:
            event["request"]["user"] = "one"
        if i % 7 == 0:
            event["time"] = ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", -1e300, None][i % 4]
        if i % 11 == 0:
            del event["request"]["user"]
    texts = [json.dumps(event).encode() for event in odd]
    texts[5:5] = [b"{", b"\xff\xfe", b"null", b'"x"', b'{"a":' * 2000, b"{}"]
    source = MemorySource(texts)
    follower = build(model, source, tmp_path / "state", learn=True)
    follower.run()
    letters = (tmp_path / "state" / "dead-letters.jsonl").read_text().splitlines()
    assert follower.events + len(letters) == len(texts) and len(letters) == 5
    assert len(source.acknowledged) == len(texts)


def test_feedback_while_it_runs(model, lines, tmp_path):
    """Fails if a mute, or what was accepted, does not reach a process that runs; if a muted alert
    is sent; or if what was learned is gone after the next start."""
    attack = lines[20]
    source = MemorySource([attack])
    follower = build(model, source, tmp_path / "state", learn=True)
    follower.run()
    store = WatchStore(tmp_path / "state")
    (entry,) = store.alerts(ANY)
    assert entry.event["paths"] and entry.status in ("alert", "shadow")
    output = tmp_path / "out.jsonl"
    source = MemorySource([])
    source.records = [Record(attack, "memory:again")]
    follower = build(model, source, tmp_path / "state", outputs=[create_output(f"jsonl:{output}")])
    store.add_mute(Mute(endpoint=entry.content["endpoint"], reason="ours"))
    store.accept_alert(entry.content["id"])
    follower.run()
    muted = store.alert(follower.detector.alert_id(EventParser(SETTINGS).parse(source.records)[0]))
    assert muted.status == "muted" and muted.reason == "mute 1: ours"
    assert store.mutes()[0].alerts == 1 and not output.exists()
    assert follower.learned == [] and store.accepted_to_learn() == []
    store.close()


def test_new_shape_is_reported_once(model, tmp_path):
    """Fails if a new key is not a shape, if more than its first alert is shown, also after a
    restart, or if the rule does not accept it."""
    products = {}
    for event in generate_traffic(4, 12, 0, ()):
        if event["request"]["path"] == "/v2/products" and "query" in event["request"]:
            products.setdefault(event["request"]["user"], event)
    said, records = [], []
    for i, event in enumerate(products.values()):
        event["request"]["query"]["discount"] = "yes"
        records.append(Record(json.dumps(event).encode(), f"memory:{i}"))
    users = len(records)
    for part in (records[:5], records[5:]):
        source = MemorySource([])
        source.records = part
        follower = build(model, source, tmp_path / "state", said=said, batch_size=1)
        follower.run()
    store = WatchStore(tmp_path / "state")
    (shape,) = store.shapes("new")
    assert shape.added == [("request.query.discount", "string")]
    assert (shape.events, shape.entities) == (users, users) and users > 7
    statuses = store.alert_values("status", STATUSES)
    assert statuses["known_shape"] >= 3, statuses
    shown = [each.content["findings"] for each in store.alerts()]
    assert sum({f["path"] for f in found} == {"request.query.discount"} for found in shown) == 1
    assert sum("new shape" in line for line in said) == 1
    source.records = [Record(records[0].data, "memory:100")]
    build(model, source, tmp_path / "state", said=said, adopt_entities=5).run()
    assert store.shapes("accepted") and f"used by {users} entities" in said[-1]
    source.records = [Record(records[0].data, "memory:101")]
    build(model, source, tmp_path / "state").run()
    assert store.alert_values("status", ["accepted"]) in ({}, {"accepted": 1})
    store.close()


# ----------------------------------------------------------------------------------------- parts
def test_read_ahead_is_bounded_and_recovers():
    """Fails if more is read than fits, a failing source ends the thread, or it is not said."""

    class Flaky(MemorySource):
        fails = 0

        def read(self, max_events, timeout):
            if len(self.records) - len(self.waiting) >= 100 and self.fails < 2:
                self.fails += 1
                raise SourceError("the broker is away.")
            return super().read(max_events, timeout)

    said, source = [], Flaky([b"x"] * 500)
    reader = ReadAhead(source.reopen, 64, said.append)
    time.sleep(0.3)
    assert reader.waiting <= 64 and len(source.waiting) >= 500 - 64
    taken = []
    while not reader.exhausted:
        records = reader.take(30, 1.0)
        assert len(records) <= 30
        taken += [record.id for record in records]
        reader.acknowledge([record.id for record in records])
    reader.close()
    assert taken == [record.id for record in source.records] and len(source.acknowledged) == 500
    assert said == ["the broker is away. Trying again.", "memory answers again."]

    def refuse():
        raise SourceError("no such stream")

    with pytest.raises(SourceError, match="no such stream"):
        ReadAhead(refuse, 64, said.append)


def test_shares_of_entities(lines):
    """Fails if the shares of several processes overlap, leave an entity out, or split one."""
    events = EventParser(SETTINGS).parse(MemorySource(lines).records)
    shares = {
        event.entity: {entity_share(each, 3) for each in events if each.entity == event.entity}
        for event in events
    }
    assert all(len(found) == 1 for found in shares.values())
    assert len(set().union(*shares.values())) == 3


def test_metrics_and_health(model, lines, tmp_path):
    """Fails if a metric is missing, or /ready says yes while something is wrong."""
    follower = build(model, MemorySource(lines[:50]), tmp_path / "state")
    server = serve_metrics("127.0.0.1", 0, follower.metrics, follower.health)
    address = f"http://127.0.0.1:{server.server_address[1]}"

    def get(path):
        try:
            with urllib.request.urlopen(address + path) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert get("/health")[0] == 200 and get("/ready")[0] == 503 and get("/other")[0] == 404
    follower.run()
    assert get("/ready") == (200, '{"ok": true, "alive": true, "problems": {}}\n')
    follower.health.problems["store"] = "The disk is full."
    assert get("/ready")[0] == 503 and "disk is full" in get("/ready")[1]
    follower.health.beat -= 1000
    assert get("/health")[0] == 503
    metrics = get("/metrics")[1]
    assert "regard_watch_records_total 50.0" in metrics
    assert "process_resident_memory_bytes" in metrics
    assert 'regard_watch_latency_seconds_bucket{le="1.0"}' in metrics
    with pytest.raises(OSError, match="choose another --metrics-port"):
        serve_metrics("127.0.0.1", server.server_address[1], follower.metrics, follower.health)
    server.shutdown()
    server.server_close()


def test_bench(model, lines, tmp_path):
    """Fails if a stage is not measured."""
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    result = measure_stages(
        Detector.load(model), str(tmp_path / "a.jsonl"), events=200, batch_size=64
    )
    assert result.events == 200 and result.leaves > 5 and all(result.seconds.values())


# ------------------------------------------------------------------------------------- processes
def start(model, source, folder, *options):
    """A `regard watch follow` process, once it follows."""
    command = [sys.executable, "-m", "regard", "watch", "follow", str(source)]
    command += ["--model", str(model), "--state", str(folder), "--metrics-port", "none", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr:
        said.append(line)
        if " following " in line:
            break
    return process, said


def test_process_stops_and_goes_on(model, lines, tmp_path):
    """Fails if SIGTERM does not end the process cleanly with everything committed, a second
    process may use its folder, or the next one does not go on where it was."""
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(b"\n".join(lines[:200]) + b"\n")
    process, said = start(model, file, tmp_path / "state", "--commit-every", "0.1s")
    try:
        other, refused = start(model, file, tmp_path / "state")
        assert other.wait(60) == 1 and "Another process" in refused[0]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(stored(tmp_path / "state")[1]) < 5:
            time.sleep(0.1)
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.wait(60) == 0 and "stopped: 200 events" in rest, said
    with file.open("ab") as more:
        more.write(b"\n".join(lines[200:210]) + b"\n")
    process, _ = start(model, file, tmp_path / "state", "--until-end")
    rest = process.stderr.read()
    assert process.wait(60) == 0 and "stopped: 10 events" in rest


def benchmark():
    """benchmarks/watch_faults.py."""
    path = Path(__file__).parents[1] / "benchmarks" / "watch_faults.py"
    spec = importlib.util.spec_from_file_location("watch_faults", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["watch_faults"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis", "nats"])
def test_killed_processes_lose_nothing(broker, model, lines, tmp_path):
    """Fails if kill -9 loses an alert, or counts a record twice; 50 kills of each are in
    benchmarks/results/watch-faults.json."""
    pytest.importorskip(broker, reason=f"the package {broker} is not installed")
    faults = benchmark()
    traffic = faults.Traffic(model, lines, {number + 1 for number in range(20, 600, 40)})
    try:
        faults.BROKERS[broker](tmp_path).close()
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(f"no server of {broker}: {error}")
    (tmp_path / "reference").mkdir()
    reference = faults.run_reference(traffic, tmp_path / "reference")
    (tmp_path / "killed").mkdir()
    result = faults.run_kills(broker, traffic, reference, tmp_path / "killed", 2, seed=1)
    assert result["nothing_lost"] and result["planted"] >= 10, result


# ----------------------------------------------------------------------------------------- usage
def test_state_folder(model, tmp_path):
    """Fails if a folder of another model or of somebody else is used, or what a crash left of the
    model stops the next start."""
    state = tmp_path / "state"
    prepare_folder(state)
    load_detector(model, state)
    (state / "model").mkdir()
    said = []
    assert load_detector(model, state, report=said.append).model_id
    assert "what was learned since is lost" in said[0]
    store = WatchStore(state)
    store.set_fact("model_id", "other")
    store.close()
    with pytest.raises(ValueError, match=r"used with another model .*--new-model"):
        load_detector(model, state)
    load_detector(model, state, new_model=True)
    load_detector(model, state)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        prepare_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="is not a state folder"):
        prepare_folder(tmp_path)
    with lock_folder(state), pytest.raises(ValueError, match="already working"), lock_folder(state):
        pass


def test_wrong_options(model, tmp_path):
    """Fails if a wrong option or source ends in a traceback, or is accepted."""
    assert (
        parse_share("2/3") == (1, 3) and parse_port("none") is None and parse_days("2d") == 172800
    )
    for arguments, message in (
        (["redis://localhost:1/requests"], "Cannot read redis://localhost:1"),
        (["rediss+x://a/b"], "there is no source"),
        (["-", "--share", "3/2"], "--share is the number of this process"),
        (["-", "--metrics-port", "many"], "--metrics-port is a number"),
        (["-", "--output", "pager:me"], "output must be one of"),
        (["-", "--commit-every", "often"], "Expected a duration"),
        (["-", "--replay", "yesterday"], "Expected a duration"),
        (["-", "--secret-file", str(tmp_path / "none")], "none"),
        (["-", "--model", str(tmp_path / "none")], "There is no model at"),
    ):
        given = [*arguments, "--state", str(tmp_path / "state")]
        if "--model" not in given:
            given += ["--model", str(model)]
        if "--metrics-port" not in given:
            given += ["--metrics-port", "none"]
        done = CliRunner().invoke(app, ["watch", "follow", *given])
        assert done.exit_code == 1 and message in done.output.replace("\n", " "), done.output


def test_name_of_the_consumer(tmp_path):
    """Fails if the consumer of a Redis group changes between two starts with one folder."""
    url = name_consumer("redis://h/s?group=g", tmp_path)
    assert url.startswith("redis://h/s?group=g&consumer=") and url == name_consumer(
        "redis://h/s?group=g", tmp_path / "."
    )
    assert name_consumer("redis://h/s", tmp_path).startswith("redis://h/s?consumer=")
    for given in ("redis://h/s?consumer=a", "nats://h/s", "traffic.jsonl"):
        assert name_consumer(given, tmp_path) == given
    assert os.sep not in url.rpartition("=")[2]
