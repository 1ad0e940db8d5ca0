"""The attention function that transformers calls in each layer.

Shapes: query (b, h, n, e), key (b, g, m, e) and value (b, g, m, f), where g divides h. Returns (b,
n, h, f), and the attention map (b, h, n, m) if it was requested.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from transformers.utils.output_capturing import _active_collector

from regard.attentions import SoftmaxAttention
from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.backends import attend
from regard.backends.sdpa import attend_with_sinks
from regard.errors import Unsupported
from regard.hf import introspection
from regard.hf.attention_spec import AttentionSpec, is_shift_invariant, why_not_cross
from regard.hf.masks import MaskRule, as_bool, infer_rule, intersect
from regard.mixer import Attention, QueryMaskAttention, identity_values
from regard.numerics import zero_padding_tokens
from regard.pattern import Band, Causal, Full
from regard.prior import Prior, PriorSum, SoftCap

UNSUPPORTED_KWARGS = {
    "cu_seq_lens_q": "packs examples into one row (cu_seq_lens)",
    "block_indices": "selects its own keys",
    "cache": "uses a paged cache",
}


class AttentionInputs(NamedTuple):
    """Inputs of one call: q (b, h, n, e), k (b, g, m, e), v (b, g, m, f) and settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: float
    bias: Tensor | None  # (b or 1, h, n, m), added to the scores
    cross: bool
    prior: Prior | None = None  # caps the scores, or adds sinks


class BiasTensor(Prior):
    """A prior from a tensor (b or 1, h, n, m), whose first positions are q_start and k_start."""

    def __init__(self, bias: Tensor, q_start: int, k_start: int) -> None:
        super().__init__()
        self.bias, self.q_start, self.k_start = bias, q_start, k_start

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look up the bias of these positions."""
        return self.bias[:, :, q_pos - self.q_start, k_pos - self.k_start]


class GivenSinks(Prior):
    """Sinks (h) that are parameters of the model."""

    compares_positions, relative = False, True

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.heads, self.given = len(logits), (logits,)  # in a tuple: not a parameter of its own

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Zero, see `Sinks`."""
        return torch.zeros((1, *[1] * q_pos.dim()), dtype=q.dtype, device=q.device)

    def for_scale(self, scale: float) -> None:
        """See `Prior.for_scale`."""
        return None

    def sink_logits(self) -> Tensor:
        """See `Prior.sink_logits`."""
        return self.given[0]


def add_priors(*priors: Prior | None) -> Prior | None:
    """The sum of those that are not None."""
    found = [prior for prior in priors if prior is not None]
    return PriorSum(*found) if len(found) > 1 else next(iter(found), None)


