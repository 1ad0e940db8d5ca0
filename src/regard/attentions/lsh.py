"""LSH attention (Reformer): softmax attention inside hash buckets, with shared queries and keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attentions.kv_cache import EVICTION_SLACK
from regard.backends import token_groups
from regard.errors import Unsupported, check_int
from regard.mixer import Can, SharedQKAttention, check_batch
from regard.numerics import unit_vectors
from regard.route.lsh import (
    CODE_STRIDE,
    AngularHash,
    chunk_by_bucket_rank,
    chunk_by_sorted_bucket,
    codes_match,
    groups_per_round,
)


class LSHState(NamedTuple):
    """The last two chunks of each bucket.

    Attributes:
        k: Keys (b h m e), or None before the first token.
        v: Values (b h m f).
        code: Bucket and chunk of each key in each round (b h r m).
        bucket_sizes: Number of tokens in each bucket so far (b h r buckets).
        evict_at: Number of keys at which to look for keys to evict.
    """

    k: Tensor | None
    v: Tensor | None
    code: Tensor | None
    bucket_sizes: Tensor | None
    evict_at: int


class LSHAttention(SharedQKAttention):
    """LSH attention (Kitaev et al. 2020, arXiv 2001.04451).

        k_j = q_j / |q_j|,  out_i = Σ_j softmax_j(q_i · k_j · scale) v_j

    over the tokens j ≠ i that token i meets in at least one hash round, or v_i if there are none.
    In a round, i meets the tokens of its bucket in its own chunk and in the chunk before. Chunks
    are cut from the tokens sorted by bucket and position. In the causal form they are counted
    inside each bucket, and i meets earlier tokens only.

    Args:
        hashing: Hash function.
        chunk: Chunk length.
        same_bucket: If False, i also meets the tokens of other buckets in those chunks.
        once: If False, a key counts as often as it is met in several rounds.
        scale: Scale of the scores. Defaults to 1/√e.
    """

    can = Can(
        cross="queries and keys are shared, and the hash sorts a single sequence",
        attn_mask="a token that meets no other token returns its own value",
        rotary="tokens would be hashed by position instead of content",
    )

    def __init__(
        self,
        hashing: AngularHash,
        *,
        chunk: int = 64,
        same_bucket: bool = True,
        once: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_int(1, chunk=chunk)
        self.hashing, self.chunk, self.heads = hashing, chunk, hashing.heads
        self.same_bucket, self.once, self.scale = same_bucket, once, scale
        if not same_bucket:
            reason = "which buckets share a chunk depends on later tokens; use same_bucket=True"
            self.can = self.can.without(causal=reason)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: LSHState | None = None,
    ) -> tuple[Tensor, LSHState | None]:
        """See `Attention.forward`. k is the same tensor as q."""
        if state is not None:
            outs = []  # chunk by chunk, since evicting keys bounds the work of the next chunk
            for q_chunk, v_chunk in zip(
                q.split(self.chunk, 2), v.split(self.chunk, 2), strict=True
            ):
                out, state = self._stream_chunk(q_chunk, v_chunk, state)
                outs.append(out)
            return torch.cat(outs, 2), state
        bucket, buckets = self.hashing(q), self.hashing.buckets
        if causal:
            chunks = chunk_by_bucket_rank(bucket, mask, buckets=buckets, chunk=self.chunk)
        else:
            chunks = chunk_by_sorted_bucket(
                bucket, mask, buckets=buckets, chunk=self.chunk, same_bucket=self.same_bucket
            )
        groups = groups_per_round(chunks, causal=causal, once=self.once)
        k = unit_vectors(k)
        out, visible = token_groups.attend(q, k, v, groups, scale=self._scale(q), mask=mask)
        return torch.where(visible[..., None], out, v), None

    def _stream_chunk(self, q: Tensor, v: Tensor, state: LSHState) -> tuple[Tensor, LSHState]:
        """Attend from a few tokens to all stored keys, and evict the keys that no later token
        meets."""
        n, own_v, k, bucket = q.shape[2], v, unit_vectors(q), self.hashing(q)
        sizes = state.bucket_sizes
        if sizes is None:
            sizes = bucket.new_zeros(*bucket.shape[:3], self.hashing.buckets)
        same = (bucket[..., :, None] == bucket[..., None, :]).tril(-1)
        rank = sizes.gather(-1, bucket) + same.sum(-1)
        code = q_code = bucket * CODE_STRIDE + rank // self.chunk
        if state.k is not None and state.v is not None and state.code is not None:
            check_batch(state.k, q)
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
            code = torch.cat((state.code, q_code), 3)
        sizes = sizes.scatter_add(-1, bucket, torch.ones_like(bucket))

        # in how many rounds query and key meet, (b h n m); the last keys are the queries themselves
        rounds = codes_match(q_code, code).sum(2).tril(k.shape[2] - n - 1)
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * self._scale(q)
        if not self.once:
            scores = scores + rounds.clamp(min=1).to(scores.dtype).log()
        lowest = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(rounds == 0, lowest).softmax(-1).to(v.dtype)
        out = torch.where((rounds > 0).any(-1, keepdim=True), weights @ v, own_v)
        if k.shape[2] < state.evict_at:
            return out, LSHState(k, v, code, sizes, state.evict_at)

        # later tokens meet the current chunk of each bucket and the chunk before
        bucket = code // CODE_STRIDE
        current = bucket * CODE_STRIDE + sizes.gather(-1, bucket) // self.chunk
        needed = (code >= current - 1).any(2)
        try:
            count = int(needed.sum(-1).max())  # heads that need fewer keep some that nobody meets
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise Unsupported(
                "a stream of LSH attention evicts keys by their content, which torch.func.vmap "
                "cannot do: stream the whole batch at once"
            ) from None
        keep = needed.logical_not().argsort(dim=-1, stable=True)[..., :count]
        k, v = (x.gather(2, keep[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (k, v))
        code = code.gather(3, keep[:, :, None].expand(-1, -1, code.shape[2], -1))
        return out, LSHState(k, v, code, sizes, max(2 * count, count + EVICTION_SLACK))

    def initial_state(self) -> LSHState:
        """No tokens yet."""
        return LSHState(None, None, None, None, EVICTION_SLACK)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
