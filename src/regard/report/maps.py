"""What trained models look at: attention maps on one test example, and the patterns of their mixers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.compare.ledger import DONE, Entry
from regard.compare.plan import label, made
from regard.mixer import Mixer
from regard.models import Part, build, load
from regard.models.model import outer_mixers
from regard.show import mixer_pictures
from regard.show.build import pattern_of
from regard.show.picture import Picture
from regard.tasks import IGNORE, Task
from regard.train.run import MODEL, Spec, config_of, read_spec

MOST = 2048  # tokens of which a map is made: it has as many rows and columns, for each head
CELLS = 96  # to a side of a drawn map; more tokens share cells
SMALL = 256  # tokens of the picture of a mixer without a pattern, at most


@dataclass(frozen=True)
class Map:
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
class Drawn:
    """The pictures of a mechanism's pattern; `words` what they show, or why there are none."""

    mixer: str
    pictures: list[Picture]
    words: str


def shortest(entries: Iterable[Entry]) -> list[Entry]:
    """The first finished run of each mechanism on each task, at the shortest length that it was trained at."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in sorted((e for e in entries if e.status == DONE), key=lambda e: int(e.words["length"])):
        found.setdefault((_label(entry, "mixer"), _label(entry, "task")), entry)
    return list(found.values())


def _label(entry: Entry, which: str) -> str:
    return label(Part(**entry.words[which]))


# ---------------------------------------------------------------------------------------------- maps
def maps(root: Path, entries: Iterable[Entry]) -> list[Map]:
    """One for each of `shortest`; what cannot be had is said in its place, and the others go on."""
    return [_map(root, entry) for entry in shortest(entries)]


def _map(root: Path, entry: Entry) -> Map:
    given = (_label(entry, "mixer"), _label(entry, "task"), int(entry.words["length"]))
    try:
        tokens, asked = _example(made(Part(**entry.words["task"])))
        layers = looked(root / "runs" / entry.key / MODEL, tokens)
    except (ValueError, TypeError, OSError, RuntimeError) as error:  # a file that is gone, a task that has other tokens
        return Map(*given, [], [], [], str(error))
    why = "" if any(layer is not None for layer in layers) else "this mixer has no attention map"
    return Map(*given, [str(t) for t in tokens.tolist()], asked, layers, why)


def _example(made: Task) -> tuple[Tensor, list[bool]]:
    """The tokens (n) of the first test example, and where it has a target."""
    example = made.example("test", 0)
    if example.tokens.dim() != 1 or len(example.tokens) > MOST:
        raise ValueError(
            f"maps are drawn of one sequence of at most {MOST:,} tokens, and this is {tuple(example.tokens.shape)}"
        )
    asked = example.target != IGNORE
    return example.tokens, asked.tolist() if asked.dim() else [False] * len(example.tokens)


@torch.no_grad()
def looked(folder: Path, tokens: Tensor) -> list[Tensor | None]:
    """The maps of a saved model on tokens (n), layer by layer: (h n n), absolute values."""
    model: Any = load(folder).eval()
    return [None if each is None else each[0].abs().float() for each in model.attention(tokens[None])]


def coarse(weights: Tensor, cells: int = CELLS) -> Tensor:
    """(n n) -> at most (cells cells): the mean of each cell."""
    n = len(weights)
    if n <= cells:
        return weights
    edge = -(-n // cells)
    return torch.nn.functional.avg_pool2d(weights[None, None], edge, ceil_mode=True, count_include_pad=False)[0, 0]


# ---------------------------------------------------------------------------------------------- patterns
def patterns(root: Path, entries: list[Entry]) -> list[Drawn]:
    """The pattern of each mechanism, as it was built for the first run that it finished."""
    first: dict[str, Entry] = {}
    for entry in shortest(entries):
        first.setdefault(_label(entry, "mixer"), entry)
    names = dict.fromkeys(_label(entry, "mixer") for entry in entries)
    without = {_label(entry, "mixer"): entry.why for entry in entries}
    return [_pattern(root, first[name]) if name in first else Drawn(name, [], without[name]) for name in names]


def _pattern(root: Path, entry: Entry) -> Drawn:
    name, n = _label(entry, "mixer"), int(entry.words["length"])
    try:
        return _drawn(name, fresh(read_spec(root / "runs" / entry.key)), n)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        return Drawn(name, [], str(error))


def fresh(spec: Spec) -> Mixer:
    """The mixer of the first layer, as it was before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.settings.seed)
        return outer_mixers(build(config_of(spec, made(spec.task))))[0]


def _drawn(name: str, mixer: Mixer, n: int) -> Drawn:
    form = "causal, " if mixer.causal else ""
    if pattern_of(mixer) is not None:
        return Drawn(name, mixer_pictures(mixer, n, min(n, CELLS)), f"{form}{n:,} tokens")
    if n > SMALL:
        return Drawn(name, [], f"no pattern: what it looks at depends on the tokens, and {n:,} are too many to draw")
    return Drawn(name, mixer_pictures(mixer, n), f"no pattern: {form}what it does to {n:,} random tokens")
