"""Stacks that a configuration can name, and the arguments it can give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from regard.block import Block, Layer
from regard.errors import Unsupported, check_choice, check_int
from regard.residual import NormFactory, Residual
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
    LunaStack,
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
    "conv": Conv1dCompression,
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
    """Builds the layers of a stack.

    Attributes:
        depth: Number of layers in the configuration.
        period: Mixers and feed-forward layers repeat every `period` layers.
        build_block: Layer index and number of layers to build -> block.
        build_sublayers: The same -> its sub-layers without residuals, for reversible stacks.
        norm: Width -> norm. With `heads`, for stacks that add layers of their own.
        residual: Width -> residual, for stacks that add residuals of their own.
    """

    depth: int
    period: int
    build_block: Callable[[int, int], Block]
    build_sublayers: Callable[[int, int], Sequence[Layer]]
    norm: NormFactory
    heads: int
    residual: Callable[[int], Residual]

    def blocks(self, count: int | None = None) -> list[Block]:
        """Build `count` blocks, by default as many as the stack is deep."""
        count = self.depth if count is None else count
        check_int(1, blocks=count)
        if count % self.period:
            raise ValueError(
                f"the stack has {count} blocks, which is no multiple of the {self.period} "
                "mixers and feed-forward layers that repeat"
            )
        return [self.build_block(index, count) for index in range(count)]


def sequential(builder: StackBuilder) -> Layer:
    """Blocks in sequence."""
    return SequentialStack(builder.blocks())


def weight_sharing(builder: StackBuilder, *, blocks: int = 1, order: str = "sequence") -> Layer:
    """`blocks` blocks that share their weights over the depth of the stack."""
    return SharedStack(builder.blocks(blocks), builder.depth, order=order)


def universal(
    builder: StackBuilder,
    *,
    halting: bool = False,
    epsilon: float = 0.01,
    loss_weight: float = 0.01,
    bias: float = 1.0,
    timing_signal: bool = True,
) -> Layer:
    """One block for `layers` steps, or with halting for at most as many."""
    (block,) = builder.blocks(1)
    unit = None
    if halting:
        unit = Halting(block.dim, epsilon=epsilon, loss_weight=loss_weight, bias=bias)
    elif (epsilon, loss_weight, bias) != (0.01, 0.01, 1.0):
        raise ValueError("epsilon, loss_weight and bias need halting=true")
    return UniversalStack(block, builder.depth, halting=unit, timing_signal=timing_signal)


def reversible(builder: StackBuilder, *, concat: bool = False) -> Layer:
    """Reversible sub-layers; `concat` doubles the output width."""
    depth = builder.depth
    sublayers = [s for index in range(depth) for s in builder.build_sublayers(index, depth)]
    return ReversibleStack(sublayers, concat=concat)


def segments(
    builder: StackBuilder, *, segment_length: int, memory_length: int | None = None
) -> Layer:
    """Transformer-XL: segments with a memory of hidden states."""
    return SegmentStack(builder.blocks(), segment_length=segment_length, memory=memory_length)


def compressive(
    builder: StackBuilder,
    *,
    segment_length: int,
    memory_length: int,
    compressed_length: int,
    compression_rate: int,
    compression: str = "conv",
    loss: str = "attention",
    loss_weight: float = 1.0,
) -> Layer:
    """Compressive Transformer: segments with a memory and a compressed memory."""
    check_choice("compression", compression, COMPRESSIONS)
    check_choice("loss", loss, COMPRESSION_LOSSES)
    memory = partial(
        CompressiveMemory,
        memory_length=memory_length,
        compressed_length=compressed_length,
        compression_rate=compression_rate,
        compression=COMPRESSIONS[compression],
        loss=COMPRESSION_LOSSES[loss],
        loss_weight=loss_weight,
    )
    return SegmentStack(builder.blocks(), segment_length=segment_length, memory=memory)


def feedback(builder: StackBuilder, *, span: int | None = None, share_kv: bool = True) -> Layer:
    """Feedback Transformer: all layers attend to one memory."""
    return FeedbackStack(builder.blocks(), span=span, share_kv=share_kv)


def funnel(
    builder: StackBuilder,
    *,
    block_sizes: list[int],
    stride: int = 2,
    separate_cls: bool = False,
    pool_q_only: bool = True,
) -> Layer:
    """Funnel Transformer: groups of `block_sizes` blocks at decreasing length; the remaining blocks
    form the decoder, at full length."""
    if not isinstance(block_sizes, list):
        raise ValueError(f"block_sizes must be a list of integers, not {block_sizes!r}")
    check_int(1, **{f"block_sizes[{i}]": size for i, size in enumerate(block_sizes)})
    if sum(block_sizes) > builder.depth:
        raise ValueError(
            f"block_sizes need {sum(block_sizes)} layers, but the model has {builder.depth}"
        )
    blocks = iter(builder.blocks())
    groups = [list(islice(blocks, size)) for size in block_sizes]
    return FunnelStack(
        groups, list(blocks), stride=stride, separate_cls=separate_cls, pool_q_only=pool_q_only
    )


def class_attention(
    builder: StackBuilder,
    *,
    class_layers: int = 2,
    hidden: int | None = None,
    norm_all_tokens: bool = True,
) -> Layer:
    """CaiT: a class token joins after the last block and attends to all tokens in own layers."""
    check_int(1, class_layers=class_layers)
    blocks = builder.blocks()
    dim = blocks[0].dim
    layers = [
        ClassAttentionLayer(
            dim,
            builder.heads,
            hidden=4 * dim if hidden is None else hidden,
            norm=builder.norm,
            norm_all_tokens=norm_all_tokens,
        )
        for _ in range(class_layers)
    ]
    return ClassAttentionStack(blocks, layers)


def realformer(builder: StackBuilder) -> Layer:
    """RealFormer: attention scores are passed on from block to block."""
    return RealFormerStack(builder.blocks())


def luna(builder: StackBuilder) -> Layer:
    """Luna: the packed sequence is passed on from block to block."""
    return LunaStack(builder.blocks(), residual=builder.residual)


def mixers_stack(builder: StackBuilder) -> Layer:
    """The stack that the mixers bring along, `sequential` for most."""
    blocks = builder.blocks()
    names = {block.mixer.stack_name for block in blocks}
    special = sorted(names - {"sequential"})
    if len(special) > 1:
        raise Unsupported(
            f"the mixers need different stacks, {' and '.join(special)}: "
            "use one of these mixers in all layers"
        )
    name = special[0] if special else "sequential"
    return STACKS[name](builder._replace(build_block=lambda index, count: blocks[index]))


STACKS: Mapping[str, Callable[..., Layer]] = {
    "sequential": sequential,
    "shared": weight_sharing,
    "universal": universal,
    "reversible": reversible,
    "segments": segments,
    "compressive": compressive,
    "feedback": feedback,
    "funnel": funnel,
    "realformer": realformer,
    "luna": luna,
    "class_attention": class_attention,
}
