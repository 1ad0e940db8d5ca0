"""ProbSparse attention (Informer): only the queries with the most uneven attention attend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attentions.softmax import SoftmaxAttention
from regard.device import widest_dtype
from regard.errors import check_int
from regard.mixer import Can, QueryMaskAttention, State
from regard.numerics import at_least_float32
from regard.query_prototypes import gather_rows, valid_first_order

STEPS = 1 << 13  # between a power of two and the next
QUERY_CHUNK = 256  # queries that are measured at once
MAX_KEYS_PER_SAMPLE = 64  # up to this many keys per sampled key, scoring all keys is faster
USES_FUTURE = "which queries attend is decided among all of them, including later ones"
SAMPLES = "it samples about ln n keys on the host, and an exported graph does not know n"


class ProbSparseAttention(QueryMaskAttention):
    """ProbSparse attention (Zhou et al. 2021, arXiv 2012.07436).

    For each query, M(q) = max_j q·k_j/√e − mean_j q·k_j/√e over a few sampled keys. The queries
    with the largest M attend to all keys. The others get the mean of the values. With r real keys,
    factor · ⌈ln r⌉ are sampled, with replacement. With r real queries, as many attend, at least
    one.
    """

    can = Can(
        "rotary",
        causal=USES_FUTURE,
        stream=USES_FUTURE,
        independent_queries="which queries attend is decided among all of them",
        attn_mask="most queries return the mean of all values",
        export=SAMPLES,
    )

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
        """See `Attention.forward`."""
        b, h, n, _ = q.shape
        m = k.shape[2]
        if n == 0 or m == 0:
            return v.new_zeros(b, h, n, v.shape[3]), None
        if mask is not None:
            v = v.masked_fill(~mask[:, None, :, None], 0)
        keys = q.new_ones(b, m, dtype=torch.bool) if mask is None else mask
        queries = q.new_ones(b, n, dtype=torch.bool) if query_mask is None else query_mask
        mean = v.sum(2, keepdim=True) / keys.sum(1).clamp(min=1)[:, None, None, None]
        selected, attends = self.select(q, k, keys, queries)
        y = self.inner(gather_rows(q, selected), k, v, mask=mask)[0]
        y = torch.where(attends, y, mean)
        out = mean.expand(b, h, n, -1).scatter(2, selected[..., None].expand_as(y), y)
        return out, None

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Select the queries that attend.

        Args:
            q: Queries (b h n e).
            k: Keys (b h m e).
            keys: Which keys are real (b m).
            queries: Which queries are real (b n).

        Returns:
            Indices of the queries with the largest M (b h u), and which of them attend (b 1 u 1):
            shorter examples have fewer.
        """
        n = q.shape[2]
        # `topk` breaks ties by the length. Equal queries get equal numbers, then the first wins.
        steps = _logarithmic_steps(self.measure(q, k, keys)).masked_fill(~queries[:, None], -1)
        order = steps * n - torch.arange(n, device=q.device)
        selected = order.topk(self._max_samples(n), -1).indices
        rank = torch.arange(selected.shape[-1], device=q.device)[:, None]
        return selected, rank < self._samples(queries)[:, None, None, None]

    def measure(self, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        """The measure M of each query (b h n)."""
        q, k = at_least_float32(q) / math.sqrt(q.shape[-1]), at_least_float32(k)
        (_, h, n, _), m = q.shape, k.shape[2]
        count, draws = self._samples(keys)[:, None, None, None], self._max_samples(m)
        uniform = torch.stack([_uniform(self.seed, draw, n) for draw in range(draws)], 1)
        uniform = uniform.to(widest_dtype(q.device)).to(q.device)
        total = keys.sum(1)[:, None, None]
        rank = (uniform * total).long().minimum((total - 1).clamp(min=0))  # float32 may round up
        sample = valid_first_order(keys).gather(1, rank.flatten(1)).view(rank.shape)  # (b n draws)
        unused = torch.arange(draws, device=q.device) >= count
        parts = []
        for q_part, index in zip(
            q.split(QUERY_CHUNK, 2), sample.split(QUERY_CHUNK, 1), strict=True
        ):
            if m <= MAX_KEYS_PER_SAMPLE * draws:
                scores = (q_part @ k.mT).gather(3, index[:, None].expand(-1, h, -1, -1))
            else:  # the sample is the same for all heads, so fetch a key of all heads at once
                rows = zip(k.transpose(1, 2), index, strict=True)
                sampled = torch.stack([keys_of[i] for keys_of, i in rows])  # (b n draws h e)
                scores = torch.einsum("bhne,bnuhe->bhnu", q_part, sampled)
            mean = scores.masked_fill(unused, 0).sum(-1) / count[..., 0]
            parts.append(scores.masked_fill(unused, -torch.inf).amax(-1) - mean)
        return torch.cat(parts, 2)

    def _samples(self, real: Tensor) -> Tensor:
        """factor · ⌈ln r⌉, at least 1 and at most r, for the r real tokens of each example."""
        total = real.sum(1).clamp(min=1)
        samples = self.factor * total.to(widest_dtype(total.device)).log().ceil().long()
        return torch.minimum(samples.clamp(min=1), total)

    def _max_samples(self, n: int) -> int:
        """The same for n tokens. No example of that length has more."""
        return min(max(self.factor * math.ceil(math.log(n)), 1), n)


def _logarithmic_steps(x: Tensor) -> Tensor:
    """Numbers >= 0 as integers >= 0 in the same order, rounded to 13 bits of precision, so that
    those that are equal but for rounding are equal."""
    mantissa, exponent = torch.frexp(at_least_float32(x).clamp(min=0))  # 0.5 <= mantissa < 1
    steps = (exponent.long() + 2048) * STEPS + (mantissa * 2 * STEPS).round().long()
    return torch.where(mantissa > 0, steps, 0)


def _uniform(seed: int, draw: int, n: int) -> Tensor:
    """n numbers in [0, 1). The first ones do not depend on n."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    with torch._C._DisableFuncTorch():  # vmap refuses random numbers, also from a seed
        return torch.rand(n, dtype=torch.float64, generator=generator)
