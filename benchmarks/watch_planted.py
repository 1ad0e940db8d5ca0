"""Edits planted into clean events: how many are found, and is the edited leaf named first?

    python benchmarks/watch_planted.py DATA --out benchmarks/results/watch-planted.json

DATA is a folder with api-security-atrdf/, aws-cloudtrail-stratus/ and mordor/. The traffic of
`regard watch demo`, with drift and without attacks, is used beside them. 80 % of the events teach;
one leaf is edited in some of the others. "in order": the newest 20 % are edited. "mixed": every
fifth event, because the recordings of Mordor and CloudTrail change from minute to minute: what is
new in an event anyhow competes with the edit. See `regard.watch.self_test` for the edits and for
"found" and "hit_at_1"; the levels are leaf alone, and all of them for the demo.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from watch_requests import parse, read_atrdf, read_lines

from regard.watch.demo import generate_traffic
from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.self_test import SelfTest, run_self_test
from regard.watch.settings import LEVELS, WatchSettings

EDITS = 200  # of each kind
SEEDS = (0, 1, 2)


def read_sets(root: Path) -> dict[str, list[Event]]:
    """Clean events of four sources, in order of time."""
    benign = [row.event for row in read_atrdf(root) if row.attack is None]
    cloudtrail = [
        json.loads(line)
        for line in read_lines(root / "aws-cloudtrail-stratus" / "cloudtrail_events.jsonl.xz")
    ]
    mordor = [
        json.loads(line)
        for path in sorted((root / "mordor").glob("windows_*.jsonl.xz"))
        for line in read_lines(path)
    ]
    shop = list(generate_traffic(10, 150, attacks=()))
    host = WatchSettings(format="jsonl", entity="Hostname", endpoint="Channel EventID")
    user = WatchSettings(
        format="jsonl", entity="request.user", endpoint="request.method request.path"
    )
    sets = {
        "ATRDF, benign": [replace(event, time=float(i)) for i, event in enumerate(benign)],
        "CloudTrail": parse(cloudtrail, WatchSettings(format="cloudtrail")),
        "Mordor, Windows": parse(mordor, host),
        "demo": parse(shop, user),
    }
    return {name: sorted(events, key=lambda e: e.time) for name, events in sets.items()}


def test_edits(
    known: Sequence[Event], new: Sequence[Event], levels: tuple[str, ...], seed: int
) -> dict[str, SelfTest]:
    """The self-test on events that the detector has not learned from."""
    detector = Detector.learn(known, WatchSettings(levels=levels, seed=seed))
    states = detector.initial_states()
    checked = []
    for start in range(0, len(new), 256):
        checked += detector.score(new[start : start + 256], states)
    return run_self_test(detector, known, checked, edits=EDITS, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, events in read_sets(options.data).items():
        cut = round(0.8 * len(events))
        orders = {"in order": (events[:cut], events[cut:])}
        if name in ("CloudTrail", "Mordor, Windows"):
            orders["mixed"] = ([e for i, e in enumerate(events) if i % 5], events[::5])
        for order, (known, new) in orders.items():
            levels = LEVELS if name == "demo" else ("leaf",)
            runs = [test_edits(known, new, levels, seed) for seed in SEEDS]
            print(f"{name}, {order}: {len(known)} and {len(new)} events")
            table = results[f"{name}, {order}"] = {}
            for kind in runs[0]:
                each = [asdict(run[kind]) for run in runs]
                table[kind] = {
                    key: float(np.mean([one[key] for one in each]))
                    for key in ("edits", "found", "hit_at_1")
                    if each[0][key] is not None
                }
                table[kind]["by_level"] = {
                    level: float(np.mean([one["by_level"][level] for one in each]))
                    for level in each[0]["by_level"]
                }
                print(f"  {kind:14s}", table[kind], flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
