"""What a vision transformer has learned before its first layer: the figures of Dosovitskiy et al.
2021 (arXiv 2010.11929, figure 7): filters of the patch embedding, and similarity of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.inspection.pictures import data_uri
from regard.inspection.subject import Subject
from regard.models.embeddings import PatchEmbedding

FILTERS = 28  # principal components that are shown
FILTERS_PER_ROW = 7
CELL = 4  # pixels of a cell of the similarity


def vision_figures(subject: Subject) -> list[dict[str, Any]]:
    """The figures of a model of images; empty for other models."""
    grid = subject.grid
    if grid is None:
        return []
    figures = []
    kernel = patch_kernel(subject.model)
    if kernel is not None:
        figures.append(
            {
                "title": "Patch embedding",
                "caption": f"The first {len(principal_filters(kernel))} principal components of "
                "the filters that turn a patch into a token, the strongest first.",
                "image": data_uri(filter_sheet(principal_filters(kernel))),
            }
        )
    positions = position_vectors(subject.model, grid)
    if positions is not None:
        figures.append(
            {
                "title": "Position embeddings",
                "caption": "Each square is one patch, and shows the cosine of its position "
                "embedding with those of all patches: white is 1, black is the smallest.",
                "image": data_uri(similarity_sheet(positions, grid)),
            }
        )
    return figures


def patch_kernel(model: nn.Module) -> Tensor | None:
    """Weights (d, c, height, width) of the convolution that embeds patches."""
    for module in model.modules():
        if isinstance(module, PatchEmbedding):
            return module.project.weight if isinstance(module.project, nn.Conv2d) else None
        if isinstance(module, nn.Conv2d) and module.stride == module.kernel_size:
            return module.weight
    return None


@torch.no_grad()
def position_vectors(model: nn.Module, grid: tuple[int, int]) -> Tensor | None:
    """Position embeddings (patches, d), or None without learned or computed ones."""
    count, device = grid[0] * grid[1], next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, PatchEmbedding):
            width = module(torch.zeros(1, *module.shape, device=device))[0].shape[2]
            vectors = module.position(torch.zeros(1, count, width, device=device), 0)[0]
            return vectors if bool(vectors.abs().any()) else None
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Parameter) and table.dim() == 3 and table.shape[1] >= count:
            return table[0, table.shape[1] - count :]
    return None


def principal_filters(kernel: Tensor) -> Tensor:
    """Principal components (k, c, height, width) of filters (d, c, height, width)."""
    flat = kernel.detach().float().flatten(1)
    components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False).Vh
    count = min(FILTERS, len(components))
    return components[:count].unflatten(1, kernel.shape[1:])


def filter_sheet(filters: Tensor) -> Tensor:
    """Filters (k, c, height, width) in rows, as pixels (c, height, width), each in its range."""
    low = filters.amin((1, 2, 3), keepdim=True)
    scaled = (filters - low) / (filters.amax((1, 2, 3), keepdim=True) - low).clamp(min=1e-12)
    scaled = scaled.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    return tile_sheet(scaled if scaled.shape[1] == 3 else scaled.mean(1, keepdim=True))


def similarity_sheet(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines of all positions with each, as a grid of grids: pixels (1, height, width)."""
    vectors = torch.nn.functional.normalize(positions.detach().float(), dim=1)
    cosine = (vectors @ vectors.T).view(-1, 1, *grid)
    cosine = cosine.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    return tile_sheet(cosine, grid[1])


def tile_sheet(pictures: Tensor, columns: int = FILTERS_PER_ROW) -> Tensor:
    """Pictures (k, c, height, width) in rows with lines between, as (c, ..., ...)."""
    low = pictures.min()
    padded = torch.nn.functional.pad(pictures, (1, 1, 1, 1), value=float(low))
    missing = -len(padded) % columns
    padded = torch.cat((padded, padded.new_full((missing, *padded.shape[1:]), float(low))))
    rows = padded.unflatten(0, (-1, columns))  # (rows, columns, c, height, width)
    return rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
