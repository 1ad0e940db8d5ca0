"""Tensor operations shared by several mixers: masked softmax, precision, and ops that
`torch.export` can trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, keep: Tensor | None) -> Tensor:
    """Softmax over the last axis of scores (... m), restricted to `keep`.

    A row without any kept entry is all zeros.
    """
    if keep is None:
        return torch.softmax(scores, -1)
    lowest = torch.finfo(scores.dtype).min  # not -inf: a fully masked row would become NaN
    return torch.softmax(scores.masked_fill(~keep, lowest), -1) * keep.any(-1, keepdim=True)


def attention_mask(
    n: int,
    m: int,
    *,
    causal: bool,
    mask: Tensor | None,
    device: torch.device,
    attn_mask: Tensor | None = None,
) -> Tensor | None:
    """Which of m keys the last n queries may attend to: (b h n m), where b and h may be 1, or
    (n m), or None if all of them.

    `mask` (b m) is the padding mask and `attn_mask` (b h n m) the pair mask, True = keep.
    """
    keep = torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n) if causal else None
    if mask is not None:
        keep = mask[:, None, None, :] if keep is None else mask[:, None, None, :] & keep
    if attn_mask is not None:
        keep = attn_mask if keep is None else attn_mask & keep
    return keep


def additive_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask, True = keep, as an addend of the scores: 0 or -inf."""
    zeros = torch.zeros(keep.shape, dtype=dtype, device=keep.device)
    return zeros.masked_fill_(~keep, -torch.inf)


def zero_padding_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (... n d) with zeros at padding tokens, mask (... n).

    Multiplying by zero would keep NaN.
    """
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32, for exponentials, transforms and long sums."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; what float16 cannot hold becomes its largest number, not infinity."""
    if dtype != torch.float16:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def unit_vectors(x: Tensor, dim: int = -1) -> Tensor:
    """x / |x| along an axis. Zero vectors stay zero, with a zero gradient.

    `torch.nn.functional.normalize` has a gradient of 1e12 there, and NaN in float16.
    """
    wide = at_least_float32(x)
    norm = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    return (wide / norm.masked_fill(norm <= 1e-12, torch.inf)).to(x.dtype)


def disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not apply to the device of x."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()  # entering torch.autocast costs as much as a small matrix product


def token_matmul(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (n m) @ x (b m c) + bias (n) -> (b n c), as a single matrix product instead of a
    batched one.
    """
    b, m, c = x.shape
    flat = x.transpose(0, 1).reshape(m, b * c)
    y = weight @ flat if bias is None else torch.addmm(bias[:, None], weight, flat)
    return y.view(weight.shape[0], b, c).transpose(0, 1)


def slice_dim(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    """x[start:end] along an axis; x itself if that is all of it, because a slice costs a copy in
    the backward pass.
    """
    if (
        torch.compiler.is_exporting()
    ):  # a slice of everything would be specialised to the traced length
        return x.index_select(dim, torch.arange(start, end, device=x.device))
    return x if (start, end) == (0, x.shape[dim]) else x.narrow(dim, start, end - start)


def chunk_length(size: int, n: int) -> int:
    """Tokens per chunk: at most `size`.

    When exporting, all n: a graph for any length has no loop over chunks.
    """
    return n if torch.compiler.is_exporting() else min(size, n)


def stable_argsort(x: Tensor) -> Tensor:
    """Stable argsort of non-negative integers x (... n) along the last axis."""
    if torch.compiler.is_exporting():  # ONNX has no stable sort: make all values distinct
        n = x.shape[-1]
        return (x.long() * n + torch.arange(n, device=x.device)).argsort(-1)
    return x.argsort(dim=-1, stable=True)


def cumulative_max(x: Tensor) -> Tensor:
    """Running maximum of x (... n) along the last axis."""
    if torch.compiler.is_exporting():  # ONNX has no cumulative maximum: compare all pairs
        n = x.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return torch.where(later, x.amin(-1, keepdim=True)[..., None], x[..., None, :]).amax(-1)
    return x.cummax(-1).values
