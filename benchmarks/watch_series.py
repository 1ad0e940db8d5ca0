"""The level "series" of `regard watch` and its model on SMD, NAB and traffic of the demo shop.

    python benchmarks/watch_series.py DATA             all tables, 8 minutes on one core
    python benchmarks/watch_series.py DATA smd nab     some of them
    python benchmarks/watch_series.py --table          the tables from the stored results

DATA is a folder with smd-subset/ and nab/. Results are written to
benchmarks/results/watch-series.json.

smd       four machines: fit on the normal part, test on the labelled one. VUS-PR with a window of
          100, AUROC, AP, and the best F1 after point adjustment, to show what that is worth
nab       52 series with labels, one by one: fit on the first 15 % and fixed; the same, but updated
          every 64 rows; and fit on the whole series without labels, as TSB-AD's methods are
nab-score the score of NAB itself (standard profile), one threshold for all series
shop      incidents found at 20 alerts a day, by one level alone, in traffic of `regard watch demo`
speed     events per second of CPU time, on traffic of the shop
vus       seconds of CPU time for VUS of 24,000 points
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.ensemble import IsolationForest
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.preprocessing import StandardScaler

from regard.json_files import write_json
from regard.watch.demo.traffic import generate_labelled_traffic
from regard.watch.detector import Detector
from regard.watch.events import read_events
from regard.watch.series import SeriesLevel, SeriesModel
from regard.watch.settings import WatchSettings
from regard.watch.vus import volume_under_surface

RESULT = Path(__file__).parent / "results" / "watch-series.json"
SEEDS = (0, 1, 2)
PROBATION, UPDATE_ROWS = 0.15, 64
DAY = 86_400.0


class Labelled(NamedTuple):
    """A series: times (n), values (n), labels (n)."""

    name: str
    times: np.ndarray
    values: np.ndarray
    labels: np.ndarray


# -------------------------------------------------------------------------------------------- SMD
def read_smd(data: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Machine -> train (n, 38), test (m, 38), labels (m)."""
    content = lzma.decompress((data / "smd-subset" / "smd_uint16_T.npz.xz").read_bytes())
    arrays = np.load(io.BytesIO(content), allow_pickle=False)
    machines = sorted({name.rsplit("_", 1)[0] for name in arrays})
    return {
        name: (
            arrays[f"{name}_train"].T / 65535.0,
            arrays[f"{name}_test"].T / 65535.0,
            arrays[f"{name}_label"].astype(int),
        )
        for name in machines
    }


def score_by_model(train: np.ndarray, test: np.ndarray, lags: int | None) -> np.ndarray:
    model = SeriesModel(lags)
    model.fit(train)
    return model.score(test).bits


