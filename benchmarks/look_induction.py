"""Induction heads: which mechanisms form them, and does it take two layers?

    python benchmarks/look_induction.py         two minutes on a free core

Decoders learn the task `recall`: 8 pairs of a key and a value, then the keys again; at each the
value is wanted. An induction head (Olsson et al. 2022, arXiv 2209.11895) looks, at a repeated key,
at the token behind its earlier place. It needs an earlier layer that tells each token what came
before it; here that is a window of two tokens, as in docs/orderings.md, where two plain layers of
softmax attention took far longer to find it. So a model has one layer of a mechanism, or that layer
behind such a window.

The score of a head is its share of attention on the right value, over 64 test examples; chance is
its mean share on the value of another pair. Results go to benchmarks/results/look_induction.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.inspection.inspected import InspectedModel
from regard.inspection.metrics import normalize
from regard.inspection.operators import HeadOperator
from regard.inspection.subject import find_subject
from regard.models import ModuleSpec, build, module_spec
from regard.tasks import create_task
from regard.tasks.base import IGNORE_INDEX
from regard.train import Trainer, TrainSettings
from regard.train.run import RunSpec, model_config

RESULT = Path(__file__).parent / "results" / "look_induction.json"
MIXERS = {
    "vanilla": module_spec("vanilla"),
    "linear": module_spec("linear"),
    "retnet": module_spec("retnet"),
    "delta_rule": module_spec("delta_rule"),
    "local, 8 tokens": module_spec("local", window=8),
}
PAIRS, STEPS, EXAMPLES = 8, 400, 64
TASK: dict[str, Any] = {"length": 4 * PAIRS, "pairs": PAIRS, "keys": 32, "values": 32}


def head_scores(model: InspectedModel, tokens: Tensor, labels: Tensor) -> Tensor:
    """Share of each head (heads of all layers, 2) on the token behind the earlier key, and on the
    value of another pair."""
    queries = (labels != IGNORE_INDEX).nonzero()[:, 0]
    keys = tokens[: 2 * PAIRS : 2]
    right = torch.stack([2 * (keys == tokens[q]).nonzero()[0, 0] + 1 for q in queries])
    values = torch.arange(1, 2 * PAIRS, 2)
    scores = []
    for placed in model.maps:
        assert isinstance(placed.map.operator, HeadOperator)
        weights = normalize(placed.map.operator.dense())
        on_right = weights[:, queries, right].mean(1)
        on_all = weights[:, queries][:, :, values].sum(2).mean(1)
        scores.append(torch.stack((on_right, (on_all - on_right) / (PAIRS - 1)), 1))
    return torch.cat(scores)


def measure(name: str, mixer: ModuleSpec, layers: int) -> dict[str, Any]:
    spec = module_spec("recall", **TASK)
    task = create_task(spec.name, **spec.arguments)
    mixers = [module_spec("local", window=1), mixer][-layers:]
    torch.manual_seed(0)
    config = model_config(RunSpec(task=spec, layers=layers), task).replace(mixer=mixers)
    model = build(config)
    settings = TrainSettings(steps=STEPS, batch_size=32, lr=3e-3, seed=0, eval_every=STEPS)
    Trainer(model, task, settings).run()
    accuracy = Trainer(model, task, settings).evaluate("test").value
    total = torch.zeros(())
    for index in range(EXAMPLES):
        example = task.example("test", index)
        inspected = InspectedModel(find_subject(model.eval(), example))
        total = total + head_scores(inspected, example.inputs["x"], example.targets["labels"])
    scores = (total / EXAMPLES).tolist()
    best, chance = max(scores)
    return {
        "mixer": name,
        "layers": layers,
        "accuracy": accuracy,
        "induction": best,
        "chance": chance,
        "heads": scores,
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, mixer in MIXERS.items():
        for layers in (1, 2):
            row = measure(name, mixer, layers)
            rows.append(row)
            print({key: value for key, value in row.items() if key != "heads"}, flush=True)
            content = {"task": TASK, "steps": STEPS, "examples": EXAMPLES, "rows": rows}
            RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
