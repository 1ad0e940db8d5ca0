"""The backend `flex`: FlexAttention, with a block mask that is derived from the pattern instead of
from all n x m pairs.

Meant for accelerators. On a CPU it supports the forward pass only, and `sparse` is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from regard.backends import calibration
from regard.backends.call import AttentionCall
from regard.backends.protocol import Backend
from regard.layout.lattice import number_tiles, tile_order
from regard.pattern import Pattern

BLOCK = 128  # queries and keys of a block; FlexAttention's default
DEVICES = ("cpu", "cuda", "xpu")  # those that FlexAttention has kernels for


class FlexBackend(Backend[AttentionCall]):
    """PyTorch's FlexAttention, compiled on accelerators."""

    name = "flex"
    min_tokens = (BLOCK, BLOCK)  # within one block there is nothing to leave out

    def refuses(self, call: AttentionCall) -> str | None:
        """The reason why this backend does not support the call, or None."""
        device = call.q.device.type
        if device not in DEVICES:
            return f"FlexAttention does not support the {device} device"
        if device == "cpu" and call.needs_grad():
            return "FlexAttention has no backward pass on the CPU"
        if call.sinks is not None:
            return "it does not support sinks"
        if call.prior is not None or call.global_attention_mask is not None:
            return "it does not support priors and global_attention_mask"
        if isinstance(call.k_positions, Tensor):
            return "it requires consecutive key positions"
        return None

    def cost(self, call: AttentionCall) -> float | None:
        """Seconds at a nominal speed. None on the CPU, and for a pattern that is dense."""
        if call.q.device.type == "cpu" or call.has_dense_pattern():
            return None
        return calibration.accelerator_seconds(calibration.describe_workload(call), sparse=True)

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """flex_attention with the pattern as block mask."""
        blocks = block_mask(
            call.pattern,
            call.q.shape[2],
            call.k.shape[2],
            q_start=call.q_start,
            k_start=call.k_start(),
            mask=call.mask,
            attn_mask=call.attn_mask,
            device=call.q.device,
        )
        attention = _flex_attention(call.q.device.type)
        grouped = call.group_size() > 1
        return partial(attention, block_mask=blocks, scale=call.scale, enable_gqa=grouped)


@lru_cache(2)
def _flex_attention(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=False)


def block_mask(
    pattern: Pattern,
    n: int,
    m: int,
    *,
    q_start: int = 0,
    k_start: int = 0,
    size: int = BLOCK,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """A FlexAttention `BlockMask` with exactly the blocks that contain a visible pair; no n x m
    tensor is built.

    Args:
        pattern: The pattern.
        n, m: Number of queries and keys.
        q_start, k_start: Positions of the first query and the first key.
        size: Block size.
        mask: Padding mask (b m), True = keep. With a mask no block counts as full.
        attn_mask: Pair mask that broadcasts to (b h n m), True = keep.
        device: Device of the block mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    q = tile_order(torch.arange(n), size, q_start)
    k = tile_order(torch.arange(m), size, k_start)
    patterns = pattern.parts if pattern.heads else (pattern,)
    ids = torch.stack([number_tiles(p, q, k)[0] for p in patterns])  # (h rows cols)
    has_mask = mask is not None or attn_mask is not None
    full = torch.zeros_like(ids, dtype=torch.bool) if has_mask else ids == 1
    partial = (ids > 0) & ~full

    def block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The number of blocks in each row (1 h r), and their columns first (1 h r c)."""
        blocks = blocks.to(device)
        columns = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None], columns.int()[None]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # `_allows` without `expand`, which the compiler of FlexAttention does not support
        keep = patterns[0]._allows(q + q_start, k + k_start) & (k >= 0)
        for head, other in enumerate(patterns[1:], 1):
            keep = torch.where(h == head, other._allows(q + q_start, k + k_start), keep)
        if attn_mask is not None:
            # one example or one head stands for all
            own_b, own_h = b % attn_mask.shape[0], h % attn_mask.shape[1]
            keep = keep & attn_mask[own_b, own_h, q, k]
        return keep if mask is None else keep & mask[b, k]

    return BlockMask.from_kv_blocks(
        *block_lists(partial),
        *block_lists(full),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(n, m),
    )
