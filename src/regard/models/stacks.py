"""A table: the words that a configuration may use for how its layers stand together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from regard.block import Block, Layer
from regard.errors import check_choice, check_whole
from regard.residual import MakeNorm
from regard.stack import (
    AttentionReconstruction,
    AutoEncoding,
    Carry,
    ClassLast,
    ClassLayer,
    Compress,
    Compressive,
    Convolution,
    Feedback,
    Funnel,
    Halting,
    MaxPool,
    MeanPool,
    MostUsed,
    Plain,
    Reconstruction,
    Reversible,
    Segments,
    Shared,
    Universal,
)

COMPRESSIONS: Mapping[str, Callable[[int, int], Compress]] = {
    "convolution": Convolution, "mean": MeanPool, "max": MaxPool, "most_used": MostUsed,
}  # fmt: skip
LOSSES: Mapping[str, Callable[[int, int], Reconstruction] | None] = {
    "attention": AttentionReconstruction, "auto_encoding": AutoEncoding, "none": None,
}  # fmt: skip


class Kit(NamedTuple):
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
    norm: MakeNorm
    heads: int

    def blocks(self, count: int | None = None) -> list[Block]:
        """So many blocks, as many as the stack is deep unless given; none of the mixers may be left out."""
        count = self.depth if count is None else count
        check_whole(1, blocks=count)
        if count % self.turns:
            raise ValueError(f"the stack has {count} blocks, and {self.turns} parts take turns: that must come out even")
        return [self.block(number) for number in range(count)]


def plain(kit: Kit) -> Layer:
    """One block after the other."""
    return Plain(kit.blocks())


def shared(kit: Kit, *, blocks: int = 1, order: str = "sequence") -> Layer:
    """So many blocks, used again and again until the stack is as deep as the configuration says."""
    return Shared(kit.blocks(blocks), kit.depth, order=order)


def universal(
    kit: Kit, *, halting: bool = False, epsilon: float = 0.01, weight: float = 0.01, bias: float = 1.0, signal: bool = True
) -> Layer:
    """One block at every step, as many steps as the configuration has layers, or with `halting` at most as many."""
    (block,) = kit.blocks(1)
    halt = Halting(block.dim, epsilon=epsilon, weight=weight, bias=bias) if halting else None
    if not halting and (epsilon, weight, bias) != (0.01, 0.01, 1.0):
        raise ValueError("epsilon, weight and bias are of halting, and there is none: give halting=true")
    return Universal(block, kit.depth, halting=halt, signal=signal)


def reversible(kit: Kit, *, beside: bool = False) -> Layer:
    """Sub-layers whose activations are computed again; `beside`: what comes out is twice as wide as what goes in."""
    return Reversible([half for number in range(kit.depth) for half in kit.halves(number)], beside=beside)


def segments(kit: Kit, *, segment: int, memory: int | None = None) -> Layer:
    """Segments that look at what the layers held of those before."""
    return Segments(kit.blocks(), segment=segment, memory=memory)


def compressive(
    kit: Kit, *, segment: int, recent: int, compressed: int, rate: int, compress: str = "convolution", loss: str = "attention",
    weight: float = 1.0,
) -> Layer:  # fmt: skip
    """The same, with older states compressed."""
    check_choice("compress", compress, COMPRESSIONS)
    check_choice("loss", loss, LOSSES)
    memory = partial(
        Compressive, recent=recent, compressed=compressed, rate=rate, compress=COMPRESSIONS[compress], loss=LOSSES[loss],
        weight=weight,
    )  # fmt: skip
    return Segments(kit.blocks(), segment=segment, memory=memory)


def feedback(kit: Kit, *, span: int | None = None, shared: bool = True) -> Layer:
    """All layers look at one memory of the past."""
    return Feedback(kit.blocks(), span=span, shared=shared)


def funnel(kit: Kit, *, groups: list[int], stride: int = 2, cls: bool = False, ask_all: bool = True) -> Layer:
    """Groups of so many blocks, each at a shorter length; the blocks that are left come after, at the full length."""
    if not isinstance(groups, list):
        raise ValueError(f"groups must be a list of whole numbers, not {groups!r}")
    check_whole(1, **{f"group {i}": group for i, group in enumerate(groups)})
    if sum(groups) > kit.depth:
        raise ValueError(f"groups take {sum(groups)} layers, and there are {kit.depth}")
    blocks = iter(kit.blocks())
    cut = [list(islice(blocks, group)) for group in groups]
    return Funnel(cut, list(blocks), stride=stride, cls=cls, ask_all=ask_all)


def class_last(kit: Kit, *, last: int = 2, hidden: int | None = None, every: bool = True) -> Layer:
    """A class token joins behind the last layer, and asks all others in `last` layers of its own."""
    check_whole(1, last=last)
    blocks = kit.blocks()
    dim = blocks[0].dim
    inside = 4 * dim if hidden is None else hidden
    return ClassLast(blocks, [ClassLayer(dim, kit.heads, hidden=inside, norm=kit.norm, every=every) for _ in range(last)])


def carry(kit: Kit) -> Layer:
    """The scores of each block go on to the next."""
    return Carry(kit.blocks())


STACKS: Mapping[str, Callable[..., Layer]] = {
    "plain": plain, "shared": shared, "universal": universal, "reversible": reversible, "segments": segments,
    "compressive": compressive, "feedback": feedback, "funnel": funnel, "carry": carry,
    "class_last": class_last,
}  # fmt: skip
