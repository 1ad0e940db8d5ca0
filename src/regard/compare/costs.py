"""What each candidate costs, measured apart from learning in a process of its own.

Training steps, evaluations and inference of all candidates of a task are timed in turn, in rotating
order, so that a slow phase of the machine affects all of them alike.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from regard.bench.probe import CALL_ERRORS
from regard.bench.stats import Times, paired_ratio, time_interleaved
from regard.compare.halving import StepCost
from regard.compare.load import Load, LoadWatch
from regard.compare.results import CostRow
from regard.device import synchronize
from regard.json_files import CorruptFile, read_json, write_json
from regard.models import build
from regard.models.config import StrictModel
from regard.plugins import load_plugins
from regard.tasks.base import Batch, Example, Task
from regard.train import checkpoint
from regard.train.evaluation import evaluate_examples
from regard.train.run import RunSpec, build_task, model_config
from regard.train.state import collect_state
from regard.train.trainer import Trainer

REQUEST_FILE, COSTS_FILE = "request.json", "costs.json"
COSTS_DIR = "costs"  # in the folder of a comparison
MIN_ROUNDS, MAX_ROUNDS = 3, 30
STEP_SHARE, EVAL_SHARE = 0.6, 0.15  # of the time; the rest is for the latency
SAVES = 6  # times that of a checkpoint: four of a run, the last with the best weights, the model
LONGEST_OF = 64  # test examples; the longest of them is used for the latency


class CostRequest(StrictModel):
    """What request.json stores.

    Attributes:
        specs: A run of each candidate by label.
        seconds: Time for the measurement.
        latency: Whether to measure inference too, beside training and evaluation.
    """

    specs: dict[str, RunSpec]
    seconds: float
    latency: bool = True


class CandidateTimes(BaseModel):
    """Measured seconds of one candidate, round by round, or the reason why there are none."""

    model_config = ConfigDict(extra="forbid")

    step: list[float] = []
    example: list[float] = []  # of an evaluation
    latency: list[float] = []
    step_tokens: float = 0.0
    setup: float = 0.0  # to build the model and the optimizer, and for what the first step prepares
    reason: str = ""


class MeasuredCosts(BaseModel):
    """What costs.json stores.

    Attributes:
        times: Times of each candidate by label.
        start_seconds: Time of a run from its command until its data is read.
        save_seconds: Time to write a checkpoint.
        load: Cores used by other processes, all cores and seconds; None where unknown.
    """

    model_config = ConfigDict(extra="forbid")

    times: dict[str, CandidateTimes]
    start_seconds: float
    save_seconds: float = 0.0
    load: dict[str, Any] | None

    def rows(self, task: str, length: int, reference: str) -> dict[str, CostRow]:
        """Return the costs by label, relative to a reference."""
        base = self.times.get(reference, CandidateTimes())
        rows = {}
        for label, own in self.times.items():
            if own.reason or not own.step:
                rows[label] = CostRow(label, task, length, reason=own.reason)
                continue
            compared = base.step and label != reference
            rows[label] = CostRow(
                label,
                task,
                length,
                step_seconds=median(own.step),
                step_tokens=own.step_tokens,
                eval_seconds=median(own.example),
                latency=median(own.latency),
                speedup=paired_ratio(base.step, own.step) if compared else None,
                latency_speedup=paired_ratio(base.latency, own.latency) if compared else None,
            )
        return rows

    def step_costs(self, labels: Iterable[str]) -> dict[str, StepCost]:
        """Return the costs of the candidates that could be measured, as means, for a plan."""
        fixed = self.start_seconds + SAVES * self.save_seconds
        return {
            label: StepCost(fmean(own.step), fmean(own.example), fixed + own.setup)
            for label in labels
            if (own := self.times.get(label)) and own.step and own.example and not own.reason
        }

    def machine_load(self) -> Load | None:
        """Return how busy other processes kept the machine."""
        return None if self.load is None else Load(**self.load)


def read_costs(folder: Path) -> MeasuredCosts | None:
    """Return the costs that were measured in a folder; None if there are none, or damaged."""
    try:
        return MeasuredCosts.model_validate(read_json(folder / COSTS_FILE))
    except (OSError, CorruptFile, ValidationError):
        return None


def read_request(folder: Path) -> CostRequest:
    """Return what is to be measured in a folder."""
    content = (folder / REQUEST_FILE).read_bytes()
    return CostRequest.model_validate_json(content, strict=False)


def measure_costs(
    folder: Path,
    start_time: float,
    check: Callable[[], None] = lambda: None,
    *,
    task: Task | None = None,
) -> MeasuredCosts:
    """Measure the candidates of request.json and write costs.json.

    Args:
        start_time: `time.time()` when the process was started.
        check: Called between the parts; it may raise to end the measurement.
        task: Their task, if it has been created.
    """
    request = read_request(folder)
    specs = request.specs
    first = next(iter(specs.values()))
    if first.threads is not None:
        torch.set_num_threads(first.threads)
    load_plugins(plugin.path for plugin in first.plugins)
    task = build_task(first) if task is None else task
    start_seconds = time.time() - start_time
    trainers: dict[str, Trainer] = {}
    times: dict[str, CandidateTimes] = {label: CandidateTimes() for label in specs}
    for label, spec in specs.items():
        begin = time.perf_counter()
        try:
            trainers[label] = _warm_trainer(spec, task)
            times[label].setup = time.perf_counter() - begin
        except CALL_ERRORS as error:
            times[label].reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        check()
    watch = LoadWatch()
    step = {label: partial(_train_step, trainer) for label, trainer in trainers.items()}
    before = {label: (trainer.step, trainer.tokens) for label, trainer in trainers.items()}
    for label, values in _measure(step, STEP_SHARE * request.seconds).items():
        steps, tokens = before[label]
        own = trainers[label]
        times[label].step = values
        times[label].step_tokens = (own.tokens - tokens) / (own.step - steps)
        times[label].setup = max(0.0, times[label].setup - median(values))
    check()
    save_seconds = _time_checkpoint(next(iter(trainers.values())), folder) if trainers else 0.0
    size = first.settings.batch_size
    sample = task.sample("valid", size).tolist()
    evaluate = {label: partial(_evaluate, each, sample) for label, each in trainers.items()}
    for label, values in _measure(evaluate, EVAL_SHARE * request.seconds).items():
        times[label].example = [value / len(sample) for value in values]
    check()
    if request.latency:
        example = full_length_example(task)
        infer = {label: partial(_infer, each, example) for label, each in trainers.items()}
        rest = 1 - STEP_SHARE - EVAL_SHARE
        for label, values in _measure(infer, rest * request.seconds).items():
            times[label].latency = values
    load = watch.load()
    costs = MeasuredCosts(
        times=times,
        start_seconds=start_seconds,
        save_seconds=save_seconds,
        load=None if load is None else asdict(load),
    )
    write_json(folder / COSTS_FILE, costs.model_dump(mode="json"))
    return costs


def _measure(calls: Mapping[str, Callable[[], object]], seconds: float) -> Times:
    return time_interleaved(calls, seconds, min_rounds=MIN_ROUNDS, max_rounds=MAX_ROUNDS)


def _warm_trainer(spec: RunSpec, task: Task) -> Trainer:
    """A trainer that has made a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.settings.seed)
        model = build(model_config(spec, task))
    trainer = Trainer(model, task, spec.settings)
    _train_step(trainer)
    return trainer


