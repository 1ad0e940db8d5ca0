"""A memory of very many slots, of which each token reads a few, found by comparing with few keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.ffn.base import FeedForward
from regard.norm import BatchNorm
from regard.numerics import at_least_float32, zero_padding_tokens


class ProductKeyMemory(FeedForward):
    """y = Σ_heads Σ_{(i,j) in top k} softmax(q₁·c_i + q₂·c'_j) V_ij (Lample et al. 2019, arXiv 1907.05242).

    Each head has its query q = W x, in two halves, and two sets of `count_keys` half-keys, c and c'.  Every pair of them is a key,
    so there are keys² slots.  The k best pairs are among the k best of each half: so 2 · keys and k² scores find them, and
    nothing of size (tokens · keys²) exists.  The heads share the values V (keys² d).

    top        k
    width      of a query, even: dim unless given, plus one where that is odd
    normalise  batch norm of the queries, over the real tokens; it keeps slots from dying.  While training, tokens of a batch
               then depend on each other; in evaluation they do not
    sparse     the gradient of the values is a sparse tensor, for optimisers that take one
    """

    def __init__(
        self,
        dim: int,
        keys: int = 128,
        *,
        heads: int = 4,
        top: int = 32,
        width: int | None = None,
        normalise: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__(dim)
        width = dim + dim % 2 if width is None else width
        check_int(1, keys=keys, heads=heads, top=top, width=width)
        if width % 2:
            raise ValueError(f"width must be even, for a query has two halves, not {width}")
        if top > keys:
            raise ValueError(f"top must be at most the number of half-keys, {keys}, not {top}")
        self.heads, self.top, self.sparse = heads, top, sparse
        self.query = nn.Linear(dim, heads * width)
        self.norm = BatchNorm(heads * width) if normalise else None
        self.keys = nn.Parameter(
            (2 * torch.rand(heads, 2, keys, width // 2) - 1) * (2 / width) ** 0.5
        )
        self.values = nn.Parameter(torch.randn(keys**2, dim) * dim**-0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        x = zero_padding_tokens(x, mask)
        slots, weights = (t.flatten(0, 1).flatten(1) for t in self.find(x, mask))
        out = F.embedding_bag(
            slots,
            self.values,
            mode="sum",
            per_sample_weights=weights.to(self.values.dtype),
            sparse=self.sparse,
        )
        return out.view_as(x)

    def find(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k best slots of each head and their weights, both (b n h k)."""
        q = at_least_float32(self.query(x))
        q = q if self.norm is None else self.norm(q, mask)
        halves = q.unflatten(-1, (self.heads, 2, -1))
        scores, half = torch.einsum("bnhsw,hskw->bnhsk", halves, self.keys.to(q.dtype)).topk(
            self.top, -1
        )
        pairs = scores[..., 0, :, None] + scores[..., 1, None, :]
        best, pair = pairs.flatten(-2).topk(self.top, -1)
        first, second = (
            half[..., s, :].gather(-1, at)
            for s, at in enumerate((pair // self.top, pair % self.top))
        )
        return first * self.keys.shape[2] + second, best.softmax(-1)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dim={self.dim}, slots={self.values.shape[0]}, heads={self.heads}, top={self.top}"
