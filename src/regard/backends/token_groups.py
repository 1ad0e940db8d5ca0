"""Attention inside groups of tokens, given by index: for routes that depend on content, and for priors with gradients.

On a CPU by PyTorch's fused calls, merged as in `fused`; with a prior, elsewhere, or where something wants to see each
operation, in plain differentiable PyTorch, whose memory grows with the scores inside the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.autograd import apply_function, differentiable_vjp
from regard.backends.tiled_flash import blinded, flash, flash_backward
from regard.native import are_plain_tensors
from regard.prior import Prior


class TokenGroups(NamedTuple):
    """Groups of queries that share keys: q (... g s), k (... g t), token numbers, -1 = none; keep (... g s t).

    The axes in front are (b h), or nothing where all examples and heads are alike.
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
    prior: Prior | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> Tensor:
    """q (b h n e), k (b h m e), v (b h m f) -> (b h n f).

    A query may stand in several groups; their results are merged by log-sum-exp.  One that sees nothing gives zero.
    """
    return attend_with_visibility(
        q,
        k,
        v,
        groups,
        scale=scale,
        mask=mask,
        prior=prior,
        q_start=q_start,
        k_start=k_start,
    )[0]


def attend_with_visibility(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Iterable[TokenGroups],
    *,
    scale: float,
    mask: Tensor | None = None,
    prior: Prior | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives, and (b h n): whether the query saw any key."""
    if prior is None and k.shape[2] and q.numel() and v.numel() and are_plain_tensors(q, k, v):
        width = v.shape[-1]
        out, lse = apply_function(_Fused, *_one_width(q, k, v), scale, *_settled(q, groups, mask))
        return out[..., :width], lse > -torch.inf
    return _in_the_open(
        q,
        k,
        v,
        groups,
        scale=scale,
        mask=mask,
        prior=prior,
        q_start=q_start,
        k_start=k_start,
    )


def _in_the_open(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Iterable[TokenGroups],
    *,
    scale: float,
    mask: Tensor | None = None,
    prior: Prior | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> tuple[Tensor, Tensor]:
    n = q.shape[2]
    places, outs, sums = [], [], []
    for group in groups if k.shape[2] else ():
        out, lse = _inside(q, k, v, group, scale, mask, prior, q_start, k_start)
        at = torch.where(group.q < 0, n, group.q).expand(
            lse.shape
        )  # place n collects what is no token
        places.append(at.flatten(2))
        outs.append(out.flatten(2, 3))
        sums.append(lse.flatten(2))
    if not places:
        return v.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=torch.bool)
    out, lse = _merge(torch.cat(places, 2), torch.cat(outs, 2), torch.cat(sums, 2), n)
    return out, lse > -torch.inf


def _merge(at: Tensor, out: Tensor, lse: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Results (b h t f) that belong to the queries `at` (b h t), weighed by exp(lse): one for each query, and its lse."""
    b, h, _, f = out.shape
    top = lse.new_full((b, h, n + 1), -torch.inf).scatter_reduce(2, at, lse.detach(), "amax")
    weight = (lse - top.masked_fill(top == -torch.inf, 0).gather(2, at)).exp()
    total = lse.new_zeros(b, h, n + 1).scatter_add(2, at, weight)[..., :n]
    where = at[..., None].expand(-1, -1, -1, f)
    mixed = out.new_zeros(b, h, n + 1, f).scatter_add(
        2, where, out * weight[..., None].to(out.dtype)
    )[:, :, :n]
    return mixed / total.masked_fill(total == 0, 1)[..., None].to(out.dtype), top[
        ..., :n
    ] + total.log()


class _Fused(torch.autograd.Function):
    """q (b h n e), k and v (b h m e), and of each group q and k (b h g s), (b h g t) and what is added, (b h g s t) or None
    -> out (b h n e), and its log-sum-exp (b h n), which has no gradient."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, *groups: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, places, outs, sums = q.shape[2], [], [], []
        for at_q, at_k, addend in _threes(groups):
            views = (
                _take(q, at_q.clamp(min=0)),
                _take(k, at_k.clamp(min=0)),
                _take(v, at_k.clamp(min=0)),
            )
            out, lse = flash(*(x.flatten(0, 1) for x in views), attn_mask=addend, scale=scale)
            lse = blinded(lse, addend).view(at_q.shape)
            places.append(torch.where(at_q < 0, n, at_q).flatten(2))
            outs.append(out.view(*at_q.shape, -1).flatten(2, 3))
            sums.append(lse.flatten(2))
        if not places:
            return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        return _merge(torch.cat(places, 2), torch.cat(outs, 2), torch.cat(sums, 2), n)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.scale, *groups = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, *groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *groups = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the fused backward has no derivative
            seen = [
                TokenGroups(at, to, None if x is None else (x == 0).view(*at.shape, -1))
                for at, to, x in _threes(groups)
            ]
            plainly = partial(_in_the_open, groups=seen, scale=ctx.scale)
            return (
                *differentiable_vjp(lambda *x: plainly(*x)[0], (q, k, v), grad),
                None,
                *[None] * len(groups),
            )
        lse = lse.masked_fill(
            lse == -torch.inf, torch.inf
        )  # a query that sees nothing has no weight anywhere
        total = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
        for at_q, at_k, addend in _threes(groups):
            q_start, k_start = at_q.clamp(min=0), at_k.clamp(min=0)
            at = [_take(x, q_start).flatten(0, 1) for x in (grad, q, out)]
            own = (
                lse.gather(2, q_start.flatten(2)).view(at_q.shape).masked_fill(at_q < 0, torch.inf)
            )
            keys = [_take(x, k_start).flatten(0, 1) for x in (k, v)]
            shares = flash_backward(
                at[0],
                at[1],
                *keys,
                at[2],
                own.flatten(0, 1),
                0.0,
                False,
                attn_mask=addend,
                scale=ctx.scale,
            )
            for sum_, share, index in zip(total, shares, (q_start, k_start, k_start), strict=True):
                _add(sum_, index, share)
        return *(x.to(q.dtype) for x in total), None, *[None] * len(groups)


def _threes(groups: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    return zip(groups[::3], groups[1::3], groups[2::3], strict=True)


def _settled(q: Tensor, groups: Iterable[TokenGroups], mask: Tensor | None) -> list[Tensor | None]:
    """Of each group the numbers of its queries and keys for all examples and heads, and what hides the pairs not seen."""
    found: list[Tensor | None] = []
    b, h = q.shape[:2]
    for group in groups:
        at_q, at_k = (x.expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
        keep = _keep(group, at_k, mask)
        hidden = (
            None
            if keep.all()
            else torch.zeros(keep.shape, dtype=q.dtype).masked_fill_(~keep, -torch.inf)
        )
        addend = None if hidden is None else hidden.expand(b, h, *hidden.shape[-3:]).flatten(0, 1)
        found += [at_q, at_k, addend]
    return found


def _keep(group: TokenGroups, at_k: Tensor, mask: Tensor | None) -> Tensor:
    """Which pairs are seen, broadcastable to (b h g s t)."""
    keep = (group.q >= 0)[..., :, None] & (group.k >= 0)[..., None, :]
    keep = keep if group.keep is None else keep & group.keep
    if mask is None:
        return keep
    real = mask[:, None, :, None].expand(-1, at_k.shape[1], -1, -1)
    return keep & _take(real, at_k.clamp(min=0))[..., 0][..., None, :]


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The fused kernels want one width for all: zeros change no score and no value."""
    wide = max(q.shape[3], v.shape[3])
    return [x if x.shape[3] == wide else F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v)]


