"""Which attacks on the demo shop are found with 20 alerts a day, and whether that budget is kept.

    python benchmarks/watch_demo.py --out benchmarks/results/watch-demo.json

The traffic is that of `regard watch demo`: 200 customers, 14 days to learn from, then 7 days with
13 kinds of attacks, one incident of each a day. In those 7 days the app has a release with a new
endpoint and a new key, prices rise, and a campaign runs. Nothing of the 7 days is used to learn.

Two questions:

- Ranking: an incident is found if one of its events is above the threshold that 20 normal events a
  day exceed. The threshold is set on the labels, for all methods alike.
- Budget: `regard watch` sets the threshold by itself, and learns from what it takes for normal. How
  many alerts a day are there, on the same days without attacks and with them, and which incidents
  get one?
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from watch_requests import score_forest, score_length, score_random, score_rarity, score_trigrams

from regard.watch.demo import ATTACKS, Label, generate_labelled_traffic
from regard.watch.demo.run import FIELDS, event_time
from regard.watch.demo.shop import DAY, START
from regard.watch.detector import Detector, ScoredEvent
from regard.watch.event import Event
from regard.watch.events import EventParser
from regard.watch.learning import learn_detector
from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record

SEEDS = (0, 1, 2)
LEARN_DAYS, DAYS, USERS, BUDGET = 14, 7, 200, 20
BATCH = 256
WINDOW = 60.0  # seconds of the rate


def make_events(
    seed: int, *, attacks: bool = True
) -> tuple[list[Event], list[Event], list[Label | None]]:
    """Events to learn from, events to test with, and the labels of those."""
    settings = WatchSettings(**FIELDS, seed=seed)
    parser = EventParser(settings)
    kinds = tuple(ATTACKS) if attacks else ()
    traffic = generate_labelled_traffic(
        LEARN_DAYS + DAYS, USERS, seed, kinds, attacks_from=LEARN_DAYS
    )
    known, new, labels = [], [], []
    for i, (event, label) in enumerate(traffic):
        record = Record(json.dumps(event).encode(), f"shop:{i}")
        if event_time(event) < START + LEARN_DAYS * DAY:
            known.append(record)
        else:
            new.append(record)
            labels.append(label)
    return parser.parse(known), parser.parse(new), labels


def run_detector(detector: Detector, test: Sequence[Event]) -> list[ScoredEvent]:
    """Score and learn as `regard watch follow` does."""
    states, scored = detector.initial_states(), []
    for start in range(0, len(test), BATCH):
        batch = detector.score(test[start : start + BATCH], states)
        detector.update(batch)
        scored += batch
    return scored


def score_markov(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    """Surprise of the next endpoint after the last three of the entity, with add-one smoothing."""
    counts: dict[tuple[str, ...], int] = {}
    scores = []
    last: dict[str, deque[str]] = {}
    endpoints = {event.endpoint for event in train}
    for event in (*train, *test):
        context = last.setdefault(event.entity, deque(maxlen=3))
        pair, key = tuple(context), (*context, event.endpoint)
        p = (counts.get(key, 0) + 1) / (counts.get(pair, 0) + len(endpoints) + 1)
        scores.append(-np.log2(p))
        if len(scores) <= len(train):
            counts[key] = counts.get(key, 0) + 1
            counts[pair] = counts.get(pair, 0) + 1
        context.append(event.endpoint)
    return np.array(scores[len(train) :])


def score_rate(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    """Requests of the entity within a minute: what a rate limit sees."""
    recent: dict[str, deque[float]] = {}
    scores = []
    for event in test:
        times = recent.setdefault(event.entity, deque())
        times.append(event.time)
        while times[0] < event.time - WINDOW:
            times.popleft()
        scores.append(float(len(times)))
    return np.array(scores)


Score = Callable[[Sequence[Event], Sequence[Event], int], np.ndarray]
BASELINES: dict[str, Score] = {
    "requests in a minute": score_rate,
    "Markov, order 3": score_markov,
    "3-grams of the event": score_trigrams,
    "isolation forest": score_forest,
    "rarity of the endpoint": score_rarity,
    "length": score_length,
    "random": score_random,
}


def found_at_budget(scores: np.ndarray, labels: Sequence[Label | None]) -> dict[str, float]:
    """Share of the incidents of each kind with an event above the threshold of the budget."""
    normal = np.sort(scores[[label is None for label in labels]])
    threshold = normal[-(BUDGET * DAYS + 1)]
    incidents: dict[Label, bool] = {}
    for score, label in zip(scores.tolist(), labels, strict=True):
        if label is not None:
            incidents[label] = incidents.get(label, False) or score > threshold
    return share_by_kind(incidents)


def share_by_kind(incidents: dict[Label, bool]) -> dict[str, float]:
    """Share of the incidents of each kind that were found, and of all incidents."""
    shares = {
        kind: float(np.mean([found for label, found in incidents.items() if label.kind == kind]))
        for kind in ATTACKS
    }
    return shares | {"all": float(np.mean(list(incidents.values())))}


def count_by_day(scored: Sequence[ScoredEvent]) -> list[int]:
    """Number of alerts on each day."""
    days = [0] * DAYS
    for each in scored:
        day = int((each.event.time - START) / DAY - LEARN_DAYS)
        days[min(day, DAYS - 1)] += each.status == "alert"
    return days


def measure(seed: int, baselines: dict[str, Score]) -> dict[str, Any]:
    """All figures of one seed."""
    train, test, labels = make_events(seed)
    began = time.process_time()
    detector = learn_detector(train, WatchSettings(**FIELDS, seed=seed)).detector
    learned = time.process_time()
    scored = run_detector(detector, test)
    done = time.process_time()

    reported: dict[Label, bool] = {label: False for label in labels if label is not None}
    false_alerts = 0
    for each, label in zip(scored, labels, strict=True):
        if each.status == "alert":
            if label is None:
                false_alerts += 1
            else:
                reported[label] = True
    with_attacks = count_by_day(scored)

    clean = learn_detector(train, WatchSettings(**FIELDS, seed=seed)).detector
    without = count_by_day(run_detector(clean, make_events(seed, attacks=False)[1]))
    result: dict[str, Any] = {
        "seed": seed,
        "learned": len(train),
        "tested": len(test),
        "levels": [level.name for level in detector.levels],
        "learn_cpu_seconds": round(learned - began, 1),
        "score_cpu_seconds": round(done - learned, 1),
        "budget": {
            "found": share_by_kind(reported),
            "alerts_by_day": with_attacks,
            "realised_over_asked": sum(with_attacks) / DAYS / BUDGET,
            "false_alerts_a_day": false_alerts / DAYS,
            "alerts_by_day_without_attacks": without,
            "realised_over_asked_without_attacks": sum(without) / DAYS / BUDGET,
        },
        "ranking": {
            "regard watch": found_at_budget(np.array([each.score for each in scored]), labels)
        },
    }
    for level in detector.levels:
        scores = np.array([-np.log2(each.level_p[level.name]) for each in scored])
        result["ranking"][f"level {level.name}"] = found_at_budget(scores, labels)
    for name, score in baselines.items():
        result["ranking"][name] = found_at_budget(score(train, test, seed), labels)
    return result


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print means over seeds as Markdown."""
    names = list(runs[0]["ranking"])
    print("| attack | by its own threshold | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 2) + "|")
    for kind in [*ATTACKS, "all"]:
        own = np.mean([run["budget"]["found"][kind] for run in runs])
        cells = [np.mean([run["ranking"][name][kind] for run in runs]) for name in names]
        print(f"| {kind} | {own:.2f} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    for run in runs:
        budget = run["budget"]
        for name, days in (
            ("with attacks", "alerts_by_day"),
            ("without", "alerts_by_day_without_attacks"),
        ):
            print(
                f"seed {run['seed']}, {name}: {sum(budget[days]) / DAYS:.1f} alerts a day, "
                f"×{sum(budget[days]) / DAYS / BUDGET:.2f} of {BUDGET}; by day {budget[days]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--no-baselines", dest="baselines", action="store_false")
    arguments = parser.parse_args()
    baselines = BASELINES if arguments.baselines else {}
    runs = []
    for seed in arguments.seeds:
        runs.append(measure(seed, baselines))
        show(runs[-1:])
    show(runs)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
