"""Edits planted into clean events: how many are found, and is the edited leaf named first?

    python benchmarks/watch_planted.py DATA --out benchmarks/results/watch-planted.json

DATA is a folder with api-security-atrdf/, aws-cloudtrail-stratus/ and mordor/. The traffic of
`regard watch demo` is used beside them. The first 80 % of the events, in order of time, teach; one
leaf is edited in some of the others. "found" is the share of edited events with p <= 0.01 (of
unedited events, about 1 % are), "hit@1" the share for which the first finding names the edited
leaf. Sessions: ten events of an entity that are given to another one, or put in another order;
"found" is the share with a smaller least p than 99 % of unedited sessions of ten events.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from watch_requests import parse, read_atrdf, read_lines

from regard.watch.demo import generate_traffic
from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.planted import LEAF_EDITS, EditPlanter
from regard.watch.settings import WatchSettings

TEACH = 0.8
EDITS = 200  # of each kind
SESSIONS, LENGTH = 200, 10
SEEDS = (0,)


def read_sets(root: Path) -> dict[str, list[Event]]:
    """Clean events of four sources."""
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
    return {
        "ATRDF, benign": [replace(event, time=float(i)) for i, event in enumerate(benign)],
        "CloudTrail": parse(cloudtrail, WatchSettings(format="cloudtrail")),
        "Mordor, Windows": parse(
            mordor,
            WatchSettings(format="jsonl", entity="Hostname", endpoint="Channel EventID"),
        ),
        "demo": parse(
            shop,
            WatchSettings(
                format="jsonl", entity="request.user", endpoint="request.method request.path"
            ),
        ),
    }


def measure_leaf_edits(events: Sequence[Event], seed: int) -> dict[str, dict[str, float]]:
    """For each kind of edit the number planted, the share found, and hit@1."""
    cut = round(TEACH * len(events))
    known, new = events[:cut], events[cut:]
    detector = Detector.learn(known, WatchSettings(levels=("leaf",), seed=seed))
    planter = EditPlanter(known, seed)
    results = {}
    for kind in LEAF_EDITS:
        edits = planter.plant(new, kind, EDITS)
        if not edits:
            continue
        scored = detector.score([edit.event for edit in edits], {})
        named = [detector.alert(each).findings[0].path for each in scored]
        results[kind] = {
            "edits": len(edits),
            "found": float(np.mean([each.p <= 0.01 for each in scored])),
            "hit_at_1": float(np.mean([n == e.path for n, e in zip(named, edits, strict=True)])),
        }
    clean = detector.score(list(new), {})
    results["unedited"] = {
        "edits": len(new),
        "found": float(np.mean([each.p <= 0.01 for each in clean])),
    }
    return results


def measure_session_edits(events: Sequence[Event], seed: int) -> dict[str, dict[str, float]]:
    """Sessions of another entity, and sessions in another order."""
    cut = round(TEACH * len(events))
    detector = Detector.learn(
        events[:cut], WatchSettings(levels=("leaf", "sequence", "path", "user"), seed=seed)
    )
    rng = random.Random(seed)
    by_entity: dict[str, list[Event]] = defaultdict(list)
    for event in events[cut:]:
        if event.entity:
            by_entity[event.entity].append(event)
    sessions = [
        each[start : start + LENGTH]
        for each in by_entity.values()
        for start in range(0, len(each) - LENGTH + 1, LENGTH)
        if len({event.endpoint for event in each[start : start + LENGTH]}) > 2
    ]
    rng.shuffle(sessions)
    unedited, chosen = sessions[SESSIONS:], sessions[:SESSIONS]
    entities = sorted(by_entity)

    def least_p(session: Sequence[Event]) -> float:
        return min(each.p for each in detector.score(session, detector.initial_states()))

    def give_away(session: Sequence[Event]) -> list[Event]:
        old = session[0].entity
        new = rng.choice([entity for entity in entities if entity != old])
        return [
            replace(
                event,
                entity=new,
                values=[new if value == old else value for value in event.values],
            )
            for event in session
        ]

    def shuffle(session: Sequence[Event]) -> list[Event]:
        mixed = rng.sample(list(session), len(session))
        return [replace(event, time=old.time) for event, old in zip(mixed, session, strict=True)]

    if len(unedited) < SESSIONS or len(entities) < 10:
        return {}
    limit = float(np.quantile([least_p(session) for session in unedited[:1_000]], 0.01))
    return {
        kind: {
            "edits": len(chosen),
            "found": float(np.mean([least_p(edit(session)) <= limit for session in chosen])),
        }
        for kind, edit in (("other user's session", give_away), ("changed order", shuffle))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, events in read_sets(options.data).items():
        events = sorted(events, key=lambda event: event.time)
        runs = []
        for seed in SEEDS:
            runs.append({**measure_leaf_edits(events, seed), **measure_session_edits(events, seed)})
        results[name] = {
            "events": len(events),
            **{
                kind: {
                    key: float(np.mean([run[kind][key] for run in runs])) for key in runs[0][kind]
                }
                for kind in runs[0]
            },
        }
        print(name, len(events))
        for kind in runs[0]:
            print("  ", kind, {k: round(v, 3) for k, v in results[name][kind].items()}, flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
