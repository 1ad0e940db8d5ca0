"""The loop: batches, updates, evaluations, checkpoints.  Stopped and resumed, it gives the same weights, bit by bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.models.save import own_tensors
from regard.notes import noted
from regard.tasks.base import Batch, Task
from regard.train import checkpoint
from regard.train.average import Average
from regard.train.log import Log
from regard.train.sampler import indexes
from regard.train.settings import Settings
from regard.train.stopping import listening

RUNNING = "checkpoints"  # the folder of a run's checkpoints


class Diverged(RuntimeError):
    """The loss is no number any more."""


class Interrupted(RuntimeError):
    """Somebody stopped the run; what it had done is kept."""


class Progress(NamedTuple):
    """What a watcher sees after a step."""

    step: int
    steps: int
    fraction: float  # how much is over: of the steps, or of the time if that goes faster
    loss: float
    rate: float
    seconds: float
    tokens: int


class Result(NamedTuple):
    """What a run came to: the best evaluation, what it cost, and the evaluations one by one."""

    steps: int
    seconds: float
    tokens: int
    parameters: int
    loss: float
    best: float
    test: float
    metric: str
    stopped: str  # "steps", "seconds" or "patience"
    curve: list[dict[str, float]]


class Trainer:
    """Trains a model, tokens (b n), mask (b n) -> logits, on a task.

    folder   where metrics and checkpoints go; None: nowhere
    watch    called after each step
    """

    def __init__(
        self, model: nn.Module, task: Task, settings: Settings, *, folder: Path | None = None,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:  # fmt: skip
        self.model, self.task, self.settings, self.folder, self.watch = model, task, settings, folder, watch
        self.optimizer = torch.optim.AdamW(grouped(model, settings.decay), lr=settings.rate, betas=settings.betas)
        self.average = None if settings.ema is None else Average(model, settings.ema)
        self.log = Log(folder)
        self.step, self.tokens, self.before = 0, 0, 0.0  # updates, tokens and seconds so far; seconds of earlier processes
        self.curve: list[dict[str, float]] = []
        self.loss, self.rate = math.nan, settings.rate

    # ------------------------------------------------------------------------------------------ the run
    def run(self) -> Result:
        """Train to the end, evaluate on the test split, and say what came of it."""
        torch.manual_seed(self.settings.seed)
        self._resume()
        self.began = time.monotonic()
        with listening() as asked:
            while not (stopped := self._over()):
                self._update()
                self._after()
                if asked.to_stop:
                    raise Interrupted(f"stopped at step {self.step}{self._kept()}")
        if not self.curve or self.curve[-1]["step"] != self.step:
            self._evaluate()
        if self.folder is not None:
            self._save()
        return self._result(stopped)

    def _over(self) -> str:
        """Why to stop; "": not yet."""
        s = self.settings
        if self.step >= s.steps:
            return "steps"
        if s.seconds is not None and self.seconds >= s.seconds:
            return "seconds"
        return "patience" if s.patience is not None and self._since_best() >= s.patience else ""

    def _update(self) -> None:
        """One step of the optimizer."""
        s, total = self.settings, 0.0
        self.model.train()
        rate = s.rate * s.factor(self.step, self.fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = indexes(self.task.size("train"), s.batch, self.step, seed=s.seed)
        parts = [rows[i :: s.accumulate] for i in range(min(s.accumulate, len(rows)))]
        for part in parts:
            batch = self.task.batch("train", part)
            loss = self._loss(batch) * (len(part) / len(rows))
            loss.backward()
            total += float(loss.detach())
            self.tokens += batch.tokens.numel() if batch.mask is None else int(batch.mask.sum())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if s.clip is None else s.clip)
        if not (math.isfinite(total) and math.isfinite(float(norm))):
            raise Diverged(f"the loss is {total} and the gradient's norm {float(norm)} at step {self.step}{self._last()}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        self.step, self.loss, self.rate = self.step + 1, total, rate

    def _loss(self, batch: Batch) -> Tensor:
        """Of the task, and what the parts of the model add to it."""
        with noted() as notes, self._precision():
            logits = self.model(batch.tokens, mask=batch.mask)
        return self.task.loss(logits, batch.target) + notes.cost()

    def _after(self) -> None:
        """What is due after a step."""
        s = self.settings
        self.log.write({"step": self.step, "loss": self.loss, "seconds": self.seconds, "tokens": self.tokens})
        self.watch(Progress(self.step, s.steps, self.fraction, self.loss, self.rate, self.seconds, self.tokens))
        if self.step % s.evaluate == 0:
            self._evaluate()
        if self.folder is not None and self.step % s.save == 0:
            self._save()

    # ------------------------------------------------------------------------------------------ evaluation
    def _evaluate(self) -> None:
        value = self.score("valid")
        self.curve.append({"step": self.step, "seconds": self.seconds, "valid": value, "loss": self.loss})
        self.log.write({"step": self.step, "valid": value, "seconds": self.seconds})

    @torch.no_grad()
    def score(self, split: str, examples: int | None = None) -> float:
        """The metric over the first examples of a split, with the averaged weights if there are any."""
        summed, count = 0.0, 0
        most = min(self.task.size(split), self.settings.examples if examples is None else examples)
        if not most:
            raise ValueError(f"there are no examples in the split {split!r}")
        self.model.eval()
        with Average.swapped(self.average, self.model), self._precision():
            for first in range(0, most, self.settings.batch):
                batch = self.task.batch(split, range(first, min(first + self.settings.batch, most)))
                s, n = self.task.score(self.model(batch.tokens, mask=batch.mask), batch.target)
                summed, count = summed + s, count + n
        return summed / max(count, 1)

    def _since_best(self) -> int:
        """How many evaluations ago the best one was."""
        values = [row["valid"] for row in self.curve]
        return len(values) - 1 - values.index(self._best(values)) if values else 0

    def _best(self, values: list[float]) -> float:
        return max(values) if self.task.larger_is_better else min(values)

    def _result(self, stopped: str) -> Result:
        parameters = sum(p.numel() for p in self.model.parameters())
        best, test = self._best([row["valid"] for row in self.curve]), self.score("test")
        return Result(
            self.step, self.seconds, self.tokens, parameters, self.loss, best, test, self.task.metric, stopped, self.curve
        )

    # ------------------------------------------------------------------------------------------ time and state
    @property
    def seconds(self) -> float:
        """Spent on this run, in this and earlier processes."""
        return self.before + time.monotonic() - self.began

    @property
    def fraction(self) -> float:
        """How much of the training is over, from 0 to 1."""
        s = self.settings
        done = self.step / s.steps
        return done if s.seconds is None else max(done, min(self.seconds / s.seconds, 1.0))

    def _precision(self) -> AbstractContextManager[Any]:
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    def _save(self) -> Path:
        assert self.folder is not None
        tensors: dict[str, Mapping[str, Tensor]] = {"model": own_tensors(self.model), "optimizer": self._moments()}
        tensors["random"] = {"torch": torch.get_rng_state()}
        if self.average is not None:
            tensors["average"] = self.average.weights
        facts = {"seconds": self.seconds, "tokens": self.tokens, "loss": self.loss, "curve": self.curve}
        facts["settings"] = self.settings.model_dump(mode="json")
        return checkpoint.save(self.folder / RUNNING, self.step, tensors, facts)

    def _moments(self) -> dict[str, Tensor]:
        """What the optimizer remembers, by the number of the parameter."""
        state = self.optimizer.state_dict()["state"]
        return {f"{number}.{key}": value for number, each in state.items() for key, value in each.items()}

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        self.began = time.monotonic()
        path = None if self.folder is None else checkpoint.newest(self.folder / RUNNING)
        if path is None:
            self.log.cut(0)
            return
        tensors, facts = checkpoint.load(path)
        changed = [
            k for k, v in self.settings.model_dump(mode="json").items() if facts["settings"].get(k) != v and k != "steps"
        ]
        if changed:
            raise ValueError(f"{path} was trained with another {', '.join(changed)}: resume it with the same settings")
        with torch.no_grad():
            for name, tensor in own_tensors(self.model).items():
                tensor.copy_(tensors["model"][name])
        state = self.optimizer.state_dict()
        state["state"] = unflattened(tensors["optimizer"])
        self.optimizer.load_state_dict(state)
        if self.average is not None:
            self.average.weights = tensors["average"]
        torch.set_rng_state(tensors["random"]["torch"])
        self.step, self.before, self.tokens = int(path.name.rsplit("-", 1)[1]), facts["seconds"], facts["tokens"]
        self.curve, self.loss = facts["curve"], facts["loss"]
        self.log.cut(self.step)

    def _kept(self) -> str:
        return "" if self.folder is None else f"; kept in {self._save()}: run the same again to go on"

    def _last(self) -> str:
        """Where the last good weights are."""
        path = None if self.folder is None else checkpoint.newest(self.folder / RUNNING)
        return "" if path is None else f"; the last good checkpoint is {path}"


def grouped(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, gains and other vectors do not."""
    found = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in found if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0},
    ]


def unflattened(flat: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """ "3.exp_avg" -> {3: {"exp_avg": ...}}."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in flat.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = value
    return state
