"""Query prototypes: queries that are alike attend once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor, nn

from regard import native
from regard.errors import check_int
from regard.mixer import Can
from regard.numerics import at_least_float32, stable_argsort

Expand = Callable[[Tensor], Tensor]

_CLUSTERS = Struct("7q4P")  # arguments of the C++ kernel, field by field


class QueryPrototypes(nn.Module, ABC):
    """Base class: maps q (b h n e) to prototypes (b h p e) and a function that expands their
    outputs.

    The function maps (b h p f) to (b h n f): each query gets the output of its prototype. Queries
    that `mask` (b n) excludes must have no influence on the prototypes.
    """

    can: Can = Can(
        "rotary",
        causal="a prototype stands for queries at many positions",
        stream="a prototype stands for queries at many positions",
        independent_queries="a prototype is computed from many queries",
        attn_mask="a prototype stands for many queries",
    )

    @abstractmethod
    def forward(self, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Expand]: ...


class QueryClusters(QueryPrototypes):
    """Clusters of queries with similar hashes; prototypes are their means
    (Vyas et al. 2020, arXiv 2007.04825).

    Each query is hashed to `bits` signs by random planes. Lloyd's algorithm clusters the signs:
    each query goes to the centre with the smallest Hamming distance, and each bit of a centre
    becomes the majority of its cluster. Ties and empty clusters leave a centre unchanged. The
    initial centres are evenly spaced real queries.

    Args:
        width: Head width e.
        clusters: Number of clusters. Some may stay empty.
        bits: Number of planes.
        iterations: Iterations of Lloyd's algorithm.
        seed: Seed of the planes.
    """

    planes: Tensor

    def __init__(
        self, width: int, clusters: int, *, bits: int = 63, iterations: int = 10, seed: int = 0
    ) -> None:
        super().__init__()
        check_int(1, width=width, clusters=clusters, bits=bits)
        check_int(0, iterations=iterations, seed=seed)
        self.clusters, self.iterations = clusters, iterations
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("planes", torch.randn(bits, width, generator=generator))

    def forward(self, q: Tensor, mask: Tensor | None) -> tuple[Tensor, Expand]:
        """The mean of each cluster (b h clusters e), zero where it is empty."""
        index = self.assign(q, mask)
        return self.means(q, index, mask), lambda y: gather_rows(y, index)

    @torch.no_grad()
    def assign(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Cluster of each query (b h n)."""
        b, h, n, _ = q.shape
        if n == 0:
            return torch.zeros(b, h, n, dtype=torch.long, device=q.device)
        q = at_least_float32(q)
        projections = q @ self.planes.to(q.dtype).T
        real = q.new_ones(b, n, dtype=torch.bool) if mask is None else mask
        rank = torch.arange(self.clusters, device=q.device)
        rank = rank * real.sum(1, keepdim=True) // self.clusters
        first = valid_first_order(real).gather(1, rank)[:, None].expand(-1, h, -1)
        lloyd = _lloyd_cpp if native.supports(projections) else _lloyd_torch
        return lloyd(projections, mask, first, self.iterations)

    def means(self, q: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
        """Mean of the real queries of each cluster (b h clusters e)."""
        wide = at_least_float32(q)  # 16-bit floats cannot count far, and float16 sums overflow
        weight = torch.ones_like(index, dtype=wide.dtype)
        if mask is not None:
            weight = weight * mask[:, None]
        shape = (*q.shape[:2], self.clusters)
        total = wide.new_zeros(*shape, q.shape[-1])
        total = total.scatter_add(2, index[..., None].expand_as(q), wide * weight[..., None])
        count = wide.new_zeros(shape).scatter_add(2, index, weight)
        return (total / count.clamp(min=1)[..., None]).to(q.dtype)


def _lloyd_cpp(projections: Tensor, mask: Tensor | None, first: Tensor, iterations: int) -> Tensor:
    """Lloyd's algorithm on the signs of `projections` (b h n bits), in C++.

    Args:
        projections: (b h n bits).
        mask: (b n), True = real query, or None.
        first: Index of the query at each initial centre (b h clusters).
        iterations: Number of iterations.

    Returns:
        Cluster of each query (b h n).
    """
    projections, first = projections.contiguous(), first.contiguous()
    mask = None if mask is None else mask.contiguous()
    nearest = torch.empty(projections.shape[:3], dtype=torch.long)
    arguments = _CLUSTERS.pack(
        *projections.shape,
        first.shape[2],
        iterations,
        torch.get_num_threads(),
        projections.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        first.data_ptr(),
        nearest.data_ptr(),
    )
    native.run("cluster", projections.dtype, arguments)
    return nearest


def _lloyd_torch(
    projections: Tensor, mask: Tensor | None, first: Tensor, iterations: int
) -> Tensor:
    """The same on any device. The dot product of ±1 vectors counts the bits that agree."""
    bits = torch.where(projections >= 0, 1.0, -1.0).to(projections.dtype)
    votes = bits if mask is None else bits * mask[:, None, :, None]
    centres = gather_rows(bits, first)
    for _ in range(iterations):
        nearest = (bits @ centres.mT).argmax(-1)
        total = torch.zeros_like(centres).scatter_add(2, nearest[..., None].expand_as(bits), votes)
        centres = torch.where(total == 0, centres, total.sign())
    return (bits @ centres.mT).argmax(-1)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (b h p f), index (b h n) -> (b h n f). Copies whole rows, unlike `gather`."""
    b, h, p, f = x.shape
    first = torch.arange(0, b * h * p, p, device=x.device) if p else index.new_zeros(b * h)
    rows = (index + first.view(b, h, 1)).flatten()
    return x.reshape(b * h * p, f).index_select(0, rows).view(*index.shape, f)


def valid_first_order(mask: Tensor) -> Tensor:
    """mask (b n) -> indices of the True entries in order, followed by those of the others (b n)."""
    return stable_argsort((~mask).to(torch.uint8))
