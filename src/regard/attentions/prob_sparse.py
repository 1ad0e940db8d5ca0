"""ProbSparseAttention attention: the queries that stand out attend, and the others take the mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions.softmax import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Attention, Can, State
from regard.query_prototypes import gather_rows, valid_first_order

ROWS = 256  # queries that are measured at once
MAX_KEYS_PER_SAMPLE = 64  # where there are at most so many keys for each that is drawn, one product with all of them is faster
AHEAD = "which queries attend is decided among all of them, the later ones too"
DRAWN = "it draws about ln n keys on the host, and a graph for any length knows no n"


class ProbSparseAttention(Attention):
    """Zhou et al. 2021, arXiv 2012.07436.  M(q) = max_j q·k_j/√e − mean_j q·k_j/√e, over a few keys drawn for each query;
    the queries with the largest M attend to all keys, and the others give the mean of the values.

    With r query_mask keys `factor` ⌈ln r⌉ are drawn, with replacement; with r query_mask queries so many attend, at least one.
    """

    can = Can(causal=AHEAD, stream=AHEAD, export=DRAWN)
    needs_query_mask = True

    def __init__(self, *, factor: int = 5, seed: int = 0) -> None:
        super().__init__()
        check_int(1, factor=factor)
        check_int(0, seed=seed)
        self.factor, self.seed, self.inner = factor, seed, SoftmaxAttention()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`; query_mask (b n) says which queries count."""
        b, h, n, _ = q.shape
        if n == 0 or k.shape[2] == 0:
            return v.new_zeros(b, h, n, v.shape[3]), None
        keys = (
            torch.ones(b, k.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
        )
        queries = (
            torch.ones(b, n, dtype=torch.bool, device=q.device)
            if query_mask is None
            else query_mask
        )
        v = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0)
        mean = v.sum(2, keepdim=True) / keys.sum(1).clamp(min=1)[:, None, None, None]
        found, counts = self.select(q, k, keys, queries)
        y = self.inner(gather_rows(q, found), k, v, mask=mask)[0]
        y = torch.where(counts, y, mean)
        at = found[..., None].expand_as(y)
        return mean.expand(b, h, n, -1).scatter(2, at, y), None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The queries that stand out most, (b h u), and which of them attend, (b 1 u 1): shorter examples have fewer."""
        measure = self.measure(q, k, keys).masked_fill(~queries[:, None], -torch.inf)
        wanted = self._count(queries)
        found = measure.topk(self._most(q.shape[2]), -1).indices
        return found, torch.arange(found.shape[-1], device=q.device)[None, None, :, None] < wanted[
            :, None, None, None
        ]

    def measure(self, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        """M of each query, (b h n)."""
        exact = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
        q, k = q.to(exact) / math.sqrt(q.shape[-1]), k.to(exact)
        wanted, draws = self._count(keys)[:, None, None, None], self._most(k.shape[2])
        drawn = torch.stack([_uniform(self.seed, draw, q.shape[2]) for draw in range(draws)], 1).to(
            q.device
        )
        rank = (drawn * keys.sum(1)[:, None, None]).long()
        at = valid_first_order(keys).gather(1, rank.flatten(1)).view(rank.shape)  # (b n draws)
        beyond = torch.arange(draws, device=q.device) >= wanted
        parts = zip(q.split(ROWS, 2), at.split(ROWS, 1), strict=True)
        scores = _all_of if k.shape[2] <= MAX_KEYS_PER_SAMPLE * draws else _each_of
        return torch.cat(
            [_measured(scores(some, k, mine), beyond, wanted[..., 0]) for some, mine in parts], 2
        )

    def _count(self, query_mask: Tensor) -> Tensor:
        """factor ⌈ln r⌉, between 1 and the r query_mask tokens, for each example."""
        total = query_mask.sum(1).clamp(min=1)
        wanted = self.factor * total.double().log().ceil().long()
        return torch.minimum(wanted.clamp(min=1), total)

    def _most(self, n: int) -> int:
        """The same for n tokens: no example of that length has more."""
        return min(max(self.factor * math.ceil(math.log(n)), 1), n)


def _all_of(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """q (b h n e), k (b h m e), at (b n u) -> the scores (b h n u) with keys `at`, out of those with all keys."""
    return (q @ k.mT).gather(3, at[:, None].expand(-1, q.shape[1], -1, -1))


def _each_of(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """The same, of these keys alone: they are the same for all heads, so that a row of all of them is fetched at once."""
    rows = k.transpose(1, 2)
    drawn = torch.stack([mine[some] for mine, some in zip(rows, at, strict=True)])  # (b n u h e)
    return torch.einsum("bhne,bnuhe->bhnu", q, drawn)


def _measured(scores: Tensor, beyond: Tensor, wanted: Tensor) -> Tensor:
    """Greatest less mean of scores (b h n u), without those beyond the draws that are wanted."""
    most = scores.masked_fill(beyond, -torch.inf).amax(-1)
    return most - scores.masked_fill(beyond, 0).sum(-1) / wanted


def _uniform(seed: int, draw: int, n: int) -> Tensor:
    """n numbers in [0, 1): the same for the first tokens, however many follow."""
    return torch.rand(
        n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed * 1_000_003 + draw)
    )
