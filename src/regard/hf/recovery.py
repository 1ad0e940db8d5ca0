"""recover: what a swap lost is won back from texts without labels."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.hf.distillation import DistillationLoss, Examples, Gaps, LayerByLayer, Whole
from regard.hf.drift import LayerChange, SwapReport, block_of, drifted, states
from regard.hf.modules import Replacement
from regard.hf.sample import max_length, model_inputs
from regard.hf.swapping import BEFORE, find_sites, restore
from regard.json_files import read_json, write_json
from regard.models.config import ModuleSpec
from regard.train.settings import TrainSettings
from regard.train.trainer import Trainer

FIRST = 0.3  # the share of the time for layers one by one
HELD = 0.1  # of the examples are not trained on
MOST_HELD = 100
OFTEN = {"eval_every": 50, "save_every": 50, "eval_examples": 64, "warmup_steps": 20}
EVER = 10**9  # steps, where time is the limit
OBJECTIVES = ("match", "masked")
FACTS = "recovery.json"
EVERYTHING = ""  # the path of the model itself
LEAST = 8  # examples


@dataclass
class RecoveryResult:
    """What was won back, on examples that were not trained on.

    before, after   the drift from the old model; None for masked modelling
    curve           evaluations in order: stage, step, seconds, and `near`: in "layers" the cosine of what the new layers give
                    with what the old ones do, in "whole" that of what comes out, in "masked" how many gaps were filled rightly
    """

    before: SwapReport | None
    after: SwapReport | None
    curve: list[dict[str, Any]]
    steps: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        reports = {
            name: None if r is None else r.as_dict()
            for name, r in (("before", self.before), ("after", self.after))
        }
        return {**reports, "curve": self.curve, "steps": self.steps, "seconds": self.seconds}

    def __str__(self) -> str:
        rows = [
            f"{row['stage']:<7} step {row['step']:>6}  {row['seconds']:>7.1f} s  {row['near']:.4f}"
            for row in self.curve
        ]
        if self.before is not None and self.after is not None:
            for layer, was in self.before.cosine.items():
                rows.append(
                    f"layer {layer}: cosine {was:.4f} before, {self.after.cosine[layer]:.4f} after"
                )
            rows.append(
                f"{self.before.kind}: cosine {self.before.output:.4f} before, {self.after.output:.4f} after"
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
    batch: int = 16,
    length: int | None = None,
    rate: float = 3e-4,
    seed: int = 0,
    watch: Callable[[str, float, float], None] | None = None,
) -> RecoveryResult:
    """Train a swapped model towards the one it was, in place, on texts without labels; part of them is held out to measure.

    First the new layers alone, each on what the old one was given (`FIRST` of the time); then all blocks with a new layer, on
    the hidden states after each of them and on what comes out.  `restore` still gives back the old model, bit by bit.

    data       texts, with `tokenizer`, of which long ones are cut up; or tensors: tokens (n) each, or all of one shape
    objective  "match": the old model; "masked": gaps in texts (Longformer's way, after `extend_positions`), for models with a
               head over the vocabulary
    seconds    or `steps`: how long
    folder     where checkpoints go: the same call again goes on where it was stopped
    length     the most tokens of an example; None: what the model is for
    watch      told of the stage, how much of it is over, and the loss; None: a bar on a terminal
    """
    check_choice("objective", objective, OBJECTIVES)
    check_int(1, batch=batch)
    check_positive("rate", rate)
    check_time(seconds, steps)
    new: dict[str, nn.Module] = {
        site.path: site.module for site in find_sites(model) if isinstance(site.module, Replacement)
    }
    if not new and objective == "match":
        raise ValueError("nothing was swapped in this model, so there is nothing to win back")
    examples = examples_of(model, data, tokenizer, length)
    blocks = [EVERYTHING] if objective == "masked" else list(dict.fromkeys(map(block_of, new)))
    teacher = (
        model if objective == "masked" else restore(deepcopy(model)).requires_grad_(False).eval()
    )
    plan = stages(model, teacher, new, blocks, objective, tokenizer)
    settings: dict[str, Any] = {
        "batch_size": batch,
        "lr": rate,
        "seed": seed,
        "weight_decay": 0.0,
        **OFTEN,
    }
    facts = {
        "objective": objective,
        "layers": standing(model),
        "texts": digest([*examples.splits["train"], *examples.splits["valid"]]),
    }
    check_folder(
        folder,
        facts
        if objective == "masked"
        else {**facts, "weights": digest(teacher.state_dict().values())},
    )
    before = None if objective == "masked" else compared(model, teacher, examples)
    remember(model, blocks)
    curve: list[dict[str, Any]] = []
    done, spent = 0, 0.0
    with frozen(model, blocks), uncached(model, teacher), watched(watch) as told:
        for stage, lesson, share in plan:
            limits: dict[str, Any] = {
                "steps": EVER if steps is None else max(1, round(steps * share))
            }
            limits["max_seconds"] = None if seconds is None else seconds * share
            trainer = Trainer(
                lesson,
                examples,
                TrainSettings(**settings, **limits),
                folder=None if folder is None else Path(folder) / stage,
                on_step=lambda p, stage=stage: told(stage, p.fraction, p.loss),  # type: ignore[misc]
            )
            with evaluated(lesson):
                start = {
                    "stage": stage,
                    "step": done,
                    "seconds": spent,
                    "near": trainer.score("valid"),
                }
                found = trainer.run()
            curve.append(start)
            curve += [row_of(stage, each, done, spent) for each in found.curve]
            done, spent = done + found.steps, spent + found.seconds
    after = None if before is None else compared(model, teacher, examples)
    return RecoveryResult(before, after, curve, done, spent)


def check_time(seconds: float | None, steps: int | None) -> None:
    """One of the two, and more than nothing."""
    if (seconds is None) == (steps is None):
        raise ValueError("say how long: either seconds or steps")
    if seconds is not None:
        check_positive("seconds", seconds)
    if steps is not None:
        check_int(1, steps=steps)


def standing(model: nn.Module) -> dict[str, Any]:
    """What stands in which layer, as JSON says it."""
    found = {
        site.layer: site.module.said
        for site in find_sites(model)
        if isinstance(site.module, Replacement)
    }
    return json.loads(json.dumps(found, default=repr))


def digest(tensors: Iterable[Tensor]) -> str:
    """A number for all that tensors hold, by which others are told from them."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_folder(folder: str | Path | None, facts: dict[str, Any]) -> None:
    """A folder goes on with what it began with: the same mixers, the same texts, the same weights to win back."""
    if folder is None:
        return
    path = Path(folder) / FACTS
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)
    elif (before := read_json(path)) != facts:
        other = next(
            key for key in facts if not isinstance(before, dict) or before.get(key) != facts[key]
        )
        raise ValueError(
            f"{folder} holds a recovery with other {other}: take another folder, or remove it"
        )


