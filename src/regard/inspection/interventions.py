"""Change heads while a model runs, and see what becomes of its output.

A head is switched off by zeros in place of its output, before the output projection. Its map can
also be replaced by a uniform one over the keys it may see, by the identity, or by that of another
input of the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import check_choice
from regard.inspection.answers import Answer, read_answer
from regard.inspection.data import HeadEdit
from regard.inspection.inspected import InspectedModel, PlacedMap
from regard.inspection.operators import HeadOperator
from regard.inspection.recording import AttentionRecord, Edit, Recorder
from regard.mixer import evaluation_mode

REPLACEMENTS = ("zero", "uniform", "identity", "example")
BATCH = 16  # changed copies of the input in one call
MAX_RUNS = 20_000  # heads x tokens up to which the importance of all heads is part of a page
MAX_EXAMPLE = 1024  # tokens of a map that is taken from another input


class HeadChange(NamedTuple):
    """A change of one head, or of all heads of a layer (None).

    Attributes:
        layer: Number of the layer in the order of the calls.
        head: Number of the head, or None.
        replace: See `REPLACEMENTS`.
        weights: Maps (h, n, m) of another input, for "example".
        example: Only in this example of the batch. None: in all.
    """

    layer: int
    head: int | None
    replace: str = "zero"
    weights: Tensor | None = None
    example: int | None = None


class HeadChanges(Edit):
    """Changes of heads, for `record_call`.

    Args:
        changes: What to change.
        by_head: Layers whose heads are recorded; the others can only be switched off whole.
    """

    def __init__(self, changes: Sequence[HeadChange], by_head: set[int]) -> None:
        self.changes, self.by_head = list(changes), by_head

    def heads(self, layer: int, record: AttentionRecord) -> Tensor | None:
        """See `Edit`."""
        wanted = [change for change in self.changes if change.layer == layer]
        if not wanted or layer not in self.by_head:
            return None
        output = record.output.clone()
        for change in wanted:
            examples = (
                slice(None) if change.example is None else slice(change.example, change.example + 1)
            )
            heads = slice(None) if change.head is None else slice(change.head, change.head + 1)
            new = replaced_output(change, record)
            output[examples, heads] = new[examples, heads].to(output.dtype)
        return output

    def output(self, layer: int, output: Tensor) -> Tensor | None:
        """See `Edit`."""
        if layer in self.by_head:
            return None
        changed = None
        for change in self.changes:
            if change.layer == layer:
                changed = output.clone() if changed is None else changed
                if change.example is None:
                    changed.zero_()
                else:
                    changed[change.example] = 0
        return changed


def replaced_output(change: HeadChange, record: AttentionRecord) -> Tensor:
    """The outputs (b, h, n, f) of all heads with another map."""
    values = record.values()
    if change.replace == "zero":
        return torch.zeros_like(record.output)
    if change.replace == "identity":
        if record.queries != record.keys:
            raise ValueError("Only a map with as many queries as keys can be the identity.")
        return values
    if change.replace == "example":
        assert change.weights is not None
        if change.weights.shape[1:] != (record.queries, record.keys):
            raise ValueError(
                f"The other input has maps of {tuple(change.weights.shape[1:])} tokens, and this "
                f"one of {(record.queries, record.keys)}: give one with as many tokens."
            )
        return change.weights.to(values) @ values
    visible = record.visible()
    keep = torch.ones_like(values[:, :1, :, :1])
    if record.mask is not None:
        keep = record.mask[:, None, :, None].to(values.dtype)
    if visible is not None:
        weights = visible.to(values.dtype) * keep.mT
        return weights / weights.sum(-1, keepdim=True).clamp(min=1) @ values
    if record.causal and record.queries == record.keys:
        return (values * keep).cumsum(2) / keep.cumsum(2).clamp(min=1)
    mean = (values * keep).sum(2, keepdim=True) / keep.sum(2, keepdim=True).clamp(min=1)
    return mean.expand_as(record.output)


def parse_edits(
    model: InspectedModel,
    edits: Sequence[HeadEdit],
    examples: Mapping[str, InspectedModel] | None = None,
) -> list[HeadChange]:
    """Changes from what a page asks for, checked.

    Args:
        model: The model.
        edits: `map` is an index in its maps.
        examples: The same model on the texts that edits with "example" name.
    """
    changes = []
    for edit in edits:
        placed = find_map(model, edit["map"])
        heads = 0 if placed.map.operator is None else placed.map.operator.heads
        head, replacement = edit["head"], edit["replace"]
        if placed.number < 0:
            raise ValueError("This is the map of the whole model, which has no heads to change.")
        check_choice("replace", replacement, REPLACEMENTS)
        by_head = placed.map.attention is not None
        if head is not None and not 0 <= head < heads:
            raise ValueError(f"There is no head {head}: layer {placed.layer} has {heads}.")
        if not by_head and ((head is not None and heads > 1) or replacement != "zero"):
            raise ValueError(
                f"Layer {placed.layer} ({placed.mixer}) does not compute its heads one by one: it "
                "can only be switched off whole."
            )
        weights = None
        if replacement == "example":
            other = (examples or {})[edit["example"]]
            operator = find_map(other, edit["map"]).map.operator
            assert isinstance(operator, HeadOperator)
            if max(operator.queries, operator.keys) > MAX_EXAMPLE:
                raise ValueError(f"Maps of at most {MAX_EXAMPLE:,} tokens can be taken over.")
            weights = operator.dense()
        changes.append(HeadChange(placed.number, head if by_head else None, replacement, weights))
    return changes


def find_map(model: InspectedModel, number: int) -> PlacedMap:
    """A map by its number."""
    if not 0 <= number < len(model.maps):
        raise ValueError(f"There is no map {number}: the model has {len(model.maps)}.")
    return model.maps[number]


def editable_layers(model: InspectedModel) -> set[int]:
    """Layers whose heads can be changed one by one."""
    return {placed.number for placed in model.maps if placed.map.attention is not None}


@contextmanager
def changed_heads(model: InspectedModel, changes: Sequence[HeadChange]) -> Iterator[None]:
    """Inside, all calls of the model run with the changes."""
    edit = HeadChanges(changes, editable_layers(model))
    recorder = Recorder(model.subject.model, layers=model.blocks, keep=(), edit=edit)
    with evaluation_mode(model.subject.model), recorder.install():
        yield


@torch.no_grad()
def changed_answer(model: InspectedModel, changes: Sequence[HeadChange], count: int = 1) -> Answer:
    """The answer with changes, for `count` copies of the input."""
    subject = model.subject if count == 1 else model.subject.repeat(count)
    with changed_heads(model, changes):
        return read_answer(subject, subject.call())


def head_importance(model: InspectedModel) -> list[dict[str, Any]]:
    """How far the output moves when a head, or all heads of a layer, are switched off:
    {"map", "layer", "head", "change"}, with head None for the layer."""
    answer = read_answer(model.subject, model.output)
    targets: list[tuple[int, PlacedMap, int | None]] = []
    for number, placed in enumerate(model.maps):
        if placed.map.operator is None or placed.number < 0:  # the whole model
            continue
        heads = placed.map.operator.heads if placed.map.attention is not None else 0
        targets.append((number, placed, None))
        targets += [(number, placed, head) for head in range(heads)]
    results = []
    for start in range(0, len(targets), BATCH):
        part = targets[start : start + BATCH]
        changes = [
            HeadChange(placed.number, head, example=i) for i, (_, placed, head) in enumerate(part)
        ]
        found = answer.changes(changed_answer(model, changes, len(part))).tolist()
        results += [
            {"map": number, "layer": placed.layer, "head": head, "change": float(f"{change:.5g}")}
            for (number, placed, head), change in zip(part, found, strict=True)
        ]
    return results
