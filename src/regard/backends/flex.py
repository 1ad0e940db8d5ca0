"""FlexAttention, with its block mask asked of the pattern instead of computed from n x m pairs.

Meant for accelerators; on a CPU it runs forward only, and there `sparse` is the better choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import AttentionCall
from regard.layout.lattice import number_tiles
from regard.pattern import Pattern, position_tiles

OLDEST = (2, 6)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def refuses(call: AttentionCall) -> str | None:
    """Why it cannot do this; None: it can."""
    if _version() < OLDEST:
        return f"it needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, and this is {torch.__version__}"
    if call.q.device.type == "meta":
        return "FlexAttention has no form without numbers"
    if call.q.device.type == "cpu" and call.grad():
        return "FlexAttention has no backward pass on the CPU"
    if (
        call.prior is not None
        or call.global_attention_mask is not None
        or isinstance(call.k_positions, Tensor)
    ):
        return "priors, marks and scattered keys are not translated"
    return None


def _version() -> tuple[int, ...]:
    return tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])


def run(call: AttentionCall) -> Tensor:
    """flex_attention with the pattern as block mask; compiled where there is an accelerator."""
    assert isinstance(call.k_positions, int)
    n, m = call.q.shape[2], call.k.shape[2]
    blocks = block_mask(
        call.pattern,
        n,
        m,
        q_start=call.q_start,
        k_start=call.k_positions,
        mask=call.mask,
        device=call.q.device,
    )
    return _flex(call.q.device.type)(call.q, call.k, call.v, block_mask=blocks, scale=call.scale)


@lru_cache(2)
def _flex(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    eager: Callable[..., Any] = flex_attention
    return eager if device == "cpu" else torch.compile(eager, dynamic=False)


def block_mask(
    pattern: Pattern,
    n: int,
    m: int,
    *,
    q_start: int = 0,
    k_start: int = 0,
    size: int = 128,
    mask: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """A FlexAttention `BlockMask` of exactly the blocks that hold a seen pair; no n x m tensor is made.

    mask (b m), True = a real token: blocks are then never taken as full, and the mask is looked up inside.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tables = torch.stack(
        [
            _numbers(p, n, m, q_start, k_start, size)
            for p in (pattern.parts if pattern.heads else (pattern,))
        ]
    )
    full = (tables == 1) if mask is None else torch.zeros_like(tables, dtype=torch.bool)
    partial = (tables > 0) & ~full
    (count, columns), (full_count, full_columns) = (
        _ordered(partial.to(device)),
        _ordered(full.to(device)),
    )
    return BlockMask.from_kv_blocks(
        count,
        columns,
        full_count,
        full_columns,
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(pattern, q_start, k_start, mask),
        seq_lengths=(n, m),
    )


def _numbers(pattern: Pattern, n: int, m: int, q_start: int, k_start: int, size: int) -> Tensor:
    q, k = (
        torch.where(x < 0, -1, x + at)
        for x, at in ((position_tiles(n, size), q_start), (position_tiles(m, size), k_start))
    )
    ids, _ = number_tiles(pattern, q, k)
    return ids


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their columns first: (1 h r), (1 h r c)."""
    columns = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None], columns.int()[None]


def _mask_mod(pattern: Pattern, q_start: int, k_start: int, mask: Tensor | None) -> MaskMod:
    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, *others = pattern.parts if pattern.heads else (pattern,)
        keep = first._allows(q + q_start, k + k_start) & (
            k >= 0
        )  # single pairs: nothing to expand, which compilers dislike
        for head, other in enumerate(others, 1):
            keep = torch.where(h == head, other._allows(q + q_start, k + k_start), keep)
        return keep if mask is None else keep & mask[b, k]

    return allowed
