"""Attention maps of trained models on one test example, and the patterns of their mixers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.plan import cached_task
from regard.compare.record import RUNS_DIR
from regard.compare.results import entry_labels
from regard.mixer import Mixer
from regard.models import ModuleSpec, build, load
from regard.models.model import outer_mixers
from regard.show import mixer_pictures
from regard.show.build import pattern_of
from regard.show.picture import Picture
from regard.tasks.base import IGNORE_INDEX, LABELS
from regard.train.run import MODEL_DIR, RunSpec, model_config, read_spec

MAX_MAP_TOKENS = 2048  # a map has this many rows and columns for every head
MAX_CELLS = 96  # cells per side of a drawn map; in a longer one several tokens share a cell
MAX_RESPONSE_TOKENS = 256  # tokens in the picture of a mixer without a pattern

# what a deleted model, or a task whose data have changed, may raise
READ_ERRORS = (ValueError, TypeError, OSError, RuntimeError)


@dataclass(frozen=True)
class AttentionMap:
    """The attention maps of one model.

    Attributes:
        tokens: Tokens of the example, as text.
        has_target: Whether there is something to predict at each token.
        layers: (h, n, n) for each layer, or None for a mixer without a map.
        reason: Why there is no map; "" if there is one.
    """

    mixer: str
    task: str
    length: int
    tokens: list[str]
    has_target: list[bool]
    layers: list[Tensor | None]
    reason: str = ""


@dataclass(frozen=True)
class PatternPictures:
    """Pictures of a mixer's pattern; `caption` says what they show, or why there are none."""

    mixer: str
    pictures: list[Picture]
    caption: str


def shortest_runs(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the first finished run of each mixer and task, at the shortest length."""
    runs: dict[tuple[str, str], LedgerEntry] = {}
    done = (entry for entry in entries if entry.status == DONE)
    for entry in sorted(done, key=lambda entry: int(entry.settings["length"])):
        mixer, task, _ = entry_labels(entry)
        runs.setdefault((mixer, task), entry)
    return list(runs.values())


def load_maps(root: Path, entries: Iterable[LedgerEntry]) -> list[AttentionMap]:
    """Return the maps of each of `shortest_runs`, or the reason why there are none."""
    return [_load_map(root, entry) for entry in shortest_runs(entries)]


def _load_map(root: Path, entry: LedgerEntry) -> AttentionMap:
    names = entry_labels(entry)
    try:
        example = cached_task(ModuleSpec(**entry.settings["task"])).example("test", 0)
        tokens, labels = example.inputs.get("x"), example.targets.get(LABELS)
        if (
            tokens is None
            or tokens.is_floating_point()
            or tokens.dim() != 1
            or len(tokens) > MAX_MAP_TOKENS
        ):
            shapes = {name: tuple(each.shape) for name, each in example.inputs.items()}
            raise ValueError(
                f"maps are drawn for one sequence of at most {MAX_MAP_TOKENS:,} tokens, but this "
                "example has " + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            )
        layers = attention_maps(root / RUNS_DIR / entry.key / MODEL_DIR, tokens)
    except READ_ERRORS as error:
        return AttentionMap(*names, [], [], [], str(error))
    has_target = [False] * len(tokens)
    if labels is not None and labels.shape == tokens.shape:
        has_target = (labels != IGNORE_INDEX).tolist()
    return AttentionMap(
        *names,
        tokens=[str(token) for token in tokens.tolist()],
        has_target=has_target,
        layers=layers,
        reason="" if any(x is not None for x in layers) else "this mixer has no attention map",
    )


@torch.no_grad()
def attention_maps(folder: Path, tokens: Tensor) -> list[Tensor | None]:
    """Return the absolute attention weights (h, n, n) of each layer of a model on tokens (n)."""
    model: Any = load(folder).eval()
    layers = model.attention_maps(tokens[None])
    return [None if weights is None else weights[0].abs().float() for weights in layers]


def downsample(weights: Tensor, cells: int = MAX_CELLS) -> Tensor:
    """Average weights (n, n) to at most (cells, cells)."""
    if len(weights) <= cells:
        return weights
    return torch.nn.functional.avg_pool2d(
        weights[None, None], -(-len(weights) // cells), ceil_mode=True, count_include_pad=False
    )[0, 0]


def load_patterns(root: Path, entries: list[LedgerEntry]) -> list[PatternPictures]:
    """Return the pattern of each mixer, as it was built for its first finished run."""
    runs: dict[str, LedgerEntry] = {}
    for entry in shortest_runs(entries):
        runs.setdefault(entry_labels(entry)[0], entry)
    reasons = {entry_labels(entry)[0]: entry.reason for entry in entries}
    return [
        _load_pattern(root, name, runs[name]) if name in runs else PatternPictures(name, [], reason)
        for name, reason in reasons.items()
    ]


def _load_pattern(root: Path, name: str, entry: LedgerEntry) -> PatternPictures:
    n = int(entry.settings["length"])
    try:
        mixer = untrained_mixer(read_spec(root / RUNS_DIR / entry.key))
        tokens = f"{'causal, ' if mixer.causal else ''}{n:,} tokens"
        if pattern_of(mixer) is not None:
            return PatternPictures(name, mixer_pictures(mixer, n, min(n, MAX_CELLS)), tokens)
        if n > MAX_RESPONSE_TOKENS:
            caption = f"no fixed pattern, and {n:,} tokens are too many to draw"
            return PatternPictures(name, [], caption)
        caption = f"no fixed pattern: response to random input, {tokens}"
        return PatternPictures(name, mixer_pictures(mixer, n), caption)
    except READ_ERRORS as error:
        return PatternPictures(name, [], str(error))


def untrained_mixer(spec: RunSpec) -> Mixer:
    """Build the mixer of a run's first layer with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.settings.seed)
        return outer_mixers(build(model_config(spec, cached_task(spec.task))))[0]