def _add(total: Tensor, index: Tensor, share: Tensor) -> None:
    """Add rows (b*h g s e) to the tokens `index` (b h g s) of total (b h n e)."""
    b, h, n, e = total.shape
    first = n * torch.arange(b * h).view(b, h, 1, 1)
    total.view(-1, e).index_add_(0, (index + first).flatten(), share.reshape(-1, e).to(total.dtype))


def _inside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: TokenGroups,
    scale: float,
    mask: Tensor | None,
    prior: Prior | None,
    q_start: int,
    k_start: int,
) -> tuple[Tensor, Tensor]:
    """The result (b h g s f) of each group by itself, and its log-sum-exp (b h g s), of at least single precision."""
    b, h = q.shape[:2]
    at_q, at_k = (x.clamp(min=0).expand(b, h, *x.shape[-2:]) for x in (group.q, group.k))
    keep = _keep(group, at_k, mask)
    gq, gk, gv = _take(q, at_q), _take(k, at_k), _take(v, at_k)
    scores = (gq * scale @ gk.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if prior is not None:
        scores = scores + prior(
            group.q.clamp(min=0)[..., :, None] + q_start,
            group.k.clamp(min=0)[..., None, :] + k_start,
            gq,
            gk,
        )
    scores = scores.masked_fill(
        ~keep, torch.finfo(scores.dtype).min
    )  # finite: rows that see nothing are dropped below
    seen = (scores > torch.finfo(scores.dtype).min).any(
        -1
    )  # a prior may rule out what the groups allow
    scores = scores.masked_fill(~seen[..., None], 0)
    weights = scores.softmax(-1)
    best = scores.detach().argmax(-1, keepdim=True)
    lse = (scores.gather(-1, best) - weights.gather(-1, best).log())[
        ..., 0
    ]  # faster than a logsumexp beside the softmax
    return weights.to(v.dtype) @ gv * seen[..., None], lse.masked_fill(~seen, -torch.inf)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (b h n e), index (b h g s) -> (b h g s e)."""
    b, h, n, e = x.shape
    first = n * torch.arange(b * h, device=x.device).view(
        b, h, 1, 1
    )  # whole rows at once are faster than a gather
    return x.reshape(-1, e).index_select(0, (index + first).flatten()).view(*index.shape, e)
