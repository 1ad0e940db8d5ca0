"""Maps of attention heads as operators: they can be multiplied by values, and are never stored.

`weigh` gives map x values for any values (m, c). With columns of the identity as values this is a
block of columns of the map; with indicators of groups of tokens it is the map with its columns
pooled. So a tile of any size costs one call of the attention that is drawn, with as many values as
the tile has columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspection.recording import AttentionRecord

MAX_VALUES = 1 << 24  # floats of one call: heads x rows x columns


class HeadOperator(ABC):
    """The maps (h, n, m) of the heads of a layer.

    Attributes:
        heads: Number of heads h.
        queries: Number of queries n.
        keys: Number of keys m.
        dtype: Of values and results.
    """

    heads: int
    queries: int
    keys: int
    dtype: torch.dtype

    @abstractmethod
    def weigh(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Map times values (1 or h, m, c): (h, rows, c)."""

    def block(self, rows: slice, columns: slice) -> Tensor:
        """A block of the maps, (h, rows, columns)."""
        start, stop, _ = columns.indices(self.keys)
        wide = max(1, stop - start)
        height = len(range(*rows.indices(self.queries)))
        step = max(1, min(wide, MAX_VALUES // max(1, self.heads * max(height, self.keys))))
        parts = []
        for first in range(start, stop, step):
            last = min(first + step, stop)
            one_hot = torch.zeros(1, self.keys, last - first, dtype=self.dtype)
            one_hot[0, torch.arange(first, last), torch.arange(last - first)] = 1
            parts.append(self.weigh(one_hot, rows))
        return torch.cat(parts, -1)

    def rows(self, rows: slice) -> Tensor:
        """Consecutive rows of the maps, (h, rows, m)."""
        return self.block(rows, slice(None))

    def dense(self) -> Tensor:
        """The whole maps (h, n, m); for short sequences."""
        return self.block(slice(None), slice(None))

    def pool_map(self, rows: slice, columns: slice, shape: tuple[int, int]) -> Tensor:
        """A block of the maps in `shape` (rows, columns) cells, (h, *shape): the mean weight of
        each cell. A cell is one pair if there are as many as tokens."""
        indicators = cell_means(columns, self.keys, shape[1]).to(self.dtype)
        parts = []
        step = max(1, MAX_VALUES // max(1, self.heads * max(shape[1], 64)))
        start, stop, _ = rows.indices(self.queries)
        means = cell_means(slice(0, stop - start), stop - start, shape[0]).to(self.dtype)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            block = self.weigh(indicators[None], slice(first, last))
            parts.append(means[first - start : last - start].T @ block)
        return torch.stack(parts).sum(0)


def cell_edges(size: int, cells: int) -> Tensor:
    """First token of each of `cells` cells over `size` tokens, and the end (cells + 1)."""
    return torch.arange(cells + 1) * size // cells


def cell_means(tokens: slice, count: int, cells: int) -> Tensor:
    """Columns that average over the cells of some tokens, (count, cells): those tokens are cut into
    `cells` cells, and a cell has weight one over its size at its tokens."""
    start, stop, _ = tokens.indices(count)
    edges = cell_edges(stop - start, cells) + start
    sizes = edges.diff()
    cell = torch.repeat_interleave(torch.arange(cells), sizes)
    means = torch.zeros(count, cells)
    means[torch.arange(start, stop), cell] = 1 / sizes[cell]
    return means


class RecordedHeads(HeadOperator):
    """The heads of a recorded call, of one example of its batch.

    Args:
        width: Values must have this width, because the attention adds learned values of its own.
            Their share of the output, which is no token's, is subtracted.
    """

    def __init__(
        self, record: AttentionRecord, example: int = 0, *, width: int | None = None
    ) -> None:
        self.record, self.example, self.width = record, example, width
        self.heads, self.queries, self.keys = record.heads, record.queries, record.keys
        self.dtype = record.output.dtype

    @torch.no_grad()
    def weigh(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """See `HeadOperator`."""
        values = values.to(self.record.output.device)
        if self.width is None:
            return self.record.attend(values, rows, self.example).to(self.dtype).cpu()
        parts = []
        for part in values.split(self.width, -1):
            padded = F.pad(part, (0, self.width - part.shape[-1]))
            learned = self.record.attend(torch.zeros_like(padded), rows, self.example)
            found = self.record.attend(padded, rows, self.example) - learned
            parts.append(found[..., : part.shape[-1]])
        return torch.cat(parts, -1).to(self.dtype).cpu()

    def rows(self, rows: slice) -> Tensor:
        """See `HeadOperator`. A row is the derivative of one output by the values, which needs one
        backward pass instead of m columns."""
        if self.width is not None:
            return super().rows(rows)
        start, stop, _ = rows.indices(self.queries)
        count, groups = stop - start, self.record.v.shape[1]
        device = self.record.output.device
        with torch.enable_grad():
            values = torch.zeros(
                groups, self.keys, count, dtype=self.dtype, device=device, requires_grad=True
            )
            out = self.record.attend(values, slice(start, stop), self.example)
        found = torch.zeros(self.heads, count, self.keys, dtype=self.dtype)
        shared = self.heads // groups  # heads that share values: one backward pass for each
        for place in range(shared):
            directions = torch.zeros_like(out)
            directions[place::shared] = torch.eye(count, dtype=out.dtype, device=device)
            (gradient,) = torch.autograd.grad(
                out, values, directions, retain_graph=True, materialize_grads=True
            )
            found[place::shared] = gradient.mT.detach().cpu()
        return found


class DenseHeads(HeadOperator):
    """Maps that are stored, (h, n, m)."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights.detach().cpu()
        self.heads, self.queries, self.keys = weights.shape
        self.dtype = weights.dtype

    def weigh(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """See `HeadOperator`."""
        return self.weights[:, rows] @ values


class ProductHeads(HeadOperator):
    """The product of the maps of several steps, the first step last; with `residual`, the values
    also pass each step but the first unchanged."""

    def __init__(self, steps: Sequence[HeadOperator], *, residual: bool = False) -> None:
        self.steps, self.residual = list(steps), residual
        self.heads, self.dtype = steps[0].heads, steps[0].dtype
        self.queries, self.keys = steps[0].queries, steps[-1].keys

    def weigh(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """See `HeadOperator`."""
        for step in reversed(self.steps[1:]):
            values = step.weigh(values)
        last = self.steps[0].weigh(values, rows)
        return last + values[:, rows] if self.residual else last

    def rows(self, rows: slice) -> Tensor:
        """See `HeadOperator`."""
        if self.residual:
            return super().rows(rows)
        found = self.steps[0].rows(rows)
        for step in self.steps[1:]:  # of few queries: packed tokens, inducing points, latents
            found = found @ step.rows(slice(None))
        return found
