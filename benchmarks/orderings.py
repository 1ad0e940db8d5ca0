"""What is known about mechanisms, seen again in minutes: small models, several seeds, the same training for all.

    python benchmarks/orderings.py [recall copy extrapolate] [--seeds 3] [--plot docs/images/orderings.png]

recall       softmax attention recalls pairs where a state of fixed size does not, as the pairs grow in number
copy         a window does not reach symbols far away; a window with global tokens does
extrapolate  trained on 64 characters, asked at up to 512: ALiBi beside the sinusoid

Each score is written to benchmarks/results/orderings-NAME.json as soon as it is there.  The same command goes on where it
stopped, and only prints where nothing is missing; --again forgets what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.environment import environment
from regard.models import ModuleSpec, build, module_spec
from regard.models.config import TokenInput
from regard.tasks import Task, create_task
from regard.train import Interrupted, Trainer, TrainSettings
from regard.train.run import RunSpec, model_config

RESULTS = Path(__file__).parent / "results"
Scores = dict[str, dict[str, list[float]]]  # row, column: a score for each seed


class Case(NamedTuple):
    """One model to train.

    row     its name in the table
    task    what it learns; `asked` are the columns of the table, and what is asked in each
    model   where its configuration differs from that of the others in its table
    """

    row: str
    task: ModuleSpec
    asked: dict[str, ModuleSpec]
    model: dict[str, Any]
    settings: dict[str, Any]


class Ordering(NamedTuple):
    """A table, and what it must show.

    better, worse   rows; in each column of `where` the gap between them must be above two standard deviations
    """

    about: str
    metric: str
    cases: list[Case]
    better: str
    worse: str
    where: list[str]


def recall() -> Ordering:
    """Layer 1 sees a token and the one before it, so that a value knows its key; layer 2 is what is asked about."""
    mixers = {"softmax": "vanilla", "linear": "linear"}
    cases = []
    for pairs in PAIRS:
        probe = module_spec("recall", length=4 * pairs, pairs=pairs, keys=32, values=32)
        settings = {"steps": 400, "batch_size": 32, "lr": 3e-3}
        for row, mixer in mixers.items():
            layers = {"mixer": [module_spec("local", window=1), module_spec(mixer)]}
            cases.append(Case(row, probe, {f"{pairs} pairs": probe}, layers, settings))
    return Ordering(
        "associative recall", "accuracy", cases, "softmax", "linear", [f"{PAIRS[-1]} pairs"]
    )


def copy() -> Ordering:
    """One symbol of eight, 42 tokens away; two layers of the window reach 14.  The global tokens do not hold it."""
    probe = module_spec("copy", length=48, lead=4, gap=41, symbols=8, causal=False)
    blocks = {"block": 4, "window": 3, "random": 0}
    mixers = {
        "window": module_spec("bigbird", globals=0, **blocks),
        "window + 4 global tokens": module_spec("bigbird", globals=1, **blocks),
        "dense softmax": module_spec("vanilla"),
    }
    settings = {"steps": 400, "batch_size": 16, "lr": 3e-3}
    cases = [
        Case(row, probe, {"accuracy": probe}, {"mixer": [mixer]}, settings)
        for row, mixer in mixers.items()
    ]
    return Ordering(
        "copy from afar", "accuracy", cases, "window + 4 global tokens", "window", ["accuracy"]
    )


def extrapolate() -> Ordering:
    """The built-in language; windows lie side by side, so that a longer one has seen more and should score better."""
    asked = {f"at {length}": module_spec("lm", length=length) for length in (64, 128, 256, 512)}
    settings = {"steps": 400, "batch_size": 16, "lr": 3e-3}
    loud = TokenInput(
        vocab_size=made(asked["at 64"]).vocab_size, scale_embeddings=True
    )  # as the sinusoid's paper has them: else it drowns the tokens
    models = {
        name: {"position": module_spec(name), "input": loud} for name in ("sinusoid", "alibi")
    }
    cases = [Case(row, asked["at 64"], asked, model, settings) for row, model in models.items()]
    return Ordering(
        "train short, ask long",
        "bits for each character",
        cases,
        "alibi",
        "sinusoid",
        list(asked)[1:],
    )


PAIRS = (8, 16)
ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "recall": recall,
    "copy": copy,
    "extrapolate": extrapolate,
}


# ---------------------------------------------------------------------------------------------- training
def made(words: ModuleSpec) -> Task:
    return create_task(words.name, **words.arguments)


def scored(case: Case, seed: int) -> dict[str, float]:
    """Train once; the test score in each column."""
    learned = made(case.task)
    torch.manual_seed(seed)
    model = build(model_config(RunSpec(task=case.task), learned).replace(**case.model))
    steps = case.settings["steps"]
    settings = TrainSettings(**case.settings, seed=seed, eval_every=steps)
    Trainer(model, learned, settings).run()
    return {
        column: Trainer(model, made(words), settings).score("test")
        for column, words in case.asked.items()
    }


def fill(name: str, ordering: Ordering, seeds: int) -> Scores:
    """Train what is missing in the file of results."""
    path = RESULTS / f"orderings-{name}.json"
    scores: Scores = json.loads(path.read_text())["scores"] if path.exists() else {}
    for seed in range(seeds):
        for case in ordering.cases:
            if all(len(scores.get(case.row, {}).get(column, [])) > seed for column in case.asked):
                continue
            began = time.monotonic()
            found = scored(case, seed)
            for column, score in found.items():
                scores.setdefault(case.row, {}).setdefault(column, []).append(score)
            words = ", ".join(f"{column} {score:.3f}" for column, score in found.items())
            print(
                f"  {case.row}, seed {seed}: {words}, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
            keep(path, ordering, scores)
    return scores


def keep(path: Path, ordering: Ordering, scores: Scores) -> None:
    cases = [
        {"row": c.row, "task": c.task.model_dump(), "settings": c.settings} for c in ordering.cases
    ]
    path.write_text(
        json.dumps({"scores": scores, "cases": cases, "environment": environment()}, indent=1)
        + "\n"
    )


# ---------------------------------------------------------------------------------------------- telling
def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def tell(ordering: Ordering, scores: Scores) -> None:
    """The table, and the gaps that were promised."""
    print(f"\n{ordering.about}: {ordering.metric}, mean ± standard deviation over seeds")
    columns = list(dict.fromkeys(column for found in scores.values() for column in found))
    print(" " * 26 + "".join(f"{column:>18}" for column in columns))
    for row, found in scores.items():
        cells = (f"{statistics.fmean(found[c]):.3f} ± {spread(found[c]):.3f}" for c in columns)
        print(f"  {row:<24}" + "".join(f"{cell:>18}" for cell in cells))
    for column in ordering.where:
        one, other = scores[ordering.better][column], scores[ordering.worse][column]
        gap, noise = (
            abs(statistics.fmean(one) - statistics.fmean(other)),
            2 * max(spread(one), spread(other)),
        )
        print(
            f"  {ordering.better} before {ordering.worse}, {column}: by {gap:.3f}; two standard deviations are {noise:.3f}"
        )


def draw(tables: dict[str, tuple[Ordering, Scores]], path: Path) -> None:
    """A panel for each table: every seed a dot, the means joined."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(tables), figsize=(4 * len(tables), 3.4), squeeze=False, layout="constrained"
    )
    for panel, (ordering, scores) in zip(panels[0], tables.values(), strict=True):
        for (row, found), colour in zip(
            scores.items(), ("#0072b2", "#d55e00", "#888888"), strict=False
        ):
            places = list(found) if len(found) > 1 else [row]
            panel.plot(
                places, [statistics.fmean(v) for v in found.values()], color=colour, label=row
            )
            for place, values in zip(places, found.values(), strict=True):
                panel.plot(
                    [place] * len(values), values, "o", color=colour, alpha=0.6, markersize=5
                )
        panel.set(title=ordering.about, ylabel=ordering.metric, ylim=(0, None))
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        if len(next(iter(scores.values()))) > 1:
            panel.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, print and draw."""
    read = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    read.add_argument("tables", nargs="*", help=f"of {', '.join(ORDERINGS)}; all unless given")
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--again", action="store_true")
    read.add_argument("--plot", type=Path)
    given = read.parse_args()
    for name in given.tables:
        if name not in ORDERINGS:
            read.error(f"no table {name!r}: there are {', '.join(ORDERINGS)}")
    tables = {}
    for name in given.tables or ORDERINGS:
        if given.again:
            (RESULTS / f"orderings-{name}.json").unlink(missing_ok=True)
        ordering = ORDERINGS[name]()
        try:
            tables[name] = ordering, fill(name, ordering, given.seeds)
        except Interrupted:
            raise SystemExit(
                "stopped: the same command goes on with the scores that are missing"
            ) from None
        tell(*tables[name])
    if given.plot is not None:
        draw(tables, given.plot)


if __name__ == "__main__":
    main()
