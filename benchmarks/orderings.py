"""Known orderings of mixers, reproduced in minutes with small models and several seeds.

    python benchmarks/orderings.py [recall copy extrapolate] [--seeds 3] [--plot FILE.png]

recall       softmax attention recalls key-value pairs that a state of fixed size does not
copy         a window does not reach distant symbols; a window with global tokens does
extrapolate  trained on 64 characters and tested on up to 512: ALiBi and sinusoidal positions

Every score is written to benchmarks/results/orderings-NAME.json at once. The same command resumes
an interrupted run and prints complete tables; --restart discards the scores.
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

    Attributes:
        row: Its name in the table.
        task: The task it is trained on.
        tests: Column of the table -> the task it is tested on.
        model: Fields of its configuration that differ from the default.
        settings: Training settings.
    """

    row: str
    task: ModuleSpec
    tests: dict[str, ModuleSpec]
    model: dict[str, Any]
    settings: dict[str, Any]


class Ordering(NamedTuple):
    """A table and what it has to show.

    Attributes:
        title, metric: What is measured.
        cases: The models.
        better, worse: Two rows whose gap must exceed two standard deviations.
        columns: The columns where it must.
    """

    title: str
    metric: str
    cases: list[Case]
    better: str
    worse: str
    columns: list[str]


def recall() -> Ordering:
    """Layer 1 sees two tokens, so that a value knows its key; layer 2 is what is compared."""
    mixers = {"softmax": "vanilla", "linear": "linear"}
    cases = []
    for pairs in PAIRS:
        task = module_spec("recall", length=4 * pairs, pairs=pairs, keys=32, values=32)
        settings = {"steps": 400, "batch_size": 32, "lr": 3e-3}
        for row, mixer in mixers.items():
            layers = {"mixer": [module_spec("local", window=1), module_spec(mixer)]}
            cases.append(Case(row, task, {f"{pairs} pairs": task}, layers, settings))
    return Ordering(
        "associative recall", "accuracy", cases, "softmax", "linear", [f"{PAIRS[-1]} pairs"]
    )


def copy() -> Ordering:
    """One of eight symbols, 42 tokens away. Two layers of the window reach 14 tokens."""
    task = module_spec("copy", length=48, lead=4, gap=41, symbols=8, causal=False)
    blocks = {"block": 4, "window": 3, "random": 0}
    mixers = {
        "window": module_spec("bigbird", globals=0, **blocks),
        "window + 4 global tokens": module_spec("bigbird", globals=1, **blocks),
        "dense softmax": module_spec("vanilla"),
    }
    settings = {"steps": 400, "batch_size": 16, "lr": 3e-3}
    cases = [
        Case(row, task, {"accuracy": task}, {"mixer": [mixer]}, settings)
        for row, mixer in mixers.items()
    ]
    return Ordering(
        "copy over a distance",
        "accuracy",
        cases,
        "window + 4 global tokens",
        "window",
        ["accuracy"],
    )


def extrapolate() -> Ordering:
    """The built-in language. A longer window gives more context and should score better."""
    tests = {f"at {length}": module_spec("lm", length=length) for length in (64, 128, 256, 512)}
    settings = {"steps": 400, "batch_size": 16, "lr": 3e-3}
    # embeddings are scaled as in the paper of the sinusoid, which would drown them otherwise
    vocab_size = create_task("lm", length=64).vocab_size
    scaled = TokenInput(vocab_size=vocab_size, scale_embeddings=True)
    models = {
        name: {"position": module_spec(name), "input": scaled} for name in ("sinusoid", "alibi")
    }
    cases = [Case(row, tests["at 64"], tests, model, settings) for row, model in models.items()]
    return Ordering(
        "train short, test long",
        "bits per character",
        cases,
        "alibi",
        "sinusoid",
        list(tests)[1:],
    )


PAIRS = (8, 16)
ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "recall": recall,
    "copy": copy,
    "extrapolate": extrapolate,
}


# ---------------------------------------------------------------------- training
def build_task(spec: ModuleSpec) -> Task:
    """Create the task of a spec."""
    return create_task(spec.name, **spec.arguments)


