"""What a comparison trains: the candidates that fit each task, and the runs of each rung."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field

from regard.errors import Unsupported
from regard.models import ModuleSpec, build
from regard.models.config import Depth, Probability, Size, StrictModel
from regard.plugins import PluginFile
from regard.tasks import Task, create_task, find_task
from regard.train.run import RunSpec, check_mask, model_config, needs_padding
from regard.train.settings import Positive, TrainSettings

RUNS_DIR = "runs"  # in the folder of a comparison
DENSE_MIXER = ModuleSpec(name="vanilla")  # dense softmax attention, part of every comparison
Preference = Literal["score", "speed", "memory", "latency"]
PARTS = ("mixer", "encoder_mixer", "position", "norm", "ffn", "residual", "stack")  # what can vary
SHORT_LENGTH = 1024  # tokens, from which the default window of `local` is an eighth or less
NONE = "none"  # the name of no feed-forward layer
WARMUP_SHARE = 0.1  # of the steps of a run, at most, for the warmup

# A diverse choice of cheap mechanisms, for tasks whose mixers must be causal and for others; those
# that do not fit a task are left out.
SHORTLIST = tuple(
    ModuleSpec(name=name)
    for name in ("local", "linear", "performer", "retnet", "delta_rule", "linformer", "fnet")
)


class ComparisonPlan(StrictModel):
    """Settings of a comparison.

    Attributes:
        tasks: Tasks to train on.
        mixers: Candidates: mixers, or values of the part that varies. The reference is added if it
            is missing: dense softmax, or the model's own value of the part.
        is_shortlist: The mixers are a general choice: those that do not fit a task are left out,
            instead of a row with the reason, and a window is narrower than the task's length.
        vary: The part of the model that varies, one of `PARTS`.
        lengths: Sequence lengths of the tasks. Empty: each task's default length.
        seeds: Number of runs per candidate in the last rung, which differ only in the seed.
        rates: Learning rates to try for each candidate. One: no search.
        budget: Seconds for everything, None for no limit: then all candidates train for the steps
            of the settings.
        equal: With a budget, give every candidate the same "time" or the same "steps".
        prefer: What matters most: "score", "speed", "memory" or "latency".
        jobs: Runs at a time.
        mixer, encoder_mixer, dim, heads, layers, ffn, norm, residual, position, stack, dropout: The
            rest of the model; see `RunSpec`.
        match_params: Adjust the FFN width until each model has as many parameters as the reference.
        settings: Training settings. With a budget, `steps` is a maximum.
        plugins: Python files that register recipes or tasks.
    """

    tasks: list[ModuleSpec]
    mixers: list[ModuleSpec]
    is_shortlist: bool = False
    vary: Literal["mixer", "encoder_mixer", "position", "norm", "ffn", "residual", "stack"] = (
        "mixer"
    )
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    seeds: Annotated[int, Field(ge=1, le=100)] = 1
    rates: tuple[Positive, ...] = ()
    budget: Positive | None = None
    equal: Literal["time", "steps"] = "time"
    prefer: Preference = "score"
    jobs: Annotated[int, Field(ge=1)] = 1
    mixer: ModuleSpec = DENSE_MIXER
    encoder_mixer: ModuleSpec | None = None
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    ffn: ModuleSpec | None = ModuleSpec(name="mlp")
    norm: ModuleSpec = ModuleSpec(name="layer")
    residual: ModuleSpec = ModuleSpec(name="pre")
    position: ModuleSpec = ModuleSpec(name="learned")
    stack: ModuleSpec | None = None
    dropout: Probability = 0.0
    match_params: bool = True
    settings: TrainSettings = TrainSettings()
    plugins: tuple[PluginFile, ...] = ()

    @property
    def reference(self) -> ModuleSpec:
        """The candidate that the others are compared with."""
        if self.vary == "mixer":
            return DENSE_MIXER
        default: ModuleSpec | None = getattr(self, self.vary)
        if self.vary == "encoder_mixer":
            return default or self.mixer
        return default or ModuleSpec(name="sequential" if self.vary == "stack" else NONE)

    @property
    def candidates(self) -> list[ModuleSpec]:
        """The reference, and the others without repetition."""
        return list({spec_label(each): each for each in (self.reference, *self.mixers)}.values())

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates to try for each candidate."""
        return list(self.rates) or [self.settings.lr]


