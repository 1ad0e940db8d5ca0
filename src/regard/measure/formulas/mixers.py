"""Mixers made of several attentions, or of attentions and something else."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from torch import nn

from regard.measure.formulas.linear import chunked, sized
from regard.measure.formulas.softmax import additive, masked
from regard.measure.work import CallShape, ModuleCost, formula, kept, module_cost, product, together
from regard.mixers.axial import AxialPasses
from regard.mixers.bp_spans import span_plan
from regard.mixers.bp_transformer import BPTransformer
from regard.mixers.branches import Branches
from regard.mixers.conditional import TaskAttention
from regard.mixers.etc import ETC
from regard.mixers.funnel import FunnelMixer
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand
from regard.mixers.luna import CHUNK, CausalLuna, Luna
from regard.mixers.perceiver import Perceiver, PerceiverLayer
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.positional import PositionEmbeddedMixer
from regard.mixers.realformer import RealFormer
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.show_attend import SoftVisualAttention
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.star import Star, StarNode

PLANNED = (
    1 << 13
)  # tokens for which a tree is laid out to be counted; longer ones grow by what a level adds


def linear(call: CallShape, *layers: nn.Linear) -> ModuleCost:
    """Several linear layers over all tokens, which read the same x: it is kept once, and so is what each gives."""
    total = sum((module_cost(layer, call) for layer in layers), ModuleCost())
    return total.keeping(
        call.rows * (layers[0].in_features + sum(layer.out_features for layer in layers))
    )


@formula(AxialPasses)
def _axial(module: AxialPasses, call: CallShape) -> ModuleCost:
    """Rows, then columns: O(n √n d) on a square; causal, only whole rows are passed on, and a row looks at itself."""
    if module.inner is None:
        return together(
            rows=module_cost(module.rows, call), columns=module_cost(module.columns, call)
        )
    done = call.of(call.n // module.width * module.width)
    parts = together(
        rows=module_cost(module.rows, done),
        columns=module_cost(module.columns, done),
        inner=module_cost(module.inner, call),
    )
    held = call.b * module.dim * 2 * module.width
    return parts.holding(parts.parts["columns"].state + parts.parts["inner"].state + held)


@formula(TaskAttention)
def _task(module: TaskAttention, call: CallShape) -> ModuleCost:
    """Plain attention, and one small layer for each block of the prior."""
    one = CallShape(1, 1, 1)
    prior = module_cost(module.prior.gain, one) + module_cost(module.prior.shift, one)
    return (
        module_cost(module.heads, call)
        + prior
        + kept((6 if module.causal else 4) * call.b * call.n * call.m)
    )


@formula(ETC)
def _global_long(module: ETC, call: CallShape) -> ModuleCost:
    """Long tokens see near ones and the global ones, these see all: O(n (radius + globals) d)."""
    long = module_cost(module.long, call)
    if module.all is None:
        return long
    return together(
        long=long, all=module_cost(module.all, call.of(min(module.globals, call.n), call.n))
    )


@formula(FunnelMixer)
def _funnel(module: FunnelMixer, call: CallShape) -> ModuleCost:
    """n / stride queries: O(n² d / stride)."""
    front = module.stride - 1 if module.cls else 0
    return module_cost(module.ask, call.of(ceil((call.n + front) / module.stride), call.m))


@formula(Branches)
def _branches(module: Branches, call: CallShape) -> ModuleCost:
    """Each has its own channels, so each costs what it costs alone."""
    return together(
        **{f"branch {i}": module_cost(branch, call) for i, branch in enumerate(module.branches)}
    )


@formula(PositionEmbeddedMixer)
def _embedded(module: PositionEmbeddedMixer, call: CallShape) -> ModuleCost:
    """Positions, and the mixer inside."""
    memory = ModuleCost() if call.m == call.n else module_cost(module.embed, call.of(call.m))
    return together(
        embed=module_cost(module.embed, call) + memory, inner=module_cost(module.inner, call)
    )


@formula(Longformer)
def _longformer(module: Longformer, call: CallShape) -> ModuleCost:
    """A window, no token being marked: O(n window d)."""
    return module_cost(module.local, call)


@formula(LowRankBand)
def _low_rank_band(module: LowRankBand, call: CallShape) -> ModuleCost:
    """Both, and the values are projected for each: O(n² (rank + e) h)."""
    return together(low=module_cost(module.low, call), band=module_cost(module.band, call))


@formula(Luna)
def _luna(module: Luna, call: CallShape) -> ModuleCost:
    """Pack and unpack: O(n packed d)."""
    packed = len(module.p)
    return together(
        pack=module_cost(module.pack, call.of(packed, call.m)),
        unpack=module_cost(module.unpack, call.of(call.n, packed)),
    )


@formula(CausalLuna)
def _past_luna(module: CausalLuna, call: CallShape) -> ModuleCost:
    """Two sums over the past: O(n packed d)."""
    p, bh, e = len(module.p), call.b * module.heads, module.dim // module.heads
    tokens = linear(call, module.pack_k, module.q, module.k, module.v, module.out)
    packed = module_cost(module.pack_q, CallShape(1, p, p)) + product(
        bh, call.n, e, p, saved=bh * call.n * p
    )
    sums = chunked(sized(bh, call.n, e, p, CHUNK)) + chunked(sized(bh, call.n, p, e, CHUNK))
    return (tokens + packed + sums).holding(2 * bh * p * e)


@formula(PerceiverLayer)
def _perceiver_layer(module: PerceiverLayer, call: CallShape) -> ModuleCost:
    """Ask, and feed forward."""
    norms = kept(
        call.rows * 2 * module.ask.dim
        + (0 if module.norm_source is None else call.b * call.m * module.ask.dim)
    )
    return module_cost(module.ask, call) + module_cost(module.feed, call) + norms


@formula(Perceiver)
def _perceiver(module: Perceiver, call: CallShape) -> ModuleCost:
    """Latents read, think, and are read: O(n latents d + depth latents² d)."""
    latents = len(module.latents)
    think = sum((module_cost(layer, call.of(latents)) for layer in module.think), ModuleCost())
    return together(
        read=module_cost(module.read, call.of(latents, call.m)),
        think=think,
        write=module_cost(module.write, call.of(call.n, latents)),
    )


@formula(Poolingformer)
def _poolingformer(module: Poolingformer, call: CallShape) -> ModuleCost:
    """A window, and a wider one of pooled keys: O(n (window + reach / stride) d)."""
    return together(near=module_cost(module.near, call), far=module_cost(module.far, call))


@formula(RealFormer)
def _realformer(module: RealFormer, call: CallShape) -> ModuleCost:
    """Plain attention, as the first layer is."""
    return module_cost(module.heads, call)


@formula(MAB)
def _mab(module: MAB, call: CallShape) -> ModuleCost:
    """Ask, and feed forward: O(n m d)."""
    norms = kept(2 * call.rows * module.dim)
    return module_cost(module.ask, call) + module_cost(module.feed, call) + norms


@formula(PMA)
def _pma(module: PMA, call: CallShape) -> ModuleCost:
    """Seeds ask all tokens: O(n seeds d + n d²)."""
    return (
        module_cost(module.feed, call)
        + module_cost(module.block, call.of(len(module.seeds), call.n))
        + kept(call.rows * module.block.dim)
    )


@formula(SAB)
def _sab(module: SAB, call: CallShape) -> ModuleCost:
    return module_cost(module.block, call)


@formula(ISAB)
def _isab(module: ISAB, call: CallShape) -> ModuleCost:
    """Points read, and are read: O(n points d)."""
    points = len(module.points)
    return together(
        gather=module_cost(module.gather, call.of(points, call.m)),
        spread=module_cost(module.spread, call.of(call.n, points)),
    )


@formula(Sinkhorn)
def _sinkhorn(module: Sinkhorn, call: CallShape) -> ModuleCost:
    """Blocks are sorted, and each sees itself and what came in its place: O(n block d + n² d / block)."""
    d, e, t = module.dim, module.dim // module.heads, module.block
    s, bh = ceil(call.n / t), call.b * module.heads
    rows = min(s, module.cut or s)
    sort = module_cost(module.sort.up, call.of(s)) + module_cost(module.sort.down, call.of(s))
    sort = sort + kept((4 * module.sort.iterations + 4) * bh * s * s)
    moved = product(bh, rows, s, t, saved=0) + product(
        bh, rows, s, 2 * t * e, saved=(4 if module.causal else 2) * bh * rows * t * e
    )
    if module.cut is None and call.n % t == 0:  # fused: no scores are kept
        pairs = product(bh * s, t, e, 2 * t, saved=0) + product(
            bh * s, t, 2 * t, e, saved=bh * s * t * (6 * e + 1)
        )
    elif module.cut is None:
        pairs = product(bh * s, t, e, 2 * t) + product(bh * s, t, 2 * t, e)
        pairs = pairs + kept((2 if module.causal else 1) * bh * s * t * 2 * t)
    else:
        pairs = product(bh, call.n, e, rows * t) + product(bh, call.n, rows * t, e)
    state = call.b * (2 * call.n * d + s * d + d)
    return (linear(call, module.q, module.k, module.v, module.out) + sort + moved + pairs).holding(
        state
    )


@formula(SoftVisualAttention)
def _soft_cells(module: SoftVisualAttention, call: CallShape) -> ModuleCost:
    """A small network for each pair: O(n² width)."""
    width = module.query.out_features
    projected = (
        module_cost(module.query, call)
        + module_cost(module.key, call.of(call.m))
        + module_cost(module.gate, call)
    )
    values = product(call.b, call.n, call.m, module.dim)
    state, more = (
        call.b * call.n * (module.dim + width),
        masked(replace(call, causal=module.causal), 1),
    )
    return (
        projected.keeping(call.rows * module.dim)
        + additive(call.b, call.n, call.m, width)
        + values
        + more
    ).holding(state)


@formula(StarNode)
def _node(module: StarNode, call: CallShape) -> ModuleCost:
    """One query of each token to m keys, which were projected already; written element by element."""
    d = module.q.in_features
    pairs = 2 * product(1, call.b * call.n * call.m * d, 1, 1, saved=call.b * call.n * call.m * d)
    return (
        module_cost(module.q, call)
        + module_cost(module.out, call)
        + pairs
        + kept(2 * call.rows * d)
    )


def _seen(
    node: nn.Module, call: CallShape, queries: int, keys: int, projected: list[int]
) -> ModuleCost:
    """A node with its context: keys and values are projected once for each of the runs of tokens."""
    assert isinstance(node, StarNode)
    read = sum(
        (module_cost(part, call.of(tokens)) for part in (node.k, node.v) for tokens in projected),
        ModuleCost(),
    )
    return module_cost(node, call.of(queries, keys)) + read.keeping(
        call.b * sum(projected) * node.q.in_features
    )


@formula(Star)
def _star(module: Star, call: CallShape) -> ModuleCost:
    """Five keys for each token, and a relay that asks all: O(cycles n d²)."""
    total, n = ModuleCost(), call.n
    for cycle in range(module.cycles):
        total = total + _seen(
            module.satellites[cycle % len(module.satellites)], call, n, 5, [n, n, 1]
        )
        if cycle < module.cycles - 1:
            total = total + _seen(
                module.relays[cycle % len(module.relays)], call, 1, n + 1, [n + 1]
            )
    return total


# ---------------------------------------------------------------------------------------------- the tree
def tree_sizes(module: BPTransformer, n: int) -> tuple[int, int, int]:
    """Tokens in a tile, nodes that a tile sees, labels of their places.

    A level more, when tokens double, adds `near` spans to each side.
    """
    short = min(n, PLANNED)
    levels = _levels(module, short)
    offsets = tuple(sum(levels[:i]) for i in range(len(levels)))
    found = span_plan(0, short, module.near, module.clip, module.causal, offsets)
    more = (module.near * (1 if module.causal else 2)) * (
        max(0, (n - 1).bit_length() - (short - 1).bit_length())
    )
    return found.place.shape[1], found.nodes.shape[1] + more, len(found.labels) + more


def _levels(module: BPTransformer, n: int) -> list[int]:
    """How many spans there are of each size."""
    found = [n]
    while found[-1] > 1:
        found.append(found[-1] // 2 if module.causal else (found[-1] + 1) // 2)
    return found


@formula(BPTransformer)
def _tree(module: BPTransformer, call: CallShape) -> ModuleCost:
    """Each token sees near spans finely and far ones coarsely: O(n near log n d)."""
    levels = _levels(module, call.n)
    nodes = sum(levels)
    size, seen, labels = tree_sizes(module, call.n)
    bh, e, padded = call.b * module.heads, module.dim // module.heads, ceil(call.n / size) * size
    states = call.of(nodes)
    projected = (
        module_cost(module.q, call)
        + module_cost(module.k, states)
        + module_cost(module.v, states)
        + module_cost(module.out, call)
    )
    spans = ModuleCost()
    if len(levels) > 1:
        first = call.of(2 * levels[1] if module.causal else call.n)
        spans = module_cost(module.v, first) + module_cost(module.out, first)
    told = product(bh, padded, e, labels, saved=bh * padded * (labels + 2 * seen))
    tiles = bh * padded // size
    pairs = product(tiles, size, e, seen) + product(tiles, size, seen, e)
    state = call.b * (module.dim + 1) * sum(min(count, 2 * module.near + 4) for count in levels)
    return (projected + spans + told + pairs).holding(state)
