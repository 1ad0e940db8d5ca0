"""The levels "sequence" and "path" of `regard watch` on MSNBC clicks and Loghub's BGL.

    python benchmarks/watch_sequences.py DATA                    all tables, 3 minutes on one core
    python benchmarks/watch_sequences.py DATA next detours       some of them
    python benchmarks/watch_sequences.py --table                 the tables from the stored results

DATA is a folder with msnbc-clicks/ and loghub-2k/. Results are written to
benchmarks/results/watch-sequences.json.

next      next-event nats on MSNBC: fit on the first 160,000 visitors, test on the last 40,000, on
          all clicks of a visitor but the first
detours   a click is inserted into a visit so that both steps, to it and from it, are common ones:
          which visits have a detour, and where?
sessions  the second half of a long visit is replaced by that of another visitor
bgl       lines of BGL labelled as alerts, fitted on the unlabelled lines of the first half and
          tested on the second. Its 2,000 lines are a sample of 4.7 million, so that most neighbours
          of a line are missing: a level of sequences has little to work with
speed     events per second of CPU time
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import lzma
import math
import tarfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.metrics import average_precision_score, roc_auc_score

from regard.json_files import write_json
from regard.watch.event import Event
from regard.watch.sequences import PathLevel, SequenceLevel
from regard.watch.settings import WatchSettings

RESULT = Path(__file__).parent / "results" / "watch-sequences.json"
SEEDS = (0, 1, 2)
TRAINED, MOST_ORDER = 160_000, 5
CATEGORIES = 17
VISITS, SHORTEST_VISIT = 5_000, 4
COMMON_STEP = 0.02  # share of the steps from a category that makes a step a common one
LONG_VISIT = 20

Visits = list[list[int]]


def read_visits(data: Path) -> Visits:
    path = data / "msnbc-clicks" / "msnbc_first200000.seq.xz"
    with lzma.open(path, "rt") as file:
        return [[int(each) for each in line.split()] for line in file]


def as_events(visits: Visits, prefix: str) -> list[Event]:
    """One event a click, ten seconds apart; each visitor is an entity."""
    return [
        Event(1000.0 * j + 10 * i, f"{prefix}{j}", f"GET /{page}", [], [], f"{prefix}{j}:{i}")
        for j, visit in enumerate(visits)
        for i, page in enumerate(visit)
    ]


def fit_levels(visits: Visits) -> tuple[SequenceLevel, PathLevel]:
    events = as_events(visits, "train")
    sequence, path = SequenceLevel(WatchSettings(order=MOST_ORDER)), PathLevel(WatchSettings())
    sequence.fit(events)
    path.fit(events)
    return sequence, path


class PlainMarkov:
    """Order-k Markov without back-off; 0.1 is added to each count."""

    def __init__(self, visits: Visits, order: int) -> None:
        self.order = order
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for visit in visits:
            for i in range(1, len(visit)):
                self.counts[tuple(visit[max(0, i - order) : i])][visit[i]] += 1

    def bits(self, visit: list[int]) -> list[float]:
        """-log2 p of each click but the first."""
        found = []
        for i in range(1, len(visit)):
            known = self.counts[tuple(visit[max(0, i - self.order) : i])]
            p = (known[visit[i]] + 0.1) / (known.total() + 0.1 * CATEGORIES)
            found.append(-math.log2(p))
        return found


def measure_smoothing(train: Visits, test: Visits, order: int) -> dict[str, float]:
    """Nats of two classical smoothings with fixed parameters, beside those that are chosen."""
    counts: list[dict[tuple[int, ...], Counter[int]]] = [
        defaultdict(Counter) for _ in range(order + 1)
    ]
    start = [0] * order  # so that every context is whole
    for visit in train:
        padded = start + visit
        for i in range(order + 1, len(padded)):
            for k in range(order + 1):
                counts[k][tuple(padded[i - k : i])][padded[i]] += 1
    continuations: list[dict[tuple[int, ...], Counter[int]]] = [
        defaultdict(Counter) for _ in range(order + 1)
    ]
    for k in range(order):  # in how many contexts of one more category
        for context, following in counts[k + 1].items():
            continuations[k][context[1:]].update(following.keys())
    continuations[order] = counts[order]

    losses: dict[str, list[float]] = defaultdict(list)
    for visit in test:
        padded = start + visit
        for i in range(order + 1, len(padded)):
            kneser_ney = witten_bell = 1 / CATEGORIES
            for k in range(order + 1):
                context, x = tuple(padded[i - k : i]), padded[i]
                known, unique = counts[k].get(context), continuations[k].get(context)
                if known:
                    n, types = known.total(), len(known)
                    witten_bell = (known[x] + types * witten_bell) / (n + types)
                if unique:
                    share = max(unique[x] - 0.75, 0) + 0.75 * len(unique) * kneser_ney
                    kneser_ney = share / unique.total()
            losses["Witten-Bell"].append(-math.log(witten_bell))
            losses["interpolated Kneser-Ney"].append(-math.log(kneser_ney))
    return {f"{name}, order {order}": float(np.mean(each)) for name, each in losses.items()}


def measure_next(train: Visits, test: Visits, sequence: SequenceLevel) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for order in (1, 2, 3, 4):
        model = PlainMarkov(train, order)
        bits = [each for visit in test for each in model.bits(visit)]
        scores[f"order {order}"] = float(np.mean(bits)) * math.log(2)
    for order in (3, MOST_ORDER):
        scores |= measure_smoothing(train, test, order)

    events = as_events(test, "test")
    later = np.array([not event.source.endswith(":0") for event in events])
    steps = sequence.memory.encode(events, from_start=True)
    model = sequence.transitions
    for order in range(1, model.order + 1):
        pairs = zip(steps.contexts[later].tolist(), steps.symbols[later].tolist(), strict=True)
        p = [model.probability(context, symbol, order=order) for context, symbol in pairs]
        scores[f"back-off, order {order}"] = -float(np.mean(np.log(p)))
    bits = sequence.score(events, {}).bits[0::3]
    scores["back-off, with the entity's own history"] = float(np.mean(bits[later])) * math.log(2)
    scores["chosen"] = {"order": model.order, "own strength": sequence.own_strength}
    return scores


def common_steps(train: Visits) -> dict[int, set[int]]:
    """Category -> those that follow it in at least `COMMON_STEP` of its steps."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for visit in train:
        for a, b in itertools.pairwise(visit):
            counts[a][b] += 1
    return {
        a: {b for b, n in onward.items() if n >= COMMON_STEP * onward.total()}
        for a, onward in counts.items()
    }


