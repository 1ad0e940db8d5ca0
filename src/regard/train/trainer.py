"""The loop: batches, updates, evaluations, checkpoints.  Stopped and resumed, it gives the same weights, bit by bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.tasks.base import Task
from regard.train import checkpoint, state
from regard.train.distributed import WorkerGroup
from regard.train.ema import WeightEMA
from regard.train.interrupts import catch_interrupts
from regard.train.loss_module import LossModule, count_tokens, move_batch
from regard.train.metrics_log import MetricsLog
from regard.train.sampler import batch_indices
from regard.train.settings import TrainSettings
from regard.train.strategy import build_strategy
from regard.train.tensorboard import TensorBoardWriter
from regard.train.time_budget import TimeBudget

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints


class Diverged(RuntimeError):
    """The loss is no number any more."""


class Interrupted(RuntimeError):
    """Somebody stopped the run; what it had done is kept."""


class TrainProgress(NamedTuple):
    """What a watcher sees after a step."""

    step: int
    steps: int
    fraction: float  # how much is over: of the steps, or of the time if that goes faster
    loss: float
    rate: float
    seconds: float
    tokens: int


class TrainResult(NamedTuple):
    """What a run came to: the best evaluation, what it cost, and the evaluations one by one; `test` is over `state_batch_size`."""

    steps: int
    seconds: float
    tokens: int
    parameters: int
    loss: float
    best: float
    test: float
    examples: int
    metric: str
    stopped: str  # "steps", "seconds" or "patience"
    curve: list[dict[str, float]]


class Trainer:
    """Trains a model, tokens (b n), mask (b n) -> logits, on a task; over several processes if `group.joined` knows of them.

    folder   where metrics and checkpoints go, the same for all processes; None: nowhere
    watch    called after each step, in the first process
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: TrainSettings,
        *,
        folder: Path | None = None,
        watch: Callable[[TrainProgress], None] = lambda progress: None,
    ) -> None:
        self.model, self.task, self.settings, self.folder, self.watch = (
            model,
            task,
            settings,
            folder,
            watch,
        )
        self.group = WorkerGroup()
        self.place = build_strategy(model, settings.parallel, self.group)
        self.optimizer = torch.optim.AdamW(
            param_groups(model, settings.decay),
            lr=settings.rate,
            betas=settings.betas,
            foreach=self.place.foreach,
        )
        self.average = None if settings.ema is None else WeightEMA(model, settings.ema)
        self.lesson = LossModule(model, task, settings.precision)
        self.log = open_log(folder, settings) if self.group.leads else MetricsLog(None)
        self.step, self.tokens, self.before = (
            0,
            0,
            0.0,
        )  # updates, tokens and seconds so far; seconds of earlier processes
        self.began = time.monotonic()
        self.clock, self.saved = (
            0.0,
            (0, 0),
        )  # the seconds that all processes know of; steps and evaluations in the checkpoint
        self.pace, self.judged = TimeBudget(settings.seconds), 0  # examples of the last evaluation
        self.curve: list[dict[str, float]] = []
        self.loss, self.rate = math.nan, settings.rate

    # ------------------------------------------------------------------------------------------ the run
    def run(self) -> TrainResult:
        """Train to the end, evaluate on the test split, and say what came of it."""
        state.seed(self.settings, self.group.rank)
        self._resume()
        self.wrapped = self.place.wrap(self.lesson)
        self.began = time.monotonic()
        with catch_interrupts() as asked:
            while not (stopped := self._over()):
                self._update()
                self._after()
                if self._agreed(asked.requested):
                    raise Interrupted(f"stopped at step {self.step}{self._kept()}")
        if not self.curve or self.curve[-1]["step"] != self.step:
            self._evaluate()
        if self.folder is not None:
            self._save()
        self.log.close()
        return self._result(stopped)

    def _agreed(self, asked: bool) -> bool:
        """Whether any process was asked to stop; and all look at the clock of the first."""
        now, pace = self.seconds, self.pace
        told = (now, now - self.clock, pace.judging) if self.group.leads else (0.0, 0.0, 0.0)
        self.clock, pace.step, pace.judging, wish = self.group.sum(*told, float(asked))
        return wish > 0

    def _over(self) -> str:
        """Why to stop; "": not yet."""
        s = self.settings
        if self.step >= s.steps:
            return "steps"
        if self.step and self.pace.over(self.clock):
            return "seconds"
        return "patience" if s.patience is not None and self._since_best() >= s.patience else ""

    def _update(self) -> None:
        """One step of the optimizer."""
        s = self.settings
        self.model.train()
        rate = s.rate * s.factor(self.step, self.fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._gradients()
        norm = self.place.clip(s.clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"the loss is {loss} and the gradient's norm {norm} at step {self.step}{self._last()}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        self.step, self.loss, self.rate = self.step + 1, loss, rate

    def _gradients(self) -> float:
        """Of the mean over all targets of the step, whoever has them; returns that mean."""
        s, group, total = self.settings, self.group, 0.0
        rows = batch_indices(
            self.task.size("train"),
            s.batch,
            self.step,
            seed=s.seed,
            rank=group.rank,
            world=group.world,
        )
        parts = [rows[i :: s.accumulate] for i in range(min(s.accumulate, len(rows)))]
        batches = [self.task.batch("train", part) for part in parts]
        counts = [(self.task.counted(batch.target), count_tokens(batch)) for batch in batches]
        targets, tokens = group.sum(sum(t for t, _ in counts), sum(n for _, n in counts))
        for batch, (t, n) in zip(batches, counts, strict=True):
            with nullcontext() if batch is batches[-1] else self.place.holding(self.wrapped):
                loss = self.wrapped(
                    move_batch(batch, self.device), t / max(targets, 1), n / max(tokens, 1)
                )
                (
                    loss * group.world
                ).backward()  # processes are averaged over, and the shares add up to one already
            total += float(loss.detach())
        self.tokens += int(tokens)
        return group.sum(total)[0]

    def _after(self) -> None:
        """What is due after a step."""
        s = self.settings
        self.log.write(
            {"step": self.step, "loss": self.loss, "seconds": self.seconds, "tokens": self.tokens}
        )
        if self.group.leads:
            self.watch(
                TrainProgress(
                    self.step,
                    s.steps,
                    self.fraction,
                    self.loss,
                    self.rate,
                    self.seconds,
                    self.tokens,
                )
            )
        tenth = self.pace.passed(self.fraction)
        if self.step % s.evaluate == 0 or self.step == s.steps or tenth:
            self._evaluate()
        if self.folder is not None and (self.step % s.save == 0 or tenth):
            self._save()

    # ------------------------------------------------------------------------------------------ evaluation
    def _evaluate(self) -> None:
        began = self.seconds
        value = self.score("valid", until=self.pace.limit(began, last=bool(self._over())))
        most = min(self.task.size("valid"), self.settings.examples)
        self.pace.judging = (self.seconds - began) * most / max(self.judged, 1)
        self.curve.append(
            {"step": self.step, "seconds": self.seconds, "valid": value, "loss": self.loss}
        )
        self.log.write({"step": self.step, "valid": value, "seconds": self.seconds})

    @torch.no_grad()
    def score(
        self, split: str, examples: int | None = None, *, until: float | None = None
    ) -> float:
        """The metric over the first examples of a split, with the averaged weights if there are any; over fewer of them, but
        a batch at least, where all would not be done at the second `until` of the run."""
        summed, count, group, began = 0.0, 0.0, self.group, self.seconds
        most = min(self.task.size(split), self.settings.examples if examples is None else examples)
        if not most:
            raise ValueError(f"there are no examples in the split {split!r}")
        self.model.eval()
        with WeightEMA.swapped(self.average, self.model):
            for first in range(0, most, self.settings.batch):
                rows = range(first, min(first + self.settings.batch, most))[
                    group.rank :: group.world
                ]
                # one that has none left answers all the same: the others may wait for its share of the weights
                batch = move_batch(self.task.batch(split, rows or [first]), self.device)
                s, n = self.task.score(self.lesson.answer(batch), batch.target)
                summed, count = (summed + s, count + n) if rows else (summed, count)
                self.judged = min(first + self.settings.batch, most)
                if until is not None and self._late(
                    until, (self.seconds - began) * self.settings.batch / self.judged
                ):
                    break
        summed, count = group.sum(summed, count)
        return summed / max(count, 1)

    def _late(self, until: float, more: float) -> bool:
        """Whether so many seconds more are too many, by the clock of the first process."""
        return self.group.sum(float(self.group.leads and self.seconds + more > until))[0] > 0

    def _since_best(self) -> int:
        """How many evaluations ago the best one was."""
        values = [row["valid"] for row in self.curve]
        return len(values) - 1 - values.index(self._best(values)) if values else 0

    def _best(self, values: list[float]) -> float:
        return max(values) if self.task.larger_is_better else min(values)

    def _result(self, stopped: str) -> TrainResult:
        best, test = (
            self._best([row["valid"] for row in self.curve]),
            self.score("test", until=self.settings.seconds),
        )
        return TrainResult(
            self.step,
            self.seconds,
            self.tokens,
            self.place.parameters(),
            self.loss,
            best,
            test,
            self.judged,
            self.task.metric,
            stopped,
            self.curve,
        )

    # ------------------------------------------------------------------------------------------ time and state
    @property
    def seconds(self) -> float:
        """Spent on this run, in this and earlier processes."""
        return self.before + time.monotonic() - self.began

    @property
    def fraction(self) -> float:
        """How much of the training is over, from 0 to 1."""
        return max(self.step / self.settings.steps, self.pace.fraction(self.clock))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def _save(self) -> Path:
        """A checkpoint; the same twice is written once."""
        assert self.folder is not None
        root = self.folder / CHECKPOINTS
        if self.saved != (self.step, len(self.curve)):
            files = state.pack(self.place, self.optimizer, self.average)
            facts = {
                "seconds": self.seconds,
                "tokens": self.tokens,
                "loss": self.loss,
                "curve": self.curve,
            }
            facts["settings"] = self.settings.model_dump(mode="json")
            self.group.first(lambda: checkpoint.save(root, self.step, files, facts))
            self.saved = (self.step, len(self.curve))
        return checkpoint.checkpoint_path(root, self.step)

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        self.began = time.monotonic()
        path = self._newest()
        if path is not None:
            files, facts = checkpoint.load(path)
            state.check_settings(path, facts, self.settings)
            state.unpack(files, self.place, self.optimizer, self.average)
            self.step = int(path.name.rsplit("-", 1)[1])
            state.unpack_random(files, self.settings, self.group.rank, self.step)
            self.before, self.tokens = facts["seconds"], facts["tokens"]
            self.clock, self.curve, self.loss = self.before, facts["curve"], facts["loss"]
            self.saved = (self.step, len(self.curve))
            self.pace.passed(self.fraction)
        self.log.cut(self.step, [row["step"] for row in self.curve])

    def _newest(self) -> Path | None:
        """The last good checkpoint, which all processes take."""
        root = None if self.folder is None else self.folder / CHECKPOINTS
        return (
            None if root is None else self.group.first(lambda: checkpoint.latest_checkpoint(root))
        )

    def _kept(self) -> str:
        return (
            "" if self.folder is None else f"; kept in {self._save()}: run the same again to go on"
        )

    def _last(self) -> str:
        """Where the last good weights are."""
        path = self._newest()
        return "" if path is None else f"; the last good checkpoint is {path}"


def open_log(folder: Path | None, settings: TrainSettings) -> MetricsLog:
    """The log of a run."""
    if settings.tensorboard and folder is None:
        raise ValueError("the setting tensorboard needs a folder")
    return MetricsLog(
        folder, TensorBoardWriter(folder) if settings.tensorboard and folder is not None else None
    )


def param_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, gains and other vectors do not."""
    found = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in found if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0},
    ]
