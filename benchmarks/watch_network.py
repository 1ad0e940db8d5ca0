"""The networks of `regard watch`: which mixer at which level, beside floors and simple baselines.

    python benchmarks/watch_network.py DATA                      all parts, 15 minutes of CPU time
    python benchmarks/watch_network.py DATA leaves events        some of them
    python benchmarks/watch_network.py --table                   the tables from the stored results

DATA is a folder with aws-cloudtrail-stratus/, mordor/, api-security-atrdf/, msnbc-clicks/ and
smd-subset/. Runs that are in benchmarks/results/watch-network.json are not repeated.

leaves  the task masked_leaves: bits per leaf, split in order of time
events  the task next_event on MSNBC: nats per event; 152,000 visitors train, 8,000 choose the
        weights, the last 40,000 test
series  the task forecast on SMD: mean squared error of the training files' last fifth
vus     VUS-PR (window 100) of forecast errors on the labelled files of SMD, beside `SeriesModel`
mixed   what the mixture of floor and network saves in `regard watch learn`, on held-out events
edits   a leaf gets a value that is frequent at its endpoint, from an event of another user
speed   events per second of CPU time on CloudTrail, floor and network in turns
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from watch_planted import read_sets
from watch_sequences import TRAINED, as_events, read_visits

from regard.json_files import write_json
from regard.models.spec import ModuleSpec
from regard.tasks import Task
from regard.tasks.event_splits import split_by_time
from regard.tasks.forecast import Forecast
from regard.tasks.masked_leaves import MaskedLeaves
from regard.tasks.next_event import NextEvent
from regard.train.evaluation import evaluate_examples
from regard.watch.event import Event
from regard.watch.learning import learn_detector
from regard.watch.leaves import LeafLevel
from regard.watch.network.cascade import Cascade
from regard.watch.network.leaf_network import LeafNetwork
from regard.watch.network.sequence_network import SequenceNetwork
from regard.watch.network.settings import NetworkSettings
from regard.watch.network.training import build_network, takes_mask, train_network
from regard.watch.sequences import SequenceLevel
from regard.watch.series.model import SeriesModel
from regard.watch.settings import WatchSettings
from regard.watch.vus import volume_under_surface

RESULT = Path(__file__).parent / "results" / "watch-network.json"
SETS = ("CloudTrail", "Mordor, Windows", "ATRDF, benign", "demo")
LEAF_MIXERS = ("vanilla", "linear", "fnet")
EVENT_MIXERS = ("vanilla", "linear")
SERIES_MIXERS = ("vanilla", "linear")
MACHINES = ("1-6", "1-7", "2-1", "3-4")
SEEDS = (0, 1, 2)
LEAF_STEPS, EVENT_STEPS, SERIES_STEPS = 500, 2000, 500
EVALUATED = 4000  # test examples
MOST_EVENTS = 6000  # of a set, the first in order of time
EDITS = 200
ROUNDS = 5  # of the measurement of speed
MACHINES_STEPS = (0.7, 0.8)

Results = dict[str, dict[str, Any]]


@lru_cache
def event_sets(root: Path) -> dict[str, list[Event]]:
    return {
        name: sorted(events[:MOST_EVENTS], key=lambda event: event.time)
        for name, events in read_sets(root).items()
    }


def run_once(results: Results, part: str, name: str, measure: Callable[[], Any]) -> None:
    """Store what `measure` returns, unless it is known."""
    if name in results.setdefault(part, {}):
        return
    start = time.process_time()
    results[part][name] = measure()
    print(f"{part}: {name}: {results[part][name]}  ({time.process_time() - start:.0f} s)")
    write_json(RESULT, results)


def train_and_test(
    task: Task, mixer: str, steps: int, seed: int, *, position: str, **changes: Any
) -> float:
    """The first metric of the test split after training."""
    settings = NetworkSettings(mixer=ModuleSpec(name=mixer), steps=steps, seed=seed, **changes)
    model = build_network(task, settings, position=position, length=task.length)
    if isinstance(task, MaskedLeaves):
        task.padding = "mask" if takes_mask(model) else "tokens"
    train_network(model, task, settings)
    evaluation = evaluate_examples(
        task,
        model,
        tested(task),
        "test",
        forward=lambda batch: model(**batch.inputs),
        batch_size=64,
        device=torch.device("cpu"),
    )
    return evaluation.value


def tested(task: Task) -> list[int]:
    return task.sample("test", min(EVALUATED, task.size("test"))).tolist()


def measure_task(
    results: Results,
    part: str,
    name: str,
    build: Callable[[], Task],
    mixers: Sequence[str],
    steps: int,
    seeds: Sequence[int],
    **options: Any,
) -> None:
    """Baselines and mixers on a task."""
    wanted = [f"{name} | {mixer} | {seed}" for seed in seeds for mixer in mixers]
    if all(each in results.get(part, {}) for each in wanted):
        return
    task = build()
    print(name, *task.notes(), sep="\n  ")
    for baseline, score in task.baselines().items():
        run_once(
            results,
            part,
            f"{name} | {baseline}",
            lambda score=score: task.metric.compute(score(tested(task))),
        )
    for seed in seeds:
        for mixer in mixers:
            run_once(
                results,
                part,
                f"{name} | {mixer} | {seed}",
                lambda mixer=mixer, seed=seed: train_and_test(task, mixer, steps, seed, **options),
            )


def measure_leaves(root: Path, results: Results, seeds: Sequence[int]) -> None:
    for name in SETS:

        def build(name: str = name) -> Task:
            return MaskedLeaves(split_by_time(event_sets(root)[name], name))

        measure_task(
            results, "leaves", name, build, LEAF_MIXERS, LEAF_STEPS, seeds, position="none"
        )


def measure_events(root: Path, results: Results, seeds: Sequence[int]) -> None:
    def build() -> Task:
        visits = [visit for visit in read_visits(root) if visit]
        valid = TRAINED - 8_000
        splits = {
            "train": as_events(visits[:valid], "train"),
            "valid": as_events(visits[valid:TRAINED], "valid"),
            "test": as_events(visits[TRAINED:], "test"),
        }
        return NextEvent(splits, length=32)

    measure_task(
        results,
        "events",
        "MSNBC",
        build,
        EVENT_MIXERS,
        EVENT_STEPS,
        seeds,
        position="learned",
        batch_size=128,
    )


def measure_series(root: Path, results: Results, seeds: Sequence[int]) -> None:
    content = lzma.decompress((root / "smd-subset" / "smd_uint16_T.npz.xz").read_bytes())
    arrays = np.load(io.BytesIO(content))
    for machine in MACHINES:
        values = arrays[f"machine-{machine}_train"].T / 65535.0
        first, second = (round(share * len(values)) for share in MACHINES_STEPS)
        parts = np.split(values, [first, second])

        def build(parts: list[np.ndarray] = parts) -> Task:
            return Forecast(dict(zip(("train", "valid", "test"), parts, strict=True)))

        measure_task(
            results,
            "series",
            f"SMD {machine}",
            build,
            SERIES_MIXERS,
            SERIES_STEPS,
            seeds,
            position="learned",
            batch_size=32,
            lr=1e-3,
        )


def measure_vus(root: Path, results: Results, seeds: Sequence[int]) -> None:
    content = lzma.decompress((root / "smd-subset" / "smd_uint16_T.npz.xz").read_bytes())
    arrays = np.load(io.BytesIO(content))

    def measure(machine: str, seed: int) -> dict[str, float]:
        values = arrays[f"machine-{machine}_train"].T / 65535.0
        test = arrays[f"machine-{machine}_test"].T / 65535.0
        labels = arrays[f"machine-{machine}_label"]
        first, second = (round(share * len(values)) for share in MACHINES_STEPS)
        parts = np.split(values, [first, second])
        task = Forecast(dict(zip(("train", "valid", "test"), parts, strict=True)))
        settings = NetworkSettings(steps=SERIES_STEPS, seed=seed, batch_size=32, lr=1e-3)
        model = build_network(task, settings, position="learned", length=task.length)
        train_network(model, task, settings)
        ridge = task.fit_ridge()

        def errors(steps: np.ndarray, forecast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            """Squared errors (n, columns) of each step, 0 in the first window."""
            known = torch.from_numpy(task.standardize(steps)).float()
            count, width = len(known) // task.patch, known.shape[1]
            patches = known[: count * task.patch].reshape(count, -1)
            windows = patches.unfold(0, task.length, 1)[:-1].transpose(1, 2)
            with torch.no_grad():
                found = torch.cat([forecast(part)[:, -1] for part in windows.split(256)])
            squared = torch.zeros(len(known), width)
            after = patches[task.length :]
            start = task.length * task.patch
            squared[start : count * task.patch] = ((found - after) ** 2).reshape(-1, width)
            return squared.numpy()

        scores = {}
        for name, forecast in (("network", model), ("ridge", ridge)):
            usual = errors(parts[2], forecast).mean(0) + 0.01
            scores[name] = (errors(test, forecast) / usual).clip(max=2500).mean(1)
        floor = SeriesModel()
        floor.fit(values)
        scores["SeriesModel"] = floor.score(test).bits
        ranks = [each.argsort().argsort() for each in (scores["network"], scores["SeriesModel"])]
        scores["network and SeriesModel, ranks"] = np.mean(ranks, axis=0)
        return {
            name: float(volume_under_surface(labels, each, window=100).pr)
            for name, each in scores.items()
        }

    for machine in MACHINES:
        for seed in seeds[:1]:
            run_once(
                results,
                "vus",
                f"SMD {machine} | vanilla | {seed}",
                lambda machine=machine, seed=seed: measure(machine, seed),
            )


def measure_mixed(root: Path, results: Results, seeds: Sequence[int]) -> None:
    """What the mixture saves at each level. Of MSNBC, the first 40,000 visitors are used."""

    def read_events_of(root: Path, name: str) -> Sequence[Event]:
        if name != "MSNBC":
            return event_sets(root)[name]
        return as_events([visit for visit in read_visits(root)[:40_000] if visit], "visitor")

    def gain(level: str, events: Sequence[Event], mixer: str, seed: int) -> dict[str, float]:
        settings = NetworkSettings(mixer=ModuleSpec(name=mixer), steps=LEAF_STEPS, seed=seed)
        cut = round(0.8 * len(events))
        network: LeafNetwork | SequenceNetwork
        if level == "leaf":
            leaf_floor = LeafLevel(WatchSettings())
            leaf_floor.fit(events[:cut])
            network = LeafNetwork(leaf_floor, settings)
        else:
            sequence_floor = SequenceLevel(WatchSettings())
            sequence_floor.fit(events[:cut])
            network = SequenceNetwork(sequence_floor, settings)
        found = network.fit_network(events[:cut])
        return {**found._asdict(), "suffices": found.suffices(settings.min_gain)}

    for name, level in (
        ("demo", "sequence"),
        ("CloudTrail", "leaf"),
        ("demo", "leaf"),
        ("MSNBC", "sequence"),
    ):
        for mixer in ("vanilla",):
            for seed in seeds[:1]:
                run_once(
                    results,
                    "mixed",
                    f"{name} | {level} | {mixer} | {seed}",
                    lambda name=name, level=level, mixer=mixer, seed=seed: gain(
                        level, read_events_of(root, name), mixer, seed
                    ),
                )


# ------------------------------------------------------------------------------------------- edits
def swap_values(events: Sequence[Event], known: Sequence[Event], seed: int) -> list[Any]:
    """Events in which one leaf has a value that is frequent for its path at the endpoint, from an
    event of another entity (or any other, without entities), with the place of the leaf."""
    rng = random.Random(seed)
    pool: dict[tuple[str, str], list[tuple[str, Any]]] = defaultdict(list)
    counts: dict[tuple[str, str, Any], int] = defaultdict(int)
    for event in known:
        for path, value in zip(event.paths, event.values, strict=True):
            pool[event.endpoint, path].append((event.entity, value))
            counts[event.endpoint, path, (type(value), value)] += 1
    edits = []
    order = list(range(len(events)))
    rng.shuffle(order)
    for place in order:
        event = events[place]
        leaves = [i for i, path in enumerate(event.paths) if event.paths.count(path) == 1]
        rng.shuffle(leaves)
        for i in leaves:
            source = pool[event.endpoint, event.paths[i]]
            entity, value = rng.choice(source) if source else ("", event.values[i])
            key = (event.endpoint, event.paths[i], (type(value), value))
            differs = value != event.values[i] and (entity != event.entity or not entity)
            if differs and counts[key] >= 0.05 * len(source) and len(source) >= 50:
                values = [value if j == i else each for j, each in enumerate(event.values)]
                edits.append((replace(event, values=values), event.paths[i]))
                break
        if len(edits) == EDITS:
            break
    return edits


def measure_edits(root: Path, results: Results, seeds: Sequence[int]) -> None:
    def measure(name: str, mixer: str | None, seed: int, cascade: float) -> dict[str, float | str]:
        events = event_sets(root)[name]
        cut = round(0.8 * len(events))
        settings = WatchSettings(levels=("leaf",), mixer=mixer, seed=seed)
        network_settings = partial(NetworkSettings, cascade=cascade)
        with patch("regard.watch.network.NetworkSettings", network_settings):
            detector, report = learn_detector(events[:cut], settings)
        edits = swap_values(events[cut:], events[:cut], seed)
        scored = detector.score([event for event, _ in edits], {})
        clean = detector.score(list(events[cut:]), {})
        named = [detector.alert(each).findings[0].path for each in scored]
        p = np.array([each.p for each in scored])
        normal = np.array([each.p for each in clean])
        return {
            "edits": len(edits),
            "auroc": float((p[:, None] < normal).mean() + (p[:, None] == normal).mean() / 2),
            "found": float((p <= np.quantile(normal, 0.01)).mean()),
            "hit_at_1": float(np.mean([n == e for n, (_, e) in zip(named, edits, strict=True)])),
            "network": report.levels["leaf"].get("network", ""),
        }

    for name in ("demo", "ATRDF, benign"):
        for title, mixer, cascade in (
            ("floor", None, 0.0),
            ("vanilla", "vanilla", 0.15),
            ("vanilla, no cascade", "vanilla", 1.0),
        ):
            run_once(
                results,
                "edits",
                f"{name} | {title} | 0",
                lambda name=name, mixer=mixer, cascade=cascade: measure(name, mixer, 0, cascade),
            )


# ------------------------------------------------------------------------------------------- speed
def measure_speed(root: Path, results: Results, seeds: Sequence[int]) -> None:
    events = event_sets(root)["CloudTrail"]
    cut = round(0.8 * len(events))
    test = events[cut:]

    def measure(mixer: str) -> dict[str, float]:
        floor = LeafLevel(WatchSettings())
        floor.fit(events[:cut])
        level = LeafNetwork(floor, NetworkSettings(mixer=ModuleSpec(name=mixer), steps=20))
        level.fit_network(events[:cut])
        cascade = level.cascade
        everything = Cascade(np.full_like(cascade.thresholds, -np.inf), -np.inf, 1.0, 0.0)
        bits = floor.score(test, {})
        # 15 % of these events: the newest differ from those that the thresholds were fitted on
        share = Cascade.fit(bits, 0.15, 0.01)
        seconds = defaultdict(list)
        for _ in range(ROUNDS):
            for name, each in (("floor", None), ("cascade", share), ("all", everything)):
                start = time.process_time()
                if each is None:
                    floor.score(test, {})
                else:
                    level.cascade = each
                    level.score(test, {})
                seconds[name].append(time.process_time() - start)
        rates = {name: len(test) / statistics.median(each) for name, each in seconds.items()}
        selected = len(share.select(bits, test)) / len(test)
        drifted = len(cascade.select(bits, test)) / len(test)
        leaves = float(np.mean([len(event.paths) for event in test]))
        return {**rates, "selected": selected, "selected_later": drifted, "leaves": leaves}

    for mixer in ("vanilla", "linear"):
        run_once(results, "speed", mixer, lambda mixer=mixer: measure(mixer))


PARTS = {
    "speed": measure_speed,
    "events": measure_events,
    "leaves": measure_leaves,
    "series": measure_series,
    "vus": measure_vus,
    "mixed": measure_mixed,
    "edits": measure_edits,
}


def print_tables(results: Results) -> None:
    """Means over seeds, with the smallest and the largest."""
    for part in ("leaves", "events", "series"):
        rows: dict[tuple[str, str], list[float]] = defaultdict(list)
        for name, value in results.get(part, {}).items():
            data, model, *_ = name.split(" | ")
            rows[data, model].append(value)
        print(
            f"\n{part}\n| data | model | mean | from | to | seeds |\n| --- | --- |" + " ---: |" * 4
        )
        for (data, model), values in rows.items():
            mean = statistics.mean(values)
            spread = f"{min(values):.4f} | {max(values):.4f} | {len(values)}"
            print(f"| {data} | {model} | {mean:.4f} | {spread} |")
    for part in ("vus", "mixed", "edits", "speed"):
        print(f"\n{part}")
        for name, value in results.get(part, {}).items():
            print(f"  {name}: {json.dumps(value)}")


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results: Results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if not arguments.table:
        if arguments.data is None:
            parser.error("give the folder of the data, or --table")
        torch.set_num_threads(1)
        for part in arguments.parts or PARTS:
            PARTS[part](arguments.data, results, SEEDS[: arguments.seeds])
    print_tables(results)


if __name__ == "__main__":
    main()