class PlannedRun(NamedTuple):
    """One run, or the reason (`refusal`) why the candidate cannot be trained on the task.

    Attributes:
        mixer: The candidate: a mixer, or a value of the part that varies.
        rung: Number of the rung.
        seconds: Estimated time; 0 if it is unknown.
        search: Whether it is one of several learning rates; the name tells which.
    """

    mixer: ModuleSpec
    task: ModuleSpec
    length: int
    seed: int
    spec: RunSpec | None
    refusal: str = ""
    rung: int = 0
    seconds: float = 0.0
    search: bool = False

    @property
    def key(self) -> str:
        """A hash of the settings, without thread count and time limit: the run's folder name."""
        exclude: Any = {"threads": True, "settings": {"max_seconds"}}
        text = self.spec.model_dump_json(exclude=exclude) if self.spec else repr(self)
        text += f" rung {self.rung}" if self.rung else ""
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """The candidate as it is shown."""
        return spec_label(self.mixer)

    @property
    def name(self) -> str:
        """A readable name."""
        parts = [self.label, spec_label(self.task), str(self.length), f"seed {self.seed}"]
        if self.spec is not None:
            if self.rung:
                parts.insert(3, f"rung {self.rung + 1}")
            if self.search:
                parts.append(f"lr {self.spec.settings.lr:g}")
        return " · ".join(parts)

    def settings(self) -> dict[str, Any]:
        """What identifies the run in the ledger."""
        values = {
            "mixer": self.mixer.model_dump(),
            "task": self.task.model_dump(),
            "length": self.length,
            "seed": self.seed,
            "rung": self.rung,
        }
        if self.spec is not None:
            values |= {"lr": self.spec.settings.lr, "steps": self.spec.settings.steps}
        return values


