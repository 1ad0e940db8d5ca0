"""Linear attention: each process sums up its own keys, and the sums go round; no key ever does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import EfficientAttention, LinearAttention
from regard.attentions.linear import LinearAttentionState, append_ones, safe_divide
from regard.mixer import MultiHead, merge_heads
from regard.numerics import at_least_float32, disable_autocast, zero_padding_tokens
from regard.parallel.communication import ShardedCall, before, gather, reaching


def over_sums(mixer: MultiHead, x: Tensor, mask: Tensor | None, meeting: ShardedCall) -> Tensor:
    """x (b n d), mask (b n), both of the tokens here -> (b n d)."""
    inner = mixer.inner
    q, k, v = mixer.project(x, None, meeting.at)
    with disable_autocast(x):
        if isinstance(inner, EfficientAttention):
            y = _summaries(q, k, v, mask, meeting)
        else:
            assert isinstance(inner, LinearAttention)
            y = _linear(inner, q, k, v, mask, mixer.causal, meeting)
    return mixer.out(merge_heads(y.to(x.dtype)))


def _linear(
    inner: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    meeting: ShardedCall,
) -> Tensor:
    """All sums where not causal; else those of the processes before this one, from which its own queries go on."""
    if inner.training:
        inner.feature.advance()
    phi, level = inner.feature(at_least_float32(k), meeting.at, False)
    own, rows, levelled = (
        _own(phi, _counted(v, mask), level, mask),
        phi.shape[-1],
        level is not None,
    )
    if causal:
        past = before(own, meeting)
        state = (
            LinearAttentionState(*_total(past, rows, levelled), meeting.at)
            if len(past)
            else inner.initial_state()
        )
        return reaching(inner(q, k, v, causal=True, mask=mask, state=state)[0], past)
    kv, _ = _total(torch.stack(gather(own, meeting)), rows, levelled)
    sums = inner.feature(at_least_float32(q), meeting.at, True)[0] @ kv
    return safe_divide(sums[..., :-1], sums[..., -1:], inner.feature.min_denominator)


def _counted(v: Tensor, mask: Tensor | None) -> Tensor:
    """(v 1), and zeros for tokens left out: (b h m f+1)."""
    return zero_padding_tokens(append_ones(v), None if mask is None else mask[:, None])


def _own(phi: Tensor, v: Tensor, level: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ phi(k) (v 1)ᵀ over the keys here, laid flat (b h r(f+1)); with levels relative to the highest, which is beside it."""
    if level is None:
        return (phi.mT @ v).flatten(2)
    level = level if mask is None else level.masked_fill(~mask[:, None], -torch.inf)
    top = F.pad(level.detach(), (1, 0), value=-torch.inf).amax(
        -1, keepdim=True
    )  # there may be no token here
    weight = (level - top.clamp(min=torch.finfo(top.dtype).min)).exp()[..., None]
    return torch.cat(((phi.mT @ (v * weight)).flatten(2), top), -1)


def _total(every: Tensor, rows: int, levelled: bool) -> tuple[Tensor, Tensor | None]:
    """The sums of several processes, as of `_own`, as one (b h r f+1), and its level (b h)."""
    if not levelled:
        return every.sum(0).unflatten(2, (rows, -1)), None
    tops = every[..., -1:].detach()
    top = tops.amax(0)
    share = (tops - top.clamp(min=torch.finfo(top.dtype).min)).exp()
    return (every[..., :-1] * share).sum(0).unflatten(2, (rows, -1)), top[..., 0]


def _summaries(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, meeting: ShardedCall
) -> Tensor:
    """softmax over features (q) · (softmax over all positions (k)ᵀ v): numerators, denominators and highest keys go round."""
    q, k = at_least_float32(q), at_least_float32(k)
    k = k if mask is None else k.masked_fill(~mask[:, None, :, None], -torch.inf)
    top = F.pad(k.detach(), (0, 0, 1, 0), value=-torch.inf).amax(2)[..., None]  # (b h e 1)
    weight = (k - top.mT.clamp(min=torch.finfo(top.dtype).min)).exp()
    own = torch.cat((weight.mT @ _counted(v, mask), top), -1)
    every = torch.stack(gather(own, meeting))
    tops = every[..., -1:].detach()
    sums = (
        every[..., :-1] * (tops - tops.amax(0).clamp(min=torch.finfo(tops.dtype).min)).exp()
    ).sum(0)
    return q.softmax(-1) @ safe_divide(sums[..., :-1], sums[..., -1:], None)