def score_by_norm(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    return np.linalg.norm(StandardScaler().fit(train).transform(test), axis=1)


def score_by_pca(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Squared prediction error with 90 % of the variance."""
    scaler = StandardScaler().fit(train)
    pca = PCA(0.9).fit(scaler.transform(train))
    rows = scaler.transform(test)
    return ((rows - pca.inverse_transform(pca.transform(rows))) ** 2).sum(axis=1)


def score_by_forest(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    return -IsolationForest(random_state=seed).fit(train).score_samples(test)


def point_adjusted_f1(labels: np.ndarray, scores: np.ndarray) -> float:
    """Best F1 over thresholds if one hit in a labelled range counts as a hit at all its points."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels, [0]])))
    adjusted = scores.copy()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        adjusted[start:end] = scores[start:end].max()
    order = np.argsort(-adjusted, kind="stable")
    hits = np.cumsum(labels[order])
    last = np.append(np.diff(adjusted[order]) != 0, True)  # ties are decided together
    return float((2 * hits / (np.arange(1, len(hits) + 1) + labels.sum()))[last].max())


def measure_smd(data: Path) -> dict[str, Any]:
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    per_machine: dict[str, list[float]] = defaultdict(list)
    for train, test, labels in read_smd(data).values():
        contenders: dict[str, list[np.ndarray]] = {
            "SeriesModel": [score_by_model(train, test, None)],
            "SeriesModel, 1 lag": [score_by_model(train, test, 1)],
            "L2 norm of z-scores": [score_by_norm(train, test)],
            "PCA residual": [score_by_pca(train, test)],
            "isolation forest": [score_by_forest(train, test, seed) for seed in SEEDS],
            "random": [np.random.default_rng(seed).random(len(test)) for seed in SEEDS],
        }
        for name, runs in contenders.items():
            values = [volume_under_surface(labels, run) for run in runs]
            row = scores[name]
            row["VUS-PR"].append(float(np.mean([each.pr for each in values])))
            row["VUS-ROC"].append(float(np.mean([each.roc for each in values])))
            row["AUROC"].append(float(np.mean([roc_auc_score(labels, run) for run in runs])))
            row["AP"].append(float(np.mean([average_precision_score(labels, r) for r in runs])))
            row["PA-F1"].append(float(np.mean([point_adjusted_f1(labels, r) for r in runs])))
            per_machine[name].append(row["VUS-PR"][-1])
    return {
        name: {
            **{metric: float(np.mean(values)) for metric, values in row.items()},
            "VUS-PR by machine": per_machine[name],
        }
        for name, row in scores.items()
    }


# -------------------------------------------------------------------------------------------- NAB
def read_nab(data: Path) -> list[Labelled]:
    """All 58 series; 52 of them have labels."""
    with tarfile.open(data / "nab" / "nab.tar.xz") as archive:
        files = {each.name: each for each in archive.getmembers() if each.isfile()}

        def read(suffix: str) -> str:
            name = next(each for each in files if each.endswith(suffix))
            file = archive.extractfile(files[name])
            assert file is not None
            return file.read().decode("utf-8")

        windows = json.loads(read("combined_windows.json"))
        series = []
        for name, ranges in windows.items():
            rows = list(csv.DictReader(io.StringIO(read(name))))
            times = np.array([seconds(row["timestamp"]) for row in rows])
            labels = np.zeros(len(rows), dtype=int)
            for first, last in ranges:
                labels[(times >= seconds(first)) & (times <= seconds(last))] = 1
            values = np.array([float(row["value"]) for row in rows])
            series.append(Labelled(name, times, values, labels))
    return series


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def score_fixed(each: Labelled, share: float) -> tuple[np.ndarray, int]:
    """Bits, and the number of lags, of a model fitted on the first rows."""
    end = round(share * len(each.values))
    model = SeriesModel()
    model.fit(each.values[:end], each.times[:end])
    return model.score(each.values, each.times).bits, model.lags


def score_rolling(each: Labelled) -> tuple[np.ndarray, int]:
    """The same, but the model learns the rows after it scored them."""
    end = round(PROBATION * len(each.values))
    model = SeriesModel()
    model.fit(each.values[:end], each.times[:end])
    bits = [model.score(each.values[:end], each.times[:end]).bits]
    for start in range(end, len(each.values), UPDATE_ROWS):
        rows = slice(start, start + UPDATE_ROWS)
        bits.append(model.score(each.values[rows], each.times[rows], continues=True).bits)
        model.update(each.values[rows], each.times[rows])
    return np.concatenate(bits), model.lags


def centre(bits: np.ndarray, lags: int) -> np.ndarray:
    """Bits of a window at its centre rather than at its end, which looks ahead."""
    shift = lags // 2
    return np.concatenate([bits[shift:], np.full(shift, bits[-1])]) if shift else bits


def measure_nab(data: Path) -> dict[str, Any]:
    found: dict[str, list[float]] = defaultdict(list)

    def add(name: str, labels: np.ndarray, scores: np.ndarray) -> None:
        found[name].append(volume_under_surface(labels, scores).pr)

    for each in read_nab(data):
        if not each.labels.any():
            continue
        for name, (bits, lags) in (
            ("first 15 %", score_fixed(each, PROBATION)),
            ("first 15 %, then updated", score_rolling(each)),
            ("whole series", score_fixed(each, 1.0)),
        ):
            add(f"SeriesModel, {name}", each.labels, bits)
            add(f"SeriesModel, {name}, at the window's centre", each.labels, centre(bits, lags))
        mean, spread = each.values.mean(), each.values.std() or 1.0
        add("|z|, whole series", each.labels, np.abs(each.values - mean) / spread)
        change = np.abs(np.diff(each.values, prepend=each.values[0]))
        add("change from the row before", each.labels, change)
        runs = [np.random.default_rng(seed).random(len(each.labels)) for seed in SEEDS]
        pr = [volume_under_surface(each.labels, run).pr for run in runs]
        found["random"].append(float(np.mean(pr)))
    return {name: {"VUS-PR": float(np.mean(v)), "series": len(v)} for name, v in found.items()}


def nab_score(series: list[Labelled], detections: list[np.ndarray]) -> float:
    """NAB's score, standard profile: 100 if every window is found at its start without a false
    alarm, 0 if nothing is found.

    Args:
        series: The series.
        detections: For each the positions of its alarms.
    """
    raw, windows = 0.0, 0
    for each, alarms in zip(series, detections, strict=True):
        probation = int(min(PROBATION * len(each.labels), PROBATION * 5_000))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], each.labels, [0]])))
        starts, ends = edges[::2], edges[1::2] - 1
        windows += len(starts)
        raw -= len(starts)  # as if none was found
        later = alarms[alarms >= probation]
        for start, end in zip(starts, ends, strict=True):
            inside = later[(later >= start) & (later <= end)]
            if len(inside):
                position = -(end - inside[0] + 1) / (end - start + 1)
                raw += 1 + sigmoid(position) / sigmoid(-1.0)
        for alarm in later[each.labels[later] == 0]:
            before = np.flatnonzero(ends < alarm)
            if not len(before):
                raw -= 0.11
                continue
            last = before[-1]
            length = max(ends[last] - starts[last], 1)
            raw += 0.11 * sigmoid((alarm - ends[last]) / length)
    return 100 * (raw + windows) / (2 * windows)


