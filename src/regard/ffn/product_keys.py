"""Product-key memory: many value slots, found by comparing with few keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.ffn.base import FeedForward
from regard.norm import BatchNorm
from regard.numerics import at_least_float32, zero_padding_tokens


class ProductKeyMemory(FeedForward):
    """y = Σ_heads Σ_{(i,j) in top k} softmax(q₁·c_i + q₂·c'_j) V_ij (Lample et al. 2019,
    arXiv 1907.05242).

    Each head splits its query q = W x into two halves, compared with two sets of `keys` half-keys,
    c and c'. Every pair is a key, so there are keys² slots. The k best pairs are among the k best
    of each half: 2 · keys + k² scores find them, and no tensor of size (tokens · keys²) exists.
    Heads share the values V (keys², d).

    Args:
        keys: Half-keys per set.
        top_k: Slots that a head reads.
        query_dim: Width of a query, even. Default dim, plus one if that is odd.
        query_batch_norm: Batch norm of the queries over real tokens, which keeps slots from dying.
            In training, tokens of a batch then depend on each other; in evaluation they do not.
        sparse_grad: Sparse gradient of the values, for optimisers that support it.
    """

    def __init__(
        self,
        dim: int,
        keys: int = 128,
        *,
        heads: int = 4,
        top_k: int = 32,
        query_dim: int | None = None,
        query_batch_norm: bool = True,
        sparse_grad: bool = False,
    ) -> None:
        super().__init__(dim)
        query_dim = dim + dim % 2 if query_dim is None else query_dim
        check_int(1, keys=keys, heads=heads, top_k=top_k, query_dim=query_dim)
        if query_dim % 2:
            raise ValueError(f"query_dim must be even, not {query_dim}")
        if top_k > keys:
            raise ValueError(f"top_k must be at most keys ({keys}), not {top_k}")
        self.heads, self.top_k, self.sparse_grad = heads, top_k, sparse_grad
        self.query = nn.Linear(dim, heads * query_dim)
        self.norm = BatchNorm(heads * query_dim) if query_batch_norm else None
        half_keys = 2 * torch.rand(heads, 2, keys, query_dim // 2) - 1
        self.keys = nn.Parameter(half_keys * (2 / query_dim) ** 0.5)
        self.values = nn.Parameter(torch.randn(keys**2, dim) * dim**-0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        x = zero_padding_tokens(x, mask)
        slots, weights = (t.flatten(0, 1).flatten(1) for t in self.select_slots(x, mask))
        y = F.embedding_bag(
            slots,
            self.values,
            mode="sum",
            per_sample_weights=weights.to(self.values.dtype),
            sparse=self.sparse_grad,
        )
        return y.view_as(x)

    def select_slots(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k best slots of each head and their weights, both (b, n, h, k)."""
        q = at_least_float32(self.query(x))
        if self.norm is not None:
            q = self.norm(q, mask)
        q = q.unflatten(-1, (self.heads, 2, -1))
        scores = torch.einsum("bnhsw,hskw->bnhsk", q, self.keys.to(q.dtype))
        scores, halves = scores.topk(self.top_k, -1)
        pairs = scores[..., 0, :, None] + scores[..., 1, None, :]
        best, pair = pairs.flatten(-2).topk(self.top_k, -1)
        first = halves[..., 0, :].gather(-1, pair // self.top_k)
        second = halves[..., 1, :].gather(-1, pair % self.top_k)
        return first * self.keys.shape[2] + second, best.softmax(-1)

    def extra_repr(self) -> str:
        """Shown by print."""
        slots = self.values.shape[0]
        return f"dim={self.dim}, slots={slots}, heads={self.heads}, top_k={self.top_k}"
