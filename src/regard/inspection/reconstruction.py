"""The output of a mixer from its map and its values: the check that a map is exact.

For attention inside `MultiHead` the recorded values are used. The mixers here compute a map
themselves, and each says what the map is multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.hf.modules import SwappedMixer
from regard.mixer import Mixer, MultiHead, merge_heads, split_heads
from regard.mixers import (
    AFT,
    ETC,
    Average,
    AveragePool,
    Branches,
    DynamicConv,
    FunnelMixer,
    GaussianWindow,
    GlimpseRead,
    LowRankBand,
    Sinkhorn,
    SoftVisualAttention,
    Synthesizer,
)


def reconstruct(
    mixer: Mixer, weights: Tensor, x: Tensor, context: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """The output (b, n, d) of a mixer from its attention map (b, h, n, m); None for mixers whose
    values are not known here.

    Args:
        x: Tokens (b, n, d).
        context: Tokens (b, m, d) that are attended to, or None for x.
        mask: (b, m), True = keep, or None.
    """
    source = x if context is None else context
    if mask is not None:
        source = source.masked_fill(~mask[..., None], 0)
    match mixer:
        case MultiHead():
            return _attend(mixer, weights, x, source)
        case LowRankBand():
            return _attend(mixer.low, weights, x, source)
        case Sinkhorn() | Synthesizer():
            return mixer.out(merge_heads(weights @ split_heads(mixer.v(source), mixer.heads)))
        case DynamicConv():
            values = mixer._apply_glu(source, mask)
            return mixer.out(merge_heads(weights @ split_heads(values, mixer.heads)))
        case GlimpseRead() | GaussianWindow() | SoftVisualAttention() | AveragePool():
            return weights[:, 0] @ source
        case AFT():  # a map for each channel
            return (weights @ mixer.v(source).mT[..., None])[..., 0].mT
        case Average():
            g = mixer.ffn(weights[:, 0] @ source)
            input_gate, forget_gate = mixer.gate(torch.cat((x, g), -1)).sigmoid().chunk(2, -1)
            return input_gate * x + forget_gate * g
        case FunnelMixer():  # rows of the map are repeated, and so are outputs
            return _attend(mixer.attention, weights, x, source)
        case ETC():
            long = _attend(mixer.long, weights, x, source)
            if mixer.all is None:
                return long
            first = _attend(mixer.all, weights[:, :, : mixer.globals], x, source)
            return torch.cat((first, long[:, mixer.globals :]), 1)
        case Branches():
            return _join_branches(mixer, weights, x, context, mask)
        case SwappedMixer():
            inner = reconstruct(mixer.mixer, weights, x, context, mask)
            return None if inner is None else mixer.out(inner)
    return None


def _attend(heads: MultiHead, weights: Tensor, x: Tensor, source: Tensor) -> Tensor:
    """Multi-head attention with these weights (b, h, n, m)."""
    values = split_heads(heads.v(source), heads.kv_heads)
    values = values.repeat_interleave(heads.heads // heads.kv_heads, 1)
    out: Tensor = heads.out(merge_heads(weights @ values))
    return out


def _join_branches(
    mixer: Branches, weights: Tensor, x: Tensor, context: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """The outputs of all branches side by side; each has its own heads and channels."""
    outputs, first = [], 0
    for branch, part, part_context in mixer._split(x, context):
        with torch.no_grad():
            heads = branch.attention_map(part[:1, :1]).shape[1]
        output = reconstruct(branch, weights[:, first : first + heads], part, part_context, mask)
        if output is None:
            return None
        outputs.append(output)
        first += heads
    return torch.cat(outputs, -1)
