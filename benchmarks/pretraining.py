"""What pretraining wins: masked language modeling on plain text, then fine-tuning on few or many
labelled rows, beside training from scratch and a baseline without a network.

    python benchmarks/pretraining.py DATA               about 40 minutes on one core
    python benchmarks/pretraining.py DATA --table       the table of the stored scores

DATA is a folder with wikitext-2/, bbc-news/ and wnut17/. One encoder is pretrained on WikiText-2
and on the training texts of both tasks, without their labels: `classify` on BBC News (5 classes;
articles are split by a fixed permutation into 1,425 for training, 200 for validation and 600 for
testing) and `tag` on WNUT17 (entities in tweets, its own splits). The word pieces are learned on
the same text, and are those of all runs. Both arms have the same model, steps and two learning
rates, of which the better by the validation split counts.

Every score is written to benchmarks/results/pretraining.json as soon as it is known, and a run that
has one is not repeated. Runs, text and rows are in --folder.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.json_files import write_json
from regard.models import ModuleSpec
from regard.tasks import create_task
from regard.train import TrainSettings
from regard.train.run import ModelSettings, RunSpec, run_training

RESULT = Path(__file__).parent / "results" / "pretraining.json"
MODEL = ModelSettings(dim=128, heads=4, layers=2, position=ModuleSpec(name="rope"), dropout=0.1)
VOCAB_SIZE, WINDOW = 4096, 128
PRETRAINING_STEPS, PRETRAINING_LR = 16_000, 3e-3
SEEDS, RATES = (0, 1), (1e-3, 3e-3)
SIZES = {"100 rows": 100, "1,000 rows": 1000, "all rows": None}
BBC_VALID, BBC_TEST = 200, 600
# length of an example, and the steps for each size
TASKS = {"classify": (128, (150, 200, 300)), "tag": (64, (200, 500, 1200))}


# --------------------------------------------------------------------------------------------- data
def read_text(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode("utf-8")


def split_sentences(text: str) -> list[str]:
    """The sentences of a CoNLL file, between lines that are empty or of white space."""
    return re.split(r"\n(?:[ \t]*\n)+", text.strip().replace("\r", ""))


def prepare(data: Path, folder: Path) -> None:
    """Write the text for pretraining and the rows of every size."""
    rows = [json.loads(x) for x in read_text(data / "bbc-news" / "bbc.jsonl.xz").splitlines()]
    order = np.random.default_rng(0).permutation(len(rows))
    parts = {
        "valid": order[:BBC_VALID],
        "test": order[BBC_VALID : BBC_VALID + BBC_TEST],
        "train": order[BBC_VALID + BBC_TEST :],
    }
    news = {
        split: [json.dumps({name: rows[i][name] for name in ("text", "label")}) for i in indices]
        for split, indices in parts.items()
    }
    tweets = {
        split: split_sentences(read_text(data / "wnut17" / name))
        for split, name in (
            ("train", "wnut17train.conll.xz"),
            ("valid", "emerging.dev.conll.xz"),
            ("test", "emerging.test.annotated.xz"),
        )
    }
    tweets["train"] = [
        tweets["train"][i] for i in np.random.default_rng(0).permutation(len(tweets["train"]))
    ]
    for name, count in SIZES.items():
        for task, splits, suffix, between in (
            ("classify", news, ".jsonl", "\n"),
            ("tag", tweets, ".conll", "\n\n"),
        ):
            target = folder / task / name
            target.mkdir(parents=True, exist_ok=True)
            for split, examples in splits.items():
                kept = examples[:count] if split == "train" else examples
                (target / f"{split}{suffix}").write_text(between.join(kept) + "\n", "utf-8")
    text = read_text(data / "wikitext-2" / "train.txt.xz")
    for joiner in "-,.":
        text = text.replace(f" @{joiner}@ ", joiner)
    words = (
        " ".join(line.split("\t")[0].strip() for line in tweet.split("\n"))
        for tweet in tweets["train"]
    )
    corpus = "\n".join([text, *(rows[i]["text"] for i in parts["train"]), *words])
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "train.txt").write_text(corpus, "utf-8")
    held_out = "\n".join(rows[i]["text"] for i in parts["valid"])
    for split in ("valid", "test"):
        (folder / "text" / f"{split}.txt").write_text(held_out, "utf-8")


# --------------------------------------------------------------------------------------------- runs
def pretrain(folder: Path, scores: dict[str, Any]) -> Path:
    """Pretrain once; returns the folder of the run."""
    run = folder / "pretrained"
    if "pretraining" in scores and (run / "result.json").exists():
        return run
    spec = RunSpec(
        task=ModuleSpec(
            name="mlm",
            arguments={
                "data": str(folder / "text"),
                "tokenizer": "bpe",
                "vocab_size": VOCAB_SIZE,
                "length": WINDOW,
            },
        ),
        **dict(MODEL),
        settings=TrainSettings(
            steps=PRETRAINING_STEPS,
            lr=PRETRAINING_LR,
            warmup_steps=300,
            batch_size=16,
            dtype="bfloat16",
            eval_every=PRETRAINING_STEPS // 4,
            eval_examples=64,
            save_every=PRETRAINING_STEPS // 4,
        ),
        threads=1,
    )
    started = time.process_time()
    result = run_training(spec, run)
    scores["pretraining"] = {
        "cpu_seconds": time.process_time() - started,
        "bits_per_masked_token": result["test"],
        "steps": result["steps"],
        "tokens": result["tokens"],
        "parameters": result["parameters"],
        "environment": result["environment"],
    }
    write_json(RESULT, scores)
    return run


def fine_tune(
    task: str, size: str, seed: int, lr: float, *, pretrained: Path, start: Path | None, out: Path
) -> dict[str, float]:
    """Train with the word pieces of the pretrained run, from its weights or from scratch."""
    length, steps = TASKS[task]
    data = out.parent / task / size
    count = steps[list(SIZES).index(size)]
    spec = RunSpec(
        task=ModuleSpec(
            name=task,
            arguments={"data": str(data), "length": length, "tokenizer": f"run:{pretrained}"},
        ),
        **dict(MODEL),
        settings=TrainSettings(
            steps=count,
            lr=lr,
            warmup_steps=count // 10,
            batch_size=16,
            eval_every=max(1, count // 4),
            eval_examples=2000,  # all
            save_every=count,
            seed=seed,
        ),
        pretrained=None if start is None else str(start),
        threads=1,
    )
    shutil.rmtree(out, ignore_errors=True)
    started = time.process_time()
    result = run_training(spec, out, on_warning=lambda text: None)
    shutil.rmtree(out)
    return {
        "valid": result["best"],
        "test": result["test"],
        "cpu_seconds": time.process_time() - started,
        **{name: value for name, value in result["metrics"].items() if name != "loss"},
    }


def measure(data: Path, folder: Path) -> None:
    """Everything that has no score yet."""
    scores = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    prepare(data, folder)
    pretrained = pretrain(folder, scores)
    for task in TASKS:
        for size in SIZES:
            key = f"{task}, {size}, baselines"
            if key not in scores:
                made = create_task(
                    task,
                    data=str(folder / task / size),
                    length=TASKS[task][0],
                    tokenizer=f"run:{pretrained}",
                )
                test = range(made.size("test"))
                scores[key] = {
                    name: made.metric.compute(baseline(test))
                    for name, baseline in made.baselines().items()
                }
                if task == "tag":
                    names = create_task(
                        "ner", data=str(folder / task / size), length=TASKS[task][0]
                    )
                    crf = names.baselines()["CRF"](range(names.size("test")))
                    scores[key]["CRF"] = names.metric.compute(crf)
                write_json(RESULT, scores)
            for seed in SEEDS:
                for arm, start in (("from scratch", None), ("pretrained", pretrained)):
                    for lr in RATES:
                        key = f"{task}, {size}, {arm}, lr {lr:g}, seed {seed}"
                        if key in scores:
                            continue
                        scores[key] = fine_tune(
                            task,
                            size,
                            seed,
                            lr,
                            pretrained=pretrained,
                            start=start,
                            out=folder / "run",
                        )
                        write_json(RESULT, scores)
                        print(f"{key}: {scores[key]['test']:.3f}", flush=True)


# -------------------------------------------------------------------------------------------- table
def table() -> str:
    """The scores as Markdown: mean (minimum to maximum) over seeds."""
    scores = json.loads(RESULT.read_text())
    lines = [
        "| task | labelled rows | from scratch | pretrained | baseline |",
        "| --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        for size in SIZES:
            cells = []
            for arm in ("from scratch", "pretrained"):
                values = []
                for seed in SEEDS:
                    runs = [scores[f"{task}, {size}, {arm}, lr {r:g}, seed {seed}"] for r in RATES]
                    values.append(max(runs, key=lambda run: run["valid"])["test"])
                low, high = min(values), max(values)
                cells.append(f"{statistics.mean(values):.3f} ({low:.3f} to {high:.3f})")
            best = {
                n: v for n, v in scores[f"{task}, {size}, baselines"].items() if n != "constant"
            }
            cells += [f"{value:.3f} {name}" for name, value in best.items()]
            lines.append(f"| `{task}` | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretraining"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        measure(arguments.data, arguments.folder.absolute())
    print(table())
