"""Stacks: layers in a row, used again, computed again, at other lengths, or with a memory of the past."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from regard.block import Block, Layer
from regard.errors import Unsupported
from regard.measure.formulas.layers import heads_call
from regard.measure.formulas.softmax import cache, over_pairs, scored
from regard.measure.pairs import count_pairs
from regard.measure.work import (
    CallShape,
    ModuleCost,
    blind,
    formula,
    kept,
    module_cost,
    product,
    together,
)
from regard.mixer import MultiHead
from regard.mixers import RealFormer
from regard.pattern import Band, Causal, Chunks, Pattern
from regard.stack import (
    CompressiveMemory,
    Conv1dCompression,
    CrossAttentionSublayer,
    EarlyExitStack,
    FeedbackStack,
    FeedForwardSublayer,
    FunnelStack,
    Halting,
    HiddenStateMemory,
    MixerSublayer,
    PerLayerContextStack,
    RealFormerStack,
    RecurrentStateMemory,
    ReversibleStack,
    SegmentMemory,
    SegmentStack,
    SequentialStack,
    SharedStack,
    UniversalStack,
)
from regard.stack.memory_attention import MemoryAttention, find_memory_attention


def in_turn(layers: Iterable[Layer], call: CallShape) -> ModuleCost:
    """One after the other."""
    return together(**{f"layer {i}": module_cost(layer, call) for i, layer in enumerate(layers)})


@formula(SequentialStack, PerLayerContextStack)
def _plain(module: SequentialStack | PerLayerContextStack, call: CallShape) -> ModuleCost:
    return in_turn(module.layers, call)


@formula(SharedStack)
def _shared(module: SharedStack, call: CallShape) -> ModuleCost:
    """Each application costs what its layer costs; parameters count once."""
    return in_turn((module.layers[i] for i in module.order), call)


@formula(Halting)
def _halting(module: Halting, call: CallShape) -> ModuleCost:
    return module_cost(module.ask, call) + kept(call.rows * module.dim)


@formula(UniversalStack)
def _universal(module: UniversalStack, call: CallShape) -> ModuleCost:
    """As many steps as there may be: with halting, tokens may need fewer."""
    step = module_cost(module.layer, call)
    if module.halting is not None:
        step = (
            step
            + module_cost(module.halting, call)
            + product(1, call.rows * module.dim, 1, 1, saved=0)
        )
    return step * module.steps


@formula(EarlyExitStack)
def _early_exit(module: EarlyExitStack, call: CallShape) -> ModuleCost:
    """All layers and all heads, as in training: in evaluation tokens may leave earlier."""
    read = call if module.by_token else call.of(1)
    heads = {
        f"exit {at}": module_cost(head, read)
        for at, head in zip(module.exits, module.heads, strict=True)
    }
    return together(**in_turn(module.layers, call).parts, **heads)


# ---------------------------------------------------------------------------------------------- halves, reversible
@formula(MixerSublayer, CrossAttentionSublayer)
def _mixing(module: MixerSublayer | CrossAttentionSublayer, call: CallShape) -> ModuleCost:
    seen = call if isinstance(module, CrossAttentionSublayer) else call.of(call.n)
    return together(mixer=module_cost(module.mixer, seen), norm=module_cost(module.norm, call))


@formula(FeedForwardSublayer)
def _feeding(module: FeedForwardSublayer, call: CallShape) -> ModuleCost:
    return together(ffn=module_cost(module.ffn, call), norm=module_cost(module.norm, call))


@formula(ReversibleStack)
def _reversible(module: ReversibleStack, call: CallShape) -> ModuleCost:
    """Both streams are kept at the end, and nothing else at any depth; the backward pass computes all halves again."""
    total = in_turn(module.halves, call)
    parts = {name: _again(part) for name, part in total.parts.items()}
    return together(**parts) + kept(2 * call.rows * module.dim)


def _again(part: ModuleCost) -> ModuleCost:
    """The same, computed a second time instead of kept."""
    done = ModuleCost(0, part.forward, part.forward)
    return together(half=part.keeping(0), again=done)


# ---------------------------------------------------------------------------------------------- across layers
@formula(RealFormerStack)
def _carry(module: RealFormerStack, call: CallShape) -> ModuleCost:
    """All scores of all layers in hand: O(n² d) of each, causal or not."""
    return together(
        **{f"layer {i}": _carried(block, call) for i, block in enumerate(module.blocks)}
    )


def _carried(block: Block, call: CallShape) -> ModuleCost:
    assert isinstance(block.mixer, RealFormer)
    heads = block.mixer.heads
    inside = heads_call(heads, call.of(call.n))
    fused = module_cost(heads.inner, inside)
    own = scored(inside) + kept(inside.bh * call.n * call.n)
    whole = module_cost(block, call)
    less = ModuleCost(-fused.forward, -fused.backward, -fused.again, -fused.saved)
    return (whole + less + own).holding(whole.state)


# ---------------------------------------------------------------------------------------------- other lengths
@formula(FunnelStack)
def _funnel(module: FunnelStack, call: CallShape) -> ModuleCost:
    """Each group is shorter by the stride, and its first layer asks the longer sequence."""
    first = module.stride - 1 if module.cls else 0
    parts, n = (
        {
            f"group 0 layer {i}": module_cost(layer, call)
            for i, layer in enumerate(module.groups[0])
        },
        call.n,
    )
    for number, group in enumerate(module.groups[1:], 1):
        short = ceil((n + first) / module.stride)
        for i, layer in enumerate(group):
            asks = (
                _asking(layer, call, short, n)
                if module.ask_all and not i
                else module_cost(layer, call.of(short, call.m))
            )
            parts[f"group {number} layer {i}"] = asks
        n = short
    return together(
        **parts,
        **{
            f"decoder layer {i}": module_cost(layer, call) for i, layer in enumerate(module.decoder)
        },
    )


def _asking(layer: Layer, call: CallShape, short: int, n: int) -> ModuleCost:
    """A block whose mixer asks n tokens for `short` ones; the norm before it reads both."""
    assert isinstance(layer, Block)
    alone, mixer = module_cost(layer, call.of(short)), module_cost(layer.mixer, call.of(short))
    across = module_cost(layer.mixer, call.of(short, n))
    change = ModuleCost(
        across.forward - mixer.forward,
        across.backward - mixer.backward,
        0,
        across.saved - mixer.saved,
    )
    return alone + change + module_cost(layer.mixer_residual, call.of(n))


# ---------------------------------------------------------------------------------------------- through time
@formula(SegmentStack)
def _segments(module: SegmentStack, call: CallShape) -> ModuleCost:
    """Each segment reads what its layers hold of those before it."""
    layers = enumerate(zip(module.layers, module.memories, strict=True))
    return together(
        **{
            f"layer {i}": _held(layer, memory, module.segment, call)
            for i, (layer, memory) in layers
        }
    )


def _held(layer: Layer, memory: SegmentMemory, segment: int, call: CallShape) -> ModuleCost:
    """A block over segments: keys and values of what is held are made again, and more pairs are seen."""
    look, count = find_memory_attention(layer), ceil(call.n / segment)
    if look is None or isinstance(
        memory, RecurrentStateMemory
    ):  # a state of its own, chunk by chunk
        full, last = call.n // segment, call.n % segment
        rest = module_cost(layer, call.of(last, call.m)) if last else ModuleCost()
        return (
            module_cost(layer, call.of(min(segment, call.n), call.m)) * full + rest * 1
        ).holding(module_cost(layer, call).state)
    past, inside = held_before(memory, segment, count), heads_call(look.mixer, call.of(call.n))
    whole, alone = module_cost(layer, call), over_pairs(look.inner.causal_pattern, inside)
    seen = segment_pairs(look.inner.causal_pattern, past, segment, inside)
    scores, values = 2 * call.b * seen * inside.e, 2 * call.b * seen * inside.f
    change = ModuleCost(
        scores + values - alone.forward,
        3 * scores + 2 * values - alone.backward,
        scores - alone.again,
    )
    return (
        whole + change + _made_again(look, call, sum(past)) + _compressed(memory, call, segment)
    ).holding(call.b * layer.dim * past[-1])


def held_before(memory: SegmentMemory, segment: int, count: int) -> list[int]:
    """How many hidden states a layer holds when each of so many segments begins."""
    if isinstance(memory, HiddenStateMemory):
        return [min(memory.size, i * segment) for i in range(count)]
    if not isinstance(memory, CompressiveMemory):
        raise Unsupported(f"there is no formula for what {type(memory).__name__} holds")
    found, old, recent = [], 0, 0
    for _ in range(count):
        found.append(old + recent)
        recent += segment
        leaving = max(0, recent - memory.recent) // memory.compress.rate * memory.compress.rate
        old, recent = (
            min(memory.compressed, old + leaving // memory.compress.rate),
            recent - leaving,
        )
    return found


def segment_pairs(pattern: Pattern, past: list[int], segment: int, call: CallShape) -> int:
    """Pairs over all heads, when segment i sees past[i] tokens before it, and itself as the pattern says.

    What is held counts in whole segments, as `Chunks` has them, and a part of one as that part of its pairs.
    """
    if pattern == Causal():
        sizes = [min(segment, call.n - i * segment) for i in range(len(past))]
        return call.h * sum(
            size * held + size * (size + 1) // 2 for size, held in zip(sizes, past, strict=True)
        )
    whole, rest = divmod(max(past), segment)
    less, more = (
        count_pairs(pattern & Chunks(segment, back=back), call.n, call.n, call.h)
        for back in (whole, whole + 1)
    )
    return less + (more - less) * rest // segment


def _made_again(look: MemoryAttention, call: CallShape, tokens: int) -> ModuleCost:
    """Norms, keys and values of so many held states once more; queries too where they are turned together."""
    again = call.of(tokens)
    layers = [
        look.mixer.k,
        look.mixer.v,
        look.block.mixer_residual,
        *([] if look.mixer.rotary is None else [look.mixer.q]),
    ]
    return sum((module_cost(part, again) for part in layers), ModuleCost())


def _compressed(memory: SegmentMemory, call: CallShape, segment: int) -> ModuleCost:
    """A convolution over all states that were compressed."""
    if not isinstance(memory, CompressiveMemory) or not isinstance(
        memory.compress, Conv1dCompression
    ):
        return ModuleCost()
    rate, d = memory.compress.rate, memory.compress.dim
    runs = max(0, call.n // segment * segment - memory.recent) // rate
    return product(1, call.b * runs, rate * d, d, saved=call.b * runs * rate * d)


@formula(FeedbackStack)
def _feedback(module: FeedbackStack, call: CallShape) -> ModuleCost:
    """Token by token: keys and values once where layers share them, and attention to those before, the token itself not."""
    blocks = {
        f"layer {i}": _looking_back(layer, call, module, i) for i, layer in enumerate(module.layers)
    }
    mixed = product(1, call.rows * module.dim, len(module.weights), 1)
    return together(**blocks, memory=mixed)


def _looking_back(layer: Block, call: CallShape, module: FeedbackStack, number: int) -> ModuleCost:
    look = find_memory_attention(layer)
    assert look is not None
    inside = heads_call(look.mixer, call.of(call.n))
    reach = call.n if module.span is None else module.span
    full = min(call.n - 1, reach)
    before = inside.bh * (full * (full + 1) // 2 + max(0, call.n - 1 - full) * reach)
    seen = product(before, 1, inside.e, 1, saved=0) + product(before, 1, 1, inside.f, saved=0)
    keys = ModuleCost() if module.shared and number else _projected(look.mixer, call)
    others = [
        look.mixer.q,
        look.mixer.out,
        layer.mixer_residual,
        layer.ffn,
        layer.ffn_residual,
        layer.cross_residual,
    ]
    parts = [module_cost(part, call.of(call.n)) for part in others if part is not None]
    look_at = ModuleCost() if layer.cross is None else module_cost(layer.cross, call)
    state = cache(Band(reach, 0), inside) if keys.forward else 0
    return sum([*parts, seen, look_at], keys).holding(state)


def _projected(mixer: MultiHead, call: CallShape) -> ModuleCost:
    """Keys and values of memories; queries are made with them, and let go."""
    return (
        module_cost(mixer.k, call)
        + module_cost(mixer.v, call)
        + blind(module_cost(mixer.q, call).forward)
    )