@_disable_dynamo
def attention_forward(
    spec: AttentionSpec,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, with the signature of `AttentionInterface`."""
    for name, reason in UNSUPPORTED_KWARGS.items():
        if kwargs.get(name) is not None:
            raise Unsupported(f"{type(module).__name__} {reason}, which {spec} does not support.")

    # The mask decides whether the call is causal; without a readable mask the layer does.
    n, m = query.shape[2], key.shape[2]
    cross = introspection.is_cross(module)
    causal = introspection.is_causal(module) if is_causal is None else is_causal
    rule = infer_rule(attention_mask, n, m, causal=causal and not cross)
    causal = causal if rule is None else rule.causal
    cross = cross or (n != m and not causal)
    spec = spec.for_cross if cross else spec

    length = introspection.max_positions(module)
    inner = build_attention(
        spec, query.shape[1], query.shape[3], causal and not cross, length, query.device
    )
    inner.train(module.training)
    cross_refusal = why_not_cross(inner) if cross else None
    if cross_refusal is not None:
        raise Unsupported(f"{spec} does not support cross-attention: {cross_refusal}.")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    prior = add_priors(
        None if softcap is None else SoftCap(softcap),
        None if s_aux is None else GivenSinks(s_aux),
    )
    inputs = AttentionInputs(query, key, value, scale, dropout, position_bias, cross, prior)
    out = run_attention(spec, inner, inputs, rule, attention_mask)

    # Some models ask the layer for attention maps, others only collect what it returns.
    collected = _active_collector.get() or ()  # type: ignore[no-untyped-call]
    weights = None
    if kwargs.get("output_attentions") or any("attentions" in name for name in collected):
        if not inner.can.maps:
            raise Unsupported(f"{spec} has no attention map: {inner.can.reason('maps')}")
        inputs = inputs._replace(v=identity_values(key, value), dropout=0.0)
        weights = run_attention(spec, inner, inputs, rule, attention_mask)
    return out.transpose(1, 2).contiguous(), weights


@lru_cache(64)
def build_attention(
    spec: AttentionSpec,
    heads: int,
    head_dim: int,
    causal: bool,
    length: int | None,
    device: torch.device,
) -> Attention:
    """The attention of a layer. It has no parameters and no state, so equal layers share it."""
    with torch.inference_mode(False):
        return spec.build(heads=heads, head_dim=head_dim, causal=causal, length=length).to(device)


def run_attention(
    spec: AttentionSpec,
    inner: Attention,
    x: AttentionInputs,
    rule: MaskRule | None,
    mask: Tensor | None,
) -> Tensor:
    """Attention (b, h, n, f) by the rule of the call, else by its mask (b, 1, n, m)."""
    softmax = isinstance(inner, SoftmaxAttention)
    if x.dropout and not softmax:
        raise Unsupported(
            f"{spec} has no softmax weights to drop: set the attention dropout of the model to 0."
        )
    if x.bias is not None and (not softmax or inner.prior is not None):
        raise Unsupported(f"{spec} cannot add the position bias of this layer to its scores.")
    if x.prior is not None and not softmax:
        raise Unsupported(
            f"This layer caps its scores or adds sinks to them, but {spec} has no softmax scores."
        )
    if rule is None:
        assert mask is not None
        return _run_dense_mask(spec, inner, x, mask)
    end = rule.q_start + x.q.shape[2]
    if inner.length is not None and end > inner.length:
        raise ValueError(
            f"{spec} was built for at most {inner.length} positions, but the sequence has {end}: "
            f"set length={end}."
        )
    x, rule = _drop_invisible_keys(inner, x, rule)
    if rule.first is None or is_shift_invariant(inner):
        return _run_rule(spec, inner, x, rule)
    return _run_left_padded(spec, inner, x, rule)


def _drop_invisible_keys(
    inner: Attention, x: AttentionInputs, rule: MaskRule
) -> tuple[AttentionInputs, MaskRule]:
    """Cut off keys that no query sees: unused slots of a static cache, keys behind a window."""
    m = x.k.shape[2]
    end = min(m, rule.q_start + x.q.shape[2] - rule.k_start) if rule.causal else m
    pattern = (
        intersect(inner.pattern, rule.pattern)
        if isinstance(inner, KVCacheAttention)
        else rule.pattern
    )
    start = 0
    if isinstance(pattern, Band) and pattern.step == 1 and pattern.left is not None and not x.cross:
        start = max(0, rule.q_start - pattern.left - rule.k_start)
    if (start, end) == (0, m):
        return x, rule
    bias = None if x.bias is None else x.bias[..., start:end]
    keep = None if rule.keep is None else rule.keep[:, start:end]
    x = x._replace(k=x.k[:, :, start:end], v=x.v[:, :, start:end], bias=bias)
    return x, rule._replace(
        keep=None if keep is None or keep.all() else keep, k_start=rule.k_start + start
    )


def _run_left_padded(
    spec: AttentionSpec, inner: Attention, x: AttentionInputs, rule: MaskRule
) -> Tensor:
    """Count positions from the first token of each example.

    Examples with equal padding share a call.

    In cross-attention the padding is that of the keys' sequence, and queries keep their positions.
    """
    assert rule.first is not None
    b, h, n, _ = x.q.shape
    out = x.v.new_zeros(b, h, n, x.v.shape[3])
    first = rule.first.expand(b)
    for start in first.unique().tolist():
        rows = (first == start).nonzero()[:, 0]
        i, j = 0 if x.cross else max(0, start - rule.q_start), max(0, start - rule.k_start)
        if i >= n or j >= x.k.shape[2]:
            continue
        bias = None if x.bias is None else x.bias.expand(b, -1, -1, -1)[rows, :, i:, j:]
        keep = None if rule.keep is None else rule.keep.expand(b, -1)[rows, j:]
        shifted = rule._replace(
            keep=None if keep is None or keep.all() else keep,
            first=None,
            q_start=rule.q_start if x.cross else rule.q_start + i - start,
            k_start=rule.k_start + j - start,
        )
        group = x._replace(q=x.q[rows, :, i:], k=x.k[rows, :, j:], v=x.v[rows, :, j:], bias=bias)
        out[rows, :, i:] = _run_rule(spec, inner, group, shifted)
    return out


def _run_rule(spec: AttentionSpec, inner: Attention, x: AttentionInputs, rule: MaskRule) -> Tensor:
    """Attention with the pattern, padding and positions of a rule."""
    n, m = x.q.shape[2], x.k.shape[2]
    keep = None if rule.keep is None else rule.keep.expand(x.k.shape[0], -1)
    rule = rule._replace(keep=keep)
    pattern = (
        intersect(inner.pattern, rule.pattern)
        if isinstance(inner, KVCacheAttention)
        else rule.pattern
    )
    if isinstance(inner, SoftmaxAttention):
        if x.dropout:
            visible = rule._replace(pattern=pattern).dense(n, m, x.q.device)
            return _dense_attention(x, visible, _score_bias(inner, x, rule))
        prior = inner.prior if x.bias is None else BiasTensor(x.bias, rule.q_start, rule.k_start)
        prior = add_priors(prior, x.prior)
        return attend(
            x.q,
            x.k,
            x.v,
            pattern=pattern,
            prior=prior,
            mask=keep,
            scale=x.scale,
            q_start=rule.q_start,
            k_positions=rule.k_start,
        )

    # Other attentions scale by 1/√e themselves, and some need as many key heads as query heads.
    default_scale = 1 / math.sqrt(x.q.shape[3])
    q = x.q if math.isclose(x.scale, default_scale) else x.q * (x.scale / default_scale)
    repeats = 1 if inner.can.gqa else q.shape[1] // x.k.shape[1]
    k, v = (t if repeats == 1 else t.repeat_interleave(repeats, 1) for t in (x.k, x.v))
    if isinstance(inner, KVCacheAttention):
        return inner.attend(q, k, v, CallPositions(pattern, rule.q_start, rule.k_start), mask=keep)

    # Attentions over a whole sequence.
    if rule.k_start or pattern != (Causal() if rule.causal else Full()):
        raise Unsupported(
            f"{spec} sees all keys, or all past keys, but this layer has a window: {pattern!r}."
        )
    if keep is not None:
        k, v = zero_padding_tokens(k, keep[:, None]), zero_padding_tokens(v, keep[:, None])
    if rule.causal and n == 1 and inner.can.cross:  # the last query sees all keys
        return inner(q, k, v, mask=keep)[0]
    query_mask = (
        {"query_mask": keep}
        if isinstance(inner, QueryMaskAttention) and keep is not None and n == m and not x.cross
        else {}
    )
    if rule.causal and n < m:  # pad the missing earlier queries
        q = F.pad(q, (0, 0, m - n, 0))
    return inner(q, k, v, causal=rule.causal, mask=keep, **query_mask)[0][:, :, -n:]


def _run_dense_mask(
    spec: AttentionSpec, inner: Attention, x: AttentionInputs, mask: Tensor
) -> Tensor:
    """Attention with a mask (b, 1, n, m) that no rule describes, e.g. of packed examples."""
    n, m = x.q.shape[2], x.k.shape[2]
    if not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{spec} supports padding and causal masks, but this layer has another mask "
            f"{tuple(mask.shape)}."
        )
    if inner.pattern == Full() and inner.prior is None:
        return _dense_attention(x, mask, _score_bias(inner, x, MaskRule(Full(), False)))
    if n != m or not is_shift_invariant(inner):
        raise Unsupported(
            f"{spec} depends on positions, which the mask {tuple(mask.shape)} of this layer does "
            "not give."
        )
    position = torch.arange(n, device=x.q.device)
    visible = inner.pattern.allows(position[:, None], position[None, :])  # (n, m) or (h, n, m)
    as_visible = as_bool(mask)
    mask = mask.masked_fill(~visible, -torch.inf) if as_visible is None else as_visible & visible
    return _dense_attention(x, mask, _score_bias(inner, x, MaskRule(Full(), False)))


def _dense_attention(x: AttentionInputs, mask: Tensor, bias: Tensor | None) -> Tensor:
    """Dense softmax attention with dropout, a bias and the sinks of the layer."""
    if bias is not None:
        mask = (
            torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
        ).to(x.q.dtype)
    sinks = None if x.prior is None else x.prior.sink_logits()
    if sinks is not None:
        return attend_with_sinks(
            x.q, x.k, x.v, mask=mask, scale=x.scale, sinks=sinks, dropout=x.dropout
        )
    grouped = x.q.shape[1] != x.k.shape[1]
    return F.scaled_dot_product_attention(
        x.q, x.k, x.v, mask, x.dropout, scale=x.scale, enable_gqa=grouped
    )


def _score_bias(inner: SoftmaxAttention, x: AttentionInputs, rule: MaskRule) -> Tensor | None:
    """What is added to the scores: the layer's bias or the prior of the recipe, and the cap of the
    scores."""
    prior = add_priors(inner.prior, x.prior)
    prior = None if prior is None else prior.for_scale(x.scale)
    if prior is None:
        return x.bias
    q, k = (torch.arange(t.shape[2], device=t.device) for t in (x.q, x.k))
    bias: Tensor = prior((q + rule.q_start)[:, None], (k + rule.k_start)[None, :], x.q, x.k)
    return bias if x.bias is None else bias + x.bias
