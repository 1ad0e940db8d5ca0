"""Start from the weights of another run: another head, another task, another length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.models import Model, load
from regard.models.serialization import format_names, unique_tensors
from regard.tasks.tokenizers import tokenizer_from_dict
from regard.tasks.word_encoders import FEATURES

HEAD, EMBEDDING, POSITION = "head.", ".embed.tokens.", ".position."


class CopiedRows(NamedTuple):
    """Number of rows of an embedding table that were copied, and that the source and the new model
    have; `unit` is "positions" or "tokens"."""

    copied: int
    source: int
    new: int
    unit: str


@dataclass
class WeightTransfer:
    """Which tensors of a model were taken from another run, by name.

    Attributes:
        loaded: Taken as they are.
        partial: Embeddings of positions or tokens of which the common rows were taken.
        new: Only in the new model, or initialized anew.
        left_out: Only in the source, or not taken.
        parameters: Number of values taken.
    """

    loaded: list[str] = field(default_factory=list)
    partial: dict[str, CopiedRows] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    parameters: int = 0

    def describe(self) -> str:
        """One line for the user."""
        text = f"{self.parameters:,} weights in {len(self.loaded) + len(self.partial)} tensors"
        for name, rows in self.partial.items():
            part = f"{rows.copied:,}"
            if rows.source > rows.copied:
                part = f"the first {part} of {rows.source:,}"
            text += f"; {part} {rows.unit} of {name}"
            if rows.new > rows.copied:
                text += f", and {rows.new - rows.copied:,} new ones"
        if self.new:
            text += f"; new: {format_names(self.new)}"
        if self.left_out:
            text += f"; left out: {format_names(self.left_out)}"
        return text


def transfer_weights(
    model: Model,
    source_model: Path,
    *,
    shared_tokens: int | None,
    same_targets: bool,
) -> WeightTransfer:
    """Copy the weights of a saved model where the names agree.

    The head is copied only for the same head and the same targets. Of the embedding of tokens, the
    rows of shared tokens are copied; of position embeddings of another length, the common part.
    Other tensors of the same name and another shape are an error.

    Args:
        source_model: Folder of the saved model.
        shared_tokens: Number of tokens, from 0, that mean the same in both models. None: all.
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
        is_token = EMBEDDING in name and shared_tokens is not None
        if other is None or is_head or (is_token and not shared_tokens):
            done.new.append(name)
            continue
        rows, unit = len(tensor) if tensor.dim() else 1, ""
        if is_token:
            assert shared_tokens is not None
            rows, unit = min(shared_tokens, len(tensor), len(other)), "tokens"
        elif POSITION in name and other.dim() and tensor.dim():
            rows, unit = min(len(tensor), len(other)), "positions"
        if other.shape == tensor.shape and (not unit or rows == len(tensor)):
            _copy(other, tensor)
            done.loaded.append(name)
            done.parameters += tensor.numel()
        elif unit and other.shape[1:] == tensor.shape[1:]:
            _copy(other[:rows], tensor[:rows])
            done.partial[name] = CopiedRows(rows, len(other), len(tensor), unit)
            done.parameters += tensor[:rows].numel()
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
    taken = {*done.loaded, *done.partial}
    done.left_out = [name for name in theirs if name not in taken]
    return done


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def count_shared_tokens(
    processors: tuple[Mapping[str, Any], Mapping[str, Any]], *, same_task: bool
) -> int | None:
    """Number of tokens, from 0, that mean the same for two saved processors; None: all.

    Tokens that a task adds to those of its tokenizer, such as a mask or a separator, come last and
    mean the same only in the same task.
    """
    first, second = (each.get("tokenizer") for each in processors)
    if first != second:
        return 0
    if first is None or same_task or first["type"] == FEATURES:  # no task adds features
        return None
    return tokenizer_from_dict(first).vocab_size


def same_targets(processors: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two saved processors are equal but for the length."""
    first, second = (
        {name: value for name, value in each.items() if name != "length"} for each in processors
    )
    return bool(first) and first == second
