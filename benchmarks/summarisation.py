"""Encoders of long texts: training speed and memory; and ROUGE on a data set beside its baselines.

    python benchmarks/summarisation.py                    about 3 minutes on a free core
    python benchmarks/summarisation.py --train dialogsum/ --minutes 5 --encoder local:window=64

Without --train: an encoder-decoder of 2 + 2 layers, 128 wide, with random tokens, one thread,
float32, AdamW. The decoder is dense; the encoder is dense, local or linear. In each round every
encoder takes one training step, in a rotated order, and the median of the rounds is kept. "peak MB"
is the largest sum of the tensors of a step, parameters and optimizer included. Results go to
benchmarks/results/summarisation.json.

With --train: a run of the task summarise, and ROUGE-1, -2 and -L on the whole test split, beside
the baselines of the task.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from regard.cli.parsing import parse_spec
from regard.measure.memory import count_step_bytes
from regard.measure.model import training_loss
from regard.models import EncoderConfig, Model, ModelConfig, build
from regard.models.config import LMHeadConfig, TokenInput
from regard.tasks import Task, create_task
from regard.train.inference import evaluate, load_run
from regard.train.run import RunSpec, run_training
from regard.train.settings import UNLIMITED_STEPS, TrainSettings

RESULT = Path(__file__).parent / "results" / "summarisation.json"
LAYERS, WIDTH, HEADS, VOCAB, TARGET = 2, 128, 4, 4096, 64
ENCODERS = ("vanilla", "local:window=64", "linear")


def build_model(encoder: str, source: int) -> Model:
    """A dense decoder behind one of the encoders."""
    torch.manual_seed(0)
    return build(
        ModelConfig(
            kind="seq2seq",
            input=TokenInput(vocab_size=VOCAB),
            head=LMHeadConfig(),
            dim=WIDTH,
            heads=HEADS,
            layers=LAYERS,
            length=max(source, TARGET),
            encoder=EncoderConfig(layers=LAYERS, mixer=[parse_spec(encoder)]),
        )
    )


def measure(source: int, batch: int, rounds: int) -> list[dict]:
    """All encoders at one length of the source, in turns."""
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(
        torch.randint(1, VOCAB, (batch, length), generator=generator) for length in (source, TARGET)
    )
    models = {name: build_model(name, source) for name in ENCODERS}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ENCODERS}
    for turn in range(rounds + 1):
        for shift in range(len(ENCODERS)):
            name = ENCODERS[(turn + shift) % len(ENCODERS)]
            start = time.perf_counter()
            optimizers[name].zero_grad(set_to_none=True)
            training_loss(models[name], inputs).backward()
            optimizers[name].step()
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, model in models.items():
        step = statistics.median(seconds[name])
        peak = count_step_bytes(model, inputs, torch.optim.AdamW(model.parameters()))
        rows.append(
            {
                "encoder": name,
                "source": source,
                "seconds a step": step,
                "tokens per s": batch * (source + TARGET) / step,
                "peak MB": peak / 1e6,
            }
        )
    return rows


def train(data: str, minutes: float, encoder: str, threads: int) -> None:
    """Train on a data set, and print ROUGE of the model and of the baselines."""
    arguments = {"data": data, "source_length": 256, "vocab_size": 2048}
    spec = RunSpec(
        task={"name": "summarise", "arguments": arguments},
        dim=WIDTH,
        layers=LAYERS,
        encoder_mixer=parse_spec(encoder),
        settings=TrainSettings(
            steps=UNLIMITED_STEPS,
            max_seconds=60 * minutes,
            batch_size=16,
            lr=0.002,
            eval_examples=16,
            eval_every=UNLIMITED_STEPS,
        ),
        threads=threads,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = run_training(spec, Path(folder) / "run")
        task = create_task("summarise", **arguments)
        model = evaluate(load_run(Path(folder) / "run").model, task, "test")
    print(f"{result['steps']:,} steps, {result['parameters']:,} parameters, {encoder} encoder")
    rows = {encoder: [model[metric.name] for metric in rouge_metrics(task)]}
    rows |= {name: score_baseline(task, name) for name in task.baselines()}
    print(f"{'':18}" + "".join(f"{metric.name:>9}" for metric in rouge_metrics(task)))
    for name, values in rows.items():
        print(f"{name:18}" + "".join(f"{value:9.1f}" for value in values))


def rouge_metrics(task: Task) -> list:
    """The metrics of generated texts."""
    return [metric for metric in task.metrics if metric.needs_predictions]


def score_baseline(task: Task, name: str) -> list[float]:
    """Every ROUGE of a baseline, which is computed for the first metric of a task."""
    metrics, values = task.metrics, []
    for metric in rouge_metrics(task):
        task.metrics = (metric,)
        values.append(metric.compute(task.baselines()[name](range(task.size("test")))))
        task.metrics = metrics
    return values


def main() -> None:
    """Measure, write and show; or train."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of the source")
    asked.add_argument("--batch", type=int, default=4, help="examples a step")
    asked.add_argument("--rounds", type=int, default=7, help="steps of each that are measured")
    asked.add_argument("--train", metavar="DATA", help="train on this data set instead")
    asked.add_argument("--minutes", type=float, default=5, help="of --train")
    asked.add_argument("--encoder", default="vanilla", help="mixer of the encoder of --train")
    options = asked.parse_args()
    torch.set_num_threads(1)
    if options.train:
        train(options.train, options.minutes, options.encoder, threads=1)
        return
    load = os.getloadavg()[0]
    rows = [row for n in options.lengths for row in measure(n, options.batch, options.rounds)]
    report = {
        "threads": 1,
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "vocabulary": VOCAB,
        "target": TARGET,
        "batch": options.batch,
        "rounds": options.rounds,
        "load of the machine": load,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'encoder':16} {'source':>6} {'s a step':>9} {'tokens/s':>9} {'peak MB':>9}")
    for row in rows:
        print(
            f"{row['encoder']:16} {row['source']:6} {row['seconds a step']:9.3f} "
            f"{row['tokens per s']:9,.0f} {row['peak MB']:9,.0f}"
        )


if __name__ == "__main__":
    main()
