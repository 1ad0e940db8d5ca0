"""Locality-sensitive hashing: vectors that point the same way fall into the same bucket, mostly."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.backends.token_groups import TokenGroups
from regard.errors import check_int
from regard.numerics import stable_argsort

CODE_STRIDE = (
    1 << 32
)  # between the codes of two buckets of a stream: more chunks than a bucket can have


class AngularHash(nn.Module):
    """x (b h n e) -> buckets (b h r n): argmax of [x R; -x R], by a random matrix R for each head and round.

    Andoni et al. 2015, arXiv 1509.02897, as in section 2 of Kitaev et al. 2020, arXiv 2001.04451.
    """

    rotations: Tensor

    def __init__(self, heads: int, width: int, *, buckets: int, rounds: int, seed: int = 0) -> None:
        super().__init__()
        check_int(1, rounds=rounds)
        check_int(0, seed=seed)
        check_int(2, buckets=buckets)
        if buckets % 2:
            raise ValueError(
                f"buckets come in opposite pairs, so there must be an even number, not {buckets}"
            )
        self.heads, self.buckets, self.rounds = heads, buckets, rounds
        draw = torch.randn(
            heads, rounds, width, buckets // 2, generator=torch.Generator().manual_seed(seed)
        )
        self.register_buffer("rotations", draw)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Which bucket each token falls into, in each round."""
        single = torch.promote_types(x.dtype, torch.float32)
        turned = x.to(single)[:, :, None] @ self.rotations.to(single)
        return torch.cat((turned, -turned), -1).argmax(-1)


class HashChunks(NamedTuple):
    """Where the tokens of a sequence stand in each round: chunks (b h r g c) of token numbers, -1 = none; code (b h r n), of
    bucket and chunk: a query meets a key where its code is the key's, or one more."""

    chunks: Tensor
    code: Tensor


def chunk_by_sorted_bucket(
    bucket: Tensor, mask: Tensor | None, *, buckets: int, chunk: int, same_bucket: bool
) -> HashChunks:
    """Chunks of the tokens sorted by bucket and position, the left-out ones last; bucket (b h r n)."""
    bucket, order, place = _sorted(bucket, mask, buckets)
    chunks = F.pad(order, (0, -order.shape[-1] % chunk), value=-1).unflatten(-1, (-1, chunk))
    return HashChunks(
        chunks, _code(bucket if same_bucket else torch.zeros_like(bucket), place // chunk, buckets)
    )


def chunk_by_bucket_rank(
    bucket: Tensor, mask: Tensor | None, *, buckets: int, chunk: int
) -> HashChunks:
    """Chunks counted inside each bucket: which one a token is in, and where in it, depends on earlier tokens only."""
    bucket, _, place = _sorted(bucket, mask, buckets)
    size = bucket.new_zeros(*bucket.shape[:3], buckets + 1).scatter_add(
        -1, bucket, torch.ones_like(bucket)
    )
    rank = place - (size.cumsum(-1) - size).gather(-1, bucket)
    needs = (size + chunk - 1) // chunk
    at = (needs.cumsum(-1) - needs).gather(-1, bucket) * chunk + rank
    token = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(bucket)
    bound = (
        bucket.shape[-1] // chunk + buckets + 1
    )  # for a graph, which reads no numbers: up to twice the work
    most = bound if torch.compiler.is_compiling() else int(needs.sum(-1).max())
    places = bucket.new_full((*bucket.shape[:3], most * chunk), -1).scatter_(-1, at, token)
    return HashChunks(places.unflatten(-1, (-1, chunk)), _code(bucket, rank // chunk, buckets))


def _sorted(bucket: Tensor, mask: Tensor | None, buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """The buckets, with one more for left-out tokens, after all others; the order; the place of each token in it."""
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None, None], buckets)
    order = stable_argsort(bucket)
    place = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return bucket, order, place


def _code(bucket: Tensor, place: Tensor, buckets: int) -> Tensor:
    """One number for both, short ones where they suffice: many of them are compared."""
    stride = place.shape[-1] + 2
    return (bucket * stride + place).to(
        torch.int32 if (buckets + 1) * stride < 1 << 31 else torch.int64
    )


def groups_per_round(places: HashChunks, *, causal: bool, once: bool) -> list[TokenGroups]:
    """One set of groups a round: each chunk, with the chunk before it.  No token sees itself.

    once   a key that a query meets in several rounds counts in the first of them only
    """
    found = []
    for r in range(places.code.shape[2]):
        q = places.chunks[:, :, r]
        k = torch.cat((F.pad(q, (0, 0, 1, 0), value=-1)[:, :, :-1], q), -1)
        at_q, at_k = q[..., :, None].int(), k[..., None, :].int()
        keep = at_k < at_q if causal else at_k != at_q
        keep &= _meet(places.code[:, :, r], q, k)
        for s in range(r if once else 0):
            keep = keep > _meet(places.code[:, :, s], q, k)  # and not
        found.append(TokenGroups(q, k, keep))
    return found


def _meet(code: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """code (b h n), q (b h g s), k (b h g t) -> (b h g s t): in the same bucket, and in the same chunk or one later."""
    of_q, of_k = (code.gather(-1, x.clamp(min=0).flatten(2)).view_as(x) for x in (q, k))
    return codes_match(of_q, of_k)


def codes_match(of_q: Tensor, of_k: Tensor) -> Tensor:
    """(... s), (... t) -> (... s t): the code of the query is that of the key, or one more."""
    of_q, of_k = of_q[..., :, None], of_k[..., None, :]
    return (of_q == of_k) | (of_q - 1 == of_k)
