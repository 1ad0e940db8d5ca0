"""Regard: every way that a network can mix its tokens, behind one small interface.

In short:

    import regard
    mixer = regard.create("bigbird", dim=512, heads=8, length=4096)
    y = mixer(x)                                 # (b n d) -> (b n d)
    y = regard.backends(q, k, v, pattern=regard.Band(128, 128))

`regard.list()` names the recipes, and docs/ explains them.
"""

from typing import TYPE_CHECKING, Any

from regard import models, stack, state, testing
from regard.attentions import (
    CompressedAttention,
    EfficientAttention,
    LinearAttention,
    PrototypeAttention,
    RoutedAttention,
    SoftmaxAttention,
)
from regard.auxiliary import AuxOutputs, collect_aux, record_aux
from regard.backends import attend, explain
from regard.block import Block, Layer
from regard.errors import Unsupported
from regard.hf import restore, swap
from regard.mixer import Attention, Can, Mixer, MultiHead
from regard.mixers import with_position
from regard.pattern import (
    Axial,
    Band,
    Blocks,
    Blocks2D,
    BlockTable,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    GlobalMaskKeys,
    GlobalMaskQueries,
    KeyPhase,
    Keys,
    Near2D,
    Neighbourhood,
    Nothing,
    Pattern,
    PerHead,
    Queries,
    RandomBlocks,
    block_order,
)
from regard.prior import ALiBi, Prior
from regard.registry import create, recipe
from regard.registry import list_recipes as list

if TYPE_CHECKING:
    from regard.hf import recover

__version__ = "0.1.0"

__all__ = [
    "attend",
    "create",
    "explain",
    "list",
    "models",
    "collect_aux",
    "with_position",
    "recipe",
    "recover",
    "restore",
    "stack",
    "state",
    "swap",
    "record_aux",
    "testing",
    "Attention",
    "Block",
    "Can",
    "Layer",
    "Mixer",
    "MultiHead",
    "AuxOutputs",
    "Unsupported",
    "CompressedAttention",
    "EfficientAttention",
    "LinearAttention",
    "PrototypeAttention",
    "RoutedAttention",
    "SoftmaxAttention",
    "Axial",
    "Band",
    "Blocks",
    "Blocks2D",
    "BlockTable",
    "Causal",
    "Chunks",
    "Full",
    "Global",
    "KeyPhase",
    "Keys",
    "GlobalMask",
    "GlobalMaskKeys",
    "GlobalMaskQueries",
    "Near2D",
    "Neighbourhood",
    "Nothing",
    "Pattern",
    "PerHead",
    "Queries",
    "RandomBlocks",
    "block_order",
    "ALiBi",
    "Prior",
]


def __getattr__(name: str) -> Any:
    """`recover` trains, and brings what training needs only when it is asked for."""
    if name == "recover":
        from regard.hf.recovery import recover

        return recover
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
