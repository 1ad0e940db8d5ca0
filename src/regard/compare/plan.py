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
from regard.models import Part, build
from regard.models.config import Closed, Depth, Size
from regard.models.model import outer_mixers
from regard.tasks import TASKS, Task, task
from regard.train.run import Spec, config_of
from regard.train.settings import Settings

SEEN = 64  # examples, by which a task is judged to have some that differ in length
DENSE = Part(name="vanilla")  # always among the rows: nothing says much without it
CONSTANT = "constant"  # the row that learns nothing of the input


class Plan(Closed):
    """A comparison in words.

    lengths            of the tasks; none: each task's own
    seeds              runs of each that differ in nothing but the seed
    equal_parameters   feed-forward layers are made wider or narrower until all have the parameters of dense softmax
    """

    tasks: list[Part]
    mixers: list[Part]
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    seeds: Annotated[int, Field(ge=1, le=100)] = 1
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    position: Part = Part(name="learned")
    equal_parameters: bool = True
    settings: Settings = Settings()


class Cell(NamedTuple):
    """One run, or the reason why there is none."""

    mixer: Part
    task: Part
    length: int
    seed: int
    spec: Spec | None
    refusal: str = ""

    @property
    def key(self) -> str:
        """The same for the same words, so that a comparison can be taken up again."""
        words = self.spec.model_dump_json(exclude={"threads": True, "settings": {"seconds"}}) if self.spec else repr(self)
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{label(self.mixer)} · {label(self.task)} · {self.length} · seed {self.seed}"


def label(part: Part) -> str:
    """ "local", or "local(window=64)"; of the path to data, the last name."""
    shown = ((name, Path(str(value)).name if name == "data" else value) for name, value in part.arguments.items())
    given = ", ".join(f"{name}={value}" for name, value in shown if name != "length")
    return f"{part.name}({given})" if given else part.name


def cells(plan: Plan) -> list[Cell]:
    """All runs; what does not fit together is refused here, before anything is trained.

    Seeds come first, so that whoever stops early has a whole comparison with fewer seeds.
    """
    mixers = [DENSE, *(m for m in plan.mixers if m != DENSE)]
    tasks = [sized for part in plan.tasks for sized in lengthened(part, plan.lengths)]
    named = {label_and_length(part): part for part in tasks}
    for part in tasks:
        if named[label_and_length(part)] != part:
            raise ValueError(f"two tasks would both be called {label(part)}: compare them one after the other")
    wide = {name: _Fitted(plan, part) for name, part in named.items()}
    return [wide[label_and_length(part)].cell(mixer, seed) for seed in range(plan.seeds) for part in tasks for mixer in mixers]


def lengthened(part: Part, lengths: tuple[int, ...]) -> list[Part]:
    """A task at each length that was asked for."""
    if part.name in TASKS and "length" not in inspect.signature(TASKS[part.name]).parameters and lengths:
        raise ValueError(f"the task {part.name!r} has its own length: leave lengths out")
    return [Part(name=part.name, arguments=part.arguments | {"length": n}) for n in lengths] or [part]


def label_and_length(part: Part) -> tuple[str, object]:
    """What tells tasks apart."""
    return label(part), part.arguments.get("length")


def made(part: Part) -> Task:
    """The task of these words; a comparison asks for it several times, and its data may take long to read."""
    return _made(part.model_dump_json())


@lru_cache(16)
def _made(words: str) -> Task:
    part = Part.model_validate_json(words)
    return task(part.name, **part.arguments)


class _Fitted:
    """The cells of one task: dense softmax sets the number of parameters."""

    def __init__(self, plan: Plan, part: Part) -> None:
        self.plan, self.part = plan, part
        self.task = made(part)
        self.most = count(self._spec(DENSE, 0), self.task)
        self.masked = self.task.batch("train", range(min(SEEN, self.task.size("train")))).mask is not None
        self.known: dict[str, tuple[int | None, str]] = {}  # by mixer: the width of its feed-forward layers, or a refusal

    def _spec(self, mixer: Part, seed: int, hidden: int | None = None) -> Spec:
        p = self.plan
        settings = p.settings.model_copy(update={"seed": seed})
        return Spec(
            task=self.part, mixer=mixer, dim=p.dim, heads=p.heads, layers=p.layers, hidden=hidden, position=p.position,
            settings=settings,
        )  # fmt: skip

    def cell(self, mixer: Part, seed: int) -> Cell:
        """The run of a mixer on this task."""
        name = mixer.model_dump_json()
        if name not in self.known:
            self.known[name] = self._fit(self._spec(mixer, seed))
        hidden, refusal = self.known[name]
        return Cell(mixer, self.part, self.task.length, seed, None if refusal else self._spec(mixer, seed, hidden), refusal)

    def _fit(self, spec: Spec) -> tuple[int | None, str]:
        """The same for all seeds."""
        try:
            if self.masked:
                check_mask(spec, self.task)
            if self.plan.equal_parameters:
                return hidden_for(self.most, spec, self.task), ""
            count(spec, self.task)
        except Unsupported as refusal:
            return None, str(refusal)
        return None, ""


def check_mask(spec: Spec, made: Task) -> None:
    """Where examples differ in length they are filled up, and a mixer has to be told so."""
    for mixer in outer_mixers(build(config_of(spec, made))):
        if (reason := mixer.can.reason("mask")) is not None:
            task, name = spec.task.name, spec.mixer.name
            raise Unsupported(f"the examples of {task} differ in length, and {name} takes no mask: {reason}")


def count(spec: Spec, made: Task) -> int:
    """Parameters of the model of a run."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in build(config_of(spec, made)).parameters())


def hidden_for(wanted: int, spec: Spec, made: Task) -> int | None:
    """The width of the feed-forward layers with which a model has as many parameters as wanted, as nearly as can be."""
    narrow, wide = (count(spec.model_copy(update={"hidden": hidden}), made) for hidden in (1, 2))
    hidden = 1 + round((wanted - narrow) / (wide - narrow))
    return None if hidden == 4 * spec.dim else max(1, hidden)
