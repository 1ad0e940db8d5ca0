"""Compiled FlexAttention over the patterns of Regard: PyTorch's own kernel for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.backends.flex import block_mask
from regard.bench.cell import BenchCall, BenchCell, CallEstimate, Contender, heads_call
from regard.bench.contenders import RecipeContender, attention_shapes, build_attention
from regard.errors import Unsupported
from regard.models import ModuleSpec
from regard.registry import get_recipe

RECOMPILE_LIMIT = 256  # one compilation for each pattern, length and number of threads
FLEX_MODULE = "torch.nn.attention.flex_attention"
NO_BACKWARD = "FlexAttention has no backward pass on the CPU"


@dataclass(frozen=True)
class FlexContender(Contender):
    """Compiled `flex_attention` with the pattern of a recipe as its block mask.

    It has no backward pass on a CPU. Mask and code are made before anything is timed.
    """

    spec: ModuleSpec
    is_peer: bool = True
    module: str = FLEX_MODULE
    compiles: bool = True

    @property
    def reference(self) -> str:  # type: ignore[override]
        """The recipe with the same pattern."""
        return RecipeContender(self.spec).label

    @property
    def label(self) -> str:  # type: ignore[override]
        """FlexAttention local:window=64."""
        return f"FlexAttention {self.reference}"

    def build(self, cell: BenchCell) -> BenchCall:
        if cell.scope != "kernel":
            raise Unsupported("FlexAttention has no projections: use --scope kernel")
        if cell.mode == "training" and cell.device == "cpu":
            raise Unsupported(NO_BACKWARD)
        if cell.mode == "decode":
            raise Unsupported("the block mask of FlexAttention needs blocks of 128 queries, not 1")
        is_attention = get_recipe(self.spec.name).is_attention
        attention = build_attention(self.spec, cell) if is_attention else None
        if not isinstance(attention, SoftmaxAttention) or attention.prior is not None:
            raise Unsupported(f"a block mask cannot express {self.reference}")
        pattern = attention.causal_pattern if cell.is_causal else attention.pattern
        local = pattern.resolve_global_mask(False, False)
        blocks = block_mask(local, cell.length, cell.length, device=cell.device)
        shapes = attention_shapes(self.spec, attention, cell, cell.length)
        flex = compiled_flex_attention()
        return heads_call(lambda q, k, v: flex(q, k, v, block_mask=blocks), cell, *shapes)

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        if (cell.scope, cell.mode) != ("kernel", "forward"):
            return None
        return RecipeContender(self.spec).estimate(cell)


@lru_cache(1)
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return `flex_attention` compiled for static shapes."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    config.compile_threads = 1  # worker processes would outlive a probe
    # beyond the default limit FlexAttention silently runs uncompiled
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled
