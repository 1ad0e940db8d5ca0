"""PyTorch's dense `scaled_dot_product_attention`: computes every score; the best choice if most
pairs are visible.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall, pad_to_same_width
from regard.layout import LRUCache
from regard.numerics import additive_mask
from regard.pattern import Causal, Full

MAX_PADDED_WIDTH = 256  # wider heads are not padded to the width of the others

_masks: LRUCache[tuple[Tensor | None]] = LRUCache(128 << 20)
_CAUSAL, _FULL = Causal(), Full()


def refuses(call: AttentionCall) -> str | None:
    """The reason why this backend does not support the call, or None."""
    return None


def run(call: AttentionCall) -> Tensor:
    """Dense attention; without a mask if the pattern is full or plainly causal."""
    q, k, v, width = call.q, call.k, call.v, call.v.shape[3]
    causal = is_plain_causal(call)
    mask = None if causal else build_mask(call)
    if q.shape[3] == width:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=call.scale)
    # PyTorch leaves its fused kernel if widths differ. Very wide values, such as the identity
    # matrix for an attention map, are not worth padding.
    if max(q.shape[3], width) <= MAX_PADDED_WIDTH:
        q, k, v = pad_to_same_width(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=call.scale)[..., :width]


def is_plain_causal(call: AttentionCall) -> bool:
    """Whether `is_causal=True` expresses the call: nothing but a causal pattern on the same queries
    and keys.
    """
    return (
        call.mask is None
        and call.global_attention_mask is None
        and call.prior is None
        and call.pattern == _CAUSAL
        and call.scale > 0  # PyTorch masks before it scales: -inf times zero would be NaN
        and isinstance(call.k_positions, int)
        and call.k_positions == call.q_start
        and call.q.shape[2] == call.k.shape[2]
    )


def build_mask(call: AttentionCall) -> Tensor | None:
    """The attention mask, bool or additive, broadcastable to (b h n m); None if all pairs are
    visible.
    """
    if call.prior is not None:
        return call.dense_bias()
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
