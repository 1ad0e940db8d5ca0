"""The attention function that transformers calls in every layer: heads in, heads out, by the recipe that a name asks for.

query (b h n e), key and value (b g m e), where g divides h -> (b n h e), and the map (b h n m) where it was asked for.
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
from regard.errors import Unsupported
from regard.hf.hub.masks import MaskRule, as_bool, meet, rule_of
from regard.hf.hub.names import AttentionSpec, shiftless, why_not_cross
from regard.hf.hub.roles import is_causal as calls_itself_causal, is_cross, length_of
from regard.mixer import Attention, identity_values
from regard.numerics import zero_padding_tokens
from regard.pattern import Band, Causal, Full
from regard.prior import Prior

REFUSED = {
    "softcap": "caps its scores, and that is not softmax attention of queries and keys",
    "s_aux": "adds a learned sink to its scores",
    "cu_seq_lens_q": "packs its examples into one row, by cu_seq_lens",
    "block_indices": "brings its own choice of keys",
    "cache": "keeps its keys in pages",
}


class AttentionInputs(NamedTuple):
    """One call: heads q (b h n e), k (b g m e) and v (b g m f), and what the layer said beside them."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: float
    bias: Tensor | None  # (b or 1, h, n, m), an addend to the scores
    cross: bool  # whether the keys are those of another sequence


class CallKind(NamedTuple):
    """Who may look at whom in a call (None: only its dense mask says), and what kind of attention that takes."""

    rule: MaskRule | None
    causal: bool
    cross: bool


