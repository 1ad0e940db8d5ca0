"""How many events a second one core scores and learns, without networks.

    python benchmarks/watch_speed.py DATA --out benchmarks/results/watch-speed.json

CloudTrail-like events of about 29 leaves: those of DATA/aws-cloudtrail-stratus, with fresh request
ids, event ids, times, addresses and session names, so that nothing is read from a memo that would
not be in practice. Seconds are those of the processor (`time.process_time`), one thread. Parsing is
measured apart: `regard watch bench` measures the whole of `follow`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from watch_requests import read_cloudtrail

from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.settings import LEVELS, WatchSettings

EVENTS, BATCH = 40_000, 512
PER_SECOND = 5_000  # events, by their own clocks
FRESH = ("requestID", "eventID", "eventTime", "sourceIPAddress", "userIdentity.principalId")


def vary(events: list[Event], count: int, seed: int) -> list[Event]:
    """Events like the given ones, with fresh values where each event has its own."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        event = events[i % len(events)]
        values = list(event.values)
        for place, path in enumerate(event.paths):
            if path == "eventTime":
                values[place] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1.7e9 + i))
            elif path == "sourceIPAddress":
                values[place] = f"10.{rng.randrange(8)}.{rng.randrange(256)}.{rng.randrange(256)}"
            elif path in FRESH:
                values[place] = str(uuid.UUID(int=rng.getrandbits(128)))
        entity = f"{event.entity}/{rng.randrange(500)}"
        source = f"speed:{seed}:{i}"
        seconds = 1.7e9 + i / PER_SECOND
        made.append(replace(event, values=values, time=seconds, entity=entity, source=source))
    return made


def measure(levels: tuple[str, ...], events: list[Event], new: list[Event]) -> dict[str, float]:
    """Events per second of processor time: learning, scoring, and scoring with learning."""
    start = time.process_time()
    detector = Detector.learn(events, WatchSettings(levels=levels))
    learned = time.process_time() - start

    rates = {"learn": len(events) / learned}
    half = len(new) // 2
    for name, part in (("score", new[:half]), ("score and update", new[half:])):
        states = detector.initial_states()
        seconds = []
        for first in range(0, len(part), BATCH):
            start = time.process_time()
            scored = detector.score(part[first : first + BATCH], states)
            if name != "score":
                detector.update(scored)
            seconds.append(time.process_time() - start)
        rates[name] = len(part) / sum(seconds)
        rates[f"{name}, slowest batch (ms)"] = 1e3 * float(np.max(seconds))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = [row.event for row in read_cloudtrail(options.data)]
    events, new = vary(base, EVENTS, 0), vary(base, EVENTS, 1)
    leaves = float(np.mean([len(event.paths) for event in new]))
    results: dict[str, Any] = {"leaves": leaves, "batch": BATCH, "events": EVENTS}
    for levels in (("leaf",), LEVELS):
        rates = measure(levels, events, new)
        results[",".join(levels)] = rates
        print(levels, {name: round(rate) for name, rate in rates.items()}, flush=True)
    results["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