def train_case(case: Case, seed: int) -> dict[str, float]:
    """Train once and return the test score of each column."""
    task = build_task(case.task)
    torch.manual_seed(seed)
    model = build(model_config(RunSpec(task=case.task), task).replace(**case.model))
    steps = case.settings["steps"]
    settings = TrainSettings(**case.settings, seed=seed, eval_every=steps)
    Trainer(model, task, settings).run()
    return {
        column: Trainer(model, build_task(spec), settings).evaluate("test").value
        for column, spec in case.tests.items()
    }


def train_missing(name: str, ordering: Ordering, seeds: int) -> Scores:
    """Train the cases that are missing in the file of results."""
    path = RESULTS / f"orderings-{name}.json"
    scores: Scores = json.loads(path.read_text())["scores"] if path.exists() else {}
    for seed in range(seeds):
        for case in ordering.cases:
            if all(len(scores.get(case.row, {}).get(column, [])) > seed for column in case.tests):
                continue
            started = time.monotonic()
            new = train_case(case, seed)
            for column, score in new.items():
                scores.setdefault(case.row, {}).setdefault(column, []).append(score)
            text = ", ".join(f"{column} {score:.3f}" for column, score in new.items())
            print(
                f"  {case.row}, seed {seed}: {text}, {time.monotonic() - started:.0f} s",
                file=sys.stderr,
            )
            write_scores(path, ordering, scores)
    return scores


def write_scores(path: Path, ordering: Ordering, scores: Scores) -> None:
    """Write the scores with the settings and the environment."""
    cases = [
        {"row": c.row, "task": c.task.model_dump(), "settings": c.settings} for c in ordering.cases
    ]
    path.write_text(
        json.dumps({"scores": scores, "cases": cases, "environment": environment()}, indent=1)
        + "\n"
    )


# ---------------------------------------------------------------------- output
def std(values: list[float]) -> float:
    """Return the standard deviation, NaN for one value."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def print_table(ordering: Ordering, scores: Scores) -> None:
    """Print the table and the gaps."""
    print(f"\n{ordering.title}: {ordering.metric}, mean ± standard deviation over seeds")
    columns = list(dict.fromkeys(column for found in scores.values() for column in found))
    print(" " * 26 + "".join(f"{column:>18}" for column in columns))
    for row, found in scores.items():
        cells = (f"{statistics.fmean(found[c]):.3f} ± {std(found[c]):.3f}" for c in columns)
        print(f"  {row:<24}" + "".join(f"{cell:>18}" for cell in cells))
    for column in ordering.columns:
        one, other = scores[ordering.better][column], scores[ordering.worse][column]
        gap, noise = (
            abs(statistics.fmean(one) - statistics.fmean(other)),
            2 * max(std(one), std(other)),
        )
        print(
            f"  {ordering.better} better than {ordering.worse}, {column}: gap {gap:.3f}, two "
            f"standard deviations {noise:.3f}"
        )


def draw(tables: dict[str, tuple[Ordering, Scores]], path: Path) -> None:
    """Draw a panel for each table: a dot per seed, and a line through the means."""
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
            columns = list(found) if len(found) > 1 else [row]
            means = [statistics.fmean(values) for values in found.values()]
            panel.plot(columns, means, color=colour, label=row)
            for column, values in zip(columns, found.values(), strict=True):
                x = [column] * len(values)
                panel.plot(x, values, "o", color=colour, alpha=0.6, markersize=5)
        panel.set(title=ordering.title, ylabel=ordering.metric, ylim=(0, None))
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        if len(next(iter(scores.values()))) > 1:
            panel.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(ORDERINGS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--restart", action="store_true", help="discard the scores")
    parser.add_argument("--plot", type=Path, help="draw the tables to this PNG file")
    options = parser.parse_args()
    for name in options.tables:
        if name not in ORDERINGS:
            parser.error(f"unknown table {name!r}: choose from {', '.join(ORDERINGS)}")
    tables = {}
    for name in options.tables or ORDERINGS:
        if options.restart:
            (RESULTS / f"orderings-{name}.json").unlink(missing_ok=True)
        ordering = ORDERINGS[name]()
        try:
            tables[name] = ordering, train_missing(name, ordering, options.seeds)
        except Interrupted:
            raise SystemExit("interrupted: repeat the command to resume") from None
        print_table(*tables[name])
    if options.plot is not None:
        draw(tables, options.plot)


if __name__ == "__main__":
    main()
