"""Two models side by side: which heads have the same map, and where they differ most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.inspection.data import HeadMatch
from regard.inspection.inspected import InspectedModel, PlacedMap

COMPARED = 64  # cells of a side of the maps that are compared


def head_vectors(placed: PlacedMap) -> Tensor | None:
    """The maps of the heads of a layer as unit vectors (h, cells), or None without a map."""
    operator = placed.map.operator
    if operator is None:
        return None
    shape = min(COMPARED, operator.queries), min(COMPARED, operator.keys)
    vectors = operator.pool_map(slice(None), slice(None), shape).flatten(1).float()
    vectors = torch.nan_to_num(vectors)
    return vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)


def match_heads(first: InspectedModel, second: InspectedModel) -> list[HeadMatch]:
    """For each head of the first model the most similar head of the second, among the layers that
    attend to the same tokens. Similarity is the cosine of the two maps."""
    matches: list[HeadMatch] = []
    others = [(i, p, head_vectors(p)) for i, p in enumerate(second.maps)]
    for i, placed in enumerate(first.maps):
        vectors = head_vectors(placed)
        if vectors is None:
            continue
        candidates = [
            (j, found, p)
            for j, p, found in others
            if found is not None
            and found.shape[1] == vectors.shape[1]
            and (p.role, p.queries, p.keys) == (placed.role, placed.queries, placed.keys)
        ]
        if not candidates:
            continue
        similarity = vectors @ torch.cat([found for _, found, _ in candidates]).T
        owners = [(j, head) for j, found, _ in candidates for head in range(len(found))]
        for head, row in enumerate(similarity):
            best = int(row.argmax())
            same = [
                k
                for k, (j, other) in enumerate(owners)
                if other == head and second.maps[j].layer == placed.layer
            ]
            matches.append(
                {
                    "first": (i, head),
                    "second": owners[best],
                    "similarity": round(float(row[best]), 4),
                    "same_place": round(float(row[same[0]]), 4) if same else 0.0,
                }
            )
    return matches


def change_table(
    first: InspectedModel, second: InspectedModel, matches: list[HeadMatch]
) -> dict[str, Any] | None:
    """Layer by layer, how far the second model is from the first: the change of the outputs of its
    heads, and of their maps. None if the layers cannot be compared."""
    rows: list[list[Any]] = []
    for i, placed in enumerate(first.maps):
        other = next(
            (p for p in second.maps if (p.role, p.layer) == (placed.role, placed.layer)), None
        )
        same = [match["same_place"] for match in matches if match["first"][0] == i]
        if other is None or not same:
            continue
        rows.append(
            [
                f"{placed.role} {placed.layer}",
                placed.mixer,
                other.mixer,
                round(1 - sum(same) / len(same), 4),
                round(1 - min(same), 4),
                same.index(min(same)),
                output_change(placed, other),
            ]
        )
    if not rows:
        return None
    return {
        "title": "Where the two models differ",
        "caption": "1 - cosine of the maps at the same place, and the relative change of the "
        "outputs of the heads. The layer that changed most comes first.",
        "columns": ["layer", "first", "second", "mean", "largest", "head", "outputs"],
        "rows": sorted(rows, key=lambda row: -row[3]),
    }


def output_change(first: PlacedMap, second: PlacedMap) -> float | None:
    """|a - b| / |a| of the outputs of the heads of two layers, or None."""
    if first.map.attention is None or second.map.attention is None:
        return None
    a, b = first.map.attention.output[0], second.map.attention.output[0]
    if a.shape != b.shape:
        return None
    return round(float((a - b).norm() / a.norm().clamp(min=1e-12)), 4)