def sigmoid(y: float) -> float:
    """NAB's: 1 far before the end of a window, 0 at it, −1 far after it."""
    return -1.0 if y > 3 else 2 / (1 + float(np.exp(5 * y))) - 1


def measure_nab_score(data: Path) -> dict[str, Any]:
    """One threshold for all series, the best one, as NAB's own runner chooses it."""
    series = read_nab(data)
    scores: dict[str, list[np.ndarray]] = {
        "SeriesModel, then updated": [],
        "|z| of the first 15 %": [],
    }
    for each in series:
        end = round(PROBATION * len(each.values))
        z = np.abs(each.values - each.values[:end].mean()) / (each.values[:end].std() or 1.0)
        for name, values in zip(scores, (score_rolling(each)[0], z), strict=True):
            usual = np.quantile(values[:end], 0.99)
            scores[name].append(values / (usual or 1.0))
    scores["random"] = [
        np.random.default_rng(i).random(len(each.labels)) for i, each in enumerate(series)
    ]
    results = {}
    for name, values in scores.items():
        candidates = np.quantile(np.concatenate(values), 1 - np.geomspace(1e-5, 0.1, 40))
        best = max(
            nab_score(series, [first_alarms(each, threshold) for each in values])
            for threshold in candidates
        )
        results[name] = {"NAB score": max(best, 0.0), "series": len(series)}
    return results


def first_alarms(scores: np.ndarray, threshold: float, pause: int = 100) -> np.ndarray:
    """Positions at which scores reach a threshold; after one, none for some rows."""
    alarms: list[int] = []
    for position in np.flatnonzero(scores >= threshold).tolist():
        if not alarms or position - alarms[-1] > pause:
            alarms.append(position)
    return np.array(alarms, dtype=int)