def row_of(stage: str, each: dict[str, float], done: int, spent: float) -> dict[str, Any]:
    """An evaluation, counted from the start of all."""
    return {
        "stage": stage,
        "step": done + int(each["step"]),
        "seconds": spent + each["seconds"],
        "near": each["valid"],
    }


def stages(
    model: nn.Module,
    teacher: nn.Module,
    new: dict[str, nn.Module],
    blocks: Sequence[str],
    objective: str,
    tokenizer: Any,
) -> list[tuple[str, DistillationLoss, float]]:
    """What is learned, one after the other, and for what share of the time."""
    if objective == "match":
        return [
            ("layers", LayerByLayer(teacher, new), FIRST),
            ("whole", Whole(teacher, model, blocks), 1 - FIRST),
        ]
    gap = getattr(tokenizer, "mask_token_id", None)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if gap is None or vocab_size is None or head() is None:
        raise Unsupported(
            "masked modelling needs a tokenizer with a mask token, and a model with a head over the vocabulary, "
            "such as BertForMaskedLM"
        )
    return [("masked", Gaps(model, gap, vocab_size, tokenizer.all_special_ids), 1.0)]


# ---------------------------------------------------------------------------------------------- data
def examples_of(model: nn.Module, data: Any, tokenizer: Any, length: int | None) -> Examples:
    """Tokens of texts, or tensors as they are, some of them held out."""
    if isinstance(data, str | Tensor) or not isinstance(data, Sequence):
        raise TypeError(f"texts, or tensors, in a list are expected, not {type(data).__name__}")
    longest = length or max_length(model)
    limit = max_length(model)
    if length is not None and limit is not None and length > limit:
        raise ValueError(
            f"length is {length}, and the model has positions for {limit}: `extend_positions` gives it more"
        )
    if any(isinstance(one, str) for one in data):
        found = encoded(list(data), tokenizer, longest)
    else:
        found = [
            one if one.is_floating_point() else one[:longest] for one in map(torch.as_tensor, data)
        ]
    if len(found) < LEAST:
        raise ValueError(
            f"{len(found)} examples are too few: at least {LEAST} are needed, and some hundred are better"
        )
    if any(one.is_floating_point() and not bool(torch.isfinite(one).all()) for one in found):
        raise ValueError("the data hold NaN or infinity")
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    held = min(MOST_HELD, max(1, round(HELD * len(found))))
    fill = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    return Examples([found[i] for i in order[held:]], [found[i] for i in order[:held]], fill)


