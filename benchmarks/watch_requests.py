"""How well attacks stand out from normal requests: the floor of `regard watch` beside simple
baselines, on ATRDF, HttpParams and CloudTrail.

    python benchmarks/watch_requests.py DATA --out benchmarks/results/watch-requests.json

DATA is a folder with api-security-atrdf/, http-params/ and aws-cloudtrail-stratus/.

Everything is fitted on normal events alone, and duplicates are removed. Nothing was tuned on these
data sets. The figures of a seed are those of one split and one run of each method.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import SGDOneClassSVM
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from regard.watch.detector import Detector
from regard.watch.event import Event
from regard.watch.events import EventParser
from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record

SEEDS = (0, 1, 2)
TRAIN_SHARE = 0.7  # of the normal events
LEAKS = ("request.headers.Cookie", "request.headers.Content-Length")  # of ATRDF: in attacks alone


class Labelled(NamedTuple):
    """An event, and the kind of the attack that it is part of, or None."""

    event: Event
    attack: str | None


def read_lines(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from file


def parse(objects: Sequence[object], settings: WatchSettings) -> list[Event]:
    """Events of JSON objects, in their order."""
    parser = EventParser(settings)
    lines = [json.dumps(content).encode() for content in objects]
    return parser.parse([Record(id=f"line:{i}", data=line) for i, line in enumerate(lines)])


def read_atrdf(root: Path, ignore: Sequence[str] = ()) -> list[Labelled]:
    """Requests and responses of a test API."""
    path = root / "api-security-atrdf" / "dataset_1_train.jsonl.xz"
    objects = [json.loads(line) for line in read_lines(path)]
    tags = [content["request"].pop("Attack_Tag", None) for content in objects]
    settings = WatchSettings(
        format="jsonl", endpoint="request.method request.url", ignore=tuple(ignore)
    )
    return list(map(Labelled, parse(objects, settings), tags))


def read_http_params(root: Path) -> tuple[list[Labelled], list[Labelled]]:
    """Values of request parameters: the two files of the data set."""
    parts = []
    for name in ("payload_train", "payload_test"):
        text = "".join(read_lines(root / "http-params" / f"{name}.csv.xz"))
        parts.append(
            [
                Labelled(
                    Event(float(i), "", "GET /", ["payload"], [row["payload"]], f"{name}:{i}"),
                    None if row["attack_type"] == "norm" else row["attack_type"],
                )
                for i, row in enumerate(csv.DictReader(io.StringIO(text)))
            ]
        )
    return parts[0], parts[1]


def read_cloudtrail(root: Path) -> list[Labelled]:
    """API calls of an account while an attack was simulated. The user agent, which names the tool,
    is the label and is left out."""
    path = root / "aws-cloudtrail-stratus" / "cloudtrail_events.jsonl.xz"
    objects = [json.loads(line) for line in read_lines(path)]
    labels = ["stratus-red-team" in content.get("userAgent", "") for content in objects]
    events = parse(objects, WatchSettings(format="cloudtrail", ignore=("userAgent",)))
    return [Labelled(e, "stratus" if bad else None) for e, bad in zip(events, labels, strict=True)]


def remove_duplicates(rows: Sequence[Labelled], without: Sequence[str] = ()) -> list[Labelled]:
    """The first of the rows with the same leaves.

    Args:
        without: Paths that do not count, such as an id of the request.
    """
    found: dict[tuple[object, ...], Labelled] = {}
    for row in rows:
        leaves = zip(row.event.paths, map(repr, row.event.values), strict=True)
        key = (row.event.endpoint, *(leaf for leaf in leaves if leaf[0] not in without))
        found.setdefault(key, row)
    return list(found.values())


def event_text(event: Event) -> str:
    """An event as one line, for baselines that read text."""
    leaves = (f"{path}={value}" for path, value in zip(event.paths, event.values, strict=True))
    return f"{event.endpoint} {' '.join(leaves)}"


# Methods: (normal events, events, seed) -> a score that is higher for what is less normal.


def score_floor(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    """`regard watch` with the level "leaf" alone."""
    settings = WatchSettings(levels=("leaf",), seed=seed)
    ordered = [replace(event, time=float(i)) for i, event in enumerate(train)]
    detector = Detector.learn(ordered, settings)
    scored = []
    for start in range(0, len(test), 512):
        scored += detector.score(test[start : start + 512], {})
    return np.array([each.score for each in scored])


def score_trigrams(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    """Mean surprise of the eight most surprising character 3-grams of the whole event."""
    counts: dict[str, int] = {}
    contexts: dict[str, int] = {}
    for event in train:
        text = event_text(event)
        for i in range(len(text) - 2):
            counts[text[i : i + 3]] = counts.get(text[i : i + 3], 0) + 1
            contexts[text[i : i + 2]] = contexts.get(text[i : i + 2], 0) + 1
    scores = []
    for event in test:
        text = event_text(event)
        bits = [
            np.log2(
                (contexts.get(text[i : i + 2], 0) + 128) / (counts.get(text[i : i + 3], 0) + 0.5)
            )
            for i in range(len(text) - 2)
        ]
        scores.append(np.mean(sorted(bits)[-8:]) if bits else 0.0)
    return np.array(scores)


def hashed_features(train: Sequence[Event], test: Sequence[Event]) -> tuple[object, object]:
    """Counts of leaves ("path=value") and of character 3-grams, hashed to 1,024 columns each."""
    from scipy.sparse import hstack

    leaves = HashingVectorizer(
        analyzer=lambda e: [f"{p}={v}" for p, v in zip(e.paths, e.values, strict=True)],
        n_features=1_024,
    )
    letters = HashingVectorizer(
        analyzer="char", ngram_range=(3, 3), n_features=1_024, preprocessor=event_text
    )
    return tuple(
        hstack([leaves.transform(events), letters.transform(events)]).tocsr()
        for events in (train, test)
    )


def score_forest(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    known, new = hashed_features(train, test)
    forest = IsolationForest(n_estimators=200, random_state=seed).fit(known)
    return -forest.score_samples(new)


def score_one_class(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    known, new = hashed_features(train, test)
    return -SGDOneClassSVM(nu=0.05, random_state=seed).fit(known).score_samples(new)


def score_rarity(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    """How rare the endpoint is."""
    counts: dict[str, int] = {}
    for event in train:
        counts[event.endpoint] = counts.get(event.endpoint, 0) + 1
    return np.array([-float(counts.get(event.endpoint, 0)) for event in test])


def score_length(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    return np.array([float(len(event_text(event))) for event in test])


def score_random(train: Sequence[Event], test: Sequence[Event], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(len(test))


METHODS: dict[str, Callable[[Sequence[Event], Sequence[Event], int], np.ndarray]] = {
    "floor": score_floor,
    "3-grams, top 8": score_trigrams,
    "isolation forest": score_forest,
    "one-class SVM (SGD)": score_one_class,
    "rare endpoint": score_rarity,
    "length": score_length,
    "random": score_random,
}


def measure(labels: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """AUROC, average precision, and recall at two rates of false alarms."""
    false_alarms, recall, _ = roc_curve(labels, scores, drop_intermediate=False)
    return {
        "auroc": float(roc_auc_score(labels, scores)),
        "ap": float(average_precision_score(labels, scores)),
        **{
            f"recall_at_{rate:g}": float(recall[false_alarms <= rate].max())
            for rate in (0.01, 0.001)
        },
    }


def evaluate(
    split: Callable[[int], tuple[list[Event], list[Labelled]]], methods: Sequence[str]
) -> dict[str, object]:
    """All methods on the splits of all seeds."""
    results: dict[str, object] = {}
    sizes = {}
    for name in methods:
        runs, by_kind = [], {}
        for seed in SEEDS:
            train, test = split(seed)
            labels = np.array([row.attack is not None for row in test])
            scores = METHODS[name](train, [row.event for row in test], seed)
            runs.append(measure(labels, scores))
            sizes = {
                "train": len(train),
                "normal": int((~labels).sum()),
                "attacks": int(labels.sum()),
            }
            for kind in sorted({row.attack for row in test if row.attack}):
                chosen = ~labels | np.array([row.attack == kind for row in test])
                by_kind.setdefault(kind, []).append(roc_auc_score(labels[chosen], scores[chosen]))
        results[name] = {
            metric: {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1))}
            for metric in runs[0]
            for values in [[run[metric] for run in runs]]
        }
        results[name]["auroc_by_kind"] = {k: float(np.mean(v)) for k, v in by_kind.items()}
        shown = ", ".join(f"{m} {results[name][m]['mean']:.3f}" for m in runs[0])
        print(f"  {name:22s} {shown}", flush=True)
    return {"sizes": sizes, "methods": results}


def random_split(rows: Sequence[Labelled]) -> Callable[[int], tuple[list[Event], list[Labelled]]]:
    """70 % of the normal events, at random, to learn from; the others and all attacks to test."""

    def split(seed: int) -> tuple[list[Event], list[Labelled]]:
        normal = [row for row in rows if row.attack is None]
        random.Random(seed).shuffle(normal)
        cut = round(TRAIN_SHARE * len(normal))
        attacks = [row for row in rows if row.attack is not None]
        return [row.event for row in normal[:cut]], [*normal[cut:], *attacks]

    return split


def ordered_split(rows: Sequence[Labelled]) -> Callable[[int], tuple[list[Event], list[Labelled]]]:
    """The first 70 % of the normal events to learn from; the others and all attacks to test."""

    def split(seed: int) -> tuple[list[Event], list[Labelled]]:
        normal = [row for row in rows if row.attack is None]
        cut = round(TRAIN_SHARE * len(normal))
        attacks = [row for row in rows if row.attack is not None]
        return [row.event for row in normal[:cut]], [*normal[cut:], *attacks]

    return split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    results = {}
    for name, ignore in (("ATRDF", ()), ("ATRDF without keys that only attacks have", LEAKS)):
        rows = remove_duplicates(read_atrdf(options.data, ignore))
        for order, split in (("random", random_split(rows)), ("in order", ordered_split(rows))):
            print(f"{name}, {order}")
            results[f"{name}, {order}"] = evaluate(split, list(METHODS))

    train, test = map(remove_duplicates, read_http_params(options.data))
    known = {row.event.values[0] for row in train}
    test = [row for row in test if row.event.values[0] not in known]
    normal = [row.event for row in train if row.attack is None]
    print("HttpParams")
    methods = [name for name in METHODS if name != "rare endpoint"]
    results["HttpParams"] = evaluate(lambda seed: (normal, test), methods)

    ids = ("requestID", "eventID", "eventTime")
    rows = remove_duplicates(read_cloudtrail(options.data), ids)
    print("CloudTrail")
    results["CloudTrail"] = evaluate(ordered_split(rows), list(METHODS))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
