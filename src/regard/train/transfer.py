"""Start from the weights of another run: another head, another task, another length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.models import Model, load
from regard.models.serialization import format_names, unique_tensors

HEAD, EMBEDDING, POSITION = "head.", ".embed.tokens.", ".position."


@dataclass
class WeightTransfer:
    """Which tensors of a model were taken from another run, by name.

    Attributes:
        loaded: Taken as they are.
        shortened: Position embeddings of which the common part was taken, with both lengths.
        new: Only in the new model, or initialized anew.
        left_out: Only in the source, or not taken.
        parameters: Number of values taken.
    """

    loaded: list[str] = field(default_factory=list)
    shortened: dict[str, tuple[int, int]] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    parameters: int = 0

    def describe(self) -> str:
        """One line for the user."""
        text = f"{self.parameters:,} weights in {len(self.loaded) + len(self.shortened)} tensors"
        for name, (before, after) in self.shortened.items():
            if after > before:
                text += f"; {before:,} positions of {name}, and {after - before:,} new ones"
            else:
                text += f"; the first {after:,} of {before:,} positions of {name}"
        if self.new:
            text += f"; new: {format_names(self.new)}"
        if self.left_out:
            text += f"; left out: {format_names(self.left_out)}"
        return text


def transfer_weights(
    model: Model,
    source_model: Path,
    *,
    same_tokens: bool,
    same_targets: bool,
) -> WeightTransfer:
    """Copy the weights of a saved model where the names agree.

    The head is copied only for the same head and the same targets, and the embedding of tokens only
    for the same tokenizer. Position embeddings of another length are copied in their common part.
    Other tensors of the same name and another shape are an error.

    Args:
        source_model: Folder of the saved model.
        same_tokens: Whether a token means the same in both models.
        same_targets: Whether an output means the same in both models.
    """
    source = load(source_model)
    theirs, own = unique_tensors(source), unique_tensors(model)
    assert source.config is not None
    assert model.config is not None
    same_head = same_targets and source.config.head == model.config.head
    done, different = WeightTransfer(), []
    for name, tensor in own.items():
        other = theirs.get(name)
        is_head = name.startswith(HEAD) and not same_head
        is_other_token = EMBEDDING in name and not same_tokens
        if other is None or is_head or is_other_token:
            done.new.append(name)
        elif other.shape == tensor.shape:
            _copy(other, tensor)
            done.loaded.append(name)
            done.parameters += tensor.numel()
        elif POSITION in name and other.shape[1:] == tensor.shape[1:]:
            count = min(len(other), len(tensor))
            _copy(other[:count], tensor[:count])
            done.shortened[name] = (len(other), len(tensor))
            done.parameters += tensor[:count].numel()
        else:
            different.append(f"{name} {tuple(other.shape)}, not {tuple(tensor.shape)}")
    if different:
        shown = format_names(different, "; ")
        raise ValueError(
            f"The weights of {source_model} have other shapes than the new model: {shown}. Use the "
            "same --dim, --heads, --ffn-dim and --mixer, and the same --length if the mixer "
            "depends on it."
        )
    if not done.loaded:
        raise ValueError(f"{source_model} has no weights in common with the new model.")
    taken = {*done.loaded, *done.shortened}
    done.left_out = [name for name in theirs if name not in taken]
    return done


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def same_tokens(processors: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two saved processors have equal tokenizers; True if neither has one."""
    first, second = (each.get("tokenizer") for each in processors)
    return bool(first == second)


def same_targets(processors: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two saved processors are equal but for the length."""
    first, second = (
        {name: value for name, value in each.items() if name != "length"} for each in processors
    )
    return bool(first) and first == second
