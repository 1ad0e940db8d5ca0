"""Whose maps agree with occlusion: which tokens a prediction needs, by four methods.

    python benchmarks/look_agreement.py         two minutes on a free core

Classifiers of film reviews (IMDB, the first 48 words) with two layers, one for each mechanism. For
40 test reviews each method scores the tokens: attention of the last layer (mean over heads and
queries), rollout, gradient x attention, gradient x input. Reported is the mean rank correlation
(Spearman) with the truth, occlusion: the change of the logit when the token's embedding becomes the
mean of all. Results go to benchmarks/results/look_agreement.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import regard
from regard.inspection.answers import read_answer
from regard.inspection.attribution import OCCLUSION, attributions, rank_correlation
from regard.inspection.inspected import InspectedModel
from regard.inspection.metrics import normalize
from regard.inspection.operators import HeadOperator
from regard.inspection.subject import find_subject
from regard.models import ModuleSpec
from regard.tasks import create_task
from regard.train.run import RunSpec, run_training
from regard.train.settings import TrainSettings

RESULT = Path(__file__).parent / "results" / "look_agreement.json"
DATA = Path(__file__).parents[2] / "shared" / "data" / "imdb"
MIXERS = (
    ModuleSpec(name="vanilla"),
    ModuleSpec(name="local", arguments={"window": 4}),
    ModuleSpec(name="linear"),
    ModuleSpec(name="linformer", arguments={"rank": 16}),
    ModuleSpec(name="nystrom", arguments={"landmarks": 8}),
    ModuleSpec(name="aft"),
)
WORDS, STEPS, EXAMPLES, TEXTS = 48, 300, 40, 8_000


def write_reviews(source: Path, target: Path) -> None:
    """The first words of reviews as JSON lines, in splits of their own."""
    for split, count in (("train", TEXTS), ("test", 2000)):
        with lzma.open(source / f"{split}.jsonl.xz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
        lines = []
        for row in (rows[i] for i in order.tolist()):
            text = " ".join(row["text"].replace("<br />", " ").split()[:WORDS])
            lines.append(json.dumps({"text": text, "label": row["label"]}))
        (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def attention_scores(model: InspectedModel) -> list[float] | None:
    """Mean weight that each token gets in the last layer."""
    operator = model.maps[-1].map.operator
    if not isinstance(operator, HeadOperator):
        return None
    scores: list[float] = normalize(operator.dense()).mean((0, 1)).tolist()
    return scores


def measure(mixer: ModuleSpec, folder: Path) -> dict[str, Any]:
    arguments = {"data": str(folder), "text": "text", "label": "label", "length": WORDS + 16}
    with tempfile.TemporaryDirectory() as runs:
        spec = RunSpec(
            task=ModuleSpec(name="classify", arguments={**arguments, "tokenizer": "word"}),
            mixer=mixer,
            layers=2,
            dim=64,
            heads=4,
            settings=TrainSettings(steps=STEPS, batch_size=64, lr=2e-3, eval_every=STEPS, seed=0),
        )
        result = run_training(spec, Path(runs) / "run")
        run = regard.load(Path(runs) / "run", device="cpu")
    task = create_task(spec.task.name, **spec.task.arguments)
    found: dict[str, list[float]] = {}
    kinds = set()
    for index in task.sample("test", EXAMPLES).tolist():
        model = InspectedModel(find_subject(run, task.example("test", index)))
        kinds |= {placed.map.kind for placed in model.maps}
        scores = attributions(model)
        attention = attention_scores(model)
        if attention is not None:
            scores["attention"] = attention
        truth = torch.tensor(scores.pop(OCCLUSION)).abs()
        for name, values in scores.items():
            value = rank_correlation(torch.tensor(values), truth)
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    assert read_answer(model.subject, model.output).kind == "class"
    return {
        "mixer": mixer.name,
        "arguments": mixer.arguments,
        "kinds": sorted(kinds),
        "test": float(result["test"]),
        "agreement": {name: statistics.mean(values) for name, values in found.items()},
        "standard_error": {
            name: statistics.stdev(values) / math.sqrt(len(values))
            for name, values in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA, help="folder with train and test .xz")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_reviews(parser.parse_args().data, Path(folder))
        for mixer in MIXERS:
            rows.append(measure(mixer, Path(folder)))
            print(rows[-1]["mixer"], rows[-1]["agreement"], flush=True)
            content = {"words": WORDS, "steps": STEPS, "examples": EXAMPLES, "rows": rows}
            RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
