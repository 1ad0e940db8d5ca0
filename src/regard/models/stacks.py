"""A table: the words that a configuration may use for how its layers stand together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from regard.block import Block, Layer
from regard.errors import check_choice, check_int
from regard.residual import NormFactory
from regard.stack import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    ClassAttentionLayer,
    ClassAttentionStack,
    CompressionFunction,
    CompressionLoss,
    CompressiveMemory,
    Conv1dCompression,
    FeedbackStack,
    FunnelStack,
    Halting,
    MaxPoolCompression,
    MeanPoolCompression,
    MostUsedCompression,
    RealFormerStack,
    ReversibleStack,
    SegmentStack,
    SequentialStack,
    SharedStack,
    UniversalStack,
)

COMPRESSIONS: Mapping[str, Callable[[int, int], CompressionFunction]] = {
    "convolution": Conv1dCompression,
    "mean": MeanPoolCompression,
    "max": MaxPoolCompression,
    "most_used": MostUsedCompression,
}
COMPRESSION_LOSSES: Mapping[str, Callable[[int, int], CompressionLoss] | None] = {
    "attention": AttentionReconstructionLoss,
    "auto_encoding": AutoEncodingLoss,
    "none": None,
}


class StackBuilder(NamedTuple):
    """What a side of a model is made of.

    depth    how many layers a token goes through
    turns    how many mixers take turns
    block    number -> a block
    halves   number -> its sub-layers without residuals, for stacks that add up themselves
    norm     width -> norm, and heads: for stacks that add layers of their own
    """

    depth: int
    turns: int
    block: Callable[[int], Block]
    halves: Callable[[int], Sequence[Layer]]
    norm: NormFactory
    heads: int

    def blocks(self, count: int | None = None) -> list[Block]:
        """So many blocks, as many as the stack is deep unless given; none of the mixers may be left out."""
        count = self.depth if count is None else count
        check_int(1, blocks=count)
        if count % self.turns:
            raise ValueError(
                f"the stack has {count} blocks, and {self.turns} parts take turns: that must come out even"
            )
        return [self.block(number) for number in range(count)]


def plain(kit: StackBuilder) -> Layer:
    """One block after the other."""
    return SequentialStack(kit.blocks())


def shared(kit: StackBuilder, *, blocks: int = 1, order: str = "sequence") -> Layer:
    """So many blocks, used again and again until the stack is as deep as the configuration says."""
    return SharedStack(kit.blocks(blocks), kit.depth, order=order)


def universal(
    kit: StackBuilder,
    *,
    halting: bool = False,
    epsilon: float = 0.01,
    weight: float = 0.01,
    bias: float = 1.0,
    signal: bool = True,
) -> Layer:
    """One block at every step, as many steps as the configuration has layers, or with `halting` at most as many."""
    (block,) = kit.blocks(1)
    halt = Halting(block.dim, epsilon=epsilon, weight=weight, bias=bias) if halting else None
    if not halting and (epsilon, weight, bias) != (0.01, 0.01, 1.0):
        raise ValueError(
            "epsilon, weight and bias are of halting, and there is none: give halting=true"
        )
    return UniversalStack(block, kit.depth, halting=halt, signal=signal)


def reversible(kit: StackBuilder, *, beside: bool = False) -> Layer:
    """Sub-layers whose activations are computed again; `beside`: what comes out is twice as wide as what goes in."""
    return ReversibleStack(
        [half for number in range(kit.depth) for half in kit.halves(number)], beside=beside
    )


def segments(kit: StackBuilder, *, segment: int, memory: int | None = None) -> Layer:
    """Segments that look at what the layers held of those before."""
    return SegmentStack(kit.blocks(), segment=segment, memory=memory)


def compressive(
    kit: StackBuilder,
    *,
    segment: int,
    recent: int,
    compressed: int,
    rate: int,
    compress: str = "convolution",
    loss: str = "attention",
    weight: float = 1.0,
) -> Layer:
    """The same, with older states compressed."""
    check_choice("compress", compress, COMPRESSIONS)
    check_choice("loss", loss, COMPRESSION_LOSSES)
    memory = partial(
        CompressiveMemory,
        recent=recent,
        compressed=compressed,
        rate=rate,
        compress=COMPRESSIONS[compress],
        loss=COMPRESSION_LOSSES[loss],
        weight=weight,
    )
    return SegmentStack(kit.blocks(), segment=segment, memory=memory)


def feedback(kit: StackBuilder, *, span: int | None = None, shared: bool = True) -> Layer:
    """All layers look at one memory of the past."""
    return FeedbackStack(kit.blocks(), span=span, shared=shared)


def funnel(
    kit: StackBuilder,
    *,
    groups: list[int],
    stride: int = 2,
    cls: bool = False,
    ask_all: bool = True,
) -> Layer:
    """Groups of so many blocks, each at a shorter length; the blocks that are left come after, at the full length."""
    if not isinstance(groups, list):
        raise ValueError(f"groups must be a list of whole numbers, not {groups!r}")
    check_int(1, **{f"group {i}": group for i, group in enumerate(groups)})
    if sum(groups) > kit.depth:
        raise ValueError(f"groups take {sum(groups)} layers, and there are {kit.depth}")
    blocks = iter(kit.blocks())
    cut = [list(islice(blocks, group)) for group in groups]
    return FunnelStack(cut, list(blocks), stride=stride, cls=cls, ask_all=ask_all)


def class_last(
    kit: StackBuilder, *, last: int = 2, hidden: int | None = None, every: bool = True
) -> Layer:
    """A class token joins behind the last layer, and asks all others in `last_row` layers of its own."""
    check_int(1, last=last)
    blocks = kit.blocks()
    dim = blocks[0].dim
    inside = 4 * dim if hidden is None else hidden
    return ClassAttentionStack(
        blocks,
        [
            ClassAttentionLayer(dim, kit.heads, hidden=inside, norm=kit.norm, every=every)
            for _ in range(last)
        ],
    )


def carry(kit: StackBuilder) -> Layer:
    """The scores of each block go on to the next."""
    return RealFormerStack(kit.blocks())


STACKS: Mapping[str, Callable[..., Layer]] = {
    "plain": plain,
    "shared": shared,
    "universal": universal,
    "reversible": reversible,
    "segments": segments,
    "compressive": compressive,
    "feedback": feedback,
    "funnel": funnel,
    "carry": carry,
    "class_last": class_last,
}
