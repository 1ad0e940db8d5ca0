"""Weight conversion: rules from tensor names of a checkpoint to those of a Regard model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.models.serialization import format_names, unique_tensors, warn_nonfinite

LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")

Transform = Callable[..., Tensor | tuple[Tensor, ...]]


def keep_tensor(tensor: Tensor) -> Tensor:
    """The identity transform."""
    return tensor


def transpose(tensor: Tensor) -> Tensor:
    """(in, out) -> (out, in)."""
    return tensor.T


def split_qkv(tensor: Tensor) -> tuple[Tensor, ...]:
    """Fused queries, keys and values (in, 3 out) or (3 out) -> three tensors (out, in) or (out)."""
    return tuple(part.T if part.dim() == 2 else part for part in tensor.chunk(3, -1))


@dataclass(frozen=True)
class WeightRule:
    """Converts some tensors of a checkpoint into some of a model.

    "{i}" in a name stands for the layer number. If only the targets contain it, each layer gets the
    same tensor.

    Args:
        sources: Names in the checkpoint.
        targets: Names in the model.
        transform: Source tensors -> one tensor for each target.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transform: Transform = keep_tensor


def rule(sources: str, targets: str, transform: Transform = keep_tensor) -> WeightRule:
    """A `WeightRule` with names separated by spaces."""
    return WeightRule(tuple(sources.split()), tuple(targets.split()), transform)


def weight_bias_rules(
    source: str, targets: str, transform: Transform = keep_tensor
) -> tuple[WeightRule, WeightRule]:
    """Rules for weight and bias of a linear layer or norm.

    Of the transforms, only `split_qkv` applies to the bias too.
    """
    names = targets.split()
    return (
        rule(f"{source}.weight", " ".join(f"{name}.weight" for name in names), transform),
        rule(
            f"{source}.bias",
            " ".join(f"{name}.bias" for name in names),
            transform if transform is split_qkv else keep_tensor,
        ),
    )


@dataclass(frozen=True)
class WeightMap:
    """All rules of a model family.

    Args:
        rules: Rules are used if the model has their targets, so rules for absent heads do no harm.
        prefix: Removed from names in the checkpoint.
        renames: (old, new) parts of names that changed between versions.
        ignored: Patterns of names without information: counters, and second names of tied tensors.
    """

    rules: tuple[WeightRule, ...]
    prefix: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def canonical_name(self, name: str) -> str:
        """A name in the checkpoint as the rules spell it."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renames:
            name = name.replace(old, new)
        return name


class ShapeMismatch(NamedTuple):
    """Tensors of a checkpoint whose shape differs from that of their target."""

    source: str
    shape: tuple[int, ...]
    target: str
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.source} has shape {self.shape} for {self.target}, "
            f"but the model expects {self.expected}"
        )


class UnmatchedWeights(NamedTuple):
    """Checkpoint tensors without target, model tensors without source, mismatched shapes."""

    unexpected: list[str]
    missing: list[str]
    mismatched: list[ShapeMismatch]


class WeightMatch(NamedTuple):
    """Tensors by their name in the model, and what did not match."""

    tensors: dict[str, Tensor]
    unmatched: UnmatchedWeights


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    ignore: Iterable[str] = (),
) -> None:
    """Copy the tensors of a checkpoint into a model, in the dtype of the model.

    Raises `ValueError` with all names if anything is left over, missing or of another shape; the
    model is unchanged.

    Args:
        ignore: Patterns of checkpoint names that may stay unused, e.g. "pooler.*".
    """
    match = match_weights(model, tensors, weight_map)
    unmatched = match.unmatched
    unexpected = [
        name
        for name in unmatched.unexpected
        if not any(fnmatch(name, pattern) for pattern in ignore)
    ]
    errors = []
    if unexpected:
        errors.append(
            f"unexpected in the checkpoint: {format_names(unexpected)} (`ignore` lists what may be "
            "left out)"
        )
    if unmatched.missing:
        errors.append(f"missing in the checkpoint: {format_names(unmatched.missing)}")
    if unmatched.mismatched:
        errors.append(format_names([str(mismatch) for mismatch in unmatched.mismatched], "; "))
    if errors:
        raise ValueError(f"The weights do not fit the model: {'; '.join(errors)}")
    warn_nonfinite(match.tensors, "Weights")
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in match.tensors.items():
            own[name].copy_(tensor)


def match_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], weight_map: WeightMap
) -> WeightMatch:
    """Find which tensor goes where without changing the model, and everything that does not fit."""
    own = model.state_dict(keep_vars=True)
    given = {weight_map.canonical_name(name): tensor for name, tensor in tensors.items()}
    layers = 1 + max(
        (int(number) for name in own for number in LAYER_NUMBER.findall(name)), default=0
    )
    matched: dict[str, Tensor] = {}
    used: set[str] = set()
    mismatched: list[ShapeMismatch] = []
    for weight_rule in weight_map.rules:
        for i in range(layers) if any("{i}" in name for name in weight_rule.targets) else (0,):
            sources, targets = (
                tuple(name.replace("{i}", str(i)) for name in names)
                for names in (weight_rule.sources, weight_rule.targets)
            )
            if all(name in own for name in targets) and all(name in given for name in sources):
                used.update(sources)
                source = " and ".join(sources)
                try:
                    result = weight_rule.transform(*(given[name] for name in sources))
                except (RuntimeError, IndexError, ValueError):  # such shapes cannot be transformed
                    shapes = tuple(given[sources[0]].shape), tuple(own[targets[0]].shape)
                    mismatched.append(
                        ShapeMismatch(source, shapes[0], ", ".join(targets), shapes[1])
                    )
                    continue
                for name, tensor in zip(
                    targets, result if isinstance(result, tuple) else (result,), strict=True
                ):
                    expected = own[name].shape
                    if tensor.shape == expected:
                        matched[name] = tensor
                    else:
                        mismatched.append(
                            ShapeMismatch(source, tuple(tensor.shape), name, tuple(expected))
                        )

    # Names that share a tensor in the model must get equal tensors.
    first: dict[int, str] = {}
    for name, tensor in matched.items():
        other = first.setdefault(id(own[name]), name)
        if other != name and not torch.equal(matched[other], tensor):
            raise ValueError(
                f"{other} and {name} are tied in this model, but differ in the checkpoint: build "
                "it untied."
            )

    found = {id(own[name]) for name in matched}
    found |= {id(own[name]) for mismatch in mismatched for name in mismatch.target.split(", ")}
    ignored = weight_map.ignored
    unexpected = [
        n for n in given if n not in used and not any(fnmatch(n, pattern) for pattern in ignored)
    ]
    missing = [name for name, tensor in unique_tensors(model).items() if id(tensor) not in found]
    return WeightMatch(matched, UnmatchedWeights(unexpected, missing, mismatched))
