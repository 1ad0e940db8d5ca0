"""Other mixers in the models that people already have: `swap`, `restore`, and `recover`, which wins back what was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.hf.adapters import ADAPTERS, AttentionAdapter
from regard.hf.drift import SwapReport
from regard.hf.files import load_swapped, load_transformers_model, save_swapped
from regard.hf.modules import AttentionWeights
from regard.hf.position_embeddings import extend_positions
from regard.hf.swapping import find_sites, original_attention, restore, swap

if TYPE_CHECKING:
    from regard.hf.recovery import RecoveryResult, recover

__all__ = [
    "ADAPTERS",
    "AttentionAdapter",
    "AttentionWeights",
    "RecoveryResult",
    "SwapReport",
    "extend_positions",
    "load_swapped",
    "load_transformers_model",
    "original_attention",
    "recover",
    "restore",
    "save_swapped",
    "find_sites",
    "swap",
]


def __getattr__(name: str) -> Any:
    """Training is imported when it is asked for: it brings more than a swap needs."""
    if name in ("recover", "Recovered"):
        from regard.hf import recovery

        return getattr(recovery, name)
    raise AttributeError(f"module 'regard.swap' has no attribute {name!r}")
