"""How fast `regard watch follow` is, how late, and how much memory it takes.

    python benchmarks/watch_follow.py                          about 30 minutes
    python benchmarks/watch_follow.py --memory-events 10000000 memory over ten million events: hours

A model learns four days of the demo's traffic (events of 13 leaves on average). Then

    stages     CPU time per event of each stage in one process: parse, score, explain, learn, commit
    latency    from the publication in Redis to the alert in the store, at 200 events a second
    consumers  events a second through Redis with one process, and with two that share the entities
    memory     resident memory while many events of many entities come through a pipe
    metric     same-user AUC of each distance between users, for three seeds of the traffic
    clusters   MiniBatchKMeans and DBSTREAM on the same embeddings: time and silhouette

Times of `stages` are CPU time, so that other work on the machine counts less. Wall times are those
of the machine as it was; the load is in the result. Results go to
benchmarks/results/watch-follow.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from watch_faults import RedisBroker, Traffic, make_traffic, wait_until

RESULT = Path(__file__).parent / "results" / "watch-follow.json"
RATE, LATENCY_SECONDS = 200, 60
CONSUMER_EVENTS = 20_000
DRAIN_SECONDS = 1800


def start(traffic: Traffic, source: str, state: Path, *options: str) -> subprocess.Popen[str]:
    """A `follow` process, once it follows."""
    command = [sys.executable, "-m", "regard", "watch", "follow", source]
    command += ["--model", str(traffic.model), "--state", str(state), "--metrics-port", "none"]
    process = subprocess.Popen(
        [*command, *options], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " following " in line:
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process


def stop(process: subprocess.Popen[str]) -> None:
    """End a process cleanly."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


