"""The backend `sparse`: visible tiles only, on PyTorch's fused CPU kernel, for all combinations of
heads, padding and global tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from regard import native
from regard.backends import calibration, token_groups
from regard.backends.call import AttentionCall, as_function, pad_to_same_width
from regard.backends.cpp import CppBackend
from regard.backends.protocol import Backend
from regard.backends.split import global_mask_pairs, only_adds_pairs, run_by_head
from regard.backends.tiled_flash import attend_layout
from regard.backends.token_groups import TokenGroups
from regard.layout import Layout, LayoutPart, TileRun, build_layout
from regard.numerics import additive_mask
from regard.pattern import Segments

# Estimates for many small calls are less certain: `auto` takes this backend only if its estimate is
# below this fraction of that of another.
MAX_COST_RATIO = 0.8


class SparseBackend(Backend[AttentionCall]):
    """The visible tiles of a pattern, in fused PyTorch calls."""

    name = "sparse"
    min_tokens = (192, 192)

    def refuses(self, call: AttentionCall) -> str | None:
        """The reason why this backend does not support the call, or None."""
        if call.q.device.type != "cpu":
            return f"it runs on the CPU, not on {call.q.device.type}"
        if isinstance(call.k_positions, Tensor):
            return "it requires consecutive key positions"
        if call.prior is not None and (
            call.global_attention_mask is not None or call.pattern.heads
        ):
            return "it does not support a prior with global_attention_mask or PerHead"
        if call.global_attention_mask is not None and not only_adds_pairs(call.pattern):
            return "GlobalMask under ~ removes pairs, which is not supported"
        if call.attn_mask is not None and call.global_attention_mask is not None:
            return "it does not support attn_mask with global_attention_mask"
        if native.inside_transform() or type(call.q) not in native.TENSOR_TYPES:
            return "it does not support tensor subclasses and torch.func transforms"
        return None

    def cost(self, call: AttentionCall) -> float | None:
        """Seconds, from the layout. None for a pattern that leaves out too little, and for packed
        sequences on which the C++ kernel runs: their lengths change from call to call, and a layout
        takes longer to build than the list of tiles.
        """
        if call.has_dense_pattern():
            return None
        packed = any(isinstance(leaf, Segments) for leaf in call.pattern.leaves())
        if packed and CppBackend().refuses(call) is None:
            return None
        costs, work = calibration.machine_costs(), calibration.describe_workload(call)
        short = work.n <= calibration.SAMPLE_TOKENS
        if short and calibration.sample_density(work) >= MAX_COST_RATIO:
            return None
        return calibration.sparse_seconds(costs, work) / MAX_COST_RATIO

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention over the layout of the pattern."""
        if call.pattern.heads:
            return as_function(call, partial(run_by_head, run=_attend_by_layout))
        return as_function(call, _attend_by_layout)


def _attend_by_layout(call: AttentionCall) -> Tensor:
    layouts = _build_layouts(call)
    needs_groups = call.prior is not None and not _has_relative_prior(call, layouts)
    if needs_groups or call.attn_mask is not None:
        out, _ = token_groups.attend(
            call.q,
            call.k,
            call.v,
            (group for part in layouts[0].parts for group in part_groups(part)),
            scale=call.scale,
            mask=call.mask,
            attn_mask=call.attn_mask,
            prior=call.prior,
            sinks=call.sinks,
            q_start=call.q_start,
            k_start=call.k_start(),
        )
        return out
    q, k, v = pad_to_same_width(call.q, call.k, call.v)
    group = call.group_size()
    # of the query heads that share a head of keys, one at a time: no key is copied
    members = [
        _attend(call, q[:, i::group], k, v, layouts, slice(i, None, group)) for i in range(group)
    ]
    out = members[0] if group == 1 else torch.stack(members, 2).flatten(1, 2)
    return out[..., : call.v.shape[3]]


def _build_layouts(call: AttentionCall) -> tuple[Layout, Layout]:
    """The layouts for the forward and backward pass, without pairs that global tokens add."""
    pattern, n, m = call.pattern.resolve_global_mask(False, False), call.q.shape[2], call.k.shape[2]
    q_start, k_start = call.q_start, call.k_start()
    forward = build_layout(pattern, n, m, q_start=q_start, k_start=k_start)
    if not call.needs_grad():
        return forward, forward
    return forward, build_layout(pattern, n, m, q_start=q_start, k_start=k_start, backward=True)