def _time_checkpoint(trainer: Trainer, folder: Path) -> float:
    """Seconds to write a checkpoint; all candidates have about as many parameters."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as root:
        files = collect_state(trainer.strategy, trainer.optimizer, trainer.ema)
        checkpoint.save(Path(root), trainer.step, files, {})
        return time.perf_counter() - begin


def _train_step(trainer: Trainer) -> None:
    trainer.train_step()
    synchronize(trainer.device)


def _evaluate(trainer: Trainer, indices: list[int]) -> None:
    trainer.model.eval()
    evaluate_examples(
        trainer.task,
        trainer.model,
        indices,
        "valid",
        forward=trainer.loss_module.compute_output,
        batch_size=trainer.settings.batch_size,
        device=trainer.device,
    )


@torch.no_grad()
def _infer(trainer: Trainer, batch: Batch) -> None:
    trainer.model.eval()
    trainer.loss_module.compute_output(batch.to(trainer.device))
    synchronize(trainer.device)


def full_length_example(task: Task) -> Batch:
    """A batch of one test example with as many tokens as the task allows: the longest of a sample,
    repeated until it is long enough."""
    examples = [task.example("test", index) for index in task.sample("test", LONGEST_OF).tolist()]
    longest = max(examples, key=lambda each: max(x.numel() for x in each.inputs.values()))

    def repeat(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.dim() != 2:
            return x  # an image
        axis = 0 if x.is_floating_point() else -1
        count = -(-task.length // max(1, x.shape[axis]))
        return torch.cat([x] * count, axis).narrow(axis, 0, task.length)

    if len(longest.inputs) > 1 or task.needs.kind == "seq2seq":
        return task.collate([longest])
    inputs = {name: repeat(x) for name, x in longest.inputs.items()}
    return task.collate([Example(inputs, longest.targets)])
