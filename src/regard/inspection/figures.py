"""Maps as PNG files, by matplotlib (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.console import escape_controls
from regard.inspection.attribution import rollout_tile
from regard.inspection.inspected import InspectedModel, PlacedMap

INK, PALE, COLOURS = "#1d2330", "#6b7280", "magma"
DPI = 140
THUMBNAIL_CELLS = 48
CELLS = 160  # of one side of a large map
LABELLED = 48  # tokens up to which their texts are drawn
MAX_LABEL = 14  # characters


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Saving a PNG needs matplotlib: pip install 'regard[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_overview(path: Path, model: InspectedModel) -> None:
    """All heads of all layers as thumbnails: a row for each layer."""
    maps = [placed for placed in model.maps if placed.map.operator is not None]
    if not maps:
        raise ValueError("No layer of this model has a map.")
    pictures = [pool_map(placed, THUMBNAIL_CELLS) for placed in maps]
    columns = max(map(len, pictures))
    figure = new_figure(1.0 + 1.05 * columns, 0.6 + 1.05 * len(maps))
    axes = figure.subplots(len(maps), columns, squeeze=False)
    for row, (placed, weights) in enumerate(zip(maps, pictures, strict=True)):
        for column in range(columns):
            cell = axes[row][column]
            cell.axis("off")
            if column < len(weights):
                draw(cell, weights[column])
            if row == 0:
                cell.set_title(str(column), fontsize=8, color=PALE)
        label = f"{placed.layer}" if placed.role == "self" else f"{placed.role} {placed.layer}"
        axes[row][0].text(
            -0.15,
            0.5,
            f"{label}\n{placed.map.kind}",
            transform=axes[row][0].transAxes,
            ha="right",
            va="center",
            fontsize=8,
            color=INK,
        )
    title = f"{model.subject.name}: heads of all layers; rows are queries, columns are keys"
    figure.suptitle(escape_controls(title), fontsize=10, color=INK)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def save_map(path: Path, model: InspectedModel, placed: PlacedMap, head: int | None) -> None:
    """The heads of a layer, or one of them, with the texts of the tokens."""
    if placed.map.operator is None:
        raise ValueError(f"Layer {placed.layer} has no map: {placed.map.reason}")
    weights = pool_map(placed, CELLS)
    if head is not None and not 0 <= head < len(weights):
        raise ValueError(f"There is no head {head}: layer {placed.layer} has {len(weights)}.")
    shown = list(range(len(weights))) if head is None else [head]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    side = 4.2 if len(shown) > 1 else 6.5
    figure = new_figure(side * columns, side * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False)
    for place, cell in enumerate(axes.flat):
        if place >= len(shown):
            cell.axis("off")
            continue
        draw(cell, weights[shown[place]])
        cell.set_title(f"head {shown[place]}", fontsize=10, color=INK)
        label_axis(cell.yaxis, model, placed.queries)
        label_axis(cell.xaxis, model, placed.keys)
        cell.tick_params(axis="x", rotation=90)
    error = "" if placed.map.error is None else f", error {placed.map.error:.0e}"
    title = f"{model.subject.name}, layer {placed.layer}: {placed.mixer} ({placed.map.kind}{error})"
    figure.suptitle(escape_controls(title), fontsize=11, color=INK)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def save_rollout(path: Path, model: InspectedModel) -> None:
    """The rollout over all layers: over a picture how much the first token reads of each patch,
    else as a map."""
    weights = rollout_tile(model, CELLS)
    if weights is None:
        raise ValueError(
            "There is no rollout: it needs a map of every layer over the same tokens, without "
            "negative weights."
        )
    sequence = next(iter(model.sequences.values()))
    grid, image = sequence.get("grid"), model.subject.image
    if grid is None or image is None:
        figure = new_figure(6.5, 6.9)
        cell = figure.subplots()
        draw(cell, weights[0])
        label_axis(cell.yaxis, model, sequence["id"])
        label_axis(cell.xaxis, model, sequence["id"])
        cell.tick_params(axis="x", rotation=90)
    else:
        first = sequence.get("first_patch", 0)
        row = weights[0, 0] if first else weights[0].mean(0)
        if len(row) != sequence["count"]:
            raise ValueError(f"A rollout over a picture needs at most {CELLS} patches.")
        figure = new_figure(8, 4.4)
        left, right = figure.subplots(1, 2)
        pixels = image.detach().float().cpu()
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-12)
        for cell in (left, right):
            cell.imshow(pixels.mean(0), cmap="gray")
            cell.axis("off")
        shares = row[first:].view(*grid)
        extent = (-0.5, image.shape[2] - 0.5, image.shape[1] - 0.5, -0.5)
        right.imshow(shares, cmap=COLOURS, alpha=0.65, extent=extent)
    figure.suptitle(
        escape_controls(f"{model.subject.name}: attention rollout"), fontsize=11, color=INK
    )
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def pool_map(placed: PlacedMap, cells: int) -> Tensor:
    """The map (h, rows, columns) in at most `cells` cells on a side."""
    operator = placed.map.operator
    assert operator is not None
    shape = min(cells, operator.queries), min(cells, operator.keys)
    weights = operator.pool_map(slice(None), slice(None), shape).float().abs()
    return torch.nan_to_num(weights, posinf=0.0)


def draw(cell: Any, weights: Tensor) -> None:
    """Draw one map (rows, columns); its largest weight is white."""
    cell.imshow(weights.numpy(), cmap=COLOURS, vmin=0, interpolation="nearest", aspect="auto")


def label_axis(axis: Any, model: InspectedModel, sequence: str) -> None:
    """The texts of the tokens, if they are few; control characters as escapes."""
    tokens = model.sequences[sequence]["tokens"]
    if not 0 < len(tokens) <= LABELLED:
        axis.set_ticks([])
        return
    texts = [escape_controls(token)[:MAX_LABEL].replace("$", r"\$") for token in tokens]
    axis.set_ticks(range(len(tokens)), texts, fontsize=7, color=INK)