class BiasTensor(Prior):
    """Addends that the layer computed, (b or 1, h, n, m), for queries from position `q_at` on and keys from `k_at` on."""

    def __init__(self, bias: Tensor, q_start: int, k_positions: int) -> None:
        super().__init__()
        self.bias, self.q_start, self.k_positions = bias, q_start, k_positions

    def forward(self, q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look them up."""
        return self.bias[:, :, q_pos - self.q_start, k_pos - self.k_positions]


@_disable_dynamo
def forward(
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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer; the signature is that of transformers."""
    check_known(spec, module, kwargs)
    asked = asked_of(module, attention_mask, query.shape[2], key.shape[2], is_causal)
    spec = spec.for_cross if asked.cross else spec
    inner = attention_of(spec, module, query, asked)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    work = AttentionInputs(query, key, value, scale, dropout, position_bias, asked.cross)
    out = run(spec, inner, work, asked.rule, attention_mask)
    maps = _maps(spec, inner, work, asked.rule, attention_mask) if asked_for_maps(kwargs) else None
    return out.transpose(1, 2).contiguous(), maps


def asked_of(module: nn.Module, mask: Tensor | None, n: int, m: int, told: bool | None) -> CallKind:
    """What a layer asks for, of n queries and m keys: by its mask, by what it calls itself, and by what the call says of it."""
    elsewhere = is_cross(module)
    causal = calls_itself_causal(module) if told is None else told
    rule = rule_of(mask, n, m, causal=causal and not elsewhere)
    causal = causal if rule is None else rule.causal
    cross = elsewhere or (n != m and not causal)
    return CallKind(rule, causal and not cross, cross)


def check_known(spec: AttentionSpec, module: nn.Module, kwargs: dict[str, Any]) -> None:
    """What a layer says that no attention function here knows of is refused, not left out."""
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise Unsupported(f"{spec}: {type(module).__name__} {reason}")


def asked_for_maps(kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants attention maps: some models say so to the layer, others only collect what it returns."""
    collected = _active_collector.get()  # type: ignore[no-untyped-call]
    return bool(kwargs.get("output_attentions")) or any(
        "attentions" in name for name in collected or ()
    )


def _maps(
    spec: AttentionSpec,
    inner: Attention,
    work: AttentionInputs,
    rule: MaskRule | None,
    mask: Tensor | None,
) -> Tensor:
    if not inner.can.maps:
        raise Unsupported(f"{spec} has no attention map: {inner.can.reason('maps')}")
    return run(
        spec, inner, work._replace(v=identity_values(work.k, work.v), dropout=0.0), rule, mask
    )


def attention_of(
    spec: AttentionSpec, module: nn.Module, query: Tensor, asked: CallKind
) -> Attention:
    """The attention of a layer, in training where the layer is.  It has no state, so layers that are alike share it."""
    _, heads, _, width = query.shape
    inner = _built(spec, heads, width, asked.causal, length_of(module), query.device).train(
        module.training
    )
    refusal = why_not_cross(inner) if asked.cross else None
    if refusal is not None:
        raise Unsupported(f"{spec} cannot look at another sequence: {refusal}")
    return inner


@lru_cache(64)
def _built(
    spec: AttentionSpec,
    heads: int,
    width: int,
    causal: bool,
    length: int | None,
    device: torch.device,
) -> Attention:
    with torch.inference_mode(False):
        return spec.build(heads=heads, width=width, causal=causal, length=length).to(device)


# ---------------------------------------------------------------------------------------------- one call
def run(
    spec: AttentionSpec,
    inner: Attention,
    work: AttentionInputs,
    rule: MaskRule | None,
    mask: Tensor | None,
) -> Tensor:
    """(b h n f), by the rule of the call; by the dense mask (b 1 n m) where no rule says the same."""
    if work.dropout and not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{spec} has no softmax weights to drop: set the attention dropout of the model to 0 for training"
        )
    if work.bias is not None and (
        not isinstance(inner, SoftmaxAttention) or inner.prior is not None
    ):
        raise Unsupported(
            f"{spec} cannot take the position bias that this layer adds to its scores"
        )
    if rule is None:
        assert mask is not None
        return _dense(spec, inner, work, mask)
    end = rule.q_start + work.q.shape[2]
    if inner.length is not None and end > inner.length:
        raise ValueError(
            f"{spec} was built for {inner.length} positions at most, and the sequence has {end}: say length={end}"
        )
    work, rule = _trimmed(inner, work, rule)
    if rule.first is None or shiftless(inner):
        return _at(spec, inner, work, rule)
    return _from_their_starts(spec, inner, work, rule)


def _trimmed(
    inner: Attention, work: AttentionInputs, rule: MaskRule
) -> tuple[AttentionInputs, MaskRule]:
    """Without keys that no query of the call sees: those in the future of all, which a cache of fixed size has, and those that
    a window has left behind."""
    m = work.k.shape[2]
    to = min(m, rule.q_start + work.q.shape[2] - rule.k_positions) if rule.causal else m
    seen = (
        meet(inner.pattern, rule.pattern) if isinstance(inner, KVCacheAttention) else rule.pattern
    )
    behind = seen.left if isinstance(seen, Band) and seen.step == 1 and not work.cross else None
    at = 0 if behind is None else max(0, rule.q_start - behind - rule.k_positions)
    if (at, to) == (0, m):
        return work, rule
    bias = None if work.bias is None else work.bias[..., at:to]
    real = None if rule.real is None else rule.real[:, at:to]
    work = work._replace(k=work.k[:, :, at:to], v=work.v[:, :, at:to], bias=bias)
    return work, rule._replace(
        real=None if real is None or real.all() else real, k_positions=rule.k_positions + at
    )


def _from_their_starts(
    spec: AttentionSpec, inner: Attention, work: AttentionInputs, rule: MaskRule
) -> Tensor:
    """Examples that begin with padding, each counted from its first token: those that begin alike share a call.

    Where the keys are those of another sequence, so is the padding, and the queries stay where they are.
    """
    assert rule.first is not None
    b, h, n, _ = work.q.shape
    out = work.v.new_zeros(b, h, n, work.v.shape[3])
    starts = rule.first.expand(b)
    for start in starts.unique().tolist():
        rows = (starts == start).nonzero()[:, 0]
        i, j = 0 if work.cross else max(0, start - rule.q_start), max(0, start - rule.k_positions)
        if i >= n or j >= work.k.shape[2]:
            continue
        q, k, v = work.q[rows, :, i:], work.k[rows, :, j:], work.v[rows, :, j:]
        bias = None if work.bias is None else work.bias.expand(b, -1, -1, -1)[rows, :, i:, j:]
        real = None if rule.real is None else rule.real.expand(b, -1)[rows, j:]
        real = None if real is None or real.all() else real
        q_start = rule.q_start if work.cross else rule.q_start + i - start
        moved = rule._replace(
            real=real, first=None, q_start=q_start, k_positions=rule.k_positions + j - start
        )
        out[rows, :, i:] = _at(spec, inner, work._replace(q=q, k=k, v=v, bias=bias), moved)
    return out


def _at(spec: AttentionSpec, inner: Attention, work: AttentionInputs, rule: MaskRule) -> Tensor:
    real = None if rule.real is None else rule.real.expand(work.k.shape[0], -1)
    if isinstance(inner, SoftmaxAttention):
        pattern = meet(inner.pattern, rule.pattern)
        if work.dropout:
            keep = rule._replace(pattern=pattern, real=real).dense(
                work.q.shape[2], work.k.shape[2], work.q.device
            )
            return _fused(work, keep, _addend(inner, work, rule))
        prior = (
            inner.prior
            if work.bias is None
            else BiasTensor(work.bias, rule.q_start, rule.k_positions)
        )
        return attend(
            work.q,
            work.k,
            work.v,
            pattern=pattern,
            prior=prior,
            mask=real,
            scale=work.scale,
            q_start=rule.q_start,
            k_positions=rule.k_positions,
        )
    work = _alike(inner, work)
    if isinstance(inner, KVCacheAttention):
        place = CallPositions(meet(inner.pattern, rule.pattern), rule.q_start, rule.k_positions)
        return inner.attend(work.q, work.k, work.v, place, mask=real)
    return _whole(spec, inner, work, rule._replace(real=real))


def _alike(inner: Attention, work: AttentionInputs) -> AttentionInputs:
    """Queries whose scores over √e are the layer's, and as many heads of keys and values where the attention needs them."""
    own = 1 / math.sqrt(work.q.shape[3])
    q = work.q if math.isclose(work.scale, own) else work.q * (work.scale / own)
    share = 1 if inner.supports_gqa else q.shape[1] // work.k.shape[1]
    k, v = (x if share == 1 else x.repeat_interleave(share, 1) for x in (work.k, work.v))
    return work._replace(q=q, k=k, v=v)


def _whole(spec: AttentionSpec, inner: Attention, work: AttentionInputs, rule: MaskRule) -> Tensor:
    """Attentions that take a whole sequence.  If there are only its last queries, blank ones are put in front of them."""
    q, k, v, n, m = work.q, work.k, work.v, work.q.shape[2], work.k.shape[2]
    if rule.k_positions or rule.pattern != (Causal() if rule.causal else Full()):
        raise Unsupported(
            f"{spec} sees all keys or all before it, and this layer sees a window: {rule.pattern!r}"
        )
    if rule.real is not None:
        k, v = (
            zero_padding_tokens(k, rule.real[:, None]),
            zero_padding_tokens(v, rule.real[:, None]),
        )
    more = (
        {"query_mask": rule.real}
        if inner.needs_query_mask and rule.real is not None and n == m and not work.cross
        else {}
    )
    if rule.causal and n == 1 and inner.can.cross:  # the last query sees all
        return inner(q, k, v, mask=rule.real)[0]
    if rule.causal and n < m:
        q = F.pad(q, (0, 0, m - n, 0))
    return inner(q, k, v, causal=rule.causal, mask=rule.real, **more)[0][:, :, -n:]


def _dense(spec: AttentionSpec, inner: Attention, work: AttentionInputs, mask: Tensor) -> Tensor:
    """By a mask of four dimensions that no rule describes, such as that of packed examples."""
    n, m = work.q.shape[2], work.k.shape[2]
    if not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{spec} takes padding and causality, and this layer brings another mask, {tuple(mask.shape)}"
        )
    if inner.pattern == Full() and inner.prior is None:
        return _fused(work, mask, work.bias)
    if n != m or not shiftless(inner):
        raise Unsupported(
            f"{spec} goes by positions, and a mask of its own, {tuple(mask.shape)}, does not say where each token stands"
        )
    at = torch.arange(n, device=work.q.device)
    keep = inner.pattern.allows(at[:, None], at[None, :])  # (n m), or (h n m)
    known = as_bool(mask)
    met = mask.masked_fill(~keep, -torch.inf) if known is None else known & keep
    return _fused(work, met, _addend(inner, work, MaskRule(Full(), False)))


def _fused(work: AttentionInputs, mask: Tensor, addend: Tensor | None) -> Tensor:
    """Dense attention with dropout, and with an addend to the scores."""
    k, v = (x.repeat_interleave(work.q.shape[1] // x.shape[1], 1) for x in (work.k, work.v))
    if addend is not None:
        mask = (
            torch.where(mask, addend, -torch.inf) if mask.dtype == torch.bool else mask + addend
        ).to(work.q.dtype)
    return F.scaled_dot_product_attention(work.q, k, v, mask, work.dropout, scale=work.scale)


def _addend(inner: SoftmaxAttention, work: AttentionInputs, rule: MaskRule) -> Tensor | None:
    if inner.prior is None:
        return work.bias
    q, k = (torch.arange(x.shape[2], device=x.device) for x in (work.q, work.k))
    return inner.prior((q + rule.q_start)[:, None], (k + rule.k_positions)[None, :], work.q, work.k)