def encoded(texts: list[str], tokenizer: Any, longest: int | None) -> list[Tensor]:
    """Each text as tokens; one that is too long becomes several."""
    if tokenizer is None:
        raise ValueError(
            "texts need a tokenizer: give tokenizer=AutoTokenizer.from_pretrained(...), or tensors"
        )
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError("there is no text to train on: all are blank")
    more = {"return_overflowing_tokens": True} if tokenizer.is_fast and longest is not None else {}
    rows = tokenizer(texts, truncation=longest is not None, max_length=longest, **more)["input_ids"]
    return [torch.tensor(row) for row in rows if len(row) > 2]


# ---------------------------------------------------------------------------------------------- around the training
def remember(model: nn.Module, blocks: Sequence[str]) -> None:
    """Keep what will be trained outside the new layers, once, for `restore`."""
    inside = {
        id(p)
        for m in model.modules()
        if isinstance(m, Replacement)
        for name, p in m.named_parameters()
        if not rests(name)
    }
    before: dict[str, Tensor] = model.__dict__.setdefault(BEFORE, {})
    shared = {id(p): name for name, p in restore_names(model)}
    for path in blocks:
        for p in model.get_submodule(path).parameters():
            if id(p) not in inside and (name := shared.get(id(p))) is not None:
                before.setdefault(name, p.detach().clone())


def rests(name: str) -> bool:
    """Whether a parameter of a swapped layer is that of a module which went on working."""
    return name.startswith("rest.")


def restore_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The names that parameters have in the old model."""
    for name, p in model.named_parameters():
        yield name.replace(".rest.", "."), p


@contextmanager
def frozen(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Inside, only the blocks with new layers learn."""
    wanted = {id(p) for path in blocks for p in model.get_submodule(path).parameters()}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for p, flag in flags:
        p.requires_grad_(flag and id(p) in wanted)
    try:
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


@contextmanager
def uncached(*some: nn.Module) -> Iterator[None]:
    """Inside, models of transformers make no caches, and torch's layers no short cuts around their attention."""
    configs = [m.config for m in some if hasattr(getattr(m, "config", None), "use_cache")]
    usual = [config.use_cache for config in configs]  # type: ignore[union-attr]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for config in configs:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, value in zip(configs, usual, strict=True):
            config.use_cache = value  # type: ignore[union-attr]


@contextmanager
def evaluated(lesson: nn.Module) -> Iterator[None]:
    """Inside, dropout is off; then each part is again in the mode that it was in."""
    modes = [(part, part.training) for part in lesson.modules()]
    lesson.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def watched(
    watch: Callable[[str, float, float], None] | None,
) -> Iterator[Callable[[str, float, float], None]]:
    """Who is told of each step: the user's own function, or a bar with the time that is left."""
    if watch is not None:
        yield watch
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, fraction: float, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=1.0)
            bar.update(tasks[stage], completed=fraction, description=f"{stage}, loss {loss:.4f}")

        yield tell


def said(module: Any) -> ModuleSpec:
    """What stands there now."""
    return ModuleSpec.model_construct(**module.said)


def compared(model: nn.Module, teacher: nn.Module, examples: Examples) -> SwapReport:
    """The drift from the old model on what is held out."""
    sites = [site for site in find_sites(model) if isinstance(site.module, Replacement)]
    report = SwapReport(
        [LayerChange(s.layer, s.path, type(s.old).__name__, said(s.module), (), 0) for s in sites]
    )
    blocks = [block_of(site.path) for site in sites]
    held = examples.splits["valid"]
    batches = [
        examples.batch("valid", range(i, min(i + 8, len(held)))) for i in range(0, len(held), 8)
    ]
    device = next(model.parameters()).device
    sample = [
        model_inputs(model, b.tokens.to(device), None if b.mask is None else b.mask.to(device))
        for b in batches
    ]
    with uncached(model, teacher):
        drifted(
            report,
            sample,
            lambda one: states(teacher, blocks, one),
            lambda one: states(model, blocks, one),
        )
    return report
