"""A training run: a folder made from a task, a mixer and settings.

run/spec.json        the specification: task, mixer, model size, settings
run/task.json        tokenizer and labels of the task, to use the model without its data
run/metrics.jsonl    the loss of each step, and the evaluations
run/checkpoints/     checkpoints to resume from
run/model/           config.json and model.safetensors
run/test.safetensors the statistics of each test example, by metric
run/result.json      the result, written last: a run with this file is finished
run/lock             locked while a process works in the folder
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors.torch import save as serialize

from regard.device import describe_device, peak_memory, reset_peak_memory
from regard.environment import environment, peak_bytes
from regard.errors import Unsupported, describe_stored_error, format_validation_error
from regard.folder_lock import LOCK_FILE, lock_folder
from regard.json_files import PARTIAL_PREFIX, CorruptFile, name_file, read_json, write_json
from regard.models import Model, ModelConfig, ModuleSpec, build, save
from regard.models.config import (
    Depth,
    EncoderConfig,
    InputConfig,
    Probability,
    RNNConfig,
    Size,
    StrictModel,
    TokenInput,
)
from regard.models.model import Seq2Seq, outer_mixers
from regard.models.serialization import (
    CONFIG_NAME,
    check_replaceable,
    load_tensors,
    read_config,
    read_small_text,
    remove_partial_files,
)
from regard.output_folders import check_output_folder
from regard.plugins import PluginFile, require_plugins
from regard.tasks import Task, create_task, find_task
from regard.tasks.base import SPLITS, ModelNeeds
from regard.tasks.tokenizers import RUN_PREFIX
from regard.train.checkpoint import list_checkpoints
from regard.train.distributed import WorkerGroup, init_distributed
from regard.train.evaluation import Evaluation
from regard.train.overview import RunOverview, describe_run
from regard.train.plateau import constant_loss
from regard.train.settings import TrainSettings
from regard.train.trainer import CHECKPOINTS, Trainer, TrainProgress
from regard.train.transfer import (
    WeightTransfer,
    count_shared_tokens,
    same_targets,
    transfer_weights,
)

SPEC_FILE, RESULT_FILE, MODEL_DIR, TASK_FILE = "spec.json", "result.json", "model", "task.json"
TEST_FILE = "test.safetensors"
PADDING_SAMPLE = 64  # training examples checked for different lengths
MIN_SECONDS = 1.0  # of training, however late the run starts
EXIT_SECONDS = 0.5  # to write the model and end the process


class ModelSettings(StrictModel):
    """The parts and the size of the model of a run; the task decides the rest.

    Args:
        mixer: Name and arguments of the recipe.
        dim: Model width.
        heads: Number of attention heads.
        layers: Number of layers.
        ffn_dim: Width of the feed-forward layers. None: 4 * dim.
        ffn: Feed-forward layer. None: the layers have none.
        position: Positional encoding; see `regard.position`.
        norm: Norm of the layers.
        residual: Residual connection: where the norm is, and how outputs are added.
        stack: How the layers are combined. None: as the mixer needs, else one after the other.
        dropout: Dropout probability.
        encoder_mixer: Mixer of the encoder of a model with encoder and decoder. None: as the
            decoder, which must be causal.
        encoder_layers: Layers of that encoder. None: as the decoder.
        cross: Recipe of the cross-attention between them. None: dense attention.
        rnn: A recurrent encoder and decoder instead; `dim` and `dropout` are then all that the
            model has. None: attention layers.
    """

    mixer: ModuleSpec = ModuleSpec(name="vanilla")
    dim: Size = 64
    heads: Size = 4
    layers: Depth = 2
    ffn_dim: Size | None = None
    ffn: ModuleSpec | None = ModuleSpec(name="mlp")
    position: ModuleSpec = ModuleSpec(name="learned")
    norm: ModuleSpec = ModuleSpec(name="layer")
    residual: ModuleSpec = ModuleSpec(name="pre")
    stack: ModuleSpec | None = None
    dropout: Probability = 0.0
    encoder_mixer: ModuleSpec | None = None
    encoder_layers: Depth | None = None
    cross: ModuleSpec | None = None
    rnn: RNNConfig | None = None


# what a recurrent model does not have
ATTENTION_SETTINGS = tuple(
    name for name in ModelSettings.model_fields if name not in ("dim", "dropout", "rnn")
)


def read_model_settings(path: str | Path) -> dict[str, Any]:
    """The settings that a JSON file gives, by name: `{"dim": 128, "ffn": "swiglu", ...}`."""
    text = read_small_text(Path(path).expanduser())
    try:
        settings = ModelSettings.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path}: {format_validation_error(error)}") from None
    return {name: getattr(settings, name) for name in settings.model_fields_set}


class RunSpec(ModelSettings):
    """Everything that defines a run: the model (`ModelSettings`), the task and how to train.

    Args:
        task: Name and arguments of the task.
        settings: How to train.
        pretrained: Folder of the run whose weights the model starts from. None: none.
        plugins: Python files that register its recipes or its task.
        threads: Number of PyTorch threads. None: PyTorch's default.
    """

    task: ModuleSpec
    settings: TrainSettings = TrainSettings()
    pretrained: str | None = None
    plugins: tuple[PluginFile, ...] = ()
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class CurveRow(BaseModel):
    """One evaluation in result.json."""

    model_config = ConfigDict(strict=True, extra="allow")

    step: Count
    seconds: FiniteFloat
    valid: FiniteFloat
    loss: FiniteFloat


class StoredResult(BaseModel):
    """The values of result.json that other commands read, to validate a file; see `TrainResult`."""

    model_config = ConfigDict(strict=True, extra="allow")

    steps: Count
    seconds: FiniteFloat
    tokens: Count
    parameters: Count
    loss: FiniteFloat
    best: FiniteFloat
    best_step: Count | None = None
    test: FiniteFloat | None
    examples: Count
    metrics: dict[str, FiniteFloat]
    metric: str
    higher_is_better: bool
    stopped: str
    curve: list[CurveRow]
    peak_bytes: Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)] | None
    environment: dict[str, Any]


def model_config(spec: RunSpec, task: Task) -> ModelConfig:
    """The model for a task: what the task needs, with the mixer and the size of the run."""
    needs = task.needs
    if needs.kind != "seq2seq":
        for name in ("encoder_mixer", "encoder_layers", "cross", "rnn"):
            if getattr(spec, name) is not None:
                raise ValueError(
                    f"{name} is for tasks whose model has an encoder and a decoder, such as "
                    f"translate; that of {spec.task.name} is of kind {needs.kind!r}."
                )
    if needs.draw is not None:
        return draw_config(spec, needs)
    if spec.rnn is not None:
        return rnn_config(spec, task)
    ffn = spec.ffn
    if spec.ffn_dim is not None:
        if ffn is None:
            raise ValueError("ffn_dim is the width of feed-forward layers, and the model has none.")
        ffn = ModuleSpec(name=ffn.name, arguments={**ffn.arguments, "hidden": spec.ffn_dim})
    source, target = (
        _scale_embeddings(each, spec.position) for each in (needs.input, needs.target)
    )
    assert source is not None
    encoder = None
    if spec.encoder_mixer is not None or spec.encoder_layers is not None:
        encoder = EncoderConfig(
            layers=spec.encoder_layers or spec.layers,
            mixer=[spec.encoder_mixer or spec.mixer],
            stack=spec.stack,
        )
    return ModelConfig(
        kind=needs.kind,
        input=source,
        target=target,
        head=needs.head,
        dim=spec.dim,
        heads=spec.heads,
        layers=spec.layers,
        length=None if needs.input.fixed_length is not None else needs.length,
        mixer=[spec.mixer],
        ffn=[ffn],
        norm=spec.norm,
        residual=spec.residual,
        stack=spec.stack,
        position=spec.position,
        dropout=spec.dropout,
        seed=spec.settings.seed,
        encoder=encoder,
        cross=spec.cross,
    )


def refuse_attention_settings(names: Iterable[str], model: str = "rnn") -> None:
    """Raise a ValueError if one of the settings is none of a recurrent model."""
    for name in names:
        if name in ATTENTION_SETTINGS:
            raise ValueError(f"A recurrent model ({model}) has no {name}: leave it out.")


def changed_settings(spec: RunSpec) -> Iterable[str]:
    """Names of the settings of the model that are not the defaults."""
    for name, field in ModelSettings.model_fields.items():
        if getattr(spec, name) != field.get_default():
            yield name


def draw_config(spec: RunSpec, needs: ModelNeeds) -> ModelConfig:
    """The recurrent autoencoder for a task of images."""
    refuse_attention_settings(changed_settings(spec), "draw")
    if spec.dropout:
        raise ValueError("A recurrent model (draw) has no dropout: leave it out.")
    return ModelConfig(
        kind="draw",
        input=needs.input,
        dim=spec.dim,
        heads=1,
        layers=1,
        seed=spec.settings.seed,
        draw=needs.draw,
    )


def rnn_config(spec: RunSpec, task: Task) -> ModelConfig:
    """The recurrent model for a task of text pairs."""
    refuse_attention_settings(changed_settings(spec))
    needs = task.needs
    source, target = (
        # of standard deviation 1, as the states
        each.model_copy(update={"scale_embeddings": True}) if isinstance(each, TokenInput) else each
        for each in (needs.input, needs.target)
    )
    assert source is not None
    return ModelConfig(
        kind="seq2seq",
        input=source,
        target=target if isinstance(target, TokenInput) else None,
        head=needs.head,
        dim=spec.dim,
        heads=1,
        layers=1,
        length=needs.length,
        dropout=spec.dropout,
        seed=spec.settings.seed,
        rnn=spec.rnn,
    )


def needs_padding(task: Task) -> bool:
    """Whether examples of the training split differ in length."""
    batch = task.batch("train", range(min(PADDING_SAMPLE, task.size("train"))))
    return batch.inputs.get("mask") is not None


def check_mask(spec: RunSpec, model: Model) -> None:
    """Raise `Unsupported` if a mixer of the model takes no padding mask."""
    encoder = model.encoder if isinstance(model, Seq2Seq) else None
    of_encoder = [] if encoder is None else outer_mixers(encoder)
    for mixer in outer_mixers(model):
        if (reason := mixer.can.reason("mask")) is not None:
            in_encoder = any(mixer is each for each in of_encoder)
            named = (spec.encoder_mixer if in_encoder else None) or spec.mixer
            raise Unsupported(
                f"The examples of {spec.task.name} differ in length and {named.name} does not "
                f"support a padding mask: {reason}"
            )


def _scale_embeddings(source: InputConfig | None, position: ModuleSpec) -> Any:
    """Scale token embeddings for sinusoids, which have amplitude 1 and would outweigh them."""
    if isinstance(source, TokenInput) and position.name in ("sinusoid", "sinusoid_2d"):
        return source.model_copy(update={"scale_embeddings": True})
    return source


def build_task(spec: RunSpec) -> Task:
    """The task of a run."""
    return create_task(spec.task.name, **spec.task.arguments)


def run_training(
    spec: RunSpec,
    folder: str | Path,
    on_step: Callable[[TrainProgress], None] = lambda progress: None,
    *,
    on_start: Callable[[RunOverview], None] | None = None,
    start_time: float | None = None,
    on_warning: Callable[[str], None] = warnings.warn,
    restart: bool = False,
    extend: bool = False,
    task: Task | None = None,
) -> dict[str, Any]:
    """Train, or resume the run in a folder; write the model and the result, and return the result.

    Under `torchrun`, all processes call this and train one model. Only the main process writes
    files and calls `on_step`.

    Args:
        on_start: Called in the main process before the first step, with what the run will do.
        start_time: `time.time()` from which `max_seconds` counts. None: from the first step.
        on_warning: Called with a text in the main process, for example if a checkpoint is damaged.
        restart: Start at step 0 if the run has checkpoints, but none can be read.
        extend: Continue a finished run: its result is deleted once its data is read and its folder
            locked.
        task: The task of the run, if it has been created.
    """
    folder = Path(folder)
    check_run_folder(folder)
    if (folder / RESULT_FILE).exists() and not extend:
        return read_result(folder)
    check_replaceable(folder / MODEL_DIR)
    require_plugins(spec.plugins, folder, on_warning)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    with init_distributed(device=spec.settings.device), ExitStack() as stack:
        group = WorkerGroup(spec.settings.device)
        task = build_task(spec) if task is None else task
        if group.is_main:
            for note in task.notes():
                on_warning(note)
        torch.manual_seed(spec.settings.seed)
        reset_peak_memory(group.device)
        idle_bytes = device_peak_bytes(group.device)
        model = build(model_config(spec, task))
        if needs_padding(task):
            check_mask(spec, model)
        transfer = None
        if spec.pretrained is not None and (restart or not list_checkpoints(folder / CHECKPOINTS)):
            transfer = load_pretrained(model, task, Path(spec.pretrained), on_warning)
        group.run_on_main(lambda: stack.enter_context(_open_folder(folder, spec, task)))
        if extend:
            group.run_on_main(lambda: (folder / RESULT_FILE).unlink(missing_ok=True))
        settings = spec.settings
        if settings.max_seconds is not None and start_time is not None:
            left = settings.max_seconds - (time.time() - start_time) - EXIT_SECONDS
            settings = settings.model_copy(update={"max_seconds": max(MIN_SECONDS, left)})
        trainer = Trainer(
            model,
            task,
            settings,
            folder=folder,
            on_step=on_step,
            on_warning=on_warning,
            restart=restart,
        )
        if on_start is not None and group.is_main:
            overview = describe_run(
                task,
                settings,
                parameters=trainer.strategy.count_parameters(),
                device=group.device,
                processes=group.world_size,
                transfer="" if transfer is None else transfer.describe(),
                constant_loss=constant_loss(task, settings.label_smoothing),
            )
            on_start(overview)
        trained = trainer.run()._asdict()
        peak = device_peak_bytes(group.device)
        result = {
            **trained,
            "signatures": {each.name: each.signature for each in task.metrics if each.signature},
            "peak_bytes": None if peak is None or idle_bytes is None else peak - idle_bytes,
            "environment": environment()
            | {"processes": group.world_size, "device": describe_device(group.device)},
        }
        with trainer.kept_weights():
            full_model = _gather_model(model, trainer)
            group.run_on_main(lambda: _write_result(full_model, result, trainer.test, folder))
        return result


def load_pretrained(
    model: Model,
    task: Task,
    source: Path,
    on_warning: Callable[[str], None] = warnings.warn,
) -> WeightTransfer:
    """Copy the weights of a finished run into a model for a task; see `transfer_weights`."""
    spec = read_finished_spec(source, on_warning)
    processors = (
        read_processor(source),
        {} if task.processor is None else task.processor.to_dict(),
    )
    return transfer_weights(
        model,
        source / MODEL_DIR,
        shared_tokens=count_shared_tokens(
            processors, same_task=type(task) is find_task(spec.task.name)
        ),
        same_targets=same_targets(processors),
    )


def read_finished_spec(folder: Path, on_warning: Callable[[str], None] = warnings.warn) -> RunSpec:
    """The specification of a finished run; its plugins must have been imported."""
    spec = read_spec(folder)
    if not (folder / MODEL_DIR).is_dir():
        raise ValueError(
            f"Run {folder} is not finished. Resume it with: regard train --resume {folder}"
        )
    require_plugins(spec.plugins, folder, on_warning)
    return spec


def read_processor(folder: Path) -> dict[str, Any]:
    """The saved processor of a run; empty if its task has none."""
    path = folder / TASK_FILE
    task = read_json(path) if path.exists() else {"processor": {}}
    if not isinstance(task, dict) or not isinstance(task.get("processor"), dict):
        raise CorruptFile(f"{path} does not describe a task: it has no 'processor'.")
    return dict(task["processor"])


def inherit_arguments(folder: Path, task: ModuleSpec) -> ModuleSpec:
    """The task with what fine-tuning takes from a finished run, where the task takes it and it is
    not given: the tokenizer, and `causal` if the model of the run is a decoder."""
    parameters = inspect.signature(find_task(task.name)).parameters
    inherited: dict[str, Any] = {}
    if "tokenizer" in parameters and "tokenizer" in read_processor(folder):
        inherited["tokenizer"] = f"{RUN_PREFIX}{folder}"
    if "causal" in parameters and read_config(folder / MODEL_DIR / CONFIG_NAME).kind == "decoder":
        inherited["causal"] = True
    return task.model_copy(update={"arguments": inherited | task.arguments})


def device_peak_bytes(device: torch.device) -> int | None:
    """Peak memory on a device; for the CPU, of the process, or None where it is unknown."""
    return peak_bytes() if device.type == "cpu" else peak_memory(device)


def check_run_folder(folder: Path) -> None:
    """Raise ValueError if a folder contains files, but no run."""
    check_output_folder(folder, "run", SPEC_FILE, others=[LOCK_FILE])
    if (folder / SPEC_FILE).exists():
        read_spec(folder)


@contextmanager
def _open_folder(folder: Path, spec: RunSpec, task: Task) -> Iterator[None]:
    """Lock the folder, and write spec.json and task.json; refuse one whose run had other data."""
    content = {
        "name": spec.task.name,
        "metric": task.metric.name,
        "sizes": {split: task.size(split) for split in SPLITS},
        "processor": {} if task.processor is None else task.processor.to_dict(),
    }
    if (folder / TASK_FILE).exists() and read_json(folder / TASK_FILE) != content:
        raise ValueError(
            f"The data of the run in {folder} changed since it started: train into another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
        write_json(folder / TASK_FILE, content)
        yield


def _gather_model(model: Model, trainer: Trainer) -> Model:
    """The model with all its weights in this process."""
    if trainer.group.world_size == 1:
        return model
    assert model.config is not None
    full_model = build(model.config)
    load_tensors(full_model, trainer.strategy.full_state())
    return full_model


def _write_result(model: Model, result: dict[str, Any], test: Evaluation, folder: Path) -> None:
    remove_partial_files(folder / MODEL_DIR)
    save(model, folder / MODEL_DIR)
    tensors = {name: each.contiguous() for name, each in test.statistics.items()}
    partial = folder / f"{PARTIAL_PREFIX}{TEST_FILE}"
    if partial.is_symlink():
        partial.unlink()  # or its target would be written
    with name_file(partial):
        partial.write_bytes(serialize({**tensors, "indices": torch.tensor(test.indices)}))
        partial.replace(folder / TEST_FILE)
    write_json(folder / RESULT_FILE, result)


def read_spec(folder: str | Path) -> RunSpec:
    """The specification of the run in a folder."""
    folder = Path(folder)
    try:
        return RunSpec.model_validate_json((folder / SPEC_FILE).read_bytes(), strict=False)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a run: it has no {SPEC_FILE}.") from None
    except OSError as error:
        raise ValueError(f"Cannot read {folder / SPEC_FILE}: {error.strerror}.") from None
    except ValidationError as error:
        message = describe_stored_error(folder / SPEC_FILE, error, "the specification of a run")
        raise ValueError(message) from None


def read_result(folder: Path) -> dict[str, Any]:
    """The result of a finished run; raises `CorruptFile` if the file is damaged."""
    path = folder / RESULT_FILE
    result = read_json(path)
    try:
        StoredResult.model_validate(result)
    except ValidationError as error:
        message = describe_stored_error(path, error, "the result of a run")
        raise CorruptFile(message) from None
    return dict(result)
