"""A training run: a folder made from a task, a mixer and settings.

run/spec.json        the specification: task, mixer, model size, settings
run/task.json        tokenizer and labels of the task, to use the model without its data
run/metrics.jsonl    the loss of each step, and the evaluations
run/checkpoints/     checkpoints to resume from
run/model/           config.json and model.safetensors
run/result.json      the result, written last: a run with this file is finished
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from regard.device import describe_device, peak_memory, reset_peak_memory
from regard.environment import environment, peak_bytes
from regard.errors import format_validation_error
from regard.json_files import read_json, write_json
from regard.models import Model, ModelConfig, ModuleSpec, build, save
from regard.models.config import (
    Depth,
    LMHeadConfig,
    MatchingHeadConfig,
    Probability,
    SequenceClassificationHeadConfig,
    Size,
    StrictModel,
    TokenClassificationHeadConfig,
    TokenInput,
)
from regard.models.serialization import load_tensors
from regard.tasks import Task, create_task
from regard.tasks.base import SPLITS
from regard.train.distributed import WorkerGroup, init_distributed
from regard.train.ema import averaged_weights
from regard.train.settings import TrainSettings
from regard.train.trainer import Trainer, TrainProgress

SPEC_FILE, RESULT_FILE, MODEL_DIR, TASK_FILE = "spec.json", "result.json", "model", "task.json"
MIN_SECONDS = 1.0  # of training, however late the run starts
EXIT_SECONDS = 0.5  # to write the model and end the process


class RunSpec(StrictModel):
    """Everything that defines a run.

    Args:
        task: Name and arguments of the task.
        mixer: Name and arguments of the recipe.
        dim: Model width.
        heads: Number of attention heads.
        layers: Number of layers.
        ffn_dim: Width of the feed-forward layers. None: 4 * dim.
        position: Positional encoding; see `regard.position`.
        dropout: Dropout probability.
        settings: How to train.
        threads: Number of PyTorch threads. None: PyTorch's default.
    """

    task: ModuleSpec
    mixer: ModuleSpec = ModuleSpec(name="vanilla")
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    ffn_dim: Size | None = None
    position: ModuleSpec = ModuleSpec(name="learned")
    dropout: Probability = 0.0
    settings: TrainSettings = TrainSettings()
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


def model_config(spec: RunSpec, task: Task) -> ModelConfig:
    """The model for a task: an encoder, a decoder or a dual encoder with a head."""
    kind: Literal["encoder", "decoder", "dual_encoder"] = "decoder" if task.causal else "encoder"
    head: (
        LMHeadConfig
        | TokenClassificationHeadConfig
        | SequenceClassificationHeadConfig
        | MatchingHeadConfig
    )
    if task.output == "pair":
        kind, head = "dual_encoder", MatchingHeadConfig(num_classes=task.classes)
    elif task.output == "sequence":
        pooling: Literal["last", "mean"] = "last" if task.causal else "mean"
        head = SequenceClassificationHeadConfig(num_classes=task.classes, pooling=pooling)
    elif task.is_language_model:
        head = LMHeadConfig()
    else:
        head = TokenClassificationHeadConfig(num_classes=task.classes)
    ffn = {} if spec.ffn_dim is None else {"hidden": spec.ffn_dim}
    # sinusoids have amplitude 1: unscaled embeddings would be negligible beside them
    scale = spec.position.name in ("sinusoid", "sinusoid_2d")
    return ModelConfig(
        kind=kind,
        input=TokenInput(vocab_size=task.vocab_size, scale_embeddings=scale),
        head=head,
        dim=spec.dim,
        heads=spec.heads,
        layers=spec.layers,
        length=task.length,
        mixer=[spec.mixer],
        ffn=[ModuleSpec(name="mlp", arguments=ffn)],
        position=spec.position,
        dropout=spec.dropout,
    )


def build_task(spec: RunSpec) -> Task:
    """The task of a run."""
    return create_task(spec.task.name, **spec.task.arguments)


def run_training(
    spec: RunSpec,
    folder: str | Path,
    on_step: Callable[[TrainProgress], None] = lambda progress: None,
    *,
    start_time: float | None = None,
) -> dict[str, Any]:
    """Train, or resume the run in a folder; write the model and the result, and return the result.

    Under `torchrun`, all processes call this and train one model. Only the main process writes
    files and calls `on_step`.

    Args:
        start_time: `time.time()` from which `max_seconds` counts. None: from the first step.
    """
    folder = Path(folder)
    if (folder / RESULT_FILE).exists():
        return dict(read_json(folder / RESULT_FILE))
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    with init_distributed(device=spec.settings.device):
        group = WorkerGroup(spec.settings.device)
        task = build_task(spec)
        torch.manual_seed(spec.settings.seed)
        reset_peak_memory(group.device)
        idle_bytes = device_peak_bytes(group.device)
        model = build(model_config(spec, task))
        group.run_on_main(lambda: _write_spec(folder, spec, task))
        settings = spec.settings
        if settings.max_seconds is not None and start_time is not None:
            left = settings.max_seconds - (time.time() - start_time) - EXIT_SECONDS
            settings = settings.model_copy(update={"max_seconds": max(MIN_SECONDS, left)})
        trainer = Trainer(model, task, settings, folder=folder, on_step=on_step)
        trained = trainer.run()._asdict()
        peak = device_peak_bytes(group.device)
        result = {
            **trained,
            "peak_bytes": None if peak is None or idle_bytes is None else peak - idle_bytes,
            "environment": environment()
            | {"processes": group.world_size, "device": describe_device(group.device)},
        }
        with averaged_weights(trainer.ema, model):
            full_model = _gather_model(model, trainer)
        group.run_on_main(lambda: _write_result(full_model, result, folder))
        return result


def device_peak_bytes(device: torch.device) -> int | None:
    """Peak memory on a device; for the CPU, of the process, or None where it is unknown."""
    return peak_bytes() if device.type == "cpu" else peak_memory(device)


def _write_spec(folder: Path, spec: RunSpec, task: Task) -> None:
    """Write spec.json and task.json; refuse a folder whose run had other data."""
    content = {
        "name": spec.task.name,
        "metric": task.metric,
        "sizes": {split: task.size(split) for split in SPLITS},
        "processor": task.processor_dict(),
    }
    if (folder / TASK_FILE).exists() and read_json(folder / TASK_FILE) != content:
        raise ValueError(
            f"The data of the run in {folder} changed since it started: train into another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
    write_json(folder / TASK_FILE, content)


def _gather_model(model: Model, trainer: Trainer) -> Model:
    """The model with all its weights in this process."""
    if trainer.group.world_size == 1:
        return model
    assert model.config is not None
    full_model = build(model.config)
    load_tensors(full_model, trainer.strategy.full_state())
    return full_model


def _write_result(model: Model, result: dict[str, Any], folder: Path) -> None:
    for left_over in (folder / MODEL_DIR).glob(".*"):  # of a process that was killed while writing
        left_over.unlink()
    save(model, folder / MODEL_DIR)
    write_json(folder / RESULT_FILE, result)


def read_spec(folder: str | Path) -> RunSpec:
    """The specification of the run in a folder."""
    folder = Path(folder)
    try:
        return RunSpec.model_validate_json((folder / SPEC_FILE).read_bytes(), strict=False)
    except OSError:
        raise ValueError(f"{folder} is not a run: it has no {SPEC_FILE}.") from None
    except ValidationError as error:
        raise ValueError(f"{folder / SPEC_FILE}: {format_validation_error(error)}") from None
