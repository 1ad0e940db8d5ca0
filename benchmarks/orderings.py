"""What is known about mechanisms, seen again in minutes: small models, several seeds, the same training for all.

    python benchmarks/orderings.py [recall|copy|extrapolate] [--seeds 3] [--steps 600]

recall       softmax attention recalls pairs where a state of fixed size cannot, as the pairs grow in number
copy         a window does not reach a symbol far away; global tokens do
extrapolate  trained on 64 tokens, asked at up to 512: ALiBi beside the sinusoid
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from regard.models import Part, load
from regard.train import Settings
from regard.train.run import MODEL, Spec, environment, execute, task_of

RESULTS = Path(__file__).parent / "results"


def run(name: str, arguments: dict, mixer: Part, settings: dict, folder: Path, **spec) -> dict:
    """One training; its result."""
    words = Spec(task=Part(name=name, arguments=arguments), mixer=mixer, settings=Settings(**settings), **spec)
    return execute(words, folder)


def rows(cases: dict[str, tuple], seeds: int, settings: dict, root: Path) -> list[dict]:
    """Mean and spread over seeds of each case."""
    found = []
    for label, (name, arguments, mixer, spec) in cases.items():
        scores = []
        for seed in range(seeds):
            began = time.monotonic()
            result = run(name, arguments, mixer, settings | {"seed": seed}, root / f"{len(found)}-{seed}", **spec)
            scores.append(result["test"])
            print(f"  {label}, seed {seed}: {result['test']:.3f} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
        found.append({"case": label, "accuracy": statistics.fmean(scores), "± seeds": spread, "scores": scores})
    return found


def recall(seeds: int, steps: int, root: Path) -> list[dict]:
    """Softmax beside linear attention, 4 to 32 pairs in 128 tokens."""
    mixers = {"vanilla": Part(name="vanilla"), "linear": Part(name="linear")}
    cases = {
        f"{name}, {pairs} pairs": ("recall", {"length": 128, "pairs": pairs}, mixer, {})
        for pairs in (4, 16, 32)
        for name, mixer in mixers.items()
    }
    return rows(cases, seeds, {"steps": steps, "batch": 32, "rate": 3e-3, "evaluate": steps, "save": steps}, root)


def copy(seeds: int, steps: int, root: Path) -> list[dict]:
    """Three symbols, 250 tokens away; both sides visible."""
    near = {"length": 256, "gap": 249, "causal": False}
    blocks = {"block": 8, "window": 3, "random": 0}
    mixers = {
        "a window of 12": Part(name="local", arguments={"window": 12}),
        "a window and 8 global tokens": Part(name="bigbird", arguments={**blocks, "globals": 1}),
        "dense softmax": Part(name="vanilla"),
    }
    cases = {name: ("copy", near, mixer, {}) for name, mixer in mixers.items()}
    return rows(cases, seeds, {"steps": steps, "batch": 16, "rate": 2e-3, "evaluate": steps, "save": steps}, root)


def extrapolate(seeds: int, steps: int, root: Path) -> list[dict]:
    """Language at 64 tokens, asked at longer ones; bits for each character."""
    found = []
    for name in ("sinusoid", "alibi"):
        bits: dict[int, list[float]] = {64: [], 128: [], 256: [], 512: []}
        for seed in range(seeds):
            folder = root / f"{name}-{seed}"
            settings = {"steps": steps, "batch": 32, "rate": 3e-3, "evaluate": steps, "save": steps, "seed": seed}
            run("lm", {"length": 64}, Part(name="vanilla"), settings, folder, position=Part(name=name))
            model = load(folder / MODEL).eval()
            for length, values in bits.items():
                made = task_of(Spec(task=Part(name="lm", arguments={"length": length})))
                values.append(score(model, made))
            print(f"  {name}, seed {seed}: {[round(v[-1], 2) for v in bits.values()]}", file=sys.stderr)
        for length, values in bits.items():
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            found.append({"case": f"{name} at {length}", "bits": statistics.fmean(values), "± seeds": spread, "scores": values})
    return found


@torch.no_grad()
def score(model, made, examples: int = 64) -> float:
    """The metric over the first examples of the test split."""
    summed, count = 0.0, 0
    for index in range(min(examples, made.size("test"))):
        batch = made.batch("test", [index])
        s, n = made.score(model(batch.tokens, mask=batch.mask), batch.target)
        summed, count = summed + s, count + n
    return summed / count


TABLES = {"recall": recall, "copy": copy, "extrapolate": extrapolate}


def main() -> None:
    """Print and keep the tables."""
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("tables", nargs="*", choices=[*TABLES, []], default=list(TABLES))
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--steps", type=int, default=600)
    given = read.parse_args()
    for name in given.tables:
        with tempfile.TemporaryDirectory() as folder:
            found = TABLES[name](given.seeds, given.steps, Path(folder))
        print(f"\n{name}: {TABLES[name].__doc__}")
        for row in found:
            value = row.get("accuracy", row.get("bits"))
            print(f"  {row['case']:<32} {value:.3f} ± {row['± seeds']:.3f}")
        (RESULTS / f"orderings-{name}.json").write_text(json.dumps({"about": environment(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