def insert_detour(
    visit: list[int], common: dict[int, set[int]], rng: np.random.Generator
) -> tuple[list[int], int] | None:
    """The visit with another category between two clicks, and where; None if none fits."""
    for i in rng.permutation(len(visit) - 1).tolist():
        a, b = visit[i], visit[i + 1]
        fitting = sorted(x for x in common[a] if b in common[x] and x not in (a, b))
        if fitting:
            x = int(rng.choice(fitting))
            return [*visit[: i + 1], x, *visit[i + 1 :]], i + 1
    return None


def mean_scores(rows: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean over seeds, and the spread of the first score."""
    names = rows[0].keys()
    return {
        name: {
            **{key: float(np.mean([row[name][key] for row in rows])) for key in rows[0][name]},
            "sd": float(np.std([row[name]["auroc"] for row in rows], ddof=1)),
        }
        for name in names
    }


def rank(labels: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    return {
        "auroc": float(roc_auc_score(labels, scores)),
        "ap": float(average_precision_score(labels, scores)),
    }


def path_significance(path: PathLevel, visits: Visits) -> list[np.ndarray]:
    """-log2 P(X <= f) of the path that ends at each click, of 2 or 3 steps: HYPA's score alone."""
    size, found = path.vocabulary.size, []
    for visit in visits:
        numbers = [path.vocabulary.ids["", f"GET /{page}"] for page in visit]
        bits = np.zeros(len(visit))
        for ensemble in path.ensembles:
            for i in range(ensemble.steps, len(visit)):
                walked = 0
                for number in numbers[i - ensemble.steps : i + 1]:
                    walked = walked * size + number
                bits[i] = max(bits[i], -ensemble.log_cdf(walked) / math.log(2))
        found.append(bits)
    return found


def measure_detours(
    train: Visits, test: Visits, sequence: SequenceLevel, path: PathLevel
) -> dict[str, Any]:
    common = common_steps(train)
    markov = {f"order-{k} Markov": PlainMarkov(train, k) for k in (1, 3)}
    eligible = [visit for visit in test if len(visit) >= SHORTEST_VISIT]
    rows = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        chosen = [eligible[i] for i in rng.permutation(len(eligible))[: 2 * VISITS]]
        changed = [insert_detour(visit, common, rng) for visit in chosen[:VISITS]]
        detours = [each for each in changed if each is not None]
        visits = [visit for visit, _ in detours] + chosen[VISITS:]
        places = [place for _, place in detours] + [-1] * (len(chosen) - VISITS)
        labels = np.array([place >= 0 for place in places])

        # Bits of each click of each visit, the first included.
        events = as_events(visits, "test")
        ends = np.cumsum([len(visit) for visit in visits])[:-1]
        transition = np.split(sequence.score(events, {}).bits[0::3], ends)
        path_bits = path.score(events, {}).bits.reshape(len(events), -1).max(axis=1)
        clicks: dict[str, list[np.ndarray]] = {
            name: [np.array([0.0, *model.bits(visit)]) for visit in visits]
            for name, model in markov.items()
        }
        clicks["sequence level"] = [np.array([0.0, *each[1:]]) for each in transition]
        clicks["path level"] = np.split(path_bits, ends)
        clicks["P(X <= f) alone"] = path_significance(path, visits)
        clicks["random"] = [rng.random(len(visit)) for visit in visits]

        row = {}
        for name, bits in clicks.items():
            hits = [
                place <= int(np.argmax(each)) <= place + 2
                for each, place in zip(bits, places, strict=True)
                if place >= 0
            ]
            row[name] = rank(labels, np.array([each.max() for each in bits]))
            row[name]["hit@1"] = float(np.mean(hits))
        row["length of the visit"] = rank(labels, np.array([len(visit) for visit in visits]))
        counts = np.array([np.bincount(visit, minlength=CATEGORIES + 1) for visit in visits])
        known = np.array([np.bincount(each, minlength=CATEGORIES + 1) for each in train[:20_000]])
        forest = IsolationForest(random_state=seed).fit(known)
        row["isolation forest on counts"] = rank(labels, -forest.score_samples(counts))
        rows.append(row)
    return {"detours": int(labels.sum()), "clean": int((~labels).sum()), **mean_scores(rows)}


def measure_sessions(test: Visits, sequence: SequenceLevel) -> dict[str, Any]:
    long = [visit for visit in test if len(visit) >= LONG_VISIT]
    rows = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(long))
        half = len(long) // 2
        clean = [long[i] for i in order[half:]]
        mixed = [
            long[a][: len(long[a]) // 2] + long[b][len(long[b]) // 2 :]
            for a, b in zip(order[:half], np.roll(order[:half], 1), strict=True)
        ]
        visits = clean + mixed
        labels = np.array([False] * len(clean) + [True] * len(mixed))
        bits = sequence.score(as_events(visits, "test"), {}).bits.reshape(-1, 3)
        split = np.split(bits, np.cumsum([len(visit) for visit in visits])[:-1])
        rows.append(
            {
                "session": rank(labels, np.array([each[:, 2].max() for each in split])),
                "transition": rank(labels, np.array([each[:, 0].max() for each in split])),
                "length of the visit": rank(labels, np.array([len(visit) for visit in visits])),
                "random": rank(labels, rng.random(len(visits))),
            }
        )
    return {"visits": len(long), **mean_scores(rows)}


def mine_templates(messages: list[str]) -> list[str] | None:
    """Templates by Drain3, each as it was known at its line; None if it is not installed."""
    try:
        from drain3 import TemplateMiner
        from drain3.template_miner_config import TemplateMinerConfig
    except ImportError:
        return None
    miner = TemplateMiner(config=TemplateMinerConfig())
    return [str(miner.add_log_message(message)["cluster_id"]) for message in messages]


def measure_bgl(data: Path) -> dict[str, Any]:
    with tarfile.open(data / "loghub-2k" / "loghub_2k_structured.tar.xz") as archive:
        file = archive.extractfile("BGL/BGL_2k.log_structured.csv")
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")))
    labels = np.array([row["Label"] != "-" for row in rows])
    half = len(rows) // 2
    parsers: dict[str, list[str] | None] = {
        "Loghub's templates": [row["EventId"] for row in rows],
        "Drain3": mine_templates([row["Content"] for row in rows]),
    }
    results: dict[str, Any] = {
        "train": int((~labels[:half]).sum()),
        "test": len(rows) - half,
        "alerts": int(labels[half:].sum()),
    }
    for parser, templates in parsers.items():
        if templates is None:
            continue
        events = [
            Event(float(row["Timestamp"]), row["Component"], template, [], [], f"BGL:{i}")
            for i, (row, template) in enumerate(zip(rows, templates, strict=True))
        ]
        train = [event for event, alert in zip(events[:half], labels, strict=False) if not alert]
        sequence, path = SequenceLevel(WatchSettings()), PathLevel(WatchSettings())
        sequence.fit(train)
        path.fit(train)
        states: dict[tuple[str, str], Any] = {}
        sequence.score(train, states)
        bits = sequence.score(events[half:], states).bits.reshape(-1, 3)
        path_bits = path.score(events[half:], {}).bits.reshape(half, -1).max(axis=1)
        known = Counter(event.endpoint for event in train)
        rarity = np.array([-math.log2(known[e.endpoint] + 0.5) for e in events[half:]])
        scores = {
            "sequence: transition": bits[:, 0],
            "path": path_bits,
            "rarity of the template": rarity,
            "new template": np.array([float(known[e.endpoint] == 0) for e in events[half:]]),
            "length of the line": np.array([float(len(row["Content"])) for row in rows[half:]]),
            "random": np.random.default_rng(0).random(half),
        }
        results[parser] = {name: rank(labels[half:], each) for name, each in scores.items()}
    return results


def measure_speed(test: Visits, sequence: SequenceLevel, path: PathLevel) -> dict[str, float]:
    """Events of many entities at once, in micro-batches of 256."""
    events = sorted(as_events(test[:20_000], "test"), key=lambda event: event.source[::-1])
    results = {}
    for name, level in (("sequence", sequence), ("path", path)):
        states: dict[tuple[str, str], Any] = {}
        start = time.process_time()
        for i in range(0, len(events), 256):
            level.score(events[i : i + 256], states)
        results[f"{name}: score"] = len(events) / (time.process_time() - start)
        start = time.process_time()
        for i in range(0, len(events), 256):
            level.update(events[i : i + 256])
        results[f"{name}: update"] = len(events) / (time.process_time() - start)
    return results


def print_tables(results: dict[str, Any]) -> None:
    for table, rows in results.items():
        print(f"\n{table}")
        for name, row in rows.items():
            print(f"  {name:42} {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("tables", nargs="*", default=[])
    parser.add_argument("--table", action="store_true", help="print the stored results")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if not args.table:
        if args.data is None:
            parser.error("DATA is missing: the folder with msnbc-clicks/ and loghub-2k/")
        wanted = args.tables or ["next", "detours", "sessions", "bgl", "speed"]
        visits = read_visits(args.data)
        train, test = visits[:TRAINED], visits[TRAINED:]
        sequence, path = fit_levels(train)
        measures = {
            "next": lambda: measure_next(train, test, sequence),
            "detours": lambda: measure_detours(train, test, sequence, path),
            "sessions": lambda: measure_sessions(test, sequence),
            "bgl": lambda: measure_bgl(args.data),
            "speed": lambda: measure_speed(test, sequence, path),
        }
        for table in wanted:
            if table not in measures:
                parser.error(f"there is no table {table!r}: choose from {', '.join(measures)}")
            results[table] = measures[table]()
            write_json(RESULT, results)
    print_tables(results)


if __name__ == "__main__":
    main()
