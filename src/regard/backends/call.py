"""One attention call, checked: what every executor is given."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import check_int
from regard.pattern import Pattern
from regard.prior import Prior

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionCall(NamedTuple):
    """Softmax attention of q (b h n e) over k (b h m e) and v (b h m f), where `pattern`, `mask` and `marks` allow it."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    prior: Prior | None
    mask: Tensor | None  # (b m), True = a real token
    global_attention_mask: (
        Tensor | None
    )  # (b n), True = marked; settles `GlobalMask` in the pattern
    scale: float
    q_start: int  # position of the first query
    k_positions: int | Tensor  # position of the first key, or the positions of all (m)

    def grad(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    def positions(self) -> tuple[Tensor, Tensor]:
        """Where the queries (n) and the keys (m) stand."""
        device, at = self.q.device, self.k_positions
        keys = (
            at if isinstance(at, Tensor) else torch.arange(at, at + self.k.shape[2], device=device)
        )
        return torch.arange(self.q_start, self.q_start + self.q.shape[2], device=device), keys

    def keep(self) -> Tensor:
        """Who may look at whom, densely: bool, broadcastable to (b h n m)."""
        q, k = (x.unsqueeze(1 - i) for i, x in enumerate(self.positions()))
        if self.global_attention_mask is None:
            keep = _heads_first(self.pattern.allows(q, k))
        else:
            by_query, by_key = (
                self.global_attention_mask[:, None, :, None],
                self.global_attention_mask[:, None, None, :],
            )
            cases = [
                [
                    _heads_first(self.pattern.resolve_global_mask(a, b).allows(q, k))
                    for b in (False, True)
                ]
                for a in (False, True)
            ]
            rows = [
                torch.where(by_key, needs_global_mask, plain) for plain, needs_global_mask in cases
            ]
            keep = torch.where(by_query, rows[1], rows[0])
        return keep if self.mask is None else keep & self.mask[:, None, None, :]

    def with_heads(self, heads: slice | list[int], pattern: Pattern) -> AttentionCall:
        """The same call for some of the heads."""
        q, k, v = (x[:, heads] for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v, pattern=pattern)


def _heads_first(keep: Tensor) -> Tensor:
    return keep[None] if keep.dim() == 3 else keep[None, None]


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    prior: Prior | None,
    mask: Tensor | None,
    global_attention_mask: Tensor | None,
    scale: float | None,
    q_start: int,
    k_positions: int | Tensor,
) -> AttentionCall:
    """Check what was given, say what is wrong with it, and make the call."""
    b, h, n, m, e = _check_heads(q, k, v)
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern must be a Pattern such as Band(128, 128) or Causal(), not {pattern!r}"
        )
    _check_options(prior, scale, q_start, k_positions, m)
    if prior is not None and prior.heads not in (None, h):
        raise ValueError(f"the prior is for {prior.heads} heads, but q has {h}")
    if pattern.heads not in (None, h):
        raise ValueError(f"the pattern is for {pattern.heads} heads, but q has {h}")
    check_mask(mask, (b, m), "mask")
    if global_attention_mask is None:
        pattern = (
            pattern.resolve_global_mask(False, False) if pattern.needs_global_mask else pattern
        )
    else:
        _check_marks(global_attention_mask, b, n, m, pattern)
    last = max(q_start + n, (k_positions + m) if isinstance(k_positions, int) else 0)
    if pattern.length is not None and last > pattern.length:
        raise ValueError(
            f"the pattern describes {pattern.length} positions, but the sequence has {last}: {pattern!r}"
        )
    if prior is not None and prior.length is not None and last > prior.length:
        raise ValueError(f"the prior knows {prior.length} positions, but the sequence has {last}")
    if mask is not None:  # whatever stands in left-out places, NaN included, must not be seen
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    if scale is None:
        scale = 1 / math.sqrt(e if prior is None else prior.num_terms * e)
    return AttentionCall(
        q, k, v, pattern, prior, mask, global_attention_mask, scale, q_start, k_positions
    )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """b, h, n, m, e of what fits together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of shape (b h n e), not {shape}")
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must be of one floating type, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, not on {q.device}, {k.device} and {v.device}"
        )
    (b, h, n, e), (kb, kh, km, ke), (vb, vh, vm, _) = q.shape, k.shape, v.shape
    if (kb, kh, km) != (vb, vh, vm):
        raise ValueError(f"k and v must agree in (b h m), not {(kb, kh, km)} and {(vb, vh, vm)}")
    if b != kb or (h % kh if kh else h):
        raise ValueError(
            f"k (b h) = {(kb, kh)} must have the batch and divide the heads of q, {(b, h)}"
        )
    if e != ke or e == 0:
        raise ValueError(f"q and k must have one width above 0, not {e} and {ke}")
    return b, h, n, km, e


def _check_marks(global_attention_mask: Tensor, b: int, n: int, m: int, pattern: Pattern) -> None:
    check_mask(global_attention_mask, (b, n), "global_attention_mask")
    if not pattern.needs_global_mask:
        raise ValueError(
            f"marks were given, but the pattern {pattern!r} has no Marked part to use them"
        )
    if n != m:
        raise ValueError(f"marks are for self-attention, but there are {n} queries and {m} keys")


def _check_options(
    prior: Prior | None, scale: float | None, q_start: int, k_positions: int | Tensor, m: int
) -> None:
    if prior is not None and not isinstance(prior, Prior):
        raise TypeError(f"prior must be a Prior such as ALiBi(8), not {type(prior).__name__}")
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise TypeError(f"scale must be a finite number, not {scale!r}")
    if not isinstance(k_positions, Tensor):
        check_int(0, q_start=q_start, k_positions=k_positions)
        return
    check_int(0, q_start=q_start)
    if k_positions.dtype != torch.long or tuple(k_positions.shape) != (m,):
        raise ValueError(
            f"k_at must be the first position or all ({m},) of them, as int64, not {tuple(k_positions.shape)} {k_positions.dtype}"
        )


def check_mask(mask: Tensor | None, shape: tuple[int, int], name: str) -> None:
    """A mask is a bool tensor of just this shape, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True = a real token, not {kind}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(mask.shape)}")
