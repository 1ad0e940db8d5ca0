"""The runs of a comparison: mixers × tasks × lengths × seeds."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from regard.errors import Unsupported
from regard.models import ModuleSpec, build
from regard.models.config import Depth, Size, StrictModel
from regard.models.model import outer_mixers
from regard.tasks import TASKS, Task, create_task
from regard.train.run import RunSpec, model_config
from regard.train.settings import TrainSettings

PADDING_SAMPLE = 64  # training examples checked for different lengths
DENSE_MIXER = ModuleSpec(name="vanilla")  # dense softmax attention, part of every comparison
CONSTANT_BASELINE = "constant"  # name of the row of `constant_baseline_score`


class ComparisonPlan(StrictModel):
    """Settings of a comparison.

    Attributes:
        tasks: Tasks to train on.
        mixers: Mixers to compare; dense softmax attention is added if it is missing.
        lengths: Sequence lengths of the tasks. Empty: each task's default length.
        seeds: Number of runs per mixer that differ only in the seed.
        dim, heads, layers, position: The model around each mixer.
        match_params: Adjust the FFN width until each model has as many parameters as the dense one.
        settings: Training settings.
    """

    tasks: list[ModuleSpec]
    mixers: list[ModuleSpec]
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    seeds: Annotated[int, Field(ge=1, le=100)] = 1
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    position: ModuleSpec = ModuleSpec(name="learned")
    match_params: bool = True
    settings: TrainSettings = TrainSettings()


class PlannedRun(NamedTuple):
    """One run, or the reason (`refusal`) why the mixer cannot be trained on the task."""

    mixer: ModuleSpec
    task: ModuleSpec
    length: int
    seed: int
    spec: RunSpec | None
    refusal: str = ""

    @property
    def key(self) -> str:
        """A hash of the settings, without thread count and time limit: the run's folder name."""
        exclude: Any = {"threads": True, "settings": {"max_seconds"}}
        text = self.spec.model_dump_json(exclude=exclude) if self.spec else repr(self)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """A readable name."""
        parts = (spec_label(self.mixer), spec_label(self.task), self.length, f"seed {self.seed}")
        return " · ".join(map(str, parts))

    def settings(self) -> dict[str, Any]:
        """What identifies the run in the ledger."""
        return {
            "mixer": self.mixer.model_dump(),
            "task": self.task.model_dump(),
            "length": self.length,
            "seed": self.seed,
        }


def spec_label(spec: ModuleSpec) -> str:
    """Return "local" or "local(window=64)"; of a path to data only the file name is shown."""
    shown = ", ".join(
        f"{name}={Path(str(value)).name if name == 'data' else value}"
        for name, value in spec.arguments.items()
        if name != "length"
    )
    return f"{spec.name}({shown})" if shown else spec.name


def plan_runs(plan: ComparisonPlan) -> list[PlannedRun]:
    """Return all runs of a plan. Mixers that do not fit a task are refused here, before training.

    The seed varies slowest, so a comparison that is stopped early is complete for its first seeds.
    """
    mixers = [DENSE_MIXER, *(mixer for mixer in plan.mixers if mixer != DENSE_MIXER)]
    tasks = [task for spec in plan.tasks for task in tasks_at_lengths(spec, plan.lengths)]
    labels: dict[tuple[str, object], ModuleSpec] = {}
    for task in tasks:
        label = spec_label(task)
        if labels.setdefault((label, task.arguments.get("length")), task) != task:
            raise ValueError(f"Two tasks have the same name {label}. Compare them separately.")
    fitted = [(task, list(_fit_mixers(plan, task, mixers))) for task in tasks]
    runs = []
    for seed in range(plan.seeds):
        for task, fits in fitted:
            for mixer, (ffn_width, refusal) in zip(mixers, fits, strict=True):
                spec = None if refusal else _run_spec(plan, task, mixer, seed, ffn_width)
                length = cached_task(task).length
                runs.append(PlannedRun(mixer, task, length, seed, spec, refusal))
    return runs


def tasks_at_lengths(task: ModuleSpec, lengths: tuple[int, ...]) -> list[ModuleSpec]:
    """Return the task at each length, or as it is if there are none."""
    if not lengths:
        return [task]
    if task.name in TASKS and "length" not in inspect.signature(TASKS[task.name]).parameters:
        raise ValueError(f"Task {task.name!r} has a fixed length. Leave out --lengths.")
    return [
        ModuleSpec(name=task.name, arguments=task.arguments | {"length": length})
        for length in lengths
    ]


def cached_task(spec: ModuleSpec) -> Task:
    """Create a task, or return it if it was created before: its data may take long to read."""
    return _create_task(spec.model_dump_json())


@lru_cache(16)
def _create_task(json: str) -> Task:
    spec = ModuleSpec.model_validate_json(json)
    return create_task(spec.name, **spec.arguments)


def _run_spec(
    plan: ComparisonPlan, task: ModuleSpec, mixer: ModuleSpec, seed: int, ffn_width: int | None
) -> RunSpec:
    return RunSpec(
        task=task,
        mixer=mixer,
        dim=plan.dim,
        heads=plan.heads,
        layers=plan.layers,
        ffn_dim=ffn_width,
        position=plan.position,
        settings=plan.settings.model_copy(update={"seed": seed}),
    )


def _fit_mixers(
    plan: ComparisonPlan, task_spec: ModuleSpec, mixers: list[ModuleSpec]
) -> Iterator[tuple[int | None, str]]:
    """Yield the FFN width of each mixer's model (None: the default), or why it cannot be built."""
    task = cached_task(task_spec)
    target = count_parameters(_run_spec(plan, task_spec, DENSE_MIXER, 0, None), task)
    sample = task.batch("train", range(min(PADDING_SAMPLE, task.size("train"))))
    for mixer in mixers:
        spec = _run_spec(plan, task_spec, mixer, 0, None)
        try:
            if sample.mask is not None:
                check_mask(spec, task)
            if plan.match_params:
                yield matching_ffn_width(target, spec, task), ""
            else:
                count_parameters(spec, task)  # raises if the model cannot be built
                yield None, ""
        except Unsupported as refusal:
            yield None, str(refusal)


def check_mask(spec: RunSpec, task: Task) -> None:
    """Raise `Unsupported` if the mixer takes no padding mask."""
    for mixer in outer_mixers(build(model_config(spec, task))):
        if (reason := mixer.can.reason("mask")) is not None:
            raise Unsupported(
                f"The examples of {spec.task.name} differ in length and {spec.mixer.name} does not "
                f"support a padding mask: {reason}"
            )


def count_parameters(spec: RunSpec, task: Task) -> int:
    """Return the number of parameters of a run's model."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in build(model_config(spec, task)).parameters())


def matching_ffn_width(target: int, spec: RunSpec, task: Task) -> int | None:
    """Return the FFN width that brings the parameter count closest to `target`; None: the default.

    The count is linear in the width, so two widths determine it.
    """
    one, two = (
        count_parameters(spec.model_copy(update={"ffn_dim": width}), task) for width in (1, 2)
    )
    width = 1 + round((target - one) / (two - one))
    return None if width == 4 * spec.dim else max(1, width)
