"""Induction heads: do two layers learn them, and one not, whatever the mechanism?

    python benchmarks/look_induction.py         about ten minutes on one core

Decoders with one and with two layers learn the task `recall`: pairs of a key and a value, then the
keys again; at each the value is wanted. A head that solves it looks, at a repeated key, at the
token behind its earlier place: an induction head (Olsson et al. 2022, arXiv 2209.11895). The score
of a head is its mean weight there, over 64 test examples; chance is its mean weight on the values
of the other pairs. Results go to benchmarks/results/look_induction.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.inspection.inspected import InspectedModel
from regard.inspection.metrics import normalize
from regard.inspection.operators import HeadOperator
from regard.inspection.subject import find_subject
from regard.models import ModuleSpec
from regard.tasks import create_task
from regard.tasks.base import IGNORE_INDEX
from regard.train.run import RunSpec, run_training
from regard.train.settings import TrainSettings

RESULT = Path(__file__).parent / "results" / "look_induction.json"
MIXERS = (
    ModuleSpec(name="vanilla"),
    ModuleSpec(name="linear"),
    ModuleSpec(name="retnet"),
    ModuleSpec(name="delta_rule"),
    ModuleSpec(name="local", arguments={"window": 8}),
)
TASK = {"length": 48, "pairs": 6, "keys": 24, "values": 24}
STEPS, EXAMPLES, SEEDS = 1500, 64, (0,)


def head_scores(model: InspectedModel, tokens: Tensor, labels: Tensor) -> list[dict[str, float]]:
    """Weight on the token behind the earlier key, and on other values, of each head."""
    pairs = TASK["pairs"]
    queries = (labels != IGNORE_INDEX).nonzero()[:, 0]
    keys = tokens[: 2 * pairs : 2]
    right = torch.stack([2 * (keys == tokens[q]).nonzero()[0, 0] + 1 for q in queries])
    others = torch.arange(1, 2 * pairs, 2)
    scores = []
    for placed in model.maps:
        operator = placed.map.operator
        assert isinstance(operator, HeadOperator)
        weights = normalize(operator.dense())
        on_right = weights[:, queries, right].mean(1)
        on_all = weights[:, queries][:, :, others].sum(2).mean(1)
        for head in range(operator.heads):
            other = float(on_all[head] - on_right[head]) / (pairs - 1)
            scores.append(
                {
                    "layer": placed.layer,
                    "head": head,
                    "score": float(on_right[head]),
                    "chance": other,
                }
            )
    return scores


def measure(mixer: ModuleSpec, layers: int, seed: int) -> dict[str, Any]:
    task = create_task("recall", **TASK)
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec(
            task=ModuleSpec(name="recall", arguments=TASK),
            mixer=mixer,
            layers=layers,
            dim=64,
            heads=4,
            settings=TrainSettings(steps=STEPS, batch_size=64, lr=2e-3, seed=seed),
        )
        result = run_training(spec, Path(folder) / "run")
        run = regard.load(Path(folder) / "run", device="cpu")
    totals: list[dict[str, float]] = []
    for index in range(EXAMPLES):
        example = task.example("test", index)
        model = InspectedModel(find_subject(run, example))
        scores = head_scores(model, example.inputs["x"], example.targets["labels"])
        for i, score in enumerate(scores):
            if index == 0:
                totals.append(score)
            else:
                totals[i]["score"] += score["score"]
                totals[i]["chance"] += score["chance"]
    for score in totals:
        score["score"] /= EXAMPLES
        score["chance"] /= EXAMPLES
    best = max(totals, key=lambda each: each["score"])
    accuracy = result.get("test_accuracy", result)
    return {
        "mixer": str(mixer),
        "layers": layers,
        "seed": seed,
        "accuracy": accuracy,
        "best": best,
        "heads": totals,
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for mixer in MIXERS:
        for layers in (1, 2):
            for seed in SEEDS:
                rows.append(measure(mixer, layers, seed))
                row = rows[-1]
                best = row["best"]
                print(
                    f"{row['mixer']:20}{layers} layers  accuracy {row['accuracy']}  head "
                    f"{best['layer']:.0f}.{best['head']:.0f}: {best['score']:.3f} "
                    f"(others {best['chance']:.3f})",
                    flush=True,
                )
                content = {"task": TASK, "steps": STEPS, "rows": rows}
                RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