# ------------------------------------------------------------------------------------------- shop
def measure_shop() -> dict[str, Any]:
    """Ten days of traffic; learned on the first seven, which are without attacks."""
    results: dict[str, Any] = {}
    for level in ("sequence", "path", "series"):
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        false_alerts = []
        for seed in SEEDS:
            settings = WatchSettings(
                entity="request.user",
                endpoint="request.method request.path",
                time="time",
                levels=(level,),
            )
            with tempfile.TemporaryDirectory() as folder:
                path, labels = Path(folder) / "traffic.jsonl", []
                with path.open("w", encoding="utf-8") as file:
                    for event, label in generate_labelled_traffic(10, seed=seed, attacks_from=7):
                        file.write(json.dumps(event) + "\n")
                        labels.append(label)
                events = list(read_events(path, settings))
            start = events[0].time + 7 * DAY
            split = next(i for i, event in enumerate(events) if event.time >= start)
            detector = Detector.learn(events[:split], settings)
            states, scored = detector.initial_states(), []
            for i in range(split, len(events), 256):
                batch = detector.score(events[i : i + 256], states)
                detector.update(batch)
                scored += batch
            incidents: dict[Any, bool] = {}
            for each, label in zip(scored, labels[split:], strict=True):
                if label is not None:
                    hit = each.status == "alert"
                    incidents[label] = incidents.get(label, False) or hit
            for label, hit in incidents.items():
                found[label.kind][0] += hit
                found[label.kind][1] += 1
            pairs = zip(scored, labels[split:], strict=True)
            false_alerts.append(sum(s.status == "alert" and lab is None for s, lab in pairs) / 3)
        results[level] = {
            "false alerts a day": float(np.mean(false_alerts)),
            **{kind: f"{hit}/{total}" for kind, (hit, total) in sorted(found.items())},
        }
    return results


def measure_speed() -> dict[str, Any]:
    """Three days of traffic, the last of them in micro-batches of 256."""
    settings = WatchSettings(
        entity="request.user", endpoint="request.method request.path", time="time"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic.jsonl"
        traffic = generate_labelled_traffic(3, attacks=())
        path.write_text("".join(json.dumps(event) + "\n" for event, _ in traffic), encoding="utf-8")
        events = list(read_events(path, settings))
    split = len(events) * 2 // 3
    level = SeriesLevel(settings)
    level.fit(events[:split])
    states: dict[tuple[str, str], Any] = {}
    spent = {"score": 0.0, "update": 0.0}
    for i in range(split, len(events), 256):
        batch = events[i : i + 256]
        start = time.process_time()
        level.score(batch, states)
        middle = time.process_time()
        level.update(batch)
        spent["score"] += middle - start
        spent["update"] += time.process_time() - middle
    leaves = float(np.mean([len(event.paths) for event in events]))
    scored = len(events) - split
    return {"leaves": leaves, **{name: scored / seconds for name, seconds in spent.items()}}


def measure_vus() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels = np.zeros(24_000, dtype=int)
    for start in rng.integers(0, 23_000, 10):
        labels[start : start + 100] = 1
    scores = rng.random(24_000)
    start = time.process_time()
    volume_under_surface(labels, scores)
    return {"24,000 points, window 100": {"seconds": time.process_time() - start}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("tables", nargs="*", default=[])
    parser.add_argument("--table", action="store_true", help="print the stored results")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "smd": lambda: measure_smd(args.data),
        "nab": lambda: measure_nab(args.data),
        "nab-score": lambda: measure_nab_score(args.data),
        "shop": measure_shop,
        "speed": measure_speed,
        "vus": measure_vus,
    }
    if not args.table:
        if args.data is None:
            parser.error("DATA is missing: the folder with smd-subset/ and nab/")
        for table in args.tables or measures:
            if table not in measures:
                parser.error(f"there is no table {table!r}: choose from {', '.join(measures)}")
            results[table] = measures[table]()
            write_json(RESULT, results)
    for table, rows in results.items():
        print(f"\n{table}")
        for name, row in rows.items():
            print(f"  {name:58} {row}")


if __name__ == "__main__":
    main()