def _has_relative_prior(call: AttentionCall, layouts: tuple[Layout, Layout]) -> bool:
    """Whether the prior depends on the distance alone, and no part reorders tokens."""
    parts = [part for layout in layouts for part in layout.parts]
    natural = all(part.q_order is None and part.k_order is None for part in parts)
    return natural and call.prior is not None and call.prior.relative


def _attend(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: tuple[Layout, Layout],
    heads: slice,
) -> Tensor:
    """Attention of some query heads of the call, as many as there are heads of keys."""

    def prior_bias(q_index: Tensor, k_index: Tensor) -> Tensor:
        """The prior for indices q (... s 1) and k (... 1 t) of this call: (h ... s t)."""
        assert call.prior is not None
        q_pos, k_pos = q_index + call.q_start, k_index + call.k_start()
        bias = call.prior(q_pos, k_pos, call.q, call.k)
        return bias.expand(call.q.shape[1], *[-1] * q_index.dim())[heads]

    addend = None if call.prior is None else prior_bias
    sinks = None if call.sinks is None else call.sinks[heads]
    if (
        call.mask is None
        and call.global_attention_mask is None
        and all(map(_can_flatten, (q, k, v)))
    ):
        fq, fk, fv = (x.flatten(0, 1) for x in (q, k, v))
        repeated = None if sinks is None else sinks.repeat(q.shape[0])
        flat = attend_layout(fq, fk, fv, *layouts, scale=call.scale, addend=addend, sinks=repeated)
        return flat.unflatten(0, q.shape[:2])
    outputs = []
    for i in range(q.shape[0]):  # padding and global tokens differ between examples
        bias, own = None, layouts
        if call.mask is not None and not call.mask[i].all():
            bias = additive_mask(call.mask[i], q.dtype)
        if call.global_attention_mask is not None and call.global_attention_mask[i].any():
            own = _add_global_pairs(call, call.global_attention_mask[i], layouts)
        out = attend_layout(
            q[i],
            k[i],
            v[i],
            *own,
            scale=call.scale,
            bias=bias,
            addend=addend,
            sinks=sinks,
        )
        outputs.append(out)
    return torch.stack(outputs)


def _can_flatten(x: Tensor) -> bool:
    """Whether (b h n e) can be viewed as (b*h n e) without a copy."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _add_global_pairs(
    call: AttentionCall, is_global: Tensor, layouts: tuple[Layout, Layout]
) -> tuple[Layout, Layout]:
    """The layouts with one additional call for each set of pairs that global tokens add."""
    added = []
    for keep, q_order, k_order in global_mask_pairs(call, is_global):
        n, m = keep.shape
        mask = additive_mask(keep, torch.float32)
        run = TileRun(1, 0, 0, n, 0, m, mask, has_empty_rows=True)
        added.append(LayoutPart(n, m, n, (run,), (), keep.new_empty(0), q_order, k_order))
    forward, backward = (Layout((*layout.parts, *added)) for layout in layouts)
    return forward, backward


def part_groups(part: LayoutPart) -> Iterator[TokenGroups]:
    """The calls of a part as groups of token indices."""

    def tokens(slots: Tensor, n: int, order: Tensor | None) -> Tensor:
        """Slots in the order of the part -> token indices, -1 past the end."""
        return torch.where(slots < n, slots if order is None else order[slots.clamp(max=n - 1)], -1)

    for run in part.runs:
        first = torch.arange(run.count)[:, None] * run.step
        keep = None if run.mask is None else run.mask == 0
        q, k = first + run.q0 + torch.arange(run.s), first + run.k0 + torch.arange(run.t)
        yield TokenGroups(tokens(q, part.n, part.q_order), tokens(k, part.m, part.k_order), keep)
    for group in part.groups:
        inside = torch.arange(part.size)
        q = group.q[:, None] * part.size + inside
        k = (group.k[..., None] * part.size + inside).flatten(1)
        keep = None if group.mask_ids is None else part.group_mask(group.mask_ids)
        yield TokenGroups(tokens(q, part.n, part.q_order), tokens(k, part.m, part.k_order), keep)
