"""The backend `cpp`: the visible tiles of a pattern on the C++ kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard import native
from regard.backends import calibration
from regard.backends.call import AttentionCall, as_function
from regard.backends.cpp_kernel import KernelMasks, attend_tiles
from regard.backends.protocol import Backend
from regard.backends.split import global_mask_pairs, only_adds_pairs, run_by_head
from regard.layout.tiles import TILE, TileSet, build_tiles, tiles_from_mask

# of a dense pattern: a longer list takes too much memory
MAX_DENSE_TILES = 1 << 20


class CppBackend(Backend[AttentionCall]):
    """Any list of tiles, forward and backward, in one call of the C++ kernel."""

    name = "cpp"
    min_tokens = (48, 64)

    def refuses(self, call: AttentionCall) -> str | None:
        """The reason why this backend does not support the call, or None."""
        if call.q.device.type != "cpu":
            return f"it runs on the CPU, not on {call.q.device.type}"
        if call.q.dtype not in native.DTYPE_NAMES:
            return f"it supports float32 and float64, not {call.q.dtype}"
        if isinstance(call.k_positions, Tensor):
            return "it requires consecutive key positions"
        if call.prior is not None:
            return "it does not support priors"
        if call.global_attention_mask is not None and not only_adds_pairs(call.pattern):
            return "GlobalMask under ~ removes pairs, which is not supported"
        if not native.supports(call.q, call.k, call.v):
            return native.missing_reason() or "it cannot be traced or transformed"
        return None

    def cost(self, call: AttentionCall) -> float | None:
        """Seconds, from the number of tiles. None for a dense pattern with too many of them."""
        pairs = call.q.shape[2] * call.k.shape[2]
        if call.has_dense_pattern() and pairs > MAX_DENSE_TILES * TILE * TILE:
            return None
        return calibration.cpp_seconds(
            calibration.machine_costs(), calibration.describe_workload(call)
        )

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """One kernel call for all heads that share a pattern."""
        if call.pattern.heads:
            return as_function(call, partial(run_by_head, run=self._run))
        if call.global_attention_mask is not None:
            return as_function(call, _attend_with_global_tokens)
        return partial(
            attend_tiles,
            tiles=_call_tiles(call),
            scale=call.scale,
            masks=KernelMasks(call.mask, call.attn_mask),
            sinks=call.sinks,
        )

    def _run(self, call: AttentionCall) -> Tensor:
        return self.prepare(call)(call.q, call.k, call.v)


def _call_tiles(call: AttentionCall) -> TileSet:
    """The tiles of the pattern, without those that a `global_attention_mask` adds."""
    pattern, n, m = call.pattern.resolve_global_mask(False, False), call.q.shape[2], call.k.shape[2]
    return build_tiles(pattern, n, m, q_start=call.q_start, k_start=call.k_start())


def _attend_with_global_tokens(call: AttentionCall) -> Tensor:
    """Example by example, each with the tiles that its global tokens add."""
    assert call.global_attention_mask is not None
    tiles, outputs = _call_tiles(call), []
    for i, is_global in enumerate(call.global_attention_mask):
        q, k, v = (x[i : i + 1] for x in (call.q, call.k, call.v))
        mask = None if call.mask is None else call.mask[i : i + 1]
        pairs = call.attn_mask
        if pairs is not None and pairs.shape[0] > 1:
            pairs = pairs[i : i + 1]
        added = [tiles_from_mask(*subset) for subset in global_mask_pairs(call, is_global)]
        own, masks = TileSet([*tiles, *added]), KernelMasks(mask, pairs)
        outputs.append(attend_tiles(q, k, v, own, call.scale, masks, call.sinks))
    return torch.cat(outputs)
