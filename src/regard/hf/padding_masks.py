"""How masks arrive from other libraries, and what they say: which tokens are real, (b n), True = keep."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from regard.errors import Unsupported

_last: tuple[ref[Tensor], tuple[int, bool], Tensor | None] | None = (
    None  # layers of a model are given one mask, one after the other
)


def real_tokens(mask: Tensor | None, n: int, *, causal: bool) -> Tensor | None:
    """What a mask of transformers says of n tokens: (b n), or (b 1 n n) of bools or addends; None: all are real.

    One that says more than which keys are padding, and who comes later where causal, raises: no mixer here could obey it.
    """
    global _last
    if mask is None:
        return None
    key = (0 if mask.is_inference() else mask._version, causal)
    if _last is not None and _last[0]() is mask and _last[1] == key:
        return _last[2]
    if mask.dim() == 2 and mask.is_floating_point():
        raise Unsupported(
            "a mask (b n) of floats may mean addends or shares: give bools, True = a real token"
        )
    none = (
        torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    )  # addends, or zeros and ones
    keep = mask if mask.dtype == torch.bool else mask > none
    keys = keep if keep.dim() == 2 else _from_square(keep, n, causal)
    found = None if bool(keys.all()) else keys
    _last = (ref(mask), key, found)
    return found


def _from_square(keep: Tensor, n: int, causal: bool) -> Tensor:
    """(b 1 q k) -> (b k): the last query sees all keys but padding."""
    if keep.dim() != 4 or keep.shape[1] != 1 or keep.shape[-1] < n:
        raise Unsupported(f"a mask is (b n) or (b 1 n n), not {tuple(keep.shape)}")
    keys = keep[:, 0, -1]
    square = keep[:, 0]
    expected = keys[:, None, :]
    if causal:
        last = keep.shape[-1] - square.shape[1]
        expected = expected & torch.ones(
            square.shape[1:], dtype=torch.bool, device=keep.device
        ).tril(last)
    nothing = ~expected.any(-1)  # what such a query sees does not matter: it is padding itself
    if not bool(((square == expected).all(-1) | nothing).all()):
        raise Unsupported(
            "the mask says more than which tokens are padding: a swapped layer has its own pattern for the rest"
        )
    return keys


def check_causal_mask(mask: Tensor | None, n: int, *, causal: bool, told: bool) -> None:
    """`attn_mask` of torch may only say what the mixer does by itself."""
    if mask is None:
        if told and not causal:
            raise Unsupported(
                "the layer is called causal, and was swapped for one that is not: swap with causal=True"
            )
        return
    keep = ~mask if mask.dtype == torch.bool else mask == 0
    if causal and mask.shape[-2:] == (n, n) and bool((keep == torch.ones_like(keep).tril()).all()):
        return
    if not causal and bool(keep.all()):
        return
    why = (
        "swap with causal=True if it is the causal one"
        if not causal
        else "it is not the causal one"
    )
    raise Unsupported(
        f"attn_mask says who looks at whom, and a swapped layer has its own pattern for that: {why}"
    )
