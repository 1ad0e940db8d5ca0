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
    b, h, n, _ = q.shape
    out, lse = v.new_zeros(b, h, n + 1, v.shape[-1]), v.new_full((b, h, n + 1), -torch.inf)  # place n collects padding
    for group in groups:
        at = torch.where(group.q < 0, n, group.q).expand(b, h, *group.q.shape[-2:])
        part, part_lse = _inside(q, k, v, group, scale, mask, prior, q_at, k_at)
        old, old_lse = _take(out, at), _take(lse[..., None], at)[..., 0]
        both = torch.logaddexp(old_lse, part_lse)
        safe = both.masked_fill(both == -torch.inf, 0)
        merged = old * (old_lse - safe).exp()[..., None] + part * (part_lse - safe).exp()[..., None]
        flat = at.flatten(2)
        out = out.scatter(2, flat[..., None].expand(-1, -1, -1, v.shape[-1]), merged.flatten(2, 3))
        lse = lse.scatter(2, flat, both.flatten(2))
    return out[:, :, :n]


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
    """The result (b h g s f) of each group by itself, and its log-sum-exp (b h g s)."""
    b, h = q.shape[:2]
    at_q, at_k = (x.clamp(min=0).expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
    keep = ((group.q >= 0)[..., :, None] & (group.k >= 0)[..., None, :]).expand(b, h, *group.q.shape[-2:], group.k.shape[-1])
    keep = keep if group.keep is None else keep & group.keep
    if mask is not None:
        keep = keep & _take(mask[:, None, :, None].expand(-1, h, -1, -1), at_k)[..., 0][..., None, :]
    gq, gk, gv = _take(q, at_q), _take(k, at_k), _take(v, at_k)
    scores = gq @ gk.transpose(-1, -2) * scale
    if prior is not None:
        scores = scores + prior(group.q.clamp(min=0)[..., :, None] + q_at, group.k.clamp(min=0)[..., None, :] + k_at, gq, gk)
    scores = scores.masked_fill(~keep, -torch.inf)
    seen = (scores > -torch.inf).any(-1)  # a prior may rule out what the groups allow
    scores = scores.masked_fill(~seen[..., None], 0)  # finite, then dropped
    lse = scores.logsumexp(-1).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ gv * seen[..., None], lse


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (b h n e), index (b h g s) -> (b h g s e)."""
    flat = index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, flat).unflatten(2, index.shape[2:])
