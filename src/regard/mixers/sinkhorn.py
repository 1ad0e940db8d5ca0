"""Sparse Sinkhorn attention: each block sees itself and the block that a learned sort assigns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.backends import attend
from regard.errors import check_int
from regard.mixer import (
    Can,
    Mixer,
    State,
    check_batch,
    check_heads,
    identity_values,
    merge_heads,
    split_heads,
)
from regard.numerics import at_least_float32
from regard.route.sort import BlockSort, lowest_log


class SinkhornState(NamedTuple):
    """Keys, values (b h m e), summaries of the blocks so far (b s d), sum of all tokens (b 1 d).
    The sums are float32 at least."""

    k: Tensor
    v: Tensor
    summaries: Tensor
    total: Tensor


class Sinkhorn(Mixer):
    """Sparse Sinkhorn attention (Tay et al. 2020, arXiv 2002.11296).

    With blocks K_j, V_j of keys and values, and S from `sort`, slot t of the sorted block i is
    K̃_it = Σ_j S_ij K_jt, Ṽ_it = Σ_j S_ij V_jt. A query of block i takes the softmax over K_i and
    K̃_i together; with `cut`, over the first `cut` sorted blocks alone (SortCut).

    The summary of a block is Σ x over its tokens; if causal, Σ x over all tokens up to its first.
    If some K_jt are masked or beyond the end, K̃_it is the mean of the others, weighted by their
    share of Σ_j S_ij.

    Args:
        dim: Model width.
        heads: Number of heads.
        sort: The sorting network.
        block: Block size.
        cut: SortCut: attend to the first `cut` sorted blocks only. Default: off.
        causal: Attend to earlier tokens only.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        sort: BlockSort,
        *,
        block: int = 64,
        cut: int | None = None,
        causal: bool = False,
    ) -> None:
        check_int(1, block=block, **({} if cut is None else {"cut": cut}))
        length = f"its sort network was built for {sort.blocks} blocks of {block} tokens"
        can = Can(
            cross="blocks are sorted within one sequence",
            attn_mask="a sorted key is a mixture of the keys of several blocks",
            length=length,
        )
        if cut is not None:
            can = can & Can(causal="SortCut shows the first sorted blocks to all tokens")
        super().__init__(dim, can=can, causal=causal, length=sort.blocks * block)
        check_heads(dim, heads)
        if (sort.heads, sort.causal) != (heads, causal):
            raise ValueError(
                f"sort has heads={sort.heads} and causal={sort.causal}, "
                f"but the mixer has heads={heads} and causal={causal}"
            )
        self.heads, self.sort, self.block, self.cut = heads, sort, block, cut
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def initial_state(self) -> State:
        """State before the first token."""
        return ()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        q, k, v = (split_heads(f(x), self.heads) for f in (self.q, self.k, self.v))
        past = self._extend_state(state or None, x, k, v)
        y = self._attend(q, past.k, past.v, past.summaries, mask)
        return self.out(merge_heads(y)), None if state is None else past

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """Attention map, (b h n n)."""
        if not x.numel():
            return x.new_zeros(x.shape[0], self.heads, x.shape[1], x.shape[1])
        q, k = (split_heads(f(x), self.heads) for f in (self.q, self.k))
        return self._attend(q, k, identity_values(k, k), self._summaries(x, None)[0], mask)

    def _extend_state(
        self, past: SinkhornState | None, x: Tensor, k: Tensor, v: Tensor
    ) -> SinkhornState:
        """Append the tokens of x, their keys and values to the state."""
        summaries, total = self._summaries(x, past)
        if past is not None:
            check_batch(past.k, k)
            if past.k.shape[2] + k.shape[2] > self.sort.blocks * self.block:
                raise ValueError(
                    f"the stream is longer than the {self.length} tokens that this was built for"
                )
            k, v = torch.cat((past.k, k), 2), torch.cat((past.v, v), 2)
        return SinkhornState(k, v, summaries, total)

    def _summaries(self, x: Tensor, past: SinkhornState | None) -> tuple[Tensor, Tensor]:
        """Summaries of the blocks (b s d), and the sum of all tokens (b 1 d), in float32 at least:
        16-bit floats stop growing, or overflow."""
        x = at_least_float32(x)
        if not self.causal:
            return _blocks(x, self.block, 1).sum(2), x.sum(1, keepdim=True)
        running = x.cumsum(1)
        if past is None:
            return running[:, :: self.block], running[:, -1:]
        running = running + past.total
        begun = running[:, -past.k.shape[2] % self.block :: self.block]
        return torch.cat((past.summaries, begun), 1), running[:, -1:]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, summaries: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attention of q (b h n e), the last n of m positions, over k (b h m e) and v (b h m f):
        (b h n f).
        """
        n, start = q.shape[2], k.shape[2] - q.shape[2]
        real = q.new_ones(q.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
        here = _blocks(real, self.block, 1)
        k, v = (_blocks(x, self.block, 2) for x in (k, v))
        order = self.sort.log_weights(summaries, here.any(-1))
        whole = mask is None and not start and not n % self.block and self.cut is None
        if whole and order.dtype == q.dtype:
            return self._attend_whole(_blocks(q, self.block, 2), k, v, order.exp())
        if self.cut is not None:
            first_blocks = _sort_blocks(order[:, :, : self.cut], k, v, here)
            k, v, share = (x.flatten(2, 3)[:, :, None] for x in first_blocks)
            return _softmax(q[:, :, None], k, v, share[..., None, :])[:, :, 0]
        first = start // self.block  # the block of the first query
        far_k, far_v, share = _sort_blocks(order[:, :, first:], k, v, here)
        near = here[:, None, first:, None].to(share)
        near = near.expand(-1, -1, -1, self.block, -1).tril() if self.causal else near
        far = share[..., None, :].expand(*share.shape[:3], near.shape[3], -1)
        share = torch.cat(torch.broadcast_tensors(far, near), -1)
        before = start - first * self.block  # positions of the first block before the first query
        q = _blocks(F.pad(q, (0, 0, before, 0)), self.block, 2)
        k, v = torch.cat((far_k, k[:, :, first:]), 3), torch.cat((far_v, v[:, :, first:]), 3)
        return _softmax(q, k, v, share).flatten(2, 3)[:, :, before : before + n]

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
        """Attention over complete blocks (b h s t e) without masked tokens, by fused attention."""
        blocks = q.shape[2]
        q = q.flatten(1, 2)
        k, v = (torch.cat((_mix_blocks(order, x), x), 3).flatten(1, 2) for x in (k, v))
        if self.causal:
            # The first block has no sorted block; within a block, attention is causal.
            shape = (self.heads, blocks, self.block, 2 * self.block)
            seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril_(self.block)
            seen[:, 0, :, : self.block] = False
            out = attend(q, k, v, attn_mask=seen.flatten(0, 1)[None].expand(len(q), -1, -1, -1))
        else:
            out = attend(q, k, v)
        return out.flatten(1, 2).unflatten(1, (self.heads, -1))


def _blocks(x: Tensor, size: int, axis: int) -> Tensor:
    """Split an axis of m into two, m/size and size, with zero padding."""
    after = (0, 0) * (x.ndim - 1 - axis)
    return F.pad(x, (*after, 0, -x.shape[axis] % size)).unflatten(axis, (-1, size))


def _sort_blocks(
    order: Tensor, k: Tensor, v: Tensor, here: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log S as `order` (b h r s), k and v (b h s t e), here (b s t), True = token exists -> sorted
    k and v (b h r t e), and the share (b h r t) of existing tokens in each slot. A share that is
    too small to divide by is zero.
    """
    some = (order > lowest_log(order.dtype)).any(-1, keepdim=True)
    weights = order.softmax(-1) * some
    total = order.logsumexp(-1, keepdim=True).exp()
    share = torch.einsum("bhrs,bst->bhrt", weights, here.to(weights))
    seen = share > 1e12 * torch.finfo(share.dtype).tiny
    share = torch.where(seen, share, 0)
    divisor, factor = torch.where(seen, share, 1)[..., None], (total * seen)[..., None]
    k, v = (
        _mix_blocks(weights, (x * here[:, None, ..., None]).to(order)) / divisor * factor
        for x in (k, v)
    )
    return k, v, share


def _mix_blocks(order: Tensor, x: Tensor) -> Tensor:
    """order (b h r s), blocks x (b h s t e) -> mixtures of blocks (b h r t e)."""
    return torch.einsum("bhrs,bhste->bhrte", order, x)


def _softmax(q: Tensor, k: Tensor, v: Tensor, share: Tensor) -> Tensor:
    """Softmax attention of q (b h s i e) over k and v (b h s j e), with weights share (b h s i j)
    of the keys in [0, 1].
    """
    scores = q.to(k) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores + torch.where(share > 0, share, 1).log()
    weights = scores.masked_fill(share <= 0, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights * (share > 0).any(-1, keepdim=True) @ v.to(weights)).to(q.dtype)
