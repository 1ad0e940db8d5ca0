"""Controls for the numbers of heads: shuffled tokens, and repeated random tokens.

A number of a head means little alone: a head that looks at the token before does so for any text.
So each number is computed again with the tokens of the input shuffled. Induction heads are found on
random tokens that are repeated once, where only a copy of the earlier part predicts the next one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.model_inputs import max_length
from regard.inspection.inspected import InspectedModel, PlacedMap
from regard.inspection.metrics import MapRows, finite_numbers, induction_scores, map_rows
from regard.inspection.operators import HeadOperator
from regard.inspection.subject import Subject

SEED = 0
REPEATED = 24  # random tokens, which come twice
Scores = dict[str, list[float | None]]


def shuffled_subject(subject: Subject) -> Subject | None:
    """The same input with its tokens, patches or vectors in another order; special tokens stay in
    their places. None for inputs of another kind."""
    changed: dict[str, Tensor] = {}
    for name, ids in subject.ids.items():
        changed[name] = shuffle_ids(ids, subject.special)
    image, grid = subject.image, subject.grid
    for name, value in subject.arguments.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.dim() == 3 and value.shape[1] > 1:
            changed[name] = value[:, _order(value.shape[1]).to(value.device)]
        elif value.dim() == 4 and image is not None and grid is not None:
            changed[name] = shuffle_patches(value, grid)
    return subject.with_arguments(**changed) if changed else None


def _order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED))


def shuffle_ids(ids: Tensor, special: frozenset[int]) -> Tensor:
    """Token ids (..., n) in another order, with special tokens in place."""
    rows = []
    for row in ids.flatten(0, -2):
        places = torch.tensor([i for i, token in enumerate(row.tolist()) if token not in special])
        row = row.clone()
        if len(places) > 1:
            row[places] = row[places[_order(len(places))]]
        rows.append(row)
    return torch.stack(rows).view(ids.shape)


def shuffle_patches(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Images (1, c, height, width) with their patches in another order."""
    rows, columns = grid
    height, width = pixels.shape[2] // rows, pixels.shape[3] // columns
    inside = pixels[..., : rows * height, : columns * width]
    patches = inside.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    patches = patches.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (patches, 1, c, height, width)
    patches = patches[_order(len(patches)).to(pixels.device)].unflatten(0, grid)
    shuffled = pixels.clone()
    shuffled[..., : rows * height, : columns * width] = (
        patches.permute(2, 3, 0, 4, 1, 5).flatten(4, 5).flatten(2, 3)
    )
    return shuffled


def control(model: InspectedModel, subject: Subject) -> list[MapRows | None]:
    """Rows of the maps of a model on another input, for each of its maps; None where the other
    input has no such map."""
    try:
        other = InspectedModel(subject, model.kept)
    except (ValueError, Unsupported):  # the input does not fit the model
        return [None for _ in model.maps]
    by_place = {_place(placed): placed for placed in other.maps}
    rows: list[MapRows | None] = []
    for placed in model.maps:
        found = by_place.get(_place(placed))
        operator = None if found is None else found.map.operator
        rows.append(map_rows(operator) if isinstance(operator, HeadOperator) else None)
    return rows


def _place(placed: PlacedMap) -> tuple[Any, ...]:
    return placed.role, placed.layer, placed.queries.partition(",")[0], placed.map.example


def induction(model: InspectedModel) -> tuple[list[Scores], list[Scores]]:
    """Induction and duplicate-token scores of the heads of each map, and the same where the second
    half is not a repetition; empty for models that do not read one sequence of token ids."""
    nothing: list[Scores] = [{} for _ in model.maps]
    subject = model.subject
    names = [name for name in ("x", "input_ids") if name in subject.ids]
    config: Any = getattr(subject.model, "config", None)
    size = getattr(config, "vocab_size", None)
    size = size or getattr(getattr(config, "input", None), "vocab_size", None)
    if not names or subject.is_seq2seq or size is None or size < 3:
        return nothing, nothing
    if subject.ids[names[0]].dim() != 2:
        return nothing, nothing
    limit = max_length(subject.model)
    length = REPEATED if limit is None else min(REPEATED, limit // 2)
    generator = torch.Generator().manual_seed(SEED)
    halves = torch.randint(1, size, (2, length), generator=generator)
    results = []
    for second in (0, 1):
        ids = torch.cat((halves[0], halves[second]))[None].to(subject.ids[names[0]].device)
        other = only_ids(subject, names[0], ids)
        scores: list[Scores] = []
        for rows in control(model, other):
            fits = rows is not None and rows.complete and rows.weights.shape[1] == 2 * length
            found = induction_scores(rows.weights, length) if rows is not None and fits else {}
            scores.append({name: finite_numbers(values) for name, values in found.items()})
        results.append(scores)
    return results[0], results[1]


def only_ids(subject: Subject, name: str, ids: Tensor) -> Subject:
    """The model with token ids alone: no mask, no token types."""
    kwargs = {
        key: value for key, value in subject.inputs.kwargs.items() if not isinstance(value, Tensor)
    }
    args = subject.inputs.args
    if args:
        args = (ids,)
    else:
        kwargs[name] = ids
    inputs = subject.inputs._replace(args=args, kwargs=kwargs, mask=None)
    return replace(subject, inputs=inputs, tokens={})
