"""What trained models look at: attention maps on one test example, and the patterns of their mixers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.plan import cached_task, spec_label
from regard.mixer import Mixer
from regard.models import ModuleSpec, build, load
from regard.models.model import outer_mixers
from regard.show import mixer_pictures
from regard.show.build import pattern_of
from regard.show.picture import Picture
from regard.tasks import IGNORE_INDEX, Task
from regard.train.run import MODEL_DIR, RunSpec, model_config, read_spec

MOST = 2048  # tokens of which a map is made: it has as many rows and columns, for each head
CELLS = 96  # to a side of a drawn map; more tokens share cells
SMALL = 256  # tokens of the picture of a mixer without a pattern, at most


@dataclass(frozen=True)
class AttentionMap:
    """layers: (h n n) each, or None where the mixer has none; `why` there is nothing, else "".

    tokens   what stands in the rows and columns; `asked`: whether there is something to predict there
    """

    mixer: str
    task: str
    length: int
    tokens: list[str]
    asked: list[bool]
    layers: list[Tensor | None]
    why: str = ""


@dataclass(frozen=True)
class PatternPictures:
    """The pictures of a mechanism's pattern; `words` what they show, or why there are none."""

    mixer: str
    pictures: list[Picture]
    words: str


def shortest(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """The first finished run of each mechanism on each task, at the shortest length that it was trained at."""
    found: dict[tuple[str, str], LedgerEntry] = {}
    for entry in sorted(
        (e for e in entries if e.status == DONE), key=lambda e: int(e.words["length"])
    ):
        found.setdefault((_label(entry, "mixer"), _label(entry, "task")), entry)
    return list(found.values())


def _label(entry: LedgerEntry, which: str) -> str:
    return spec_label(ModuleSpec(**entry.words[which]))


# ---------------------------------------------------------------------------------------------- maps
def maps(root: Path, entries: Iterable[LedgerEntry]) -> list[AttentionMap]:
    """One for each of `shortest`; what cannot be had is said in its place, and the others go on."""
    return [_map(root, entry) for entry in shortest(entries)]


def _map(root: Path, entry: LedgerEntry) -> AttentionMap:
    given = (_label(entry, "mixer"), _label(entry, "task"), int(entry.words["length"]))
    try:
        tokens, asked = _example(cached_task(ModuleSpec(**entry.words["task"])))
        layers = attention_maps(root / "runs" / entry.key / MODEL_DIR, tokens)
    except (
        ValueError,
        TypeError,
        OSError,
        RuntimeError,
    ) as error:  # a file that is gone, a task that has other tokens
        return AttentionMap(*given, [], [], [], str(error))
    why = "" if any(layer is not None for layer in layers) else "this mixer has no attention map"
    return AttentionMap(*given, [str(t) for t in tokens.tolist()], asked, layers, why)


def _example(made: Task) -> tuple[Tensor, list[bool]]:
    """The tokens (n) of the first test example, and where it has a target."""
    example = made.example("test", 0)
    if example.tokens.dim() != 1 or len(example.tokens) > MOST:
        raise ValueError(
            f"maps are drawn of one sequence of at most {MOST:,} tokens, and this is {tuple(example.tokens.shape)}"
        )
    asked = example.target != IGNORE_INDEX
    return example.tokens, asked.tolist() if asked.dim() else [False] * len(example.tokens)


@torch.no_grad()
def attention_maps(folder: Path, tokens: Tensor) -> list[Tensor | None]:
    """The maps of a saved model on tokens (n), layer by layer: (h n n), absolute values."""
    model: Any = load(folder).eval()
    return [
        None if each is None else each[0].abs().float() for each in model.attention(tokens[None])
    ]


def coarse(weights: Tensor, cells: int = CELLS) -> Tensor:
    """(n n) -> at most (cells cells): the mean of each cell."""
    n = len(weights)
    if n <= cells:
        return weights
    edge = -(-n // cells)
    return torch.nn.functional.avg_pool2d(
        weights[None, None], edge, ceil_mode=True, count_include_pad=False
    )[0, 0]


# ---------------------------------------------------------------------------------------------- patterns
def patterns(root: Path, entries: list[LedgerEntry]) -> list[PatternPictures]:
    """The pattern of each mechanism, as it was built for the first run that it finished."""
    first: dict[str, LedgerEntry] = {}
    for entry in shortest(entries):
        first.setdefault(_label(entry, "mixer"), entry)
    names = dict.fromkeys(_label(entry, "mixer") for entry in entries)
    without = {_label(entry, "mixer"): entry.why for entry in entries}
    return [
        _pattern(root, first[name]) if name in first else PatternPictures(name, [], without[name])
        for name in names
    ]


def _pattern(root: Path, entry: LedgerEntry) -> PatternPictures:
    name, n = _label(entry, "mixer"), int(entry.words["length"])
    try:
        return _drawn(name, fresh(read_spec(root / "runs" / entry.key)), n)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        return PatternPictures(name, [], str(error))


def fresh(spec: RunSpec) -> Mixer:
    """The mixer of the first layer, as it was before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.settings.seed)
        return outer_mixers(build(model_config(spec, cached_task(spec.task))))[0]


def _drawn(name: str, mixer: Mixer, n: int) -> PatternPictures:
    form = "causal, " if mixer.causal else ""
    if pattern_of(mixer) is not None:
        return PatternPictures(name, mixer_pictures(mixer, n, min(n, CELLS)), f"{form}{n:,} tokens")
    if n > SMALL:
        return PatternPictures(
            name,
            [],
            f"no pattern: what it looks at depends on the tokens, and {n:,} are too many to draw",
        )
    return PatternPictures(
        name, mixer_pictures(mixer, n), f"no pattern: {form}what it does to {n:,} random tokens"
    )
