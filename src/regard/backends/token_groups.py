"""Attention inside groups of tokens given by index, for content-based routing and for priors with
gradients.

On a CPU it uses PyTorch's fused kernel, with results merged as in `tiled_flash`. With a prior, on
other devices, and where every operation must be traceable, it is plain differentiable PyTorch,
whose memory grows with the scores inside the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.autograd import apply_function, differentiable_vjp
from regard.backends.call import pad_to_same_width
from regard.backends.sinks import join_sinks
from regard.backends.tiled_flash import flash, flash_backward, mask_empty_rows
from regard.native import are_plain_tensors
from regard.numerics import additive_mask
from regard.prior import Prior


class TokenGroups(NamedTuple):
    """g groups of s queries and t keys: token indices q (... g s), k (... g t), -1 = none; mask
    keep (... g s t).

    The leading axes are (b h), or none if all examples and heads have the same groups.
    """

    q: Tensor
    k: Tensor
    keep: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Iterable[TokenGroups],
    *,
    scale: float,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    prior: Prior | None = None,
    sinks: Tensor | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """q (b h n e), k (b kv m e), v (b kv m f) -> output (b h n f), and whether each query saw any
    key (b h n). kv divides h: neighbouring query heads share a head of keys and values.

    A query may be in several groups; the results are merged by their log-sum-exp. A query that sees
    no key gives zero.

    Args:
        groups: Which queries attend to which keys. No pair may occur twice.
        scale: Factor of the scores.
        mask: Padding mask (b m), True = keep.
        attn_mask: Pair mask that broadcasts to (b h n m), True = keep.
        prior: An additive bias of the scores.
        sinks: Logits (h) that join the softmax without a value.
        q_start, k_start: Positions of the first query and the first key, for the prior.
    """
    fused = prior is None and sinks is None and are_plain_tensors(q, k, v)
    if fused and k.shape[2] and q.numel() and v.numel():
        indices = _expand_groups(q, groups, mask, attn_mask)
        out, lse = apply_function(_FusedGroups, *pad_to_same_width(q, k, v), scale, *indices)
        return out[..., : v.shape[-1]], lse > -torch.inf
    return _attend_differentiable(
        q,
        k,
        v,
        groups,
        scale=scale,
        mask=mask,
        attn_mask=attn_mask,
        prior=prior,
        sinks=sinks,
        q_start=q_start,
        k_start=k_start,
    )


def _attend_differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Iterable[TokenGroups],
    *,
    scale: float,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    prior: Prior | None = None,
    sinks: Tensor | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> tuple[Tensor, Tensor]:
    b, h, n, _ = q.shape
    results = []
    for group in groups if k.shape[2] else ():
        q_index, k_index = (x.clamp(min=0).expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
        gq, gk, gv = _take(q, q_index), _take(k, k_index), _take(v, k_index)
        scores = (gq * scale @ gk.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
        if prior is not None:
            q_pos, k_pos = group.q.clamp(min=0) + q_start, group.k.clamp(min=0) + k_start
            scores = scores + prior(q_pos[..., :, None], k_pos[..., None, :], gq, gk)
        lowest = torch.finfo(scores.dtype).min  # finite: fully masked rows are set to zero below
        keep = _group_mask(group, q_index, k_index, mask, attn_mask)
        scores = scores.masked_fill(~keep, lowest)
        visible = (scores > lowest).any(-1)  # a prior may hide pairs as well
        scores = scores.masked_fill(~visible[..., None], 0)
        weights = scores.softmax(-1)
        # log-sum-exp from the weights: faster than `logsumexp` in addition to the softmax
        best = scores.detach().argmax(-1, keepdim=True)
        lse = (scores.gather(-1, best) - weights.gather(-1, best).log())[..., 0]
        out = weights.to(v.dtype) @ gv * visible[..., None]
        index = torch.where(group.q < 0, n, group.q).expand(lse.shape)
        results.append((index, out, lse.masked_fill(~visible, -torch.inf)))
    if not results:
        # zero, and a part of the graph of q
        out = q[..., :1].masked_fill(q.new_ones((), dtype=torch.bool), 0)
        return out.expand(-1, -1, -1, v.shape[-1]), q.new_zeros(b, h, n, dtype=torch.bool)
    out, lse = _merge(results, n)
    return out if sinks is None else join_sinks(out, lse, sinks), lse > -torch.inf


def _merge(results: list[tuple[Tensor, Tensor, Tensor]], n: int) -> tuple[Tensor, Tensor]:
    """Merge results of groups into one output (b h n f) and log-sum-exp (b h n) per query.

    A result is the index of its queries (b h g s), where n = no token, the output (b h g s f) and
    its lse (b h g s).
    """
    index, lse = (torch.cat([result[i].flatten(2) for result in results], 2) for i in (0, 2))
    out = torch.cat([result[1].flatten(2, 3) for result in results], 2)
    b, h, _, f = out.shape
    top = lse.new_full((b, h, n + 1), -torch.inf).scatter_reduce(2, index, lse.detach(), "amax")
    weight = (lse - top.masked_fill(top == -torch.inf, 0).gather(2, index)).exp()
    total = lse.new_zeros(b, h, n + 1).scatter_add(2, index, weight)[..., :n]
    weighted, rows = out * weight[..., None].to(out.dtype), index[..., None].expand(-1, -1, -1, f)
    mixed = out.new_zeros(b, h, n + 1, f).scatter_add(2, rows, weighted)[:, :, :n]
    out = mixed / total.masked_fill(total == 0, 1)[..., None].to(out.dtype)
    return out, top[..., :n] + total.log()


class _FusedGroups(torch.autograd.Function):
    """Attention inside groups on PyTorch's fused kernel.

    Takes q (b h n e), k and v (b kv m e), and for each group the query index (b h g s), the key
    index (b h g t) and an additive mask (b*h g s t) or None. Returns the output (b h n e) and its
    log-sum-exp (b h n), which has no gradient.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, *groups: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, results = q.shape[2], []
        for q_index, k_index, mask in _triples(groups):
            at_k = k_index.clamp(min=0)
            tokens = _take(q, q_index.clamp(min=0)), _take(k, at_k), _take(v, at_k)
            out, lse = flash(*(x.flatten(0, 1) for x in tokens), attn_mask=mask, scale=scale)
            lse = mask_empty_rows(lse, mask).view(q_index.shape)
            index = torch.where(q_index < 0, n, q_index)
            results.append((index, out.view(*q_index.shape, -1), lse))
        if not results:
            return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        return _merge(results, n)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.scale, *groups = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, *groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *groups = ctx.saved_tensors
        no_grads = [None] * (1 + len(groups))
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: the fused backward pass is not differentiable
            kept = [
                TokenGroups(i, j, None if mask is None else (mask == 0).view(*i.shape, -1))
                for i, j, mask in _triples(groups)
            ]
            formula = partial(_attend_differentiable, groups=kept, scale=ctx.scale)
            return *differentiable_vjp(lambda *x: formula(*x)[0], (q, k, v), grad), *no_grads
        # a query that sees nothing has zero weights
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        totals = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        for q_index, k_index, mask in _triples(groups):
            at_q, at_k = q_index.clamp(min=0), k_index.clamp(min=0)
            gq, gout, ggrad = (_take(x, at_q).flatten(0, 1) for x in (q, out, grad))
            gk, gv = (_take(x, at_k).flatten(0, 1) for x in (k, v))
            glse = lse.gather(2, at_q.flatten(2)).view(q_index.shape)
            glse = glse.masked_fill(q_index < 0, torch.inf).flatten(0, 1)
            grads = flash_backward(
                ggrad, gq, gk, gv, gout, glse, 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            for total, new, index in zip(totals, grads, (at_q, at_k, at_k), strict=True):
                rows = new.reshape(-1, new.shape[-1]).to(total.dtype)
                total.view(-1, rows.shape[1]).index_add_(0, _row_index(total, index), rows)
        return *(x.to(q.dtype) for x in totals), *no_grads


def _triples(groups: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    return zip(groups[::3], groups[1::3], groups[2::3], strict=True)


def _expand_groups(
    q: Tensor, groups: Iterable[TokenGroups], mask: Tensor | None, attn_mask: Tensor | None
) -> list[Tensor | None]:
    """The query index, the key index and the additive mask of each group, for all examples and
    heads.
    """
    found: list[Tensor | None] = []
    b, h = q.shape[:2]
    for group in groups:
        q_index, k_index = (x.expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
        keep = _group_mask(group, q_index, k_index, mask, attn_mask)
        hidden = None
        if not keep.all():
            hidden = additive_mask(keep, q.dtype).expand(b, h, *keep.shape[-3:]).flatten(0, 1)
        found += [q_index, k_index, hidden]
    return found


def _group_mask(
    group: TokenGroups,
    q_index: Tensor,
    k_index: Tensor,
    mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor:
    """The visible pairs, broadcastable to (b h g s t)."""
    keep = (group.q >= 0)[..., :, None] & (group.k >= 0)[..., None, :]
    keep = keep if group.keep is None else keep & group.keep
    q_index, k_index = q_index.clamp(min=0), k_index.clamp(min=0)
    if mask is not None:
        real = mask[:, None, :, None].expand(-1, k_index.shape[1], -1, -1)
        keep = keep & _take(real, k_index)[..., 0][..., None, :]
    if attn_mask is not None:
        keep = keep & _take_pairs(attn_mask, q_index, k_index)
    return keep


def _take_pairs(attn_mask: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
    """attn_mask (b h n m), where b and h may be 1, at q_index (b h g s) and k_index (b h g t) ->
    (b h g s t), with fewer examples and heads if all are alike.
    """
    b, h, _, m = attn_mask.shape
    if not (q_index.stride(0) or q_index.stride(1) or k_index.stride(0) or k_index.stride(1)):
        q_index, k_index = (x[:b, :h] for x in (q_index, k_index))  # expanded: the same groups
    attn_mask = attn_mask.expand(*q_index.shape[:2], -1, -1)
    pairs = q_index[..., :, None] * m + k_index[..., None, :]
    return attn_mask.flatten(2).gather(2, pairs.flatten(2)).view(pairs.shape)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (b kv n e), index (b h g s) -> (b h g s e). Whole rows are faster than `gather`."""
    e = x.shape[3]
    return x.reshape(-1, e).index_select(0, _row_index(x, index)).view(*index.shape, e)


def _row_index(x: Tensor, index: Tensor) -> Tensor:
    """index (b h g s) into x (b kv n e) as an index into its rows (b*kv*n e)."""
    b, kv, n, _ = x.shape
    first = n * torch.arange(b * kv, device=x.device).view(b, kv, 1, 1)
    if kv != index.shape[1]:  # neighbouring heads share one
        first = first.repeat_interleave(index.shape[1] // kv, 1)
    return (index + first).flatten()
