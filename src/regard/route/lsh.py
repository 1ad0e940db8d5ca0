"""Locality-sensitive hashing: vectors with similar directions mostly fall into the same bucket."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import native
from regard.backends.token_groups import TokenGroups
from regard.errors import check_int
from regard.numerics import stable_argsort

CODE_STRIDE = 1 << 32  # between the codes of two buckets in a stream: more chunks than a bucket has


class AngularHash(nn.Module):
    """Angular LSH: x (b h n e) -> buckets (b h r n), the argmax of [x R; -x R] with a random R for
    each head and round (Andoni et al. 2015, arXiv 1509.02897; Kitaev et al. 2020, arXiv 2001.04451,
    section 2)."""

    rotations: Tensor

    def __init__(self, heads: int, width: int, *, buckets: int, rounds: int, seed: int = 0) -> None:
        super().__init__()
        check_int(1, rounds=rounds)
        check_int(0, seed=seed)
        check_int(2, buckets=buckets)
        if buckets % 2:
            raise ValueError(f"buckets must be even, since they come in pairs, not {buckets}")
        self.heads, self.buckets, self.rounds = heads, buckets, rounds
        generator = torch.Generator().manual_seed(seed)
        rotations = torch.randn(heads, rounds, width, buckets // 2, generator=generator)
        self.register_buffer("rotations", rotations)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Bucket of each token in each round."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotated = x.to(dtype)[:, :, None] @ self.rotations.to(dtype)
        return torch.cat((rotated, -rotated), -1).argmax(-1)


class HashChunks(NamedTuple):
    """Chunks of the tokens in each round.

    Attributes:
        chunks: Token indices (b h r g c), -1 = none.
        code: Number of bucket and chunk of each token (b h r n). A query meets a key if its code is
            the key's code, or one more.
    """

    chunks: Tensor
    code: Tensor


def chunk_by_sorted_bucket(
    bucket: Tensor, mask: Tensor | None, *, buckets: int, chunk: int, same_bucket: bool
) -> HashChunks:
    """Cut the tokens, sorted by bucket (b h r n) and position with masked ones last, into
    chunks."""
    bucket, order, rank = _sort_by_bucket(bucket, mask, buckets)
    chunks = F.pad(order, (0, -order.shape[-1] % chunk), value=-1).unflatten(-1, (-1, chunk))
    if not same_bucket:
        bucket = torch.zeros_like(bucket)
    return HashChunks(chunks, _code(bucket, rank // chunk, buckets))


def chunk_by_bucket_rank(
    bucket: Tensor, mask: Tensor | None, *, buckets: int, chunk: int
) -> HashChunks:
    """Count chunks inside each bucket, so that the chunk of a token depends on earlier tokens
    only."""
    bucket, _, rank = _sort_by_bucket(bucket, mask, buckets)
    n = bucket.shape[-1]
    size = bucket.new_zeros(*bucket.shape[:3], buckets + 1)
    size = size.scatter_add(-1, bucket, torch.ones_like(bucket))
    rank = rank - (size.cumsum(-1) - size).gather(-1, bucket)  # inside its bucket
    chunks = (size + chunk - 1) // chunk
    slot = (chunks.cumsum(-1) - chunks).gather(-1, bucket) * chunk + rank
    # a graph or a torch.func transform cannot read numbers, so it does up to twice the work
    bound = n // chunk + buckets + 1
    unknown = torch.compiler.is_compiling() or native.inside_transform() or not chunks.numel()
    count = bound if unknown else int(chunks.sum(-1).max())
    token = torch.arange(n, device=bucket.device).expand_as(bucket)
    slots = bucket.new_full((*bucket.shape[:3], count * chunk), -1).scatter(-1, slot, token)
    return HashChunks(slots.unflatten(-1, (-1, chunk)), _code(bucket, rank // chunk, buckets))


def _sort_by_bucket(
    bucket: Tensor, mask: Tensor | None, buckets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Buckets with an extra last one for masked tokens, the sorted order, and the rank of each
    token."""
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None, None], buckets)
    order = stable_argsort(bucket)
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return bucket, order, torch.empty_like(order).scatter_(-1, order, ranks)


def _code(bucket: Tensor, chunk: Tensor, buckets: int) -> Tensor:
    """One number for bucket and chunk; int32 if possible, because many are compared."""
    stride = chunk.shape[-1] + 2
    fits = (buckets + 1) * stride < 1 << 31
    return (bucket * stride + chunk).to(torch.int32 if fits else torch.int64)


def groups_per_round(chunks: HashChunks, *, causal: bool, once: bool) -> list[TokenGroups]:
    """Groups of each round: each chunk attends to itself and to the chunk before. No token sees
    itself.

    With `once`, a key that a query meets in several rounds counts only in the first.
    """
    groups: list[TokenGroups] = []
    for r in range(chunks.code.shape[2]):
        q = chunks.chunks[:, :, r]
        k = torch.cat((F.pad(q, (0, 0, 1, 0), value=-1)[:, :, :-1], q), -1)
        q_index, k_index = q[..., :, None].int(), k[..., None, :].int()
        keep = k_index < q_index if causal else k_index != q_index
        keep &= _meet(chunks.code[:, :, r], q, k)
        for earlier in range(r if once else 0):
            keep = keep > _meet(chunks.code[:, :, earlier], q, k)  # keep and not met
        groups.append(TokenGroups(q, k, keep))
    return groups


def _meet(code: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether query and key meet: code (b h n), indices q (b h g s) and k (b h g t) -> (b h g s
    t)."""
    q_code, k_code = (code.gather(-1, x.clamp(min=0).flatten(2)).view_as(x) for x in (q, k))
    return codes_match(q_code, k_code)


def codes_match(q_code: Tensor, k_code: Tensor) -> Tensor:
    """Whether the code of the query is that of the key, or one more: (... s), (... t) -> (... s
    t)."""
    q_code, k_code = q_code[..., :, None], k_code[..., None, :]
    return (q_code == k_code) | (q_code - 1 == k_code)
