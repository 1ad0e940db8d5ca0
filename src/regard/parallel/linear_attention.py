"""Linear attention: each process sums over its own keys, and only the sums are exchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attentions import EfficientAttention, LinearAttention
from regard.attentions.linear import (
    LinearAttentionState,
    append_ones,
    multiply_state,
    safe_divide,
)
from regard.mixer import MultiHead, merge_heads
from regard.numerics import at_least_float32, disable_autocast, zero_padding_tokens
from regard.parallel.communication import ShardedCall, depend_on, gather_all, gather_previous


def attend_sums(mixer: MultiHead, x: Tensor, mask: Tensor | None, call: ShardedCall) -> Tensor:
    """Local tokens x (b, n, d) and mask (b, n) -> (b, n, d)."""
    q, k, v = mixer.project(x, None, call.start)
    with disable_autocast(x):
        if isinstance(mixer.inner, EfficientAttention):
            y = _efficient_attention(q, k, v, mask, call)
        else:
            assert isinstance(mixer.inner, LinearAttention)
            y = _linear_attention(mixer.inner, q, k, v, mask, mixer.causal, call)
    return mixer.out(merge_heads(y.to(x.dtype)))


def _linear_attention(
    attention: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    call: ShardedCall,
) -> Tensor:
    """Uses the sums of all processes, or, if causal, starts from those of the previous ones."""
    feature = attention.feature
    if attention.training:
        feature.advance()
    phi, level = feature(at_least_float32(k), call.start, False)
    values = _masked_values(v, mask)
    if level is None:
        own = (phi.mT @ values).flatten(2)
    else:  # sums relative to the highest level, which is sent along
        level = level if mask is None else level.masked_fill(~mask[:, None], -torch.inf)
        top = _amax_or_neg_inf(level[..., None])
        own = (phi.mT @ (values * _relative_weight(level[..., None], top))).flatten(2)
        own = torch.cat((own, top[..., 0]), -1)

    def total(sums: Tensor) -> tuple[Tensor, Tensor | None]:
        if level is None:
            return sums.sum(0).unflatten(2, (phi.shape[-1], -1)), None
        sums, top = _sum_relative(sums)
        return sums.unflatten(2, (phi.shape[-1], -1)), top[..., 0]

    if causal:
        previous = gather_previous(own, call)
        state = attention.initial_state()
        if len(previous):
            state = LinearAttentionState(*total(previous), call.start)
        y, _ = attention(q, k, v, causal=True, mask=mask, state=state)
        return depend_on(y, previous)
    kv, _ = total(gather_all(own, call))
    sums = multiply_state(feature(at_least_float32(q), call.start, True)[0], kv)
    return safe_divide(sums[..., :-1], sums[..., -1:], feature.min_denominator)


def _efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: ShardedCall
) -> Tensor:
    """softmax over features (q) · (softmax over all positions (k)ᵀ v)."""
    q, k = at_least_float32(q), at_least_float32(k)
    k = k if mask is None else k.masked_fill(~mask[:, None, :, None], -torch.inf)
    top = _amax_or_neg_inf(k)  # (b, h, 1, e)
    own = _relative_weight(k, top).mT @ _masked_values(v, mask)
    sums, _ = _sum_relative(gather_all(torch.cat((own, top.mT), -1), call))
    return q.softmax(-1) @ safe_divide(sums[..., :-1], sums[..., -1:], None)


def _masked_values(v: Tensor, mask: Tensor | None) -> Tensor:
    """Values with a column of ones, zero for padding: (b, h, m, f + 1)."""
    return zero_padding_tokens(append_ones(v), None if mask is None else mask[:, None])


def _amax_or_neg_inf(x: Tensor) -> Tensor:
    """The maximum of x (b, h, m, e) over m, without gradient; -inf if there are no tokens."""
    return F.pad(x.detach(), (0, 0, 1, 0), value=-torch.inf).amax(2, keepdim=True)


def _relative_weight(x: Tensor, top: Tensor) -> Tensor:
    """exp(x - top), and zero if top is -inf."""
    return (x - top.clamp(min=torch.finfo(top.dtype).min)).exp()


def _sum_relative(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Sum parts (p, ..., w + 1), relative to exp of their last column; returns sum and maximum."""
    tops = parts[..., -1:].detach()
    top = tops.amax(0)
    return (parts[..., :-1] * _relative_weight(tops, top)).sum(0), top