def measure_stages_of(traffic: Traffic, root: Path) -> dict[str, Any]:
    """`regard watch bench` on the lines."""
    file = root / "lines.jsonl"
    file.write_bytes(b"\n".join(traffic.lines * 3))
    command = [sys.executable, "-m", "regard", "watch", "bench", str(file), "--json"]
    done = subprocess.run(
        [*command, "--model", str(traffic.model)], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure_latency(traffic: Traffic, root: Path) -> dict[str, Any]:
    """Publish at a steady rate; planted attacks are looked for in the store every millisecond."""
    from regard.watch.follow.store import WatchStore

    (root / "redis").mkdir()
    broker = RedisBroker(root / "redis")
    process = start(traffic, broker.url, root / "state", "--no-learn")
    published: dict[str, float] = {}
    seen: dict[str, float] = {}
    done = threading.Event()

    def look() -> None:
        with closing(WatchStore(root / "state")) as store:
            last = 0
            while not done.is_set():
                rows = store.database.rows(
                    "SELECT rowid, content ->> 'source' FROM alerts WHERE rowid > ?", (last,)
                )
                for rowid, source in rows:
                    last = max(last, int(str(rowid)))
                    seen[str(source)] = time.monotonic()
                time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    begun = time.monotonic()
    for i in range(RATE * LATENCY_SECONDS):
        line = traffic.lines[i % len(traffic.lines)]
        wait = begun + i / RATE - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        published[f"redis:requests:{i + 1}-0"] = time.monotonic()
        broker.publish(i + 1, line)
    wait_until(broker.drained, DRAIN_SECONDS, "reading the rest")
    time.sleep(1)
    done.set()
    watcher.join()
    stop(process)
    broker.close()
    milliseconds = [1e3 * (seen[source] - published[source]) for source in seen]
    return {
        "events_per_second": RATE,
        "events": len(published),
        "alerts": len(milliseconds),
        **{f"p{q}_ms": round(float(np.percentile(milliseconds, q)), 1) for q in (50, 90, 99)},
        "largest_ms": round(max(milliseconds), 1),
        "load": round(os.getloadavg()[0], 1),
    }


def measure_consumers(traffic: Traffic, root: Path) -> dict[str, Any]:
    """Time to work through what waits in Redis, by one process and by two shares."""
    results: dict[str, Any] = {}
    for count in (1, 2):
        place = root / f"consumers-{count}"
        (place / "redis").mkdir(parents=True)
        broker = RedisBroker(place / "redis")
        for number in range(CONSUMER_EVENTS):
            broker.publish(number + 1, traffic.lines[number % len(traffic.lines)])
        for i in range(count):  # the groups exist, so that processes only start together
            broker.client.xgroup_create("requests", f"share{i}", "0")

        def drained(broker: Any = broker) -> bool:
            groups = broker.client.xinfo_groups("requests")
            return all(group["lag"] == 0 and group["pending"] == 0 for group in groups)

        processes = [
            start(
                traffic,
                f"{broker.url}?group=share{i}",
                place / f"state-{i}",
                "--share",
                f"{i + 1}/{count}",
            )
            for i in range(count)
        ]
        begun = time.monotonic()
        started = [process_cpu_seconds(process.pid) for process in processes]
        wait_until(drained, DRAIN_SECONDS, "reading all")
        seconds = time.monotonic() - begun
        cpu = [
            process_cpu_seconds(process.pid) - before
            for process, before in zip(processes, started, strict=True)
        ]
        for process in processes:
            stop(process)
        broker.close()
        results[str(count)] = {
            "events": CONSUMER_EVENTS,
            "events_per_second": round(CONSUMER_EVENTS / seconds),
            "events_per_second_of_cpu_of_the_slower": round(CONSUMER_EVENTS / max(cpu)),
            "cpu_seconds_of_each": [round(each, 1) for each in cpu],
            "load": round(os.getloadavg()[0], 1),
        }
    return results


def process_cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_memory(traffic: Traffic, root: Path, events: int) -> dict[str, Any]:
    """Resident memory over many events; every tenth event is of an entity that was never there."""
    process = start(traffic, "-", root / "memory-state", "--until-end", "--entities", "5000")
    assert process.stdin is not None
    pipe = process.stdin.buffer
    lines = [json.loads(line) for line in traffic.lines]
    begun, resident = time.monotonic(), []
    for i in range(events):
        event = lines[i % len(lines)]
        if i % 10 == 0:
            event = {**event, "request": {**event["request"], "user": f"new{i}"}}
        pipe.write(json.dumps(event).encode() + b"\n")
        if i % max(1, events // 40) == 0:
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            line = next(text for text in status if text.startswith("VmRSS"))
            resident.append(int(line.split()[1]) // 1024)
    cpu = process_cpu_seconds(process.pid)
    pipe.close()
    assert process.wait(DRAIN_SECONDS) == 0
    files = sum(file.stat().st_size for file in (root / "memory-state").rglob("*"))
    half = resident[len(resident) // 2 :]
    return {
        "events": events,
        "entities": events // 10,
        "entities_in_memory": 5000,
        "resident_mb": resident,
        "growth_in_the_second_half_mb": half[-1] - half[0],
        "state_folder_mb": round(files / 1e6),
        "events_per_cpu_second": round(events / cpu),
        "seconds": round(time.monotonic() - begun),
    }


def measure_users() -> tuple[dict[str, Any], dict[str, Any]]:
    """The metric for three seeds of the traffic, and two ways to cluster its embeddings."""
    from river.cluster import DBSTREAM
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.metrics import silhouette_score

    from regard.watch.demo.traffic import generate_traffic
    from regard.watch.events import EventParser
    from regard.watch.settings import WatchSettings
    from regard.watch.sources import Record
    from regard.watch.users import UserLevel

    settings = WatchSettings(
        entity="request.user", endpoint="request.method request.path", time="time", format="jsonl"
    )
    metrics: dict[str, Any] = {}
    for seed in range(3):
        parser = EventParser(settings)
        records = [
            Record(json.dumps(event).encode(), f"x:{i}")
            for i, event in enumerate(generate_traffic(4, 200, seed, ()))
        ]
        events = parser.parse(records)
        level = UserLevel(settings)
        level.fit(events)
        metrics[str(seed)] = {
            "chosen": level.metric.name,
            "scores": [score.to_json() for score in level.metric_scores],
            "clusters": len(level.clusters.centres),
        }
    states: dict[tuple[str, str], Any] = {}
    level.score(events, states)
    _, fast, _ = level._read_states(list(states.values()))
    points = level.metric.map(fast.astype(float))

    begun = time.process_time()
    kmeans = MiniBatchKMeans(len(level.clusters.centres), random_state=0, n_init=5).fit(points)
    kmeans_seconds = time.process_time() - begun
    best: dict[str, Any] = {}
    for radius in (0.1, 0.2, 0.4, 0.8):
        stream = DBSTREAM(clustering_threshold=radius * level.clusters.spread**0.5 * 4)
        begun = time.process_time()
        rows = [dict(enumerate(point)) for point in points]
        for row in rows:
            stream.learn_one(row)
        labels = [stream.predict_one(row) for row in rows]
        seconds = time.process_time() - begun
        if 1 < len(set(labels)) < len(labels):
            score = float(silhouette_score(points, labels))
            if score > best.get("silhouette", -1):
                best = {
                    "silhouette": score,
                    "clusters": len(set(labels)),
                    "users_per_cpu_second": round(len(points) / seconds),
                }
    clusters = {
        "users": len(points),
        "MiniBatchKMeans": {
            "silhouette": float(silhouette_score(points, kmeans.labels_)),
            "clusters": len(level.clusters.centres),
            "users_per_cpu_second": round(len(points) / max(kmeans_seconds, 1e-9)),
        },
        "DBSTREAM, best of four thresholds": best or "one cluster, or each point its own",
    }
    return metrics, clusters


def main() -> None:
    """Measure, and write the result after each part."""
    known = ["stages", "latency", "consumers", "memory", "users"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*known, []], default=known)
    parser.add_argument("--memory-events", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        traffic = make_traffic(root)
        for part in given.parts:
            (root / part).mkdir()
            if part == "stages":
                results[part] = measure_stages_of(traffic, root / part)
            elif part == "latency":
                results[part] = measure_latency(traffic, root / part)
            elif part == "consumers":
                results[part] = measure_consumers(traffic, root / part)
            elif part == "memory":
                results[part] = measure_memory(traffic, root / part, given.memory_events)
            else:
                results["metric"], results["clusters"] = measure_users()
            print(part, results.get(part, ""), flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