class FittedTask(NamedTuple):
    """A task at a length with its candidates.

    Attributes:
        specs: A run of each candidate that fits, by label, the reference first.
        refused: Why the others do not fit, as runs without a spec.
    """

    task: ModuleSpec
    length: int
    candidates: dict[str, ModuleSpec]
    specs: dict[str, RunSpec]
    refused: list[PlannedRun]

    @property
    def label(self) -> str:
        """The task as it is shown."""
        return spec_label(self.task)

    def run(
        self,
        label: str,
        *,
        seed: int,
        lr: float,
        steps: int,
        evaluations: int,
        eval_examples: int,
        rung: int,
        seconds: float = 0.0,
        search: bool = False,
    ) -> PlannedRun:
        """Return a run of a candidate: all that it learns is a function of these arguments."""
        spec = self.specs[label]
        changes = {
            "seed": seed,
            "lr": lr,
            "steps": steps,
            "eval_every": -(-steps // evaluations),
            "save_every": max(1, -(-steps // 4)),
            "eval_examples": eval_examples,
            "warmup_steps": min(spec.settings.warmup_steps, int(WARMUP_SHARE * steps)),
        }
        settings = spec.settings.model_copy(update=changes)
        spec = spec.model_copy(update={"settings": settings})
        candidate = self.candidates[label]
        return PlannedRun(candidate, self.task, self.length, seed, spec, "", rung, seconds, search)


def spec_label(spec: ModuleSpec) -> str:
    """Return "local" or "local(window=64)"; of a path to data only the file name is shown."""
    shown = ", ".join(
        f"{name}={Path(str(value)).name if name == 'data' else value}"
        for name, value in spec.arguments.items()
        if name != "length"
    )
    return f"{spec.name}({shown})" if shown else spec.name


def fit_tasks(plan: ComparisonPlan) -> list[FittedTask]:
    """Return each task at each length with the candidates that fit it: others are refused here,
    before anything is trained."""
    tasks = [task for spec in plan.tasks for task in tasks_at_lengths(spec, plan.lengths)]
    labels: dict[tuple[str, object], ModuleSpec] = {}
    for task in tasks:
        label = spec_label(task)
        if labels.setdefault((label, task.arguments.get("length")), task) != task:
            raise ValueError(f"Two tasks have the same name {label}. Compare them separately.")
    return [_fit_task(plan, task) for task in tasks]


def _fit_task(plan: ComparisonPlan, task: ModuleSpec) -> FittedTask:
    length = cached_task(task).length
    chosen = plan.candidates
    if plan.is_shortlist:
        chosen = [narrow_window(each, length) for each in chosen]
    candidates = {spec_label(each): each for each in chosen}
    specs, refused = {}, []
    fits = _fit_candidates(plan, task, chosen)
    for (label, each), (ffn_width, refusal) in zip(candidates.items(), fits, strict=True):
        if not refusal:
            specs[label] = _run_spec(plan, task, each, 0, ffn_width)
        elif not plan.is_shortlist or each == plan.reference:
            refused.append(PlannedRun(each, task, length, 0, None, refusal))
    return FittedTask(task, length, candidates, specs, refused)


def narrow_window(mixer: ModuleSpec, length: int) -> ModuleSpec:
    """Return `local` with a window of an eighth of a short sequence: at its default it would see
    the whole sequence, as dense softmax does."""
    if mixer != ModuleSpec(name="local") or length >= SHORT_LENGTH:
        return mixer
    return ModuleSpec(name="local", arguments={"window": max(1, length // 8)})


def plan_runs(plan: ComparisonPlan) -> list[PlannedRun]:
    """Return all runs of a plan without a budget and without a search of learning rates.

    The seed varies slowest, so a comparison that is stopped early is complete for its first seeds.
    """
    runs = []
    fitted = fit_tasks(plan)
    for seed in range(plan.seeds):
        for each in fitted:
            for label, candidate in each.candidates.items():
                if label in each.specs:
                    spec = each.specs[label]
                    settings = spec.settings.model_copy(update={"seed": seed})
                    spec = spec.model_copy(update={"settings": settings})
                    runs.append(PlannedRun(candidate, each.task, each.length, seed, spec))
            if not seed:
                runs += each.refused
    return runs


def tasks_at_lengths(task: ModuleSpec, lengths: tuple[int, ...]) -> list[ModuleSpec]:
    """Return the task at each length, or as it is if there are none."""
    if not lengths:
        return [task]
    if "length" not in inspect.signature(find_task(task.name)).parameters:
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
    plan: ComparisonPlan,
    task: ModuleSpec,
    candidate: ModuleSpec,
    seed: int,
    ffn_width: int | None,
) -> RunSpec:
    fields = (
        *("mixer", "encoder_mixer", "dim", "heads", "layers"),
        *("ffn", "norm", "residual", "position", "stack"),
    )
    values = {name: getattr(plan, name) for name in fields}
    values["plugins"] = plan.plugins
    values[plan.vary] = None if candidate.name == NONE and plan.vary == "ffn" else candidate
    settings = plan.settings.model_copy(update={"seed": seed})
    return RunSpec(task=task, ffn_dim=ffn_width, dropout=plan.dropout, settings=settings, **values)


def _fit_candidates(
    plan: ComparisonPlan, task_spec: ModuleSpec, candidates: list[ModuleSpec]
) -> Iterator[tuple[int | None, str]]:
    """Yield the FFN width of each candidate's model (None: the default), or why it cannot be
    built."""
    task = cached_task(task_spec)
    pads = needs_padding(task)
    target: int | None = None
    for candidate in candidates:  # the reference is the first
        spec = _run_spec(plan, task_spec, candidate, 0, None)
        try:
            if pads:
                check_mask(spec, build(model_config(spec, task)))
            if target is None or not plan.match_params or spec.ffn is None:
                count = count_parameters(spec, task)  # raises if the model cannot be built
                target = count if target is None else target
                yield None, ""
            else:
                yield matching_ffn_width(target, spec, task), ""
        except Unsupported as refusal:
            yield None, str(refusal)


def count_parameters(spec: RunSpec, task: Task) -> int:
    """Return the number of parameters of a run's model."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in build(model_config(spec, task)).parameters())


def matching_ffn_width(target: int, spec: RunSpec, task: Task) -> int | None:
    """Return the FFN width that brings the parameter count closest to `target`; None: the default.

    The count is linear in the width, so two widths determine it.
    """
    if count_parameters(spec, task) == target:
        return None
    one, two = (
        count_parameters(spec.model_copy(update={"ffn_dim": width}), task) for width in (1, 2)
    )
    return max(1, 1 + round((target - one) / (two - one)))
