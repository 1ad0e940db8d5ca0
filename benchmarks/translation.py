"""Translation with and without attention: BLEU against training time, and by source length.

    python benchmarks/translation.py multi30k/ --source de --target en --test test_2016 --minutes 20

trains a recurrent network with one fixed context vector (Cho et al. 2014), one with attention
(Bahdanau et al. 2015), and Transformers with dense, local and linear attention, each for the same
time, on lower-cased texts. Every score is stored at once in OUT/scores.json, and the same command
continues where it stopped; with other options it needs another --out. `--plot` draws
OUT/translation.png from the scores that exist.

The curves are BLEU of greedy search on 200 validation sentences, at each tenth of the time. BLEU by
the number of words of the source is that of beam search on the whole test split.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from regard.device import autocast
from regard.errors import did_you_mean
from regard.json_files import read_json, write_json
from regard.train import TrainSettings
from regard.train.inference import load_run
from regard.train.run import SPEC_FILE, RunSpec, build_task, read_spec, run_training

TRANSFORMER = {"dim": 192, "heads": 4, "layers": 3, "position": "sinusoid"}
LOCAL = {"name": "local", "arguments": {"window": 8}}
MODELS: dict[str, dict[str, Any]] = {
    "fixed context": {"rnn": {"attention": False}, "dim": 256},
    "RNN with attention": {"rnn": {"attention": True}, "dim": 256},
    "Transformer": {**TRANSFORMER, "mixer": "vanilla"},
    "local Transformer": {**TRANSFORMER, "mixer": LOCAL},
    "linear Transformer": {**TRANSFORMER, "mixer": "linear"},
}
CURVE_EXAMPLES = 200
LENGTH_EDGES = (0, 7, 10, 13, 16, 1000)  # words of a source: 1-7, 8-10, ...
TEST_BATCH = 64


def run_spec(name: str, options: argparse.Namespace) -> RunSpec:
    """The run of a model."""
    arguments = {
        "data": str(options.data),
        "source": options.source,
        "target": options.target,
        "test": options.test,
        "lowercase": True,
        "vocab_size": options.vocab_size,
        "length": 64,
    }
    is_rnn = "rnn" in MODELS[name]
    settings = TrainSettings(
        steps=10**9,
        max_seconds=60 * options.minutes,
        batch_size=128,
        lr=1e-3 if is_rnn else options.lr,
        warmup_steps=200,
        label_smoothing=0.1,
        eval_every=10**9,  # only at each tenth of the time
        eval_examples=CURVE_EXAMPLES,
        keep="last",
        dtype=options.dtype,
        device="cpu",
        seed=options.seed,
    )
    return RunSpec(
        task={"name": "translate", "arguments": arguments},
        dropout=options.dropout,
        settings=settings,
        threads=options.threads,
        **MODELS[name],
    )


@torch.no_grad()
def score_test(folder: Path, dtype: str) -> dict[str, Any]:
    """BLEU on the whole test split: of all sentences, and by the length of the source."""
    run = load_run(folder, device="cpu")
    task = build_task(run.spec)
    bleu, lengths, parts = task.metric, [], []
    size = task.size("test")
    for first in range(0, size, TEST_BATCH):
        batch = task.batch("test", range(first, min(first + TEST_BATCH, size)))
        with autocast(torch.device("cpu"), getattr(torch, dtype)):
            predictions = task.predict(run.model, batch)
        parts.append(bleu.update(None, batch, predictions))
        sources = [task.processor.tokenizer.decode(row) for row in batch.inputs["source"].tolist()]
        lengths += [len(text.split()) for text in sources]
    statistics, words = bleu.merge(parts), torch.tensor(lengths)
    by_length = []
    for low, high in pairwise(LENGTH_EDGES):
        chosen = (words > low) & (words <= high)
        if chosen.any():
            value = bleu.compute(statistics[chosen])
            count = int(chosen.sum())
            by_length.append({"over": low, "to": high, "sentences": count, "bleu": value})
    return {
        "bleu": bleu.compute(statistics),
        "signature": bleu.signature,
        "sentences": len(words),
        "by_length": by_length,
    }


def plot(scores: dict[str, Any], path: Path) -> None:
    """Draw BLEU against training time, and by source length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, by_length = figure.subplots(1, 2)
    for name, score in scores.items():
        minutes = [row["seconds"] / 60 for row in score["curve"]]
        over_time.plot(minutes, [row["valid"] for row in score["curve"]], ".-", label=name)
        rows = score["by_length"]
        places = [LENGTH_EDGES.index(row["over"]) for row in rows]
        by_length.plot(places, [row["bleu"] for row in rows], "o-", label=name)
    over_time.set(xlabel="minutes of training", ylabel=f"BLEU, {CURVE_EXAMPLES} valid sentences")
    bins = [f"{low + 1}-{high}" for low, high in pairwise(LENGTH_EDGES)]
    bins[-1] = f"over {LENGTH_EDGES[-2]}"
    by_length.set(xlabel="words of the source", ylabel="BLEU, test")
    by_length.set_xticks(range(len(bins)), bins)
    over_time.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train the models that have no score yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with train.de, train.en, val.de, ...")
    parser.add_argument("--source", default="de")
    parser.add_argument("--target", default="en")
    parser.add_argument("--test", default=None, help="start of the name of the test file")
    parser.add_argument("--minutes", type=float, default=20, help="of training, for each model")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas")
    parser.add_argument("--vocab-size", type=int, default=6000)
    parser.add_argument("--lr", type=float, default=2e-3, help="of the Transformers")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--dtype", default="bfloat16", help="float32 on CPUs without bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("translation"))
    parser.add_argument("--plot", action="store_true", help="only draw the figure")
    options = parser.parse_args()
    names = [name.strip() for name in options.models.split(",")]
    for name in names:
        if name not in MODELS:
            parser.error(f"no model {name!r}: {did_you_mean(name, MODELS)}")
    path = options.out / "scores.json"
    scores: dict[str, Any] = read_json(path) if path.exists() else {}
    if not options.plot:
        for name in names:
            folder, spec = options.out / name.replace(" ", "-"), run_spec(name, options)
            if (folder / SPEC_FILE).exists() and read_spec(folder) != spec:
                parser.error(f"{folder} was trained with other options: choose another --out")
            if name in scores:
                continue
            result = run_training(spec, folder)
            kept = ("curve", "steps", "seconds", "tokens", "parameters")
            scores[name] = {each: result[each] for each in kept}
            scores[name] |= score_test(folder, options.dtype)
            write_json(path, scores)
            bleu, steps = scores[name]["bleu"], result["steps"]
            print(f"{name}: BLEU {bleu:.2f} after {steps:,} steps", flush=True)
    if scores:
        plot(scores, options.out / "translation.png")
    task = build_task(run_spec(names[0], options))
    print("| model | parameters | steps | tokens/s | BLEU |\n|---|---|---|---|---|")
    for name, each in scores.items():
        counts = each["parameters"], each["steps"], round(each["tokens"] / each["seconds"])
        print(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} | {each['bleu']:.1f} |")
    for name, baseline in task.baselines().items():
        bleu = task.metric.compute(baseline(range(task.size("test"))))
        print(f"| {name} | | | | {bleu:.1f} |")


if __name__ == "__main__":
    main()
