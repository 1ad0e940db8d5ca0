"""Compiled FlexAttention over our patterns: what PyTorch itself offers for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.attentions import SoftmaxAttention
from regard.backends.flex import block_mask
from regard.bench.cell import BenchCall, BenchCell, CallEstimate, Contender, heads_call
from regard.bench.contenders import RecipeContender, build_mixer
from regard.errors import Unsupported
from regard.mixer import MultiHead
from regard.models import ModuleSpec
from regard.show.build import pattern_of

CODES = 256  # that the compiler may make: one for each pattern, length and number of threads


@dataclass(frozen=True)
class FlexContender(Contender):
    """`torch.compile`d `flex_attention`, with the pattern of a recipe as its block mask; forward only, as ever on a CPU.

    The mask is made, and the code compiled, before anything is timed.
    """

    part: ModuleSpec
    foreign: bool = True
    module: str = "torch.nn.attention.flex_attention"
    compiles: bool = True

    @property
    def of(self) -> str:  # type: ignore[override]
        """Ours over the same pattern."""
        return RecipeContender(self.part).label

    @property
    def label(self) -> str:  # type: ignore[override]
        """FlexAttention local:window=64."""
        return f"FlexAttention {self.of}"

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        if cell.level != "kernel":
            raise Unsupported(
                "it is an attention on given queries, keys and values: see the level kernel"
            )
        if cell.way == "training":
            raise Unsupported("FlexAttention has no backward pass on the CPU")
        if cell.way == "decode":
            raise Unsupported(
                "its block mask is made for whole blocks of 128 queries, and not for one token"
            )
        mixer = build_mixer(self.part, cell)
        pattern = pattern_of(mixer)
        inner = mixer.inner if isinstance(mixer, MultiHead) else None
        if pattern is None or not isinstance(inner, SoftmaxAttention) or inner.prior is not None:
            raise Unsupported(
                f"a block mask says who looks at whom, and {self.of} is more, or other, than that"
            )
        assert isinstance(mixer, MultiHead)
        blocks = block_mask(pattern.resolve_global_mask(False, False), cell.length, cell.length)
        shape = (cell.batch, mixer.heads, cell.length, cell.dim // mixer.heads)
        flex = _compiled()
        return heads_call(
            lambda q, k, v: flex(q, k, v, block_mask=blocks), cell, shape, shape, shape
        )

    def needs(self, cell: BenchCell) -> CallEstimate | None:
        """See `Contender`: those of ours, for the pattern is the same."""
        return (
            RecipeContender(self.part).needs(cell)
            if (cell.level, cell.way) == ("kernel", "forward")
            else None
        )


@lru_cache(1)
def _compiled() -> Callable[..., Tensor]:
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    config.compile_threads = 1  # no processes beside this one, which would outlive a probe
    torch._dynamo.config.recompile_limit = (
        CODES  # beyond it FlexAttention would run uncompiled, and say nothing
    )
    made: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return made
