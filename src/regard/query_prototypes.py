"""Fewer queries: those that are alike ask once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor, nn

from regard import native
from regard.errors import check_int
from regard.mixer import Can
from regard.numerics import stable_argsort

Back = Callable[[Tensor], Tensor]

_CLUSTERS = Struct("7q4P")  # the structure of the kernel, field by field


class QueryPrototypes(nn.Module, ABC):
    """q (b h n e), real (b n) -> (prototypes (b h p e), back), where back: (b h p f) -> (b h n f) gives each its answer.

    Queries that are not real must have no influence on the prototypes; None: all are.
    """

    can: Can = Can(
        causal="a prototype stands for queries at many positions",
        stream="a prototype stands for queries at many positions",
    )

    @abstractmethod
    def forward(self, q: Tensor, real: Tensor | None) -> tuple[Tensor, Back]: ...


class QueryClusters(QueryPrototypes):
    """Groups of queries whose hashes are near, and their means (Vyas et al. 2020, arXiv 2007.04825).

    Each query becomes `bits` signs, of its products with random planes.  Lloyd's algorithm groups the signs: each query
    goes to the centre from which it differs in the fewest bits, and each bit of a centre becomes that of the majority; a
    tie, or an empty cluster, leaves it as it was.  The first centres are real queries, evenly apart.

    clusters     how many groups; those that stay empty answer nobody
    iterations   of Lloyd's algorithm
    """

    planes: Tensor

    def __init__(
        self, width: int, clusters: int, *, bits: int = 63, iterations: int = 10, seed: int = 0
    ) -> None:
        super().__init__()
        check_int(1, width=width, clusters=clusters, bits=bits)
        check_int(0, iterations=iterations, seed=seed)
        self.clusters, self.iterations = clusters, iterations
        self.register_buffer(
            "planes", torch.randn(bits, width, generator=torch.Generator().manual_seed(seed))
        )

    def forward(self, q: Tensor, real: Tensor | None) -> tuple[Tensor, Back]:
        """The mean of each cluster (b h clusters e), zero where it is empty."""
        index = self.assign(q, real)
        return self.means(q, index, real), lambda y: gather_rows(y, index)

    @torch.no_grad()
    def assign(self, q: Tensor, real: Tensor | None) -> Tensor:
        """The cluster of each query, (b h n)."""
        if q.shape[2] == 0:
            return torch.zeros(q.shape[:3], dtype=torch.long, device=q.device)
        exact = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        sides, first = q.to(exact) @ self.planes.to(exact).T, self._first(q, real)
        return (_by_kernel if native.supports(sides) else _by_products)(
            sides, real, first, self.iterations
        )

    def _first(self, q: Tensor, real: Tensor | None) -> Tensor:
        """Where the first centres stand, (b h clusters): every r/clusters-th of the r real queries."""
        real = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool) if real is None else real
        rank = (
            torch.arange(self.clusters, device=q.device)
            * real.sum(1, keepdim=True)
            // self.clusters
        )
        return valid_first_order(real).gather(1, rank)[:, None].expand(-1, q.shape[1], -1)

    def means(self, q: Tensor, index: Tensor, real: Tensor | None) -> Tensor:
        """The mean of the real queries of each cluster, (b h clusters e)."""
        weight = (
            torch.ones_like(index, dtype=q.dtype)
            if real is None
            else real[:, None].expand_as(index).to(q.dtype)
        )
        shape = (*q.shape[:2], self.clusters)
        total = q.new_zeros(*shape, q.shape[-1]).scatter_add(
            2, index[..., None].expand_as(q), q * weight[..., None]
        )
        return total / q.new_zeros(shape).scatter_add(2, index, weight).clamp(min=1)[..., None]


def _by_kernel(sides: Tensor, real: Tensor | None, first: Tensor, iterations: int) -> Tensor:
    """Lloyd's algorithm on the signs of `sides` (b h n bits), from the tokens `first` (b h clusters): (b h n)."""
    sides, first = sides.contiguous(), first.contiguous()
    real = None if real is None else real.contiguous()
    nearest = torch.empty(sides.shape[:3], dtype=torch.long)
    given = (
        sides.data_ptr(),
        0 if real is None else real.data_ptr(),
        first.data_ptr(),
        nearest.data_ptr(),
    )
    sizes = (*sides.shape, first.shape[2], iterations, torch.get_num_threads())
    native.run("cluster", sides.dtype, _CLUSTERS.pack(*sizes, *given))
    return nearest


def _by_products(sides: Tensor, real: Tensor | None, first: Tensor, iterations: int) -> Tensor:
    """The same, for any device: +1 and -1 for the two sides, whose product counts the bits that agree."""
    bits = torch.where(sides >= 0, 1.0, -1.0).to(sides.dtype)
    count = bits if real is None else bits * real[:, None, :, None]
    centres = gather_rows(bits, first)
    for _ in range(iterations):
        nearest = (bits @ centres.transpose(-1, -2)).argmax(-1)
        votes = torch.zeros_like(centres).scatter_add(2, nearest[..., None].expand_as(bits), count)
        centres = torch.where(votes == 0, centres, votes.sign())
    return (bits @ centres.transpose(-1, -2)).argmax(-1)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (b h p f), index (b h n) -> (b h n f): row by row, where `gather` goes number by number."""
    b, h, p, f = x.shape
    first = torch.arange(0, b * h * p, p, device=x.device) if p else index.new_zeros(b * h)
    return (
        x.reshape(b * h * p, f)
        .index_select(0, (index + first.view(b, h, 1)).flatten())
        .view(*index.shape, f)
    )


def valid_first_order(real: Tensor) -> Tensor:
    """real (b n) -> the numbers of the real tokens in order, and then those of the others, (b n)."""
    return stable_argsort((~real).to(torch.uint8))
