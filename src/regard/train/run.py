"""A run: from words, a task, a mixer and settings, to a folder with the trained model and what came of it.

run/spec.json        the words
run/task.json        how the task reads texts, for using the model without the data
run/metrics.jsonl    the loss of each step, and the evaluations
run/checkpoints/     to go on from
run/model/           config.json and model.safetensors
run/result.json      what came of it, written last: a run that has one is over
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from regard.models import Config, Model, Part, build, save
from regard.models.config import Classify, Closed, Depth, Language, Match, Share, Size, Tag, Tokens
from regard.models.save import fill
from regard.tasks import Task, task
from regard.tasks.base import SPLITS
from regard.train.average import Average
from regard.train.checkpoint import read_json, write_json
from regard.train.group import Group, joined
from regard.train.loop import Progress, Trainer
from regard.train.parallel import Placement
from regard.train.settings import Settings

SPEC, RESULT, MODEL, TASK = "spec.json", "result.json", "model", "task.json"
LEAST = 1.0  # seconds of training, at least
WRITING = 0.5  # seconds that the model takes to write, and the process to end
LOUD = {"sinusoid", "sinusoid_2d"}  # positions as large as 1: small embeddings would drown in them


class Spec(Closed):
    """A run in words.

    task      its name and arguments; `mixer` likewise
    hidden    of the feed-forward layers; None: four times the width
    position  of tokens; see `regard.models.parts.POSITIONS`
    settings  how to train
    threads   of the process; None: as many as torch takes
    """

    task: Part
    mixer: Part = Part(name="vanilla")
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    hidden: Size | None = None
    position: Part = Part(name="learned")
    dropout: Share = 0.0
    settings: Settings = Settings()
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


def kind_of(made: Task) -> Literal["encoder", "decoder", "pair"]:
    """What reads a task."""
    if made.output == "pair":
        return "pair"
    return "decoder" if made.causal else "encoder"


def head_for(made: Task) -> Language | Tag | Classify | Match:
    """What answers it."""
    if made.output == "pair":
        return Match(classes=made.classes)
    if made.output == "token":
        return Language() if made.speaks else Tag(classes=made.classes)
    return Classify(classes=made.classes, pooling="last" if made.causal else "mean")


def config_of(spec: Spec, made: Task) -> Config:
    """The model that a task wants, around the mixer."""
    ffn = Part(name="mlp", arguments={} if spec.hidden is None else {"hidden": spec.hidden})
    return Config(
        kind=kind_of(made), input=Tokens(vocab=made.vocab, scale=spec.position.name in LOUD), head=head_for(made),
        dim=spec.dim, heads=spec.heads, layers=spec.layers, length=made.length, mixer=[spec.mixer], ffn=[ffn],
        position=spec.position, dropout=spec.dropout,
    )  # fmt: skip


def task_of(spec: Spec) -> Task:
    """The task that a specification names."""
    return task(spec.task.name, **spec.task.arguments)


def execute(
    spec: Spec, folder: Path, watch: Callable[[Progress], None] = lambda progress: None, *, since: float | None = None
) -> dict[str, Any]:
    """Train, or go on where the folder stands; write the model and the result, and return the result.

    since   the time (of `time.time()`) from which the seconds in the settings count; None: from the first step on

    Under `torchrun` all processes call it and train one model together; the first one writes, and calls `watch`.
    """
    if (folder / RESULT).exists():
        return dict(read_json(folder / RESULT))
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    with joined():
        return trained(spec, folder, watch, since)


def trained(spec: Spec, folder: Path, watch: Callable[[Progress], None], since: float | None) -> dict[str, Any]:
    """The same, when the processes know of each other."""
    group, made = Group(), task_of(spec)
    torch.manual_seed(spec.settings.seed)
    idle = peak_bytes()
    model = build(config_of(spec, made))
    group.first(lambda: prepare(folder, spec, made))
    trainer = Trainer(model, made, lasting(spec.settings, since), folder=folder, watch=watch)
    result = trainer.run()
    with Average.swapped(trainer.average, model):
        whole = portable(model, trainer.place)
    found = {**result._asdict(), "memory": peak_bytes() - idle, "environment": environment() | {"processes": group.world}}
    group.first(lambda: finish(whole, found, folder))
    return found


def lasting(settings: Settings, since: float | None) -> Settings:
    """With the seconds that are left: to start a process and to read the data takes some of them."""
    if settings.seconds is None or since is None:
        return settings
    left = settings.seconds - (time.time() - since) - WRITING
    return settings.model_copy(update={"seconds": max(LEAST, left)})


def prepare(folder: Path, spec: Spec, made: Task) -> None:
    """Write what is known before training; a folder whose run read other data is refused."""
    sizes = {split: made.size(split) for split in SPLITS}
    facts = {"name": spec.task.name, "metric": made.metric, "sizes": sizes, "facts": made.facts()}
    if (folder / TASK).exists() and read_json(folder / TASK) != facts:
        raise ValueError(f"the data of the run in {folder} have changed since it began: train into another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SPEC, spec.model_dump(mode="json"))
    write_json(folder / TASK, facts)


def portable(model: Model, place: Placement) -> Model:
    """The same model in one piece."""
    if place.group.world == 1:
        return model
    assert model.config is not None
    whole = build(model.config)
    fill(whole, place.collect())
    return whole


def finish(model: Model, found: dict[str, Any], folder: Path) -> None:
    """Write the model, and then the result."""
    for left in (folder / MODEL).glob(".*"):  # of a process that was killed while it wrote
        left.unlink()
    save(model, folder / MODEL)
    write_json(folder / RESULT, found)


def read_spec(folder: Path) -> Spec:
    """The words of a run."""
    try:
        return Spec.model_validate_json((folder / SPEC).read_bytes(), strict=False)
    except OSError:
        raise ValueError(f"{folder} is no run: it has no {SPEC}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{folder / SPEC}: {where}: {first['msg']}") from None


def peak_bytes() -> int:
    """The most memory that this process had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def environment() -> dict[str, Any]:
    """Where a number was measured."""
    return {
        "python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system(),
    }  # fmt: skip
