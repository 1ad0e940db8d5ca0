"""The training loop: steps, evaluations and checkpoints. A resumed run gives the same weights, bit
for bit."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.device import resolve_dtype, synchronize
from regard.json_files import CorruptFile
from regard.tasks.base import Batch, Task
from regard.train import checkpoint, state
from regard.train.best_weights import BestWeights, replaced_tensors
from regard.train.distributed import WorkerGroup
from regard.train.ema import WeightEMA, averaged_weights
from regard.train.evaluation import Evaluation, evaluate_examples
from regard.train.interrupts import catch_interrupts
from regard.train.loss_module import LossModule
from regard.train.metrics_log import MetricsLog
from regard.train.sampler import batch_indices
from regard.train.settings import TrainSettings
from regard.train.strategy import build_strategy
from regard.train.tensorboard import TensorBoardWriter
from regard.train.time_budget import TimeBudget

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints
MIN_LOSS_SCALE = 1.0  # float16 gradients that overflow at this scale are not a matter of the scale


class Diverged(RuntimeError):
    """The loss or the gradient is not finite."""


class Interrupted(RuntimeError):
    """The run was stopped by Ctrl-C or SIGTERM; a checkpoint was written."""


class TrainProgress(NamedTuple):
    """The state of a run after a step, for callbacks.

    `fraction` is the completed part of the steps or of the time, whichever is larger.
    """

    step: int
    steps: int
    fraction: float
    loss: float
    lr: float
    seconds: float
    tokens: int


class TrainResult(NamedTuple):
    """The result of a run.

    Attributes:
        loss: Training loss of the last step.
        best: Metric of the best evaluation on the validation split.
        best_step: Step of that evaluation; of equal ones that with the lowest loss.
        test: Metric on a random sample of `examples` examples of the test split, with the weights
            that are kept: the best or the last, see `TrainSettings.keep`. None: it has no value on
            them.
        metrics: All metrics that have a value on the same examples, by name.
        breakdown: Tables of the metrics that have one, by name, such as F1 by type.
        metric: Name of the first metric, which `best` and `test` are.
        higher_is_better: Direction of that metric.
        stopped: Why training stopped: "steps", "seconds" or "patience".
        curve: The evaluations: step, seconds, valid (the metric), loss.
    """

    steps: int
    seconds: float
    tokens: int
    parameters: int
    loss: float
    best: float
    best_step: int
    test: float | None
    examples: int
    metrics: dict[str, float]
    breakdown: dict[str, dict[str, dict[str, float]]]
    metric: str
    higher_is_better: bool
    stopped: str
    curve: list[dict[str, float]]


class Trainer:
    """Trains a model on a task, on all processes that `init_distributed` connected.

    Args:
        model: Takes the inputs of the task's batches. It is moved to the device of the settings.
        folder: Folder for metrics and checkpoints, the same for all processes. None: nothing is
            written.
        on_step: Called after each step, in the main process.
        on_warning: Called with a text in the main process, for example if a checkpoint is damaged.
        restart: Start at step 0 if there are checkpoints, but none can be read.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: TrainSettings,
        *,
        folder: Path | None = None,
        on_step: Callable[[TrainProgress], None] = lambda progress: None,
        on_warning: Callable[[str], None] = warnings.warn,
        restart: bool = False,
    ) -> None:
        if settings.tensorboard and folder is None:
            raise ValueError("tensorboard=True needs a folder.")
        self.model, self.task, self.settings = model, task, settings
        self.folder, self.on_step, self.on_warning = folder, on_step, on_warning
        self.restart = restart
        self.group = WorkerGroup(settings.device)
        dtype = resolve_dtype(settings.dtype, self.device)
        self.strategy = build_strategy(model, settings.parallel, self.group)
        self.optimizer = torch.optim.AdamW(
            param_groups(model, settings.weight_decay),
            lr=settings.lr,
            betas=settings.betas,
            foreach=self.strategy.foreach,
        )
        self.ema = None if settings.ema_decay is None else WeightEMA(model, settings.ema_decay)
        self.best = BestWeights(task.metric, keeps_weights=settings.keep == "best")
        config = getattr(model, "config", None)
        self.dim = None if config is None else config.dim
        self.loss_module = LossModule(model, task, dtype, label_smoothing=settings.label_smoothing)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.wrapped: nn.Module = self.loss_module
        self.log = MetricsLog(None)
        if self.group.is_main and folder is not None:
            self.log = MetricsLog(
                folder, TensorBoardWriter(folder) if settings.tensorboard else None
            )
        self.lengths = task.lengths_of("train") if settings.group_by_length else None
        self.step, self.tokens, self.loss = 0, 0, math.nan
        self.earlier_seconds = 0.0  # of processes before this one
        self.start_time = time.monotonic()
        self.synced_seconds = 0.0  # elapsed time of the main process, as all processes know it
        self.time_budget = TimeBudget(settings.max_seconds)
        self.curve: list[dict[str, float]] = []
        self.last_saved = (0, 0)  # steps and evaluations in the last checkpoint

    # ---------------------------------------------------------------------------------- the run
    def run(self) -> TrainResult:
        """Train to the end and evaluate on the test split.

        The model then has its last weights; `kept_weights` gives it those to use.
        """
        state.set_seed(self.settings, self.group.rank)
        self._resume()
        self.wrapped = self.strategy.wrap(self.loss_module)
        self.start_time = time.monotonic()
        with catch_interrupts() as stop:
            while not (stopped := self._stop_reason()):
                self.train_step()
                self._after_step()
                if self._synchronize(stop.requested):
                    saved = "" if self.folder is None else f"; saved to {self._save()}"
                    raise Interrupted(f"Stopped at step {self.step}{saved}")
        if not self.curve or self.curve[-1]["step"] != self.step:
            self._evaluate()
        if self.folder is not None:
            self._save()
        self.log.close()
        self.test = self.evaluate("test", deadline=self.settings.max_seconds, kept=True)
        metrics = self.test.values()
        return TrainResult(
            steps=self.step,
            seconds=self.seconds,
            tokens=self.tokens,
            parameters=self.strategy.count_parameters(),
            loss=self.loss,
            best=next(row["valid"] for row in self.curve if row["step"] == self.best.step),
            best_step=self.best.step,
            test=metrics.get(self.task.metric.name),
            examples=len(self.test.indices),
            metrics=metrics,
            breakdown=self.test.breakdowns(),
            metric=self.task.metric.name,
            higher_is_better=self.task.metric.higher_is_better,
            stopped=stopped,
            curve=self.curve,
        )

    def _synchronize(self, stop: bool) -> bool:
        """Give all processes the clock of the main one; returns whether any was asked to stop."""
        now, budget = self.seconds, self.time_budget
        clock = (now, now - self.synced_seconds, budget.eval_seconds)
        values = clock if self.group.is_main else (0.0, 0.0, 0.0)
        self.synced_seconds, budget.step_seconds, budget.eval_seconds, requests = self.group.sum(
            *values, float(stop)
        )
        return requests > 0

    def _stop_reason(self) -> str:
        """Why to stop now, or "" to continue."""
        if self.step >= self.settings.steps:
            return "steps"
        if self.step and self.time_budget.is_over(self.synced_seconds):
            return "seconds"
        patience = self.settings.patience
        since_best = sum(row["step"] > self.best.step for row in self.curve)
        return "patience" if patience is not None and since_best >= patience else ""

    def train_step(self) -> None:
        """One step of the optimizer."""
        s = self.settings
        self.model.train()
        lr = s.lr * s.lr_factor(self.step, self.fraction, self.dim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._backward()
        self.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip_gradients(s.max_grad_norm)
        overflow = self.scaler.is_enabled() and self.scaler.get_scale() > MIN_LOSS_SCALE
        if not (math.isfinite(loss) and (overflow or math.isfinite(norm))):
            path = self._latest_checkpoint()
            raise Diverged(
                f"The loss is {loss} and the gradient norm {norm} at step {self.step}"
                + ("" if path is None else f"; the last good checkpoint is {path}")
            )
        if math.isfinite(norm):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:  # float16 overflowed, maybe in another process: all skip the step
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.model)
        self.step, self.loss = self.step + 1, loss

    def _backward(self) -> float:
        """Compute the gradient of the mean loss over all targets of the step; returns that mean."""
        s, group, total = self.settings, self.group, 0.0
        rows = batch_indices(
            self.task.size("train"),
            s.batch_size,
            self.step,
            seed=s.seed,
            rank=group.rank,
            world_size=group.world_size,
            lengths=self.lengths,
        )
        parts = [
            rows[i :: s.accumulation_steps] for i in range(min(s.accumulation_steps, len(rows)))
        ]
        batches = [self._training_batch(part, number) for number, part in enumerate(parts)]
        counts = [(self.task.count_targets(b), self.task.count_tokens(b)) for b in batches]
        targets, tokens = group.sum(sum(t for t, _ in counts), sum(n for _, n in counts))
        for batch, (t, n) in zip(batches, counts, strict=True):
            last = batch is batches[-1]
            with nullcontext() if last else self.strategy.no_sync(self.wrapped):
                shares = t / max(targets, 1), n / max(tokens, 1)
                loss = self.wrapped(batch.to(self.device), *shares)
                # DDP and FSDP average over processes, but the shares already sum to one
                self.scaler.scale(loss * group.world_size).backward()
            total += float(loss.detach())
        self.tokens += int(tokens)
        return group.sum(total)[0]

    def _training_batch(self, rows: list[int], part: int) -> Batch:
        """A part of the batch of this step, augmented. The random numbers follow from the seed, the
        step and the part, so a resumed run draws the same."""
        seed = np.random.SeedSequence([self.settings.seed, self.step, self.group.rank, part])
        generator = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        return self.task.augment(self.task.batch("train", rows), generator)

    def _after_step(self) -> None:
        """Log, evaluate and save if they are due."""
        s = self.settings
        synchronize(self.device)
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "seconds": self.seconds,
            "tokens": self.tokens,
        }
        self.log.write(row)
        if self.group.is_main:
            lr = self.optimizer.param_groups[0]["lr"]
            self.on_step(TrainProgress(steps=s.steps, fraction=self.fraction, lr=lr, **row))
        tenth = self.time_budget.pass_checkpoint(self.fraction)
        if self.step % s.eval_every == 0 or self.step == s.steps or tenth:
            self._evaluate()
        if self.folder is not None and (self.step % s.save_every == 0 or tenth):
            self._save()

    # ------------------------------------------------------------------------------- evaluation
    def _evaluate(self) -> None:
        """Evaluate on the validation split and add a row to the curve."""
        start, final = self.seconds, bool(self._stop_reason())
        deadline = self.time_budget.eval_deadline(start, final=final)
        evaluation = self.evaluate("valid", deadline=deadline)
        value = evaluation.value
        if not math.isfinite(value):
            raise Diverged(f"{self.task.metric.name} on valid is {value} at step {self.step}")
        wanted = min(self.task.size("valid"), self.settings.eval_examples)
        per_example = (self.seconds - start) / len(evaluation.indices)
        self.time_budget.eval_seconds = per_example * wanted
        row = {"step": self.step, "seconds": self.seconds, "valid": value}
        self.curve.append({**row, "loss": self.loss})
        with averaged_weights(self.ema, self.model):
            self.best.update(self.step, evaluation, self.model)
        self.log.write(row)

    def evaluate(
        self,
        split: str,
        examples: int | None = None,
        *,
        deadline: float | None = None,
        kept: bool = False,
    ) -> Evaluation:
        """Evaluate on a random sample of a split (`Task.sample`), the same each time.

        With the current weights, averaged if there is an average.

        Args:
            split: "train", "valid" or "test".
            examples: Number of examples; None: `eval_examples` of the settings.
            deadline: Stop after the batch before this second of the run, but evaluate at least one.
            kept: Evaluate with `kept_weights` instead.
        """
        group, start, size = self.group, self.seconds, self.settings.batch_size
        wanted = self.settings.eval_examples if examples is None else examples
        wanted = min(self.task.size(split), wanted)
        if not wanted:
            raise ValueError(f"The {split} split has no examples.")

        def is_late(done: int) -> bool:
            if deadline is None:
                return False
            next_end = self.seconds + (self.seconds - start) * size / done
            return group.sum(float(group.is_main and next_end > deadline))[0] > 0

        self.model.eval()
        with self.kept_weights() if kept else averaged_weights(self.ema, self.model):
            return evaluate_examples(
                self.task,
                self.model,
                self.task.sample(split, wanted).tolist(),
                split,
                forward=self.loss_module.compute_output,
                batch_size=size,
                device=self.device,
                group=group,
                is_late=is_late,
                in_training=not kept,
            )

    def kept_weights(self) -> AbstractContextManager[None]:
        """Give the model the weights that are kept while the block runs: those of the best
        evaluation, or with `keep="last"` the current ones, averaged if there is an average."""
        if self.best.weights:
            return replaced_tensors(self.model, self.best.weights)
        return averaged_weights(self.ema, self.model)

    # ---------------------------------------------------------------------------- time and state
    @property
    def seconds(self) -> float:
        """Time spent on this run, including earlier processes."""
        return self.earlier_seconds + time.monotonic() - self.start_time

    @property
    def fraction(self) -> float:
        """Completed fraction of the training, from 0 to 1."""
        by_time = self.time_budget.fraction(self.synced_seconds)
        return max(self.step / self.settings.steps, by_time)

    @property
    def device(self) -> torch.device:
        """Device of the model and the batches."""
        return self.group.device

    def _save(self) -> Path:
        """Write a checkpoint, unless the last one has the same state."""
        assert self.folder is not None
        root, current = self.folder / CHECKPOINTS, (self.step, len(self.curve))
        if self.last_saved != current:
            files = state.collect_state(self.strategy, self.optimizer, self.ema)
            files |= self.best.to_files(self.strategy)
            metadata = {
                "seconds": self.seconds,
                "tokens": self.tokens,
                "loss": self.loss,
                "curve": self.curve,
                "loss_scale": self.scaler.state_dict(),
                "settings": self.settings.model_dump(mode="json"),
            }
            self.group.run_on_main(lambda: checkpoint.save(root, self.step, files, metadata))
            self.last_saved = current
        return checkpoint.checkpoint_path(root, self.step)

    def _resume(self) -> None:
        """Continue from the latest checkpoint, if there is one."""
        self.start_time = time.monotonic()
        path = self.group.run_on_main(self._choose_checkpoint)
        if path is not None:
            files, metadata = checkpoint.load(path)
            state.check_settings(path, metadata, self.settings)
            try:
                self._restore(path, files, metadata)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise CorruptFile(f"{path} does not fit this run: {error!r}") from None
        damaged = self.log.truncate(self.step, [row["step"] for row in self.curve])
        if damaged:
            self.on_warning(f"Left out {damaged} damaged lines of {self.log.path}.")

    def _restore(
        self, path: Path, files: dict[str, dict[str, Tensor]], metadata: dict[str, Any]
    ) -> None:
        """Continue from the content of a checkpoint."""
        state.restore_state(files, self.strategy, self.optimizer, self.ema)
        self.best.load_files(files, self.strategy)
        self.step = int(path.name.rsplit("-", 1)[1])
        state.restore_rng(files, self.settings, self.group.rank, self.step, self.device)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(metadata["loss_scale"])
        self.earlier_seconds = self.synced_seconds = metadata["seconds"]
        self.tokens, self.loss = metadata["tokens"], metadata["loss"]
        self.curve = metadata["curve"]
        self.last_saved = (self.step, len(self.curve))
        self.time_budget.pass_checkpoint(self.fraction)

    def _choose_checkpoint(self) -> Path | None:
        """The latest intact checkpoint; damaged ones are named, and renamed to be out of the way.

        Raises `CorruptFile` if all are damaged, unless `restart` is set.
        """
        if self.folder is None:
            return None
        root = self.folder / CHECKPOINTS
        if root.is_symlink():  # old checkpoints are deleted, and they may belong to another run
            raise ValueError(f"{root} is a symbolic link: use a folder.")
        checkpoint.remove_partial(root)
        damaged: dict[Path, str] = {}
        path = checkpoint.latest_checkpoint(root, damaged.__setitem__)
        if path is not None and self.restart:
            raise ValueError(f"{path} is intact: omit --restart to continue from there.")
        if path is None and damaged and not self.restart:
            raise CorruptFile(
                f"No checkpoint of {self.folder} can be read: {' '.join(damaged.values())} "
                f"To start again at step 0: regard train --resume {self.folder} --restart"
            )
        for broken, reason in damaged.items():
            self.on_warning(f"Left out: {reason} It is kept as {checkpoint.set_aside(broken)}.")
        if damaged:
            start = "Starting again at step 0" if path is None else f"Resuming from {path}"
            self.on_warning(f"{start}.")
        return path

    def _latest_checkpoint(self) -> Path | None:
        """The latest intact checkpoint, the same for all processes."""
        if self.folder is None:
            return None
        root = self.folder / CHECKPOINTS
        return self.group.run_on_main(lambda: checkpoint.latest_checkpoint(root))


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices are decayed; biases, gains and other vectors are not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
