"""One attention call with checked arguments: the input of every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_int
from regard.native import are_plain_tensors
from regard.pattern import MAX_START, Causal, Full, Pattern
from regard.prior import Prior

_FULL, _CAUSAL = Full(), Causal()

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class AttentionCall(NamedTuple):
    """The arguments of `regard.attend`: q (b h n e), k (b kv m e), v (b kv m f).

    kv divides h: query head i reads head i // (h / kv) of the keys and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    prior: Prior | None
    mask: Tensor | None  # (b m), True = keep
    global_attention_mask: Tensor | None  # (b n), resolves `GlobalMask` in the pattern
    scale: float
    q_start: int  # position of the first query
    k_positions: int | Tensor  # position of the first key, or the positions of all keys (m)
    attn_mask: Tensor | None = None  # broadcasts to (b h n m), True = keep
    sinks: Tensor | None = None  # (h), logits that join the softmax without a value

    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        inputs = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    def num_tokens(self) -> int:
        """The number of queries or of keys, whichever is smaller."""
        return min(self.q.shape[2], self.k.shape[2])

    def signature(self) -> Hashable | None:
        """Everything that the choice of a backend depends on. None if it must not be remembered:
        with a prior, which is a module, and where transforms or modes watch the tensors.
        """
        if self.prior is not None or not are_plain_tensors(self.q, self.k, self.v):
            return None
        return (
            self.q.shape,
            self.k.shape,
            self.v.shape,
            self.q.dtype,
            self.q.device,
            self.pattern,
            self.mask is None,
            None if self.attn_mask is None else self.attn_mask.shape,
            self.sinks is None,
            self.global_attention_mask is None,
            self.scale,
            self.q_start,
            self.k_positions if isinstance(self.k_positions, int) else None,
            self.needs_grad(),
            torch.get_num_threads(),
        )

    def is_plain_causal(self) -> bool:
        """Whether `is_causal=True` of PyTorch's function expresses the call: nothing but a causal
        pattern on the same queries and keys.
        """
        return (
            self.mask is None
            and self.attn_mask is None
            and self.sinks is None
            and self.global_attention_mask is None
            and self.prior is None
            and self.pattern == _CAUSAL
            and self.scale > 0  # PyTorch masks before it scales: -inf times zero would be NaN
            and isinstance(self.k_positions, int)
            and self.k_positions == self.q_start
            and self.q.shape[2] == self.k.shape[2]
        )

    def has_dense_pattern(self) -> bool:
        """Whether dense attention computes no score in vain, as far as patterns are concerned."""
        return self.pattern == _FULL or self.is_plain_causal()

    def group_size(self) -> int:
        """How many neighbouring query heads share a head of keys and values."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    def k_start(self) -> int:
        """The position of the first key, for backends that require consecutive keys."""
        assert isinstance(self.k_positions, int)
        return self.k_positions

    def position_grid(self) -> tuple[Tensor, Tensor]:
        """The positions of the queries (n 1) and the keys (1 m)."""
        device, k = self.q.device, self.k_positions
        if isinstance(k, Tensor):
            k = k.to(device)  # a cache keeps positions on the host
        else:
            k = torch.arange(k, k + self.k.shape[2], device=device)
        q = torch.arange(self.q_start, self.q_start + self.q.shape[2], device=device)
        return q[:, None], k[None, :]

    def dense_mask(self) -> Tensor:
        """The visible pairs as a bool tensor, broadcastable to (b h n m)."""
        q, k = self.position_grid()

        def allows(pattern: Pattern) -> Tensor:
            keep = pattern.allows(q, k)
            return keep[None] if keep.dim() == 3 else keep[None, None]

        if self.global_attention_mask is None:
            keep = allows(self.pattern)
        else:
            by_query = self.global_attention_mask[:, None, :, None]
            by_key = self.global_attention_mask[:, None, None, :]
            resolve = self.pattern.resolve_global_mask
            global_row, local_row = (
                torch.where(by_key, allows(resolve(query, True)), allows(resolve(query, False)))
                for query in (True, False)
            )
            keep = torch.where(by_query, global_row, local_row)
        if self.mask is not None:
            keep = keep & self.mask[:, None, None, :]
        return keep if self.attn_mask is None else keep & self.attn_mask

    def dense_bias(self) -> Tensor:
        """The prior of all pairs, -inf where a pair is not visible; broadcastable to (b h n m)."""
        assert self.prior is not None
        bias = self.prior(*self.position_grid(), self.q, self.k)
        return torch.where(self.dense_mask(), bias, -torch.inf).to(self.q.dtype)


def as_function(
    call: AttentionCall, run: Callable[[AttentionCall], Tensor]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`run(call)` as a function of q, k and v that does not keep the tensors of `call` alive."""
    rest = call._replace(q=None, k=None, v=None)  # type: ignore[arg-type]
    return lambda q, k, v: run(rest._replace(q=q, k=k, v=v))


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    prior: Prior | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    scale: float | None = None,
    q_start: int = 0,
    k_positions: int | Tensor = 0,
) -> AttentionCall:
    """Check the arguments of `regard.attend` and fill in defaults."""
    _check_qkv(q, k, v)
    (b, h, n, _), m = q.shape, k.shape[2]
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern must be a Pattern such as Band(128, 128) or Causal(), not {pattern!r}"
        )
    if prior is not None and not isinstance(prior, Prior):
        raise TypeError(f"prior must be a Prior such as ALiBi(8), not {type(prior).__name__}")
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise TypeError(f"scale must be a finite number, not {scale!r}")
    check_int(0, MAX_START, q_start=q_start)
    if not isinstance(k_positions, Tensor):
        check_int(0, MAX_START, k_positions=k_positions)
    elif k_positions.dtype != torch.long or tuple(k_positions.shape) != (m,):
        raise ValueError(
            f"k_positions must be an integer or an int64 tensor of shape ({m},), "
            f"not {tuple(k_positions.shape)} {k_positions.dtype}"
        )
    else:
        check_positions(k_positions, "k_positions", least=-1)
    for name, heads in (
        ("prior", None if prior is None else prior.heads),
        ("pattern", pattern.heads),
    ):
        if heads not in (None, h):
            raise ValueError(f"the {name} is for {heads} heads, but q has {h}")
    masks = {
        "mask": mask,
        "attn_mask": attn_mask,
        "global_attention_mask": global_attention_mask,
    }
    for name, given in masks.items():
        if isinstance(given, Tensor) and given.device != q.device:
            raise ValueError(f"{name} is on {given.device}, but q is on {q.device}")
    check_mask(mask, (b, m), "mask")
    attn_mask = broadcastable_attn_mask(attn_mask, b, h, n, m)
    if global_attention_mask is None:
        pattern = pattern.resolve_global_mask(False, False)
    else:
        check_mask(global_attention_mask, (b, n), "global_attention_mask")
        if not pattern.needs_global_mask:
            raise ValueError(
                f"global_attention_mask was given, but the pattern {pattern!r} has no GlobalMask"
            )
        if n != m:
            raise ValueError(
                "global_attention_mask requires self-attention, "
                f"but there are {n} queries and {m} keys"
            )
    last = max(q_start + n, (k_positions + m) if isinstance(k_positions, int) else 0)
    for name, length in (
        ("prior", None if prior is None else prior.length),
        ("pattern", pattern.length),
    ):
        if length is not None and last > length:
            raise ValueError(f"the {name} supports {length} positions, but the sequence has {last}")
    if mask is not None:  # padding may contain NaN, which must not reach the output
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    if attn_mask is not None:  # nor may that of keys which it hides from every query
        unseen = ~attn_mask.any(2).any(1)[:, None, :, None]
        k, v = (x.masked_fill(unseen, 0) for x in (k, v))
    scale = default_scale(q, prior, scale)
    sinks = None
    if prior is not None:
        sinks, prior = prior.sink_logits(), prior.for_scale(scale)
    return AttentionCall(
        q,
        k,
        v,
        pattern,
        prior,
        mask,
        global_attention_mask,
        scale,
        q_start,
        k_positions,
        attn_mask,
        sinks,
    )


