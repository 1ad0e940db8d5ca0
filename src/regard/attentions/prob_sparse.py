"""ProbSparse attention: the queries that stand out attend, and the others take the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions.softmax import SoftmaxAttention
from regard.errors import check_whole
from regard.mixer import Attention, Can, State
from regard.query import real_first, take

AHEAD = "which queries attend is decided among all of them, the later ones too"
DRAWN = "it draws about ln n keys on the host, and a graph for any length knows no n"


class ProbSparse(Attention):
    """Zhou et al. 2021, arXiv 2012.07436.  M(q) = max_j q·k_j/√e − mean_j q·k_j/√e, over a few keys drawn for each query;
    the queries with the largest M attend to all keys, and the others give the mean of the values.

    With r real keys `factor` ⌈ln r⌉ are drawn, with replacement; with r real queries so many attend, at least one.
    """

    can = Can(causal=AHEAD, stream=AHEAD, export=DRAWN)
    asks_queries = True

    def __init__(self, *, factor: int = 5, seed: int = 0) -> None:
        super().__init__()
        check_whole(1, factor=factor)
        check_whole(0, seed=seed)
        self.factor, self.seed, self.inner = factor, seed, SoftmaxAttention()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `Attention.attend`; real (b n) says which queries count."""
        b, h, n, _ = q.shape
        if n == 0 or k.shape[2] == 0:
            return v.new_zeros(b, h, n, v.shape[3]), None
        keys = torch.ones(b, k.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
        queries = torch.ones(b, n, dtype=torch.bool, device=q.device) if real is None else real
        v = v.masked_fill(~keys[:, None, :, None], 0)
        mean = v.sum(2, keepdim=True) / keys.sum(1).clamp(min=1)[:, None, None, None]
        found, counts = self.select(q, k, keys, queries)
        y = self.inner.attend(take(q, found), k, v, mask=mask)[0]
        y = torch.where(counts, y, mean)
        at = found[..., None].expand_as(y)
        return mean.expand(b, h, n, -1).scatter(2, at, y), None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The queries that stand out most, (b h u), and which of them attend, (b 1 u 1): shorter examples have fewer."""
        measure = self.measure(q, k, keys).masked_fill(~queries[:, None], -torch.inf)
        wanted = self._count(queries)
        found = measure.topk(self._most(q.shape[2]), -1).indices
        return found, torch.arange(found.shape[-1], device=q.device)[None, None, :, None] < wanted[:, None, None, None]

    def measure(self, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        """M of each query, (b h n)."""
        exact = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        q, k = q.to(exact) / math.sqrt(q.shape[-1]), k.to(exact)
        wanted = self._count(keys)
        order = real_first(keys)
        most, total = q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])
        for draw in range(self._most(k.shape[2])):
            rank = (_uniform(self.seed, draw, q.shape[2]).to(q.device) * keys.sum(1, keepdim=True)).long()
            at = order.gather(1, rank)[:, None].expand(-1, q.shape[1], -1)
            score = (q * take(k, at)).sum(-1)
            counts = (draw < wanted)[:, None, None]
            most, total = torch.where(counts, torch.maximum(most, score), most), total + score * counts
        return most - total / wanted[:, None, None]

    def _count(self, real: Tensor) -> Tensor:
        """factor ⌈ln r⌉, between 1 and the r real tokens, for each example."""
        total = real.sum(1).clamp(min=1)
        wanted = self.factor * total.double().log().ceil().long()
        return torch.minimum(wanted.clamp(min=1), total)

    def _most(self, n: int) -> int:
        """The same for n tokens: no example of that length has more."""
        return min(max(self.factor * math.ceil(math.log(n)), 1), n)


def _uniform(seed: int, draw: int, n: int) -> Tensor:
    """n numbers in [0, 1): the same for the first tokens, however many follow."""
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed * 1_000_003 + draw))
