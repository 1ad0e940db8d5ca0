"""A run: from words, a task, a mixer and settings, to a folder with the trained model and what came of it.

run/spec.json        the words
run/task.json        how the task reads texts, for using the model without the data
run/metrics.jsonl    the loss of each step, and the evaluations
run/checkpoints/     to go on from
run/model/           config.json and model.safetensors
run/result.json      what came of it, written last: a run that has one is over
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from regard.environment import environment, peak_bytes
from regard.json_files import read_json, write_json
from regard.models import Model, ModelConfig, ModuleSpec, build, save
from regard.models.config import (
    Depth,
    LMHeadConfig,
    MatchingHeadConfig,
    SequenceClassificationHeadConfig,
    Share,
    Size,
    StrictModel,
    TokenClassificationHeadConfig,
    TokenInput,
)
from regard.models.serialization import load_tensors
from regard.tasks import Task, create_task
from regard.tasks.base import SPLITS
from regard.train.distributed import WorkerGroup, init_distributed
from regard.train.ema import WeightEMA
from regard.train.settings import TrainSettings
from regard.train.strategy import ParallelStrategy
from regard.train.trainer import Trainer, TrainProgress

SPEC_FILE, RESULT_FILE, MODEL_DIR, TASK_FILE = "spec.json", "result.json", "model", "task.json"
LEAST = 1.0  # seconds of training, at least
WRITING = 0.5  # seconds that the model takes to write, and the process to end
LOUD = {"sinusoid", "sinusoid_2d"}  # positions as large as 1: small embeddings would drown in them


class RunSpec(StrictModel):
    """A run in words.

    task      its name and arguments; `mixer` likewise
    hidden    of the feed-forward layers; None: four times the width
    position  of tokens; see `regard.models.components.POSITIONS`
    settings  how to train
    threads   of the process; None: as many as torch takes
    """

    task: ModuleSpec
    mixer: ModuleSpec = ModuleSpec(name="vanilla")
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    hidden: Size | None = None
    position: ModuleSpec = ModuleSpec(name="learned")
    dropout: Share = 0.0
    settings: TrainSettings = TrainSettings()
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


def model_kind(made: Task) -> Literal["encoder", "decoder", "pair"]:
    """What reads a task."""
    if made.output == "pair":
        return "pair"
    return "decoder" if made.causal else "encoder"


def head_config(
    made: Task,
) -> (
    LMHeadConfig
    | TokenClassificationHeadConfig
    | SequenceClassificationHeadConfig
    | MatchingHeadConfig
):
    """What answers it."""
    if made.output == "pair":
        return MatchingHeadConfig(classes=made.classes)
    if made.output == "token":
        return (
            LMHeadConfig()
            if made.is_language_model
            else TokenClassificationHeadConfig(classes=made.classes)
        )
    return SequenceClassificationHeadConfig(
        classes=made.classes, pooling="last" if made.causal else "mean"
    )


def model_config(spec: RunSpec, made: Task) -> ModelConfig:
    """The model that a task wants, around the mixer."""
    ffn = ModuleSpec(name="mlp", arguments={} if spec.hidden is None else {"hidden": spec.hidden})
    return ModelConfig(
        kind=model_kind(made),
        input=TokenInput(vocab_size=made.vocab_size, scale=spec.position.name in LOUD),
        head=head_config(made),
        dim=spec.dim,
        heads=spec.heads,
        layers=spec.layers,
        length=made.length,
        mixer=[spec.mixer],
        ffn=[ffn],
        position=spec.position,
        dropout=spec.dropout,
    )


def build_task(spec: RunSpec) -> Task:
    """The task that a specification names."""
    return create_task(spec.task.name, **spec.task.arguments)


def run_training(
    spec: RunSpec,
    folder: Path,
    watch: Callable[[TrainProgress], None] = lambda progress: None,
    *,
    since: float | None = None,
) -> dict[str, Any]:
    """Train, or go on where the folder stands; write the model and the result, and return the result.

    since   the time (of `time.time()`) from which the seconds in the settings count; None: from the first step on

    Under `torchrun` all processes call it and train one model together; the first one writes, and calls `watch`.
    """
    if (folder / RESULT_FILE).exists():
        return dict(read_json(folder / RESULT_FILE))
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    with init_distributed():
        return trained(spec, folder, watch, since)


def trained(
    spec: RunSpec, folder: Path, watch: Callable[[TrainProgress], None], since: float | None
) -> dict[str, Any]:
    """The same, when the processes know of each other."""
    group, made = WorkerGroup(), build_task(spec)
    torch.manual_seed(spec.settings.seed)
    idle = peak_bytes()
    model = build(model_config(spec, made))
    group.first(lambda: prepare(folder, spec, made))
    trainer = Trainer(model, made, lasting(spec.settings, since), folder=folder, watch=watch)
    result = trainer.run()
    with WeightEMA.swapped(trainer.average, model):
        whole = portable(model, trainer.place)
    found = {
        **result._asdict(),
        "memory": peak_bytes() - idle,
        "environment": environment() | {"processes": group.world},
    }
    group.first(lambda: finish(whole, found, folder))
    return found


def lasting(settings: TrainSettings, since: float | None) -> TrainSettings:
    """With the seconds that are left: to start a process and to read the data takes some of them."""
    if settings.seconds is None or since is None:
        return settings
    left = settings.seconds - (time.time() - since) - WRITING
    return settings.model_copy(update={"seconds": max(LEAST, left)})


def prepare(folder: Path, spec: RunSpec, made: Task) -> None:
    """Write what is known before training; a folder whose run read other data is refused."""
    sizes = {split: made.size(split) for split in SPLITS}
    facts = {"name": spec.task.name, "metric": made.metric, "sizes": sizes, "facts": made.facts()}
    if (folder / TASK_FILE).exists() and read_json(folder / TASK_FILE) != facts:
        raise ValueError(
            f"the data of the run in {folder} have changed since it began: train into another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
    write_json(folder / TASK_FILE, facts)


def portable(model: Model, place: ParallelStrategy) -> Model:
    """The same model in one piece."""
    if place.group.world == 1:
        return model
    assert model.config is not None
    whole = build(model.config)
    load_tensors(whole, place.collect())
    return whole


def finish(model: Model, found: dict[str, Any], folder: Path) -> None:
    """Write the model, and then the result."""
    for left in (folder / MODEL_DIR).glob(".*"):  # of a process that was killed while it wrote
        left.unlink()
    save(model, folder / MODEL_DIR)
    write_json(folder / RESULT_FILE, found)


def read_spec(folder: Path) -> RunSpec:
    """The words of a run."""
    try:
        return RunSpec.model_validate_json((folder / SPEC_FILE).read_bytes(), strict=False)
    except OSError:
        raise ValueError(f"{folder} is no run: it has no {SPEC_FILE}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{folder / SPEC_FILE}: {where}: {first['msg']}") from None
