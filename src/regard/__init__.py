"""Regard: every way that a network can mix its tokens, behind one small interface.

In short:

    import regard
    mixer = regard.create("bigbird", dim=512, heads=8, length=4096)
    y = mixer(x)                                 # (b n d) -> (b n d)
    y = regard.attend(q, k, v, pattern=regard.Band(128, 128))

`regard.list()` names the recipes, and docs/ explains them.
"""

from typing import TYPE_CHECKING, Any

from regard import models, stack, state, testing
from regard.attend import attend, explain
from regard.attentions import Compressed, EfficientAttention, LinearAttention, Prototype, Routed, SoftmaxAttention
from regard.block import Block, Layer
from regard.errors import Unsupported
from regard.mixer import Attention, Can, Mixer, MultiHead
from regard.mixers import positioned
from regard.notes import Notes, noted, tell
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
    KeyPhase,
    Keys,
    Marked,
    MarkedKeys,
    MarkedQueries,
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
from regard.swap import restore, swap

if TYPE_CHECKING:
    from regard.swap import recover

__version__ = "0.1.0"

__all__ = [
    "attend", "create", "explain", "list", "models", "noted", "positioned", "recipe", "recover", "restore", "stack",
    "state", "swap", "tell", "testing",
    "Attention", "Block", "Can", "Layer", "Mixer", "MultiHead", "Notes", "Unsupported",
    "Compressed", "EfficientAttention", "LinearAttention", "Prototype", "Routed", "SoftmaxAttention",
    "Axial", "Band", "Blocks", "Blocks2D", "BlockTable", "Causal", "Chunks", "Full", "Global", "KeyPhase", "Keys", "Marked",
    "MarkedKeys", "MarkedQueries", "Near2D", "Neighbourhood", "Nothing", "Pattern", "PerHead", "Queries", "RandomBlocks",
    "block_order",
    "ALiBi", "Prior",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`recover` trains, and brings what training needs only when it is asked for."""
    if name == "recover":
        from regard.swap.recovering import recover

        return recover
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
