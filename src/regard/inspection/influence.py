"""Influence maps: how much output token i of any function moves when input token j does.

    influence_ij = ‖∂y_i / ∂x_j‖   (Frobenius norm of a matrix d x d)

This needs no queries, keys or values, only a derivative, so it exists for every mixer and every
module. A product of the Jacobian with a random vector u_i (one vector-Jacobian product) estimates
it: E ‖u_iᵀ ∂y_i/∂x_j‖² = ‖∂y_i/∂x_j‖² for u_i with mean 0 and covariance 1. Independent vectors at
several output tokens give the sum of their squares, so a tile of r rows of cells costs r products
for each probe, and nothing of size n x n is made. At small sizes the one-hot vectors give the exact
norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from regard.inspection.operators import cell_edges

MAX_EXACT = 4096  # products for an exact map: output tokens x width
PROBES = 8
SEED = 0


class Influence:
    """The influence map of a function of tokens.

    Args:
        function: Tokens (b, m, d) -> (b, n, d).
        x: The tokens (1, m, d) at which it is differentiated.
        queries: Number of outputs n; by default m.
        batched: Whether examples of a batch do not influence each other, so that several products
            are one call.
        probes: Random vectors for each row of cells, where the map is not exact.
    """

    heads = 1

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        *,
        queries: int | None = None,
        batched: bool = True,
        probes: int = PROBES,
    ) -> None:
        self.function, self.x = function, x.detach()
        self.keys = x.shape[1]
        self.queries = self.keys if queries is None else queries
        self.chunk = max(1, min(64, (1 << 20) // max(1, x.numel()))) if batched else 1
        self.probes = probes

    def is_exact(self, rows: slice, shape: tuple[int, int]) -> bool:
        """Whether a tile of these rows is the exact norm, not an estimate."""
        start, stop, _ = rows.indices(self.queries)
        return (stop - start) * self.width <= MAX_EXACT

    def pool_map(self, rows: slice, columns: slice, shape: tuple[int, int]) -> Tensor:
        """A block of the map in `shape` (rows, columns) cells, (1, *shape): the root mean square
        of the norms in each cell."""
        start, stop, _ = rows.indices(self.queries)
        first, last, _ = columns.indices(self.keys)
        row_edges = cell_edges(stop - start, shape[0]) + start
        squares = torch.zeros(shape[0], last - first, dtype=self.x.dtype)
        width = self.width
        if self.is_exact(rows, shape):
            cell = torch.repeat_interleave(torch.arange(shape[0]), row_edges.diff())
            order = [(i, channel) for i in range(start, stop) for channel in range(width)]
            for chunk in (order[i : i + self.chunk] for i in range(0, len(order), self.chunk)):
                vectors = torch.zeros(len(chunk), self.queries, width, dtype=self.x.dtype)
                for place, (i, channel) in enumerate(chunk):
                    vectors[place, i, channel] = 1
                found = self._products(vectors)[:, first:last]
                squares.index_add_(0, cell[[i - start for i, _ in chunk]], found)
        else:
            generator = torch.Generator().manual_seed(SEED)
            tasks = [row for row in range(shape[0]) for _ in range(self.probes)]
            for part in (tasks[i : i + self.chunk] for i in range(0, len(tasks), self.chunk)):
                vectors = torch.zeros(len(part), self.queries, width, dtype=self.x.dtype)
                for place, row in enumerate(part):
                    tokens = slice(int(row_edges[row]), int(row_edges[row + 1]))
                    size = (tokens.stop - tokens.start, width)
                    vectors[place, tokens] = torch.randn(
                        size, generator=generator, dtype=self.x.dtype
                    )
                found = self._products(vectors)[:, first:last]
                squares.index_add_(0, torch.tensor(part), found / self.probes)
        edges = cell_edges(last - first, shape[1])
        cell = torch.repeat_interleave(torch.arange(shape[1]), edges.diff())
        pooled = torch.zeros(shape[0], shape[1], dtype=squares.dtype).index_add_(1, cell, squares)
        count = row_edges.diff()[:, None] * edges.diff()[None]
        return (pooled / count).sqrt()[None]

    def dense(self) -> Tensor:
        """The whole map (1, n, m)."""
        return self.pool_map(slice(None), slice(None), (self.queries, self.keys))

    @cached_property
    def width(self) -> int:
        """Number of channels of an output token."""
        with torch.no_grad():
            return int(self.function(self.x).shape[-1])

    def _products(self, vectors: Tensor) -> Tensor:
        """‖Σ_i u_iᵀ ∂y_i/∂x_j‖² for vectors u (k, n, d): (k, m)."""
        with torch.enable_grad():
            x = self.x.expand(len(vectors), -1, -1).detach().clone().requires_grad_()
            y = self.function(x)
            if not y.requires_grad:
                return torch.zeros(len(vectors), self.keys, dtype=self.x.dtype)
            (gradient,) = torch.autograd.grad(
                y, x, vectors.to(y), allow_unused=True, materialize_grads=True
            )
        return gradient.square().sum(-1).cpu()
