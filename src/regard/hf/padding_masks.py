"""Padding masks (b, n), True = token, from the attention masks of other libraries."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from regard.errors import Unsupported

# All layers of a model receive the same mask, so the last result is kept.
_last: tuple[ref[Tensor], tuple[int, bool], Tensor | None] | None = None


def padding_mask(mask: Tensor | None, n: int, *, causal: bool) -> Tensor | None:
    """The padding mask (b, n) in a mask of transformers, or None if no token is padding.

    Raises `Unsupported` if the mask hides more than padding, and later tokens where causal.

    Args:
        mask: (b, n) or (b, 1, n, n), of bools, or of floats that are added to the scores.
        n: Number of tokens.
    """
    global _last
    if mask is None:
        return None
    key = (0 if mask.is_inference() else mask._version, causal)
    if _last is not None and _last[0]() is mask and _last[1] == key:
        return _last[2]
    if mask.dim() == 2 and mask.is_floating_point():
        raise Unsupported("A mask (b, n) of floats is ambiguous: give bools, True = token.")
    hidden = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    visible = mask if mask.dtype == torch.bool else mask > hidden
    if visible.dim() != 2:
        if visible.dim() != 4 or visible.shape[1] != 1 or visible.shape[-1] < n:
            raise Unsupported(f"Masks must be (b, n) or (b, 1, n, n), not {tuple(visible.shape)}.")
        square = visible[:, 0]
        visible = square[:, -1]  # the last query sees all keys but padding
        expected = visible[:, None, :]
        if causal:
            offset = square.shape[2] - square.shape[1]
            expected = expected & torch.ones(
                square.shape[1:], dtype=torch.bool, device=mask.device
            ).tril(offset)
        is_padding = ~expected.any(-1)  # what padding queries see does not matter
        if not bool(((square == expected).all(-1) | is_padding).all()):
            raise Unsupported(
                "The mask hides more than padding: a swapped layer has its own pattern."
            )
    result = None if bool(visible.all()) else visible
    _last = (ref(mask), key, result)
    return result


def check_causal_mask(mask: Tensor | None, n: int, *, causal: bool, is_causal: bool) -> None:
    """Raise `Unsupported` unless `attn_mask` and `is_causal` agree with the mixer."""
    if mask is None:
        if is_causal and not causal:
            raise Unsupported("The layer is called with is_causal=True: swap with causal=True.")
        return
    visible = ~mask if mask.dtype == torch.bool else mask == 0
    if not causal and not bool(visible.all()):
        raise Unsupported(
            "attn_mask is not supported in a swapped layer, which has its own pattern. "
            "If it is the causal mask, swap with causal=True."
        )
    if causal and not (
        mask.shape[-2:] == (n, n) and bool((visible == torch.ones_like(visible).tril()).all())
    ):
        raise Unsupported(
            "attn_mask must be the causal mask: the layer was swapped with causal=True."
        )
