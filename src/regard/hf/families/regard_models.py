"""Mixers of Regard's own models, which `swap` replaces too."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.errors import Unsupported
from regard.hf.families.base import AttentionAdapter, AttentionWeights, read_attention
from regard.mixer import MultiHead


def attention_weights(module: Any, first: Any) -> AttentionWeights:
    """Weights of a `MultiHead` mixer."""
    linear = [getattr(module, name, None) for name in ("q", "k", "v", "out")]
    if not isinstance(module, MultiHead) or not all(
        isinstance(layer, nn.Linear) for layer in linear
    ):
        raise Unsupported(
            f"{module.name} cannot be swapped: only MultiHead mixers have q, k, v and out "
            "projections."
        )
    if module.q_norm is not None:
        raise Unsupported(f"{module.name} cannot be swapped: it normalises queries and keys.")
    inner: Any = module.inner
    return read_attention(
        module,
        "q k v out",
        module.heads,
        causal=module.causal,
        length=module.length,
        scale=getattr(inner, "scale", None),
        kv_heads=module.kv_heads,
        prior=getattr(inner, "prior", None),
        rotary=module.rotary,
        pads=module.can.mask,
    )


# Replaced mixers are called as mixers, without the forward of an adapter.
MIXER_ADAPTER = AttentionAdapter(attention_weights, lambda self: None)
