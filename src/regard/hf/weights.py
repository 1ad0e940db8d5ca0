"""Weights from elsewhere: declared maps from their names to ours, and a list of all that found no place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.models.serialization import format_names, unique_tensors, warn_nonfinite

LAYER = re.compile(r"\.layers\.(\d+)\.")

Change = Callable[..., Tensor | tuple[Tensor, ...]]


def keep_tensor(tensor: Tensor) -> Tensor:
    """As it is."""
    return tensor


def transpose(tensor: Tensor) -> Tensor:
    """(in out) -> (out in)."""
    return tensor.T


def split_qkv(tensor: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in one: (in 3 out) or (3 out) -> three times (out in) or (out)."""
    return tuple(part.T if part.dim() == 2 else part for part in tensor.chunk(3, -1))


@dataclass(frozen=True)
class WeightRule:
    """Some of their tensors become some of ours.  "{i}" stands for a layer; on our side alone, each layer gets the same.

    change   their tensors -> ours: as many as are named
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    change: Change = keep_tensor


def rule(theirs: str, ours: str, change: Change = keep_tensor) -> WeightRule:
    """Names with spaces between them."""
    return WeightRule(tuple(theirs.split()), tuple(ours.split()), change)


def linear_rules(
    theirs: str, ours: str, change: Change = keep_tensor
) -> tuple[WeightRule, WeightRule]:
    """A linear layer: weight and bias."""
    return tuple(  # type: ignore[return-value]
        WeightRule(
            (f"{theirs}.{kind}",),
            tuple(f"{name}.{kind}" for name in ours.split()),
            change if kind == "weight" else bias,
        )
        for kind, bias in (
            ("weight", keep_tensor),
            ("bias", change if change is split_qkv else keep_tensor),
        )
    )


def norm_rules(theirs: str, ours: str) -> tuple[WeightRule, WeightRule]:
    """A layer norm: their weight is our gain."""
    return rule(f"{theirs}.weight", f"{ours}.gain"), rule(f"{theirs}.bias", f"{ours}.bias")


@dataclass(frozen=True)
class WeightMap:
    """From the names of another library to ours.

    rows      those whose tensors the model has are used, so heads that it lacks stay unused
    prefix    taken off their names
    renamed   parts of names that changed over time: old, new
    dropped   names that carry nothing: numbers that are counted, and second names of tied tensors
    """

    rows: tuple[WeightRule, ...]
    prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()

    def name(self, theirs: str) -> str:
        """Their name as the rows have it."""
        theirs = theirs.removeprefix(self.prefix)
        for old, new in self.renamed:
            theirs = theirs.replace(old, new)
        return theirs


class ShapeMismatch(NamedTuple):
    """Their tensors, by name, that give another shape than ours has."""

    theirs: str
    shape: tuple[int, ...]
    ours: str
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.theirs} gives {self.shape} for {self.ours}, and the model expects {self.expected}"


class UnmatchedWeights(NamedTuple):
    """Their tensors that found no place, ours that got nothing, and pairs whose shapes differ."""

    theirs: list[str]
    ours: list[str]
    misshapen: list[ShapeMismatch]


class WeightMatch(NamedTuple):
    """What goes where: our name -> tensor; and what is left on either side."""

    tensors: dict[str, Tensor]
    unmatched: UnmatchedWeights


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], names: WeightMap, *, leave: Iterable[str] = ()
) -> None:
    """Put their tensors into the model, in its dtype.  All must fit: what finds no place on either side raises, with the names.

    leave   patterns of their names that may stay unused, such as "pooler.*"
    """
    found = match_weights(model, tensors, names)
    left = [
        name
        for name in found.unmatched.theirs
        if not any(fnmatch(name, pattern) for pattern in leave)
    ]
    wrong = [f"their {format_names(left)} found no place (`leave` names what may)"] if left else []
    wrong += (
        [f"our {format_names(found.unmatched.ours)} got nothing"] if found.unmatched.ours else []
    )
    wrong += (
        [format_names([str(pair) for pair in found.unmatched.misshapen], "; ")]
        if found.unmatched.misshapen
        else []
    )
    if wrong:
        raise ValueError(f"the weights do not fit: {'; '.join(wrong)}")
    warn_nonfinite(found.tensors, "the weights")
    mine = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in found.tensors.items():
            mine[name].copy_(tensor)


def match_weights(model: nn.Module, tensors: Mapping[str, Tensor], names: WeightMap) -> WeightMatch:
    """What `load_weights` would do, without doing it: what goes where, and all that does not fit."""
    mine = model.state_dict(keep_vars=True)
    given = {names.name(name): tensor for name, tensor in tensors.items()}
    taken: dict[str, Tensor] = {}
    used: set[str] = set()
    odd: list[ShapeMismatch] = []
    for one in expanded(names.rows, mine):
        if all(name in given for name in one.theirs):
            used.update(one.theirs)
            fits, others = fitting(one, given, mine)
            taken.update(fits)
            odd += others
    check_tied(mine, taken)
    met = {
        id(mine[name])
        for name in (*taken, *(name for pair in odd for name in pair.ours.split(", ")))
    }
    theirs = [
        name
        for name in given
        if name not in used and not any(fnmatch(name, drop) for drop in names.dropped)
    ]
    ours = [name for name, tensor in unique_tensors(model).items() if id(tensor) not in met]
    return WeightMatch(taken, UnmatchedWeights(theirs, ours, odd))


def expanded(rows: Iterable[WeightRule], mine: Mapping[str, Tensor]) -> Iterable[WeightRule]:
    """The rows whose tensors the model has, once for each layer."""
    layers = 1 + max((int(number) for name in mine for number in LAYER.findall(name)), default=0)
    for one in rows:
        for i in range(layers) if any("{i}" in name for name in one.ours) else (0,):
            theirs, ours = (
                tuple(name.replace("{i}", str(i)) for name in side)
                for side in (one.theirs, one.ours)
            )
            if all(name in mine for name in ours):
                yield WeightRule(theirs, ours, one.change)


def fitting(
    one: WeightRule, given: Mapping[str, Tensor], mine: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[ShapeMismatch]]:
    """What a row gives, by our names: what fits, and what has another shape."""
    source = " and ".join(one.theirs)
    try:
        made = one.change(*(given[name] for name in one.theirs))
    except (
        RuntimeError,
        IndexError,
        ValueError,
    ):  # tensors of such shapes cannot even be put together
        shape = tuple(given[one.theirs[0]].shape)
        return {}, [
            ShapeMismatch(source, shape, ", ".join(one.ours), tuple(mine[one.ours[0]].shape))
        ]
    found = dict(zip(one.ours, made if isinstance(made, tuple) else (made,), strict=True))
    wrong = {name: tensor for name, tensor in found.items() if tensor.shape != mine[name].shape}
    odd = [
        ShapeMismatch(source, tuple(t.shape), name, tuple(mine[name].shape))
        for name, t in wrong.items()
    ]
    return {name: tensor for name, tensor in found.items() if name not in wrong}, odd


def check_tied(mine: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> None:
    """Names that share a tensor in the model must get equal ones."""
    first: dict[int, str] = {}
    for name, tensor in taken.items():
        other = first.setdefault(id(mine[name]), name)
        if other != name and not torch.equal(taken[other], tensor):
            raise ValueError(
                f"{other} and {name} are tied in this model, and their weights differ: build it untied"
            )
