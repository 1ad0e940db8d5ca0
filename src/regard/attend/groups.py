"""Attention inside groups of tokens, given by index: for routes that depend on content, and for priors with gradients.

Plain differentiable PyTorch.  Memory grows with the scores inside the groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.prior import Prior


class Indexed(NamedTuple):
    """Groups of queries that share keys: q (... g s), k (... g t), token numbers, -1 = none; keep (... g s t).

    The axes in front are (b h), or nothing where all examples and heads are alike.
    """

    q: Tensor
    k: Tensor
    keep: Tensor | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, groups: Iterable[Indexed], *, scale: float, mask: Tensor | None = None,
    prior: Prior | None = None, q_at: int = 0, k_at: int = 0,
) -> Tensor:  # fmt: skip
    """q (b h n e), k (b h m e), v (b h m f) -> (b h n f).

    A query may stand in several groups; their results are merged by log-sum-exp.  One that sees nothing gives zero.
    """
    return attend_seen(q, k, v, groups, scale=scale, mask=mask, prior=prior, q_at=q_at, k_at=k_at)[0]


def attend_seen(
    q: Tensor, k: Tensor, v: Tensor, groups: Iterable[Indexed], *, scale: float, mask: Tensor | None = None,
    prior: Prior | None = None, q_at: int = 0, k_at: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `attend` gives, and (b h n): whether the query saw any key."""
    n = q.shape[2]
    places, outs, sums = [], [], []
    for group in groups if k.shape[2] else ():
        out, lse = _inside(q, k, v, group, scale, mask, prior, q_at, k_at)
        at = torch.where(group.q < 0, n, group.q).expand(lse.shape)  # place n collects what is no token
        places.append(at.flatten(2))
        outs.append(out.flatten(2, 3))
        sums.append(lse.flatten(2))
    if not places:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=torch.bool)
    return _merge(torch.cat(places, 2), torch.cat(outs, 2), torch.cat(sums, 2), n)


def _merge(at: Tensor, out: Tensor, lse: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Results (b h t f) that belong to the queries `at` (b h t), weighed by exp(lse): one for each query."""
    b, h, _, f = out.shape
    top = lse.new_full((b, h, n + 1), -torch.inf).scatter_reduce(2, at, lse.detach(), "amax")
    weight = (lse - top.masked_fill(top == -torch.inf, 0).gather(2, at)).exp()
    total = lse.new_zeros(b, h, n + 1).scatter_add(2, at, weight)[..., :n]
    where = at[..., None].expand(-1, -1, -1, f)
    mixed = out.new_zeros(b, h, n + 1, f).scatter_add(2, where, out * weight[..., None].to(out.dtype))[:, :, :n]
    return mixed / total.masked_fill(total == 0, 1)[..., None].to(out.dtype), total > 0


def _inside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Indexed,
    scale: float,
    mask: Tensor | None,
    prior: Prior | None,
    q_at: int,
    k_at: int,
) -> tuple[Tensor, Tensor]:
    """The result (b h g s f) of each group by itself, and its log-sum-exp (b h g s), of at least single precision."""
    b, h = q.shape[:2]
    at_q, at_k = (x.clamp(min=0).expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
    keep = (group.q >= 0)[..., :, None] & (group.k >= 0)[..., None, :]
    keep = keep if group.keep is None else keep & group.keep
    if mask is not None:
        keep = keep & _take(mask[:, None, :, None].expand(-1, h, -1, -1), at_k)[..., 0][..., None, :]
    gq, gk, gv = _take(q, at_q), _take(k, at_k), _take(v, at_k)
    scores = (gq * scale @ gk.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if prior is not None:
        scores = scores + prior(group.q.clamp(min=0)[..., :, None] + q_at, group.k.clamp(min=0)[..., None, :] + k_at, gq, gk)
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)  # finite: rows that see nothing are dropped below
    seen = (scores > torch.finfo(scores.dtype).min).any(-1)  # a prior may rule out what the groups allow
    scores = scores.masked_fill(~seen[..., None], 0)
    weights = scores.softmax(-1)
    best = scores.detach().argmax(-1, keepdim=True)
    lse = (scores.gather(-1, best) - weights.gather(-1, best).log())[..., 0]  # faster than a logsumexp beside the softmax
    return weights.to(v.dtype) @ gv * seen[..., None], lse.masked_fill(~seen, -torch.inf)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (b h n e), index (b h g s) -> (b h g s e)."""
    b, h, n, e = x.shape
    first = n * torch.arange(b * h, device=x.device).view(b, h, 1, 1)  # whole rows at once are faster than a gather
    return x.reshape(-1, e).index_select(0, (index + first).flatten()).view(*index.shape, e)
