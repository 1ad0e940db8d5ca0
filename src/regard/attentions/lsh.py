"""Reformer: softmax attention inside buckets of a hash, whose keys are the queries themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends import token_groups
from regard.errors import check_int
from regard.mixer import Attention, Can, check_batch
from regard.route.lsh import (
    CODE_STRIDE,
    AngularHash,
    chunk_by_bucket_rank,
    chunk_by_sorted_bucket,
    codes_match,
    groups_per_round,
)

SLACK = 64  # keys are evicted once so many could be


class LSHState(NamedTuple):
    """What a stream keeps: of each bucket the last two chunks of keys and values, k (b h m e) and v (b h m f), with their
    codes (b h r m), and how many tokens each bucket has had, (b h r buckets)."""

    k: Tensor | None
    v: Tensor | None
    code: Tensor | None
    had: Tensor | None
    check: int  # look for keys to evict once there are so many


class LSHAttention(Attention):
    """LSH attention (Kitaev et al. 2020, arXiv 2001.04451): k_j = q_j / |q_j|, and

    out_i = Σ_j softmax_j(q_i · k_j · scale) v_j,  over the j ≠ i that i meets in some round; v_i where there is none.

    In a round, i meets the tokens of its bucket that stand in its chunk or in the one before.  Chunks of `chunk` are cut from
    the tokens sorted by bucket and position; causal, they are counted inside each bucket, and only earlier tokens are met.

    same_bucket   False: tokens of other buckets in those chunks are met as well
    once          False: a key that is met in several rounds counts so many times
    """

    can = Can(cross="keys are made of the queries, and the hash sorts one sequence")
    shared_qk = True
    no_rotary_reason = "the hash would sort turned queries by their places, not by what they say"

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
        self.hashing, self.chunk, self.same_bucket, self.once, self.scale = (
            hashing,
            chunk,
            same_bucket,
            once,
            scale,
        )
        self.heads = hashing.heads
        if not same_bucket:
            self.can = self.can & Can(
                causal="which other buckets share a chunk depends on later tokens: give same_bucket=True"
            )

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
        """See `Attention.forward`; k is the same as q."""
        if state is not None:
            return self._stream(q, v, state)
        bucket, sizes = self.hashing(q), {"buckets": self.hashing.buckets, "chunk": self.chunk}
        if causal:
            places = chunk_by_bucket_rank(bucket, mask, **sizes)
        else:
            places = chunk_by_sorted_bucket(bucket, mask, same_bucket=self.same_bucket, **sizes)
        found = groups_per_round(places, causal=causal, once=self.once)
        out, seen = token_groups.attend_with_visibility(
            q, _unit(k), v, found, scale=self._scale(q), mask=mask
        )
        return torch.where(seen[..., None], out, v), None

    def _stream(self, q: Tensor, v: Tensor, state: LSHState) -> tuple[Tensor, LSHState]:
        """Piece by piece, since what a piece may forget bounds what the next one looks at."""
        outs = []
        for piece, values in zip(q.split(self.chunk, 2), v.split(self.chunk, 2), strict=True):
            out, state = self._piece(piece, values, state)
            outs.append(out)
        return torch.cat(outs, 2), state

    def _piece(self, q: Tensor, v: Tensor, state: LSHState) -> tuple[Tensor, LSHState]:
        """The next few tokens: every one against all keys that are kept."""
        k, n, bucket = _unit(q), q.shape[2], self.hashing(q)
        had = (
            bucket.new_zeros(*bucket.shape[:3], self.hashing.buckets)
            if state.had is None
            else state.had
        )
        before = (
            (bucket[..., :, None] == bucket[..., None, :]).tril(-1).sum(-1)
        )  # tokens of this piece, in this bucket
        code = mine = bucket * CODE_STRIDE + (had.gather(-1, bucket) + before) // self.chunk
        if state.k is not None and state.v is not None and state.code is not None:
            check_batch(state.k, q)
            k, v, code = (
                torch.cat((state.k, k), 2),
                torch.cat((state.v, v), 2),
                torch.cat((state.code, mine), 3),
            )
        rounds = (
            codes_match(mine, code).sum(2).tril(k.shape[2] - n - 1)
        )  # in how many rounds query and key meet, (b h n m)
        had = had.scatter_add(-1, bucket, torch.ones_like(bucket))
        return self._see(q, k, v, rounds), self._forget(LSHState(k, v, code, had, state.check))

    def _see(self, q: Tensor, k: Tensor, v: Tensor, rounds: Tensor) -> Tensor:
        """Attention over the keys that are met at least once; the last keys are the queries themselves."""
        scores = (q @ k.transpose(-1, -2)).to(
            torch.promote_types(q.dtype, torch.float32)
        ) * self._scale(q)
        if not self.once:
            scores = scores + rounds.clamp(min=1).to(scores.dtype).log()
        weights = (
            scores.masked_fill(rounds == 0, torch.finfo(scores.dtype).min).softmax(-1).to(v.dtype)
        )
        return torch.where((rounds > 0).any(-1, keepdim=True), weights @ v, v[:, :, -q.shape[2] :])

    def _forget(self, state: LSHState) -> LSHState:
        """Without the keys that no later query can meet: those two chunks back in each of their buckets, or more."""
        k, v, code, had, check = state
        if k is None or v is None or code is None or had is None or k.shape[2] < check:
            return state
        bucket = code // CODE_STRIDE
        current = bucket * CODE_STRIDE + had.gather(-1, bucket) // self.chunk
        needed = (code >= current - 1).any(2)
        most = int(needed.sum(-1).max())
        at = needed.logical_not().argsort(dim=-1, stable=True)[
            ..., :most
        ]  # other rows keep a few more, which nobody meets
        k, v = (x.gather(2, at[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (k, v))
        code = code.gather(3, at[:, :, None].expand(-1, -1, code.shape[2], -1))
        return LSHState(k, v, code, had, max(2 * most, most + SLACK))

    def initial_state(self) -> LSHState:
        """No token yet."""
        return LSHState(None, None, None, None, SLACK)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)
