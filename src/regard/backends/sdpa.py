"""The backend `sdpa`: PyTorch's dense `scaled_dot_product_attention`. It computes every score, and
is the best choice if most pairs are visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import native
from regard.backends import calibration
from regard.backends.call import AttentionCall, as_function, pad_to_same_width
from regard.backends.protocol import Backend
from regard.backends.reference import attend_by_formula
from regard.errors import Unsupported
from regard.layout import LRUCache
from regard.numerics import additive_mask, at_least_float32
from regard.pattern import Full

MAX_FOLDED_QUERIES = 8  # of a head, in grouped-query attention, see `can_fold_groups`
LARGEST_SINK = 3e4  # finite, because it is multiplied by zero, also in float16
MAX_UPCAST_KEYS = 256  # on a CPU; with more, PyTorch's backward pass in 16 bits is as fast
MAX_PADDED_WIDTH = 256  # wider heads are not padded to the width of the others

_masks: LRUCache[tuple[Tensor | None]] = LRUCache(128 << 20)
_FULL = Full()


class SDPABackend(Backend[AttentionCall]):
    """All scores, in PyTorch's fused kernel, with a mask where one is needed."""

    name = "sdpa"
    traceable = True

    def refuses(self, call: AttentionCall) -> str | None:
        """None: it supports every call."""
        return None

    def cost(self, call: AttentionCall) -> float | None:
        """Seconds, from the number of queries and keys."""
        work = calibration.describe_workload(call)
        if call.q.device.type != "cpu":
            return calibration.accelerator_seconds(work, sparse=False)
        return calibration.dense_seconds(calibration.machine_costs(), work)

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """PyTorch's function, without a mask if the pattern is full or plainly causal.

        Inside `torch.func` transforms and forward-mode differentiation, which PyTorch's fused
        kernel does not support in general, it is the formula.
        """
        if native.inside_transform():
            return as_function(call, attend_by_formula)
        half = call.q.dtype in (torch.bfloat16, torch.float16)
        is_short = call.k.shape[2] <= MAX_UPCAST_KEYS
        if half and is_short and call.q.device.type == "cpu" and call.needs_grad():
            return partial(attend_in_float32, self._prepare_fused(call, torch.float32))
        return self._prepare_fused(call, call.q.dtype)

    def _prepare_fused(
        self, call: AttentionCall, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """PyTorch's fused kernel for a call whose q, k and v will have this dtype."""
        causal = call.is_plain_causal()
        mask = None if causal else build_mask(call)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        grouped = call.group_size() > 1
        if call.sinks is not None:
            return partial(attend_with_sinks, mask=mask, scale=call.scale, sinks=call.sinks)
        if grouped and can_fold_groups(call, mask, causal):
            return partial(attend_folded, mask=mask, scale=call.scale)
        if call.q.shape[3] != call.v.shape[3]:
            return partial(_attend_two_widths, mask=mask, causal=causal, scale=call.scale)
        if grouped:
            return partial(
                fused_attention,
                attn_mask=mask,
                is_causal=causal,
                scale=call.scale,
                enable_gqa=True,
            )
        if mask is None and not causal and call.scale == 1 / math.sqrt(call.q.shape[3]):
            # without keyword arguments, which cost as much as finding a remembered call
            return fused_attention if call.needs_grad() else F.scaled_dot_product_attention
        return partial(fused_attention, attn_mask=mask, is_causal=causal, scale=call.scale)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` whose second derivatives raise `Unsupported`."""
    out = F.scaled_dot_product_attention(q, k, v, *args, **kwargs)
    if out.grad_fn is not None and out.grad_fn.name().startswith("ScaledDotProduct"):
        out.grad_fn.register_prehook(_check_first_order)
    return out


def attend_in_float32(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention with copies in float32. For short sequences on a CPU this trains up to four times
    as fast as the backward pass of PyTorch's kernel in 16 bits."""
    with torch.autocast(q.device.type, enabled=False):  # it would return to 16 bits
        return attend(*map(at_least_float32, (q, k, v))).to(v.dtype)


def _check_first_order(_: object) -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise Unsupported(
            "PyTorch's fused attention does not support second derivatives: run the forward pass "
            "inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), or use "
            "backend='reference'"
        )


def can_fold_groups(call: AttentionCall, mask: Tensor | None, causal: bool) -> bool:
    """Whether the query heads that share keys should become queries of one head: one token while
    decoding, or a few without a mask. PyTorch's kernel then reads the keys once for all of them,
    and twice as fast. For many queries, whose rows would be copied, its `enable_gqa` is as fast.
    """
    n = call.q.shape[2]
    return n == 1 or (mask is None and not causal and n <= MAX_FOLDED_QUERIES)


def attend_folded(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Grouped-query attention with the heads of a group as queries: q (b h n e) -> (b kv n*h/kv e).

    A mask is allowed for one query only: (b 1 1 m) or (b h 1 m).
    """
    b, h, n, e = q.shape
    kv = k.shape[1]
    if mask is not None and mask.shape[1] == h:
        mask = mask.reshape(mask.shape[0], kv, h // kv, -1)
    q = q.reshape(b, kv, h // kv * n, e)
    out = _attend_two_widths(q, k, v, mask=mask, causal=False, scale=scale)
    return out.reshape(b, h, n, -1)


def attend_with_dropout(call: AttentionCall, dropout: float) -> Tensor:
    """Dense attention in which each weight is dropped with probability `dropout`, and kept weights
    are divided by 1 - dropout: (b h n f). It draws from PyTorch's generator of the device."""
    causal = call.is_plain_causal()
    mask = None if causal else build_mask(call)
    q, k, v = call.q, call.k, call.v
    if call.sinks is not None:
        return attend_with_sinks(
            q, k, v, mask=mask, scale=call.scale, sinks=call.sinks, dropout=dropout
        )
    return _attend_two_widths(q, k, v, mask=mask, causal=causal, scale=call.scale, dropout=dropout)


def _attend_two_widths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """PyTorch leaves its fused kernel if the widths of keys and values differ, so both are padded.

    Very wide values, such as the identity matrix for an attention map, are not worth padding.
    """
    width = v.shape[3]
    if q.shape[3] != width and max(q.shape[3], width) <= MAX_PADDED_WIDTH:
        q, k, v = pad_to_same_width(q, k, v)
    y = fused_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y[..., :width]


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Dense attention with sinks (h): q (b h n e), k (b kv m e), v (b kv m f) -> (b h n f).

    A sink is one more key, whose value is zero. One more channel of the heads holds its score: the
    logit for the queries, 1 for that key, 0 for the others.

    Args:
        mask: Bool or additive mask that broadcasts to (b h n m), or None.
        scale: Factor of the scores.
        sinks: The logits.
        dropout: Probability of dropping a weight.
    """
    score = sinks.clamp(-LARGEST_SINK, LARGEST_SINK).to(q)
    q = torch.cat((q * scale, score[:, None, None].expand(*q.shape[:3], 1)), -1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 0, 0, 1))
    is_sink = torch.zeros(k.shape[2:], dtype=torch.bool, device=k.device)
    is_sink[-1, -1] = True
    k = k.masked_fill(is_sink, 1.0)
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
    return _attend_two_widths(q, k, v, mask=mask, causal=False, scale=1.0, dropout=dropout)


def build_mask(call: AttentionCall) -> Tensor | None:
    """The attention mask, bool or additive, broadcastable to (b h n m); None if all pairs are
    visible.
    """
    if call.prior is not None:
        return call.dense_bias()
    if call.attn_mask is not None:
        only_pairs = call.pattern == _FULL and call.mask is None
        return call.attn_mask if only_pairs else call.dense_mask()
    if call.pattern == _FULL and call.mask is None:
        return None
    if call.global_attention_mask is not None or not isinstance(call.k_positions, int):
        return call.dense_mask()
    if call.mask is None:
        return call.dense_mask() if call.q_start else _cached_pattern_mask(call, additive=True)
    pattern_only, real = call._replace(mask=None), call.mask[:, None, None, :]
    if call.q_start:  # while decoding every call has another position
        keep = _pattern_mask(pattern_only)
    else:
        keep = _cached_pattern_mask(pattern_only, additive=False)
    return real if keep is None else keep & real


def _cached_pattern_mask(call: AttentionCall, *, additive: bool) -> Tensor | None:
    """The mask of the pattern, as bool or as an additive mask; None if all pairs are visible."""
    n, m, dtype = call.q.shape[2], call.k.shape[2], call.q.dtype
    key = (additive, call.pattern, n, m, call.k_positions, dtype, call.q.device)
    found = _masks.get(key)
    if found is None:
        with torch.inference_mode(False):  # cached masks must be usable in training
            keep = _pattern_mask(call)
            found = (additive_mask(keep, dtype) if additive and keep is not None else keep,)
        if type(found[0]) in (Tensor, type(None)):  # a fake tensor is useless to other calls
            _masks.add(key, found, 0 if found[0] is None else found[0].nbytes)
    return found[0]


def _pattern_mask(call: AttentionCall) -> Tensor | None:
    """The bool mask of the pattern, or None if all pairs are visible."""
    k_start, m = call.k_start(), call.k.shape[2]
    corners = (call.q_start, call.q_start + call.q.shape[2] - 1, k_start, k_start + m - 1)
    if bool(call.pattern.block(*(torch.tensor(at) for at in corners))[1].all()):
        return None
    keep = call.dense_mask()
    if keep.device.type == "cpu" and type(keep) is Tensor and keep.all():  # blocks are conservative
        return None
    return keep
