"""Locality-sensitive hashing: vectors that point the same way fall into the same bucket, mostly."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attend.groups import Indexed
from regard.errors import check_whole

STRIDE = 1 << 32  # between the codes of two buckets: more chunks than a bucket can have
LEFT_OUT = 1 << 24  # the bucket of left-out tokens, after all others


class AngularHash(nn.Module):
    """x (b h n e) -> buckets (b h r n): argmax of [x R; -x R], by a random matrix R for each head and round.

    Andoni et al. 2015, arXiv 1509.02897, as in section 2 of Kitaev et al. 2020, arXiv 2001.04451.
    """

    def __init__(self, heads: int, width: int, *, buckets: int, rounds: int, seed: int = 0) -> None:
        super().__init__()
        check_whole(1, rounds=rounds)
        check_whole(0, seed=seed)
        check_whole(2, buckets=buckets)
        if buckets % 2:
            raise ValueError(f"buckets come in opposite pairs, so there must be an even number, not {buckets}")
        self.heads, self.buckets, self.rounds = heads, buckets, rounds
        draw = torch.randn(heads, rounds, width, buckets // 2, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("rotations", draw)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Which bucket each token falls into, in each round."""
        single = torch.promote_types(x.dtype, torch.float32)
        turned = x.to(single)[:, :, None] @ self.rotations.to(single)
        return torch.cat((turned, -turned), -1).argmax(-1)


class Places(NamedTuple):
    """Where the tokens of a sequence stand in each round: order (b h r n), token numbers sorted by bucket and position, the
    left-out ones last; code (b h r n), of bucket and chunk: tokens meet where the query's is the key's, or one more."""

    order: Tensor
    code: Tensor


def by_sorted_place(bucket: Tensor, mask: Tensor | None, chunk: int, same_bucket: bool) -> Places:
    """Chunks of `chunk` tokens in sorted order, whatever the bucket, as in the paper; bucket (b h r n)."""
    bucket, order, place = _sorted(bucket, mask)
    code = place // chunk
    return Places(order, bucket * STRIDE + code if same_bucket else code)


def by_rank(bucket: Tensor, mask: Tensor | None, chunk: int) -> Places:
    """Chunks counted inside each bucket: which one a token is in depends on earlier tokens only."""
    bucket, order, place = _sorted(bucket, mask)
    in_order = bucket.gather(-1, order)
    first = torch.searchsorted(in_order, bucket)  # where the token's bucket begins
    return Places(order, bucket * STRIDE + (place - first) // chunk)


def _sorted(bucket: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The buckets, with one more for left-out tokens, after all others; the order; the place of each token in it."""
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None, None], LEFT_OUT)
    order = bucket.argsort(dim=-1, stable=True)
    place = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return bucket, order, place


def rounds_of_groups(places: Places, *, chunk: int, back: int, causal: bool, once: bool) -> list[Indexed]:
    """One set of groups a round: chunks of the sorted order, each with the `back` chunks before it.

    No token sees itself.  once: a key that a query meets in several rounds counts in the first of them only.
    """
    found = []
    for r in range(places.order.shape[2]):
        q = _chunks(places.order[:, :, r], chunk)
        k = torch.cat([_earlier(q, steps) for steps in range(back, -1, -1)], -1)
        apart = k[..., None, :] - q[..., :, None]
        keep = apart < 0 if causal else apart != 0
        keep &= _meet(places.code[:, :, r], q, k)
        for s in range(r if once else 0):
            keep &= ~_meet(places.code[:, :, s], q, k)
        found.append(Indexed(q, k, keep))
    return found


def _chunks(order: Tensor, chunk: int) -> Tensor:
    """(b h n) -> (b h n/chunk chunk), filled up with -1."""
    return F.pad(order, (0, -order.shape[-1] % chunk), value=-1).unflatten(-1, (-1, chunk))


def _earlier(chunks: Tensor, steps: int) -> Tensor:
    """Each chunk replaced by the one so many steps before it; -1 where there is none."""
    return F.pad(chunks, (0, 0, steps, 0), value=-1)[:, :, : chunks.shape[2]]


def _meet(code: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """code (b h n), q (b h g s), k (b h g t) -> (b h g s t): in the same bucket, and in the same chunk or one later."""
    of_q, of_k = (code.gather(-1, x.clamp(min=0).flatten(2)).view_as(x) for x in (q, k))
    return met(of_q, of_k)


def met(of_q: Tensor, of_k: Tensor) -> Tensor:
    """(... s), (... t) -> (... s t): the code of the query is that of the key, or one more."""
    return (of_q[..., :, None] - of_k[..., None, :]) >> 1 == 0