def check_positions(positions: Tensor, name: str, *, least: int = 0) -> None:
    """Raise ValueError if a position is so large that sums with it would overflow.

    Only tensors whose values are known without waiting for a device are checked.
    """
    if positions.numel() and are_plain_tensors(positions):
        low, high = torch.aminmax(positions)
        for value in (int(low), int(high)):
            check_int(least, MAX_START, **{f"each of {name}": value})


def default_scale(q: Tensor, prior: Prior | None, scale: float | None) -> float:
    """The factor of the scores: `scale`, or 1/√(terms e) if it is None."""
    terms = 1 if prior is None else prior.num_terms
    return 1 / math.sqrt(terms * q.shape[3]) if scale is None else scale


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of shape (b h n e), not {shape}")
    if q.dtype not in FLOAT_DTYPES or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            "q, k and v must have the same floating point dtype, "
            f"not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on the same device, not on {q.device}, {k.device} and {v.device}"
        )
    (b, h, _, e), (kb, kh, km, ke), (vb, vh, vm, _) = q.shape, k.shape, v.shape
    if (kb, kh, km) != (vb, vh, vm):
        raise ValueError(
            f"k and v must have the same (b h m), not {(kb, kh, km)} and {(vb, vh, vm)}"
        )
    if b != kb or (h % kh if kh else h):
        raise ValueError(
            f"k must have the batch size of q and a divisor of its heads: "
            f"k has (b h) = {(kb, kh)}, q has {(b, h)}"
        )
    if e != ke or e == 0:
        raise ValueError(f"q and k must have the same width > 0, not {e} and {ke}")


def check_mask(mask: Tensor | None, shape: tuple[int, int], name: str) -> None:
    """Raise unless the mask is None or a bool tensor of this shape."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool tensor, True = keep, not {kind}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(mask.shape)}")


def broadcastable_attn_mask(
    attn_mask: Tensor | None, b: int, heads: int | None, n: int, m: int
) -> Tensor | None:
    """A pair mask as a view that broadcasts to (b h n m). Raises unless it is a bool tensor of
    shape (n m), (b n m) or (b h n m), where b and h may be 1; `heads` None = any number.
    """
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(
            f"attn_mask must be a bool tensor, True = keep, not {kind}. Convert an additive mask "
            "with attn_mask >= 0, or use a prior to add to the scores."
        )
    shape = tuple(attn_mask.shape)
    fits = len(shape) in (2, 3, 4) and shape[-2:] == (n, m)
    fits = fits and (len(shape) == 2 or shape[0] in (1, b))
    if not fits or (len(shape) == 4 and heads is not None and shape[1] not in (1, heads)):
        h = "heads" if heads is None else heads
        raise ValueError(
            f"attn_mask must have shape (n m) = ({n}, {m}), (b n m) = ({b}, {n}, {m}) or "
            f"(b h n m) = ({b}, {h}, {n}, {m}), not {shape}"
        )
    if len(shape) == 2:
        return attn_mask[None, None]
    return attn_mask[:, None] if len(shape) == 3 else attn_mask


def pad_to_same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to one width, as fused kernels require.

    This changes no score and no value.
    """
    width = max(q.shape[3], v.shape[3])
    q, k, v = (x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    return q, k, v
