"""PyTorch's fused dense attention.  It computes every score and adds the mask: the best there is where most is seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.layout import LRUCache
from regard.pattern import Causal, Full

WIDEST = 256  # heads that are filled up to one width

_masks = LRUCache(128 << 20)
_CAUSAL, _FULL = Causal(), Full()


def refuses(call: AttentionCall) -> str | None:
    """Why it cannot do this; None: it can."""
    return None


def run(call: AttentionCall) -> Tensor:
    """Dense attention; the mask is left out where the pattern allows all, or is plainly causal."""
    causal = plainly_causal(call)
    mask = None if causal else mask_of(call)
    if call.q.shape[3] == call.v.shape[3]:
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, mask, 0.0, causal, scale=call.scale
        )
    q, k, v = _one_width(call)
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=call.scale)[
        ..., : call.v.shape[3]
    ]


def _one_width(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Widths that differ are filled up with zeros, which change nothing: else PyTorch leaves its fused path, and keeps all
    weights.  Very wide values, such as the identity of a map, are not worth it."""
    wide = max(call.q.shape[3], call.v.shape[3])
    if wide > WIDEST:
        return call.q, call.k, call.v
    q, k, v = (F.pad(x, (0, wide - x.shape[3])) for x in (call.q, call.k, call.v))
    return q, k, v


def plainly_causal(call: AttentionCall) -> bool:
    """Whether the call is what `is_causal` means: nothing beside it, and queries that start with the keys."""
    alone = (
        call.mask is None
        and call.global_attention_mask is None
        and call.prior is None
        and call.pattern == _CAUSAL
    )
    alone = (
        alone and call.scale > 0
    )  # PyTorch hides later keys before it scales: zero times infinity would be left
    return (
        alone
        and isinstance(call.k_positions, int)
        and call.k_positions == call.q_start
        and call.q.shape[2] == call.k.shape[2]
    )


def sees_all(call: AttentionCall) -> bool:
    """Whether the pattern allows every pair of this call, by asking for one block."""
    n, m = call.q.shape[2], call.k.shape[2]
    if call.global_attention_mask is not None or not isinstance(call.k_positions, int):
        return False
    corners = (
        torch.tensor(at)
        for at in (call.q_start, call.q_start + n - 1, call.k_positions, call.k_positions + m - 1)
    )
    return bool(call.pattern.block(*corners)[1].all())


def mask_of(call: AttentionCall) -> Tensor | None:
    """What is added to the scores, broadcastable to (b h n m); None: nothing.  Plain ones are kept for the next call."""
    if call.prior is not None:
        q, k = call.positions()
        addend = call.prior(q[:, None], k[None, :], call.q, call.k)
        return torch.where(call.keep(), addend, -torch.inf).to(call.q.dtype)
    if call.pattern == _FULL and call.mask is None:
        return None
    if call.global_attention_mask is not None or not isinstance(call.k_positions, int):
        return call.keep()
    if call.mask is None:
        return call.keep() if call.q_start else _remembered(_additive, call)
    plain, real = call._replace(mask=None), call.mask[:, None, None, :]
    keep = _seen(plain) if call.q_start else _remembered(_seen, plain)
    return real if keep is None else keep & real


def _remembered(
    make: Callable[[AttentionCall], Tensor | None], call: AttentionCall
) -> Tensor | None:
    """What is made of the pattern of a call alone."""
    key = (
        make,
        call.pattern,
        call.q.shape[2],
        call.k.shape[2],
        call.k_positions,
        call.q.dtype,
        call.q.device,
    )
    found = _masks.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept must serve training too
            found = (make(call),)
        if type(found[0]) in (
            Tensor,
            type(None),
        ):  # a stand-in that only has a shape is of no use to others
            _masks.put(key, found, 0 if found[0] is None else found[0].nbytes)
    assert isinstance(found, tuple)
    return found[0]


def _seen(call: AttentionCall) -> Tensor | None:
    """Who sees whom; None: everybody sees all."""
    if sees_all(call):
        return None
    keep = call.keep()
    if (
        keep.device.type == "cpu" and type(keep) is Tensor and keep.all()
    ):  # blocks cannot always tell
        return None
    return keep


def _additive(call: AttentionCall) -> Tensor | None:
    keep = _seen(call)
    if keep is None:
        return None
    return torch.zeros(keep.shape, dtype=call.q.dtype, device=keep.device).masked_fill_(
        ~keep, -torch.inf
    )
