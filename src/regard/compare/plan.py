"""What is compared with what: mixers × tasks × lengths × seeds, each a run in words."""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from regard.errors import Unsupported
from regard.models import ModuleSpec, build
from regard.models.config import Depth, Size, StrictModel
from regard.models.model import outer_mixers
from regard.tasks import TASKS, Task, create_task
from regard.train.run import RunSpec, model_config
from regard.train.settings import TrainSettings

SEEN = 64  # examples, by which a task is judged to have some that differ in length
DENSE_MIXER = ModuleSpec(name="vanilla")  # always among the rows: nothing says much without it
CONSTANT_BASELINE = "constant"  # the row that learns nothing of the input


class ComparisonPlan(StrictModel):
    """A comparison in words.

    lengths            of the tasks; none: each task's own
    seeds              runs of each that differ in nothing but the seed
    equal_parameters   feed-forward layers are made wider or narrower until all have the parameters of dense softmax
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
    """One run, or the reason why there is none."""

    mixer: ModuleSpec
    task: ModuleSpec
    length: int
    seed: int
    spec: RunSpec | None
    refusal: str = ""

    @property
    def key(self) -> str:
        """The same for the same words, so that a comparison can be taken up again."""
        words = (
            self.spec.model_dump_json(exclude={"threads": True, "settings": {"seconds"}})
            if self.spec
            else repr(self)
        )
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return (
            f"{spec_label(self.mixer)} · {spec_label(self.task)} · {self.length} · seed {self.seed}"
        )


def spec_label(part: ModuleSpec) -> str:
    """ "local", or "local(window=64)"; of the path to data, the last name."""
    shown = (
        (name, Path(str(value)).name if name == "data" else value)
        for name, value in part.arguments.items()
    )
    given = ", ".join(f"{name}={value}" for name, value in shown if name != "length")
    return f"{part.name}({given})" if given else part.name


def plan_runs(plan: ComparisonPlan) -> list[PlannedRun]:
    """All runs; what does not fit together is refused here, before anything is trained.

    Seeds come first, so that whoever stops early has a whole comparison with fewer seeds.
    """
    mixers = [DENSE_MIXER, *(m for m in plan.mixers if m != DENSE_MIXER)]
    tasks = [sized for part in plan.tasks for sized in tasks_at_lengths(part, plan.lengths)]
    named = {task_identity(part): part for part in tasks}
    for part in tasks:
        if named[task_identity(part)] != part:
            raise ValueError(
                f"two tasks would both be called {spec_label(part)}: compare them one after the other"
            )
    wide = {name: _Fitted(plan, part) for name, part in named.items()}
    return [
        wide[task_identity(part)].cell(mixer, seed)
        for seed in range(plan.seeds)
        for part in tasks
        for mixer in mixers
    ]


def tasks_at_lengths(part: ModuleSpec, lengths: tuple[int, ...]) -> list[ModuleSpec]:
    """A task at each length that was asked for."""
    if (
        part.name in TASKS
        and "length" not in inspect.signature(TASKS[part.name]).parameters
        and lengths
    ):
        raise ValueError(f"the task {part.name!r} has its own length: leave lengths out")
    return [
        ModuleSpec(name=part.name, arguments=part.arguments | {"length": n}) for n in lengths
    ] or [part]


def task_identity(part: ModuleSpec) -> tuple[str, object]:
    """What tells tasks apart."""
    return spec_label(part), part.arguments.get("length")


def cached_task(part: ModuleSpec) -> Task:
    """The task of these words; a comparison asks for it several times, and its data may take long to read."""
    return _made(part.model_dump_json())


@lru_cache(16)
def _made(words: str) -> Task:
    part = ModuleSpec.model_validate_json(words)
    return create_task(part.name, **part.arguments)


class _Fitted:
    """The cells of one task: dense softmax sets the number of parameters."""

    def __init__(self, plan: ComparisonPlan, part: ModuleSpec) -> None:
        self.plan, self.part = plan, part
        self.task = cached_task(part)
        self.most = count_parameters(self._spec(DENSE_MIXER, 0), self.task)
        self.masked = (
            self.task.batch("train", range(min(SEEN, self.task.size("train")))).mask is not None
        )
        self.known: dict[
            str, tuple[int | None, str]
        ] = {}  # by mixer: the width of its feed-forward layers, or a refusal

    def _spec(self, mixer: ModuleSpec, seed: int, hidden: int | None = None) -> RunSpec:
        p = self.plan
        settings = p.settings.model_copy(update={"seed": seed})
        return RunSpec(
            task=self.part,
            mixer=mixer,
            dim=p.dim,
            heads=p.heads,
            layers=p.layers,
            hidden=hidden,
            position=p.position,
            settings=settings,
        )

    def cell(self, mixer: ModuleSpec, seed: int) -> PlannedRun:
        """The run of a mixer on this task."""
        name = mixer.model_dump_json()
        if name not in self.known:
            self.known[name] = self._fit(self._spec(mixer, seed))
        hidden, refusal = self.known[name]
        return PlannedRun(
            mixer,
            self.part,
            self.task.length,
            seed,
            None if refusal else self._spec(mixer, seed, hidden),
            refusal,
        )

    def _fit(self, spec: RunSpec) -> tuple[int | None, str]:
        """The same for all seeds."""
        try:
            if self.masked:
                check_mask(spec, self.task)
            if self.plan.match_params:
                return matching_ffn_width(self.most, spec, self.task), ""
            count_parameters(spec, self.task)
        except Unsupported as refusal:
            return None, str(refusal)
        return None, ""


def check_mask(spec: RunSpec, made: Task) -> None:
    """Where examples differ in length they are filled up, and a mixer has to be told so."""
    for mixer in outer_mixers(build(model_config(spec, made))):
        if (reason := mixer.can.reason("mask")) is not None:
            task, name = spec.task.name, spec.mixer.name
            raise Unsupported(
                f"the examples of {task} differ in length, and {name} takes no mask: {reason}"
            )


def count_parameters(spec: RunSpec, made: Task) -> int:
    """Parameters of the model of a run."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in build(model_config(spec, made)).parameters())


def matching_ffn_width(wanted: int, spec: RunSpec, made: Task) -> int | None:
    """The width of the feed-forward layers with which a model has as many parameters as wanted, as nearly as can be."""
    narrow, wide = (
        count_parameters(spec.model_copy(update={"hidden": hidden}), made) for hidden in (1, 2)
    )
    hidden = 1 + round((wanted - narrow) / (wide - narrow))
    return None if hidden == 4 * spec.dim else max(1, hidden)
