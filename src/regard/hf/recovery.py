"""`recover`: train a swapped model back towards the original, on texts without labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.deep_init import evaluation_mode
from regard.device import autocast, resolve_device, resolve_dtype
from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.folder_lock import LOCK_FILE, lock_folder
from regard.hf.distillation import (
    DistillationLoss,
    LayerDistillation,
    MaskedLMLoss,
    ModelDistillation,
    UnlabelledExamples,
)
from regard.hf.drift import LayerChange, SwapReport, block_path, measure_drift, model_outputs
from regard.hf.files import swapped_layers
from regard.hf.model_inputs import build_inputs, encode_texts, max_length
from regard.hf.modules import Replacement
from regard.hf.swapping import BEFORE_RECOVERY, find_sites, restore
from regard.json_files import read_json, write_json
from regard.models.config import ModuleSpec
from regard.output_folders import check_output_folder
from regard.progress import progress_bar
from regard.train.distributed import is_main_process
from regard.train.settings import UNLIMITED_STEPS, TrainSettings
from regard.train.trainer import Trainer

LAYER_SHARE = 0.3  # of the time is for single layers
VALID_SHARE, MAX_VALID = 0.1, 100  # of the examples are held out
MIN_EXAMPLES = 8
SETTINGS = {
    "eval_every": 50,
    "save_every": 50,
    "eval_examples": 64,
    "warmup_steps": 20,
    "weight_decay": 0.0,
}
RECOVERY_NAME = "recovery.json"
ProgressCallback = Callable[[str, float, float], None]


@dataclass
class RecoveryResult:
    """The result of `recover`, measured on held-out examples.

    Attributes:
        before, after: Drift from the original model. None for objective="masked".
        curve: Evaluations with stage, step, seconds and score. The score is the cosine similarity
            of layer outputs in stage "layers", that of model outputs in stage "model", and the
            accuracy in stage "masked".
    """

    before: SwapReport | None
    after: SwapReport | None
    curve: list[dict[str, Any]]
    steps: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        reports = {"before": self.before, "after": self.after}
        return {
            **{
                name: None if report is None else report.as_dict()
                for name, report in reports.items()
            },
            "curve": self.curve,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        rows = [
            f"{row['stage']:<7} step {row['step']:>6}  {row['seconds']:>7.1f} s  {row['score']:.4f}"
            for row in self.curve
        ]
        if self.before is not None and self.after is not None:
            for layer, cosine in self.before.cosine.items():
                rows.append(
                    f"layer {layer}: cosine {cosine:.4f} before, {self.after.cosine[layer]:.4f} "
                    "after"
                )
            rows.append(
                f"{self.before.kind}: cosine {self.before.output:.4f} before, "
                f"{self.after.output:.4f} after"
            )
        return "\n".join(rows)


def recover(
    model: nn.Module,
    data: Sequence[Any],
    *,
    tokenizer: Any = None,
    objective: str = "match",
    seconds: float | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    batch_size: int = 16,
    length: int | None = None,
    lr: float = 3e-4,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str = "float32",
    callback: ProgressCallback | None = None,
) -> RecoveryResult:
    """Train a swapped model towards the original, in place, on texts without labels.

    First each new layer learns the output of the old one on the inputs of the old one. Then all
    blocks with a new layer learn the hidden states and the output of the original model. A tenth of
    the data is held out. `restore` still restores the original bit for bit.

    Args:
        data: Texts (with `tokenizer`; long ones are split), token ids (n) each, or float tensors of
            one shape.
        objective: "match" (the original model) or "masked" (masked language modelling, e.g. after
            `extend_positions`).
        seconds: Time limit. Give either `seconds` or `steps`.
        folder: Folder for checkpoints. The same call resumes an interrupted run.
        length: Maximum tokens of an example. Default: that of the model.
        lr: Peak learning rate.
        device: Move the model there first: "auto", "cpu", "cuda", "cuda:1" or "mps". Default: it
            stays where it is.
        dtype: "float32", or "bfloat16" or "float16" to train in mixed precision.
        callback: Called with the stage, the completed fraction and the loss. Default: a progress
            bar on a terminal.
    """
    check_choice("objective", objective, ("match", "masked"))
    check_int(1, batch_size=batch_size)
    check_positive("lr", lr)
    if (seconds is None) == (steps is None):
        raise ValueError("Give either seconds or steps.")
    if seconds is not None:
        check_positive("seconds", seconds)
    if steps is not None:
        check_int(1, steps=steps)
    layers = {site.path: site.module for site in find_sites(model) if site.is_swapped}
    if not layers and objective == "match":
        raise ValueError("No layer of this model was swapped, so there is nothing to recover.")
    if device is not None:
        model.to(resolve_device(device))
    own_device = next(model.parameters()).device
    autocast_dtype = resolve_dtype(dtype, own_device)
    examples = build_examples(model, data, tokenizer, length)

    facts = {
        "objective": objective,
        "layers": json.loads(json.dumps(swapped_layers(model), default=repr)),
        "texts": digest([*examples.splits["train"], *examples.splits["valid"]]),
    }
    teacher, stages = model, []
    if objective == "masked":
        blocks = [""]  # the whole model
        stages.append(("masked", build_masked_lm(model, tokenizer), 1.0))
    else:
        blocks = list(dict.fromkeys(map(block_path, layers)))
        teacher = restore(deepcopy(model)).requires_grad_(False).eval()
        stages.append(("layers", LayerDistillation(teacher, layers), LAYER_SHARE))
        stages.append(("model", ModelDistillation(teacher, model, blocks), 1 - LAYER_SHARE))
        facts["weights"] = digest(teacher.state_dict().values())
    if folder is not None:
        check_resumed_folder(Path(folder), facts)
    before = None
    if objective == "match":
        with autocast(own_device, autocast_dtype):
            before = compare_with_teacher(model, teacher, examples)
    remember_weights(model, blocks)

    curve: list[dict[str, Any]] = []
    done, spent = 0, 0.0
    with (
        nullcontext() if folder is None or not is_main_process() else lock_folder(Path(folder)),
        train_only(model, blocks),
        without_caches(model, teacher),
        progress(callback) as report,
    ):
        for stage, loss, share in stages:
            settings: dict[str, Any] = {
                **SETTINGS,
                "batch_size": batch_size,
                "lr": lr,
                "seed": seed,
                "device": str(own_device),
                "dtype": dtype,
            }
            settings["steps"] = UNLIMITED_STEPS if steps is None else max(1, round(steps * share))
            settings["max_seconds"] = None if seconds is None else seconds * share
            trainer = Trainer(
                loss,
                examples,
                TrainSettings(**settings),
                folder=None if folder is None else Path(folder) / stage,
                on_step=lambda p, stage=stage: report(stage, p.fraction, p.loss),  # type: ignore[misc]
            )
            with evaluation_mode(loss):
                curve.append(
                    {
                        "stage": stage,
                        "step": done,
                        "seconds": spent,
                        "score": trainer.evaluate("valid").value,
                    }
                )
                result = trainer.run()
            for row in result.curve:
                step, time = done + int(row["step"]), spent + row["seconds"]
                curve.append({"stage": stage, "step": step, "seconds": time, "score": row["valid"]})
            done, spent = done + result.steps, spent + result.seconds
    after = None
    if objective == "match":
        with autocast(own_device, autocast_dtype):
            after = compare_with_teacher(model, teacher, examples)
    return RecoveryResult(before, after, curve, done, spent)


def build_masked_lm(model: nn.Module, tokenizer: Any) -> DistillationLoss:
    """Masked language modelling for a model with a masked LM head."""
    mask_token_id = getattr(tokenizer, "mask_token_id", None)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if mask_token_id is None or vocab_size is None or head() is None:
        raise Unsupported(
            'objective="masked" needs a tokenizer with a mask token and a masked LM model such as '
            "BertForMaskedLM."
        )
    return MaskedLMLoss(model, mask_token_id, vocab_size, tokenizer.all_special_ids)


def build_examples(
    model: nn.Module, data: Any, tokenizer: Any, length: int | None
) -> UnlabelledExamples:
    """Texts as token ids, or tensors as they are, with some held out."""
    if isinstance(data, str | Tensor) or not isinstance(data, Sequence):
        raise TypeError(f"Expected texts or tensors in a list, got {type(data).__name__}.")
    limit = max_length(model)
    if length is not None and limit is not None and length > limit:
        raise ValueError(
            f"length={length}, but the model has {limit} positions: `extend_positions` adds more."
        )
    length = length or limit
    if any(isinstance(item, str) for item in data):
        rows = [
            row for row in encode_texts(list(data), tokenizer, length, split=True) if len(row) > 2
        ]
    else:
        rows = [
            row if row.is_floating_point() else row[:length] for row in map(torch.as_tensor, data)
        ]
    if len(rows) < MIN_EXAMPLES:
        raise ValueError(
            f"{len(rows)} examples are too few: at least {MIN_EXAMPLES} are needed, a few hundred "
            "are better."
        )
    if any(row.is_floating_point() and not bool(torch.isfinite(row).all()) for row in rows):
        raise ValueError("The data contain NaN or infinity.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = min(MAX_VALID, max(1, round(VALID_SHARE * len(rows))))
    pad_token_id = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    train, valid = [rows[i] for i in order[held_out:]], [rows[i] for i in order[:held_out]]
    return UnlabelledExamples(train, valid, pad_token_id)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the contents of tensors."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_resumed_folder(folder: Path, facts: dict[str, Any]) -> None:
    """Raise if the folder holds a run with another objective, other mixers, texts or weights."""
    check_output_folder(folder, "recovery", RECOVERY_NAME, others=[LOCK_FILE])
    path = folder / RECOVERY_NAME
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)
    elif (before := read_json(path)) != facts:
        other = next(
            key for key in facts if not isinstance(before, dict) or before.get(key) != facts[key]
        )
        raise ValueError(
            f"{folder} contains a recovery with other {other}: use another folder, or remove it."
        )


def remember_weights(model: nn.Module, blocks: Sequence[str]) -> None:
    """Store the weights that will be trained outside the new layers, for `restore`."""
    new = {
        id(p)
        for module in model.modules()
        if isinstance(module, Replacement)
        for name, p in module.named_parameters()
        if not name.startswith("kept.")  # those are weights of the original
    }
    names = {
        id(p): name.replace(".kept.", ".") for name, p in model.named_parameters()
    }  # as in the original
    before: dict[str, Tensor] = model.__dict__.setdefault(BEFORE_RECOVERY, {})
    for path in blocks:
        for p in model.get_submodule(path).parameters():
            if id(p) not in new and id(p) in names:
                before.setdefault(names[id(p)], p.detach().clone())


def compare_with_teacher(
    model: nn.Module, teacher: nn.Module, examples: UnlabelledExamples
) -> SwapReport:
    """The drift from the original model on held-out examples."""
    report = SwapReport([])
    for site in find_sites(model):
        if isinstance(site.module, Replacement):
            spec = ModuleSpec.model_construct(**site.module.spec)
            report.changes.append(
                LayerChange(site.layer, site.path, type(site.old).__name__, spec, (), 0)
            )
    blocks, device = [change.block for change in report.changes], next(model.parameters()).device
    sample = []
    for start in range(0, examples.size("valid"), 8):
        batch = examples.batch("valid", range(start, min(start + 8, examples.size("valid"))))
        x, mask = batch.inputs["x"], batch.inputs["mask"]
        assert x is not None
        sample.append(build_inputs(model, x, mask).to(device))
    with without_caches(model, teacher):
        measure_drift(
            report,
            sample,
            lambda inputs: model_outputs(teacher, blocks, inputs),
            lambda inputs: model_outputs(model, blocks, inputs),
        )
    return report


# ------------------------------------------------------------------------------ around the training
@contextmanager
def train_only(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Freeze all parameters outside these blocks."""
    trained = {id(p) for path in blocks for p in model.get_submodule(path).parameters()}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for p, flag in flags:
        p.requires_grad_(flag and id(p) in trained)
    try:
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


@contextmanager
def without_caches(*models: nn.Module) -> Iterator[None]:
    """Disable caches of transformers, and torch's fast path around its attention."""
    configs: list[Any] = [
        m.config for m in models if hasattr(getattr(m, "config", None), "use_cache")
    ]
    use_cache = [config.use_cache for config in configs]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for config, value in zip(configs, use_cache, strict=True):
            config.use_cache = value


@contextmanager
def progress(callback: ProgressCallback | None) -> Iterator[ProgressCallback]:
    """The user's callback, or one that updates a progress bar."""
    if callback is not None:
        yield callback
        return
    with progress_bar() as bar:
        yield lambda stage, fraction, loss: bar.update(
            fraction, f"{stage}, loss {loss:.4f}", stage=stage
        )
