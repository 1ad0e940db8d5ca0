"""Mixers made of several attentions, or of attentions and something else."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from torch import nn

from regard.measure.formulas.linear import chunked, sized
from regard.measure.formulas.softmax import additive, masked
from regard.measure.work import Call, Work, formula, kept, product, together, work
from regard.mixers.axial import AxialPasses
from regard.mixers.branches import Branches
from regard.mixers.conditional import TaskAttention
from regard.mixers.etc import GlobalLong
from regard.mixers.funnel import Funnel
from regard.mixers.longformer import Longformer
from regard.mixers.low_rank import LowRankBand
from regard.mixers.luna import CHUNK, Luna, PastLuna
from regard.mixers.perceiver import Layer, Perceiver
from regard.mixers.poolingformer import Poolingformer
from regard.mixers.positioned import Embedded
from regard.mixers.realformer import RealFormer
from regard.mixers.sets import ISAB, MAB, PMA, SAB
from regard.mixers.sinkhorn import Sinkhorn
from regard.mixers.soft_cells import SoftCells
from regard.mixers.spans import plan
from regard.mixers.star import Star, _Node
from regard.mixers.tree import Tree

PLANNED = 1 << 13  # tokens for which a tree is laid out to be counted; longer ones grow by what a level adds


def linear(call: Call, *layers: nn.Linear) -> Work:
    """Several linear layers over all tokens, which read the same x: it is kept once, and so is what each gives."""
    total = sum((work(layer, call) for layer in layers), Work())
    return total.keeping(call.rows * (layers[0].in_features + sum(layer.out_features for layer in layers)))


@formula(AxialPasses)
def _axial(module: AxialPasses, call: Call) -> Work:
    """Rows, then columns: O(n √n d) on a square; causal, only whole rows are passed on, and a row looks at itself."""
    if module.inner is None:
        return together(rows=work(module.rows, call), columns=work(module.columns, call))
    done = call.of(call.n // module.width * module.width)
    parts = together(rows=work(module.rows, done), columns=work(module.columns, done), inner=work(module.inner, call))
    held = call.b * module.dim * 2 * module.width
    return parts.holding(parts.parts["columns"].state + parts.parts["inner"].state + held)


@formula(TaskAttention)
def _task(module: TaskAttention, call: Call) -> Work:
    """Plain attention, and one small layer for each block of the prior."""
    one = Call(1, 1, 1)
    prior = work(module.prior.gain, one) + work(module.prior.shift, one)
    return work(module.heads, call) + prior + kept((6 if module.causal else 4) * call.b * call.n * call.m)


@formula(GlobalLong)
def _global_long(module: GlobalLong, call: Call) -> Work:
    """Long tokens see near ones and the global ones, these see all: O(n (radius + globals) d)."""
    long = work(module.long, call)
    if module.all is None:
        return long
    return together(long=long, all=work(module.all, call.of(min(module.globals, call.n), call.n)))


@formula(Funnel)
def _funnel(module: Funnel, call: Call) -> Work:
    """n / stride queries: O(n² d / stride)."""
    front = module.stride - 1 if module.cls else 0
    return work(module.ask, call.of(ceil((call.n + front) / module.stride), call.m))


@formula(Branches)
def _branches(module: Branches, call: Call) -> Work:
    """Each has its own channels, so each costs what it costs alone."""
    return together(**{f"branch {i}": work(branch, call) for i, branch in enumerate(module.branches)})


@formula(Embedded)
def _embedded(module: Embedded, call: Call) -> Work:
    """Positions, and the mixer inside."""
    memory = Work() if call.m == call.n else work(module.embed, call.of(call.m))
    return together(embed=work(module.embed, call) + memory, inner=work(module.inner, call))


@formula(Longformer)
def _longformer(module: Longformer, call: Call) -> Work:
    """A window, no token being marked: O(n window d)."""
    return work(module.local, call)


@formula(LowRankBand)
def _low_rank_band(module: LowRankBand, call: Call) -> Work:
    """Both, and the values are projected for each: O(n² (rank + e) h)."""
    return together(low=work(module.low, call), band=work(module.band, call))


@formula(Luna)
def _luna(module: Luna, call: Call) -> Work:
    """Pack and unpack: O(n packed d)."""
    packed = len(module.p)
    return together(pack=work(module.pack, call.of(packed, call.m)), unpack=work(module.unpack, call.of(call.n, packed)))


@formula(PastLuna)
def _past_luna(module: PastLuna, call: Call) -> Work:
    """Two sums over the past: O(n packed d)."""
    p, bh, e = len(module.p), call.b * module.heads, module.dim // module.heads
    tokens = linear(call, module.pack_k, module.q, module.k, module.v, module.out)
    packed = work(module.pack_q, Call(1, p, p)) + product(bh, call.n, e, p, saved=bh * call.n * p)
    sums = chunked(sized(bh, call.n, e, p, CHUNK)) + chunked(sized(bh, call.n, p, e, CHUNK))
    return (tokens + packed + sums).holding(2 * bh * p * e)


@formula(Layer)
def _perceiver_layer(module: Layer, call: Call) -> Work:
    """Ask, and feed forward."""
    norms = kept(call.rows * 2 * module.ask.dim + (0 if module.norm_source is None else call.b * call.m * module.ask.dim))
    return work(module.ask, call) + work(module.feed, call) + norms


@formula(Perceiver)
def _perceiver(module: Perceiver, call: Call) -> Work:
    """Latents read, think, and are read: O(n latents d + depth latents² d)."""
    latents = len(module.latents)
    think = sum((work(layer, call.of(latents)) for layer in module.think), Work())
    return together(
        read=work(module.read, call.of(latents, call.m)), think=think, write=work(module.write, call.of(call.n, latents))
    )


@formula(Poolingformer)
def _poolingformer(module: Poolingformer, call: Call) -> Work:
    """A window, and a wider one of pooled keys: O(n (window + reach / stride) d)."""
    return together(near=work(module.near, call), far=work(module.far, call))


@formula(RealFormer)
def _realformer(module: RealFormer, call: Call) -> Work:
    """Plain attention, as the first layer is."""
    return work(module.heads, call)


@formula(MAB)
def _mab(module: MAB, call: Call) -> Work:
    """Ask, and feed forward: O(n m d)."""
    norms = kept(2 * call.rows * module.dim)
    return work(module.ask, call) + work(module.feed, call) + norms


@formula(PMA)
def _pma(module: PMA, call: Call) -> Work:
    """Seeds ask all tokens: O(n seeds d + n d²)."""
    return work(module.feed, call) + work(module.block, call.of(len(module.seeds), call.n)) + kept(call.rows * module.block.dim)


@formula(SAB)
def _sab(module: SAB, call: Call) -> Work:
    return work(module.block, call)


@formula(ISAB)
def _isab(module: ISAB, call: Call) -> Work:
    """Points read, and are read: O(n points d)."""
    points = len(module.points)
    return together(gather=work(module.gather, call.of(points, call.m)), spread=work(module.spread, call.of(call.n, points)))


@formula(Sinkhorn)
def _sinkhorn(module: Sinkhorn, call: Call) -> Work:
    """Blocks are sorted, and each sees itself and what came in its place: O(n block d + n² d / block)."""
    d, e, t = module.dim, module.dim // module.heads, module.block
    s, bh = ceil(call.n / t), call.b * module.heads
    rows = min(s, module.cut or s)
    sort = work(module.sort.up, call.of(s)) + work(module.sort.down, call.of(s))
    sort = sort + kept((4 * module.sort.iterations + 4) * bh * s * s)
    moved = product(bh, rows, s, t, saved=0) + product(
        bh, rows, s, 2 * t * e, saved=(4 if module.causal else 2) * bh * rows * t * e
    )
    if module.cut is None and call.n % t == 0:  # fused: no scores are kept
        pairs = product(bh * s, t, e, 2 * t, saved=0) + product(bh * s, t, 2 * t, e, saved=bh * s * t * (6 * e + 1))
    elif module.cut is None:
        pairs = product(bh * s, t, e, 2 * t) + product(bh * s, t, 2 * t, e)
        pairs = pairs + kept((2 if module.causal else 1) * bh * s * t * 2 * t)
    else:
        pairs = product(bh, call.n, e, rows * t) + product(bh, call.n, rows * t, e)
    state = call.b * (2 * call.n * d + s * d + d)
    return (linear(call, module.q, module.k, module.v, module.out) + sort + moved + pairs).holding(state)


@formula(SoftCells)
def _soft_cells(module: SoftCells, call: Call) -> Work:
    """A small network for each pair: O(n² width)."""
    width = module.query.out_features
    projected = work(module.query, call) + work(module.key, call.of(call.m)) + work(module.gate, call)
    values = product(call.b, call.n, call.m, module.dim)
    state, more = call.b * call.n * (module.dim + width), masked(replace(call, causal=module.causal), 1)
    return (projected.keeping(call.rows * module.dim) + additive(call.b, call.n, call.m, width) + values + more).holding(state)


@formula(_Node)
def _node(module: _Node, call: Call) -> Work:
    """One query of each token to m keys, which were projected already; written element by element."""
    d = module.q.in_features
    pairs = 2 * product(1, call.b * call.n * call.m * d, 1, 1, saved=call.b * call.n * call.m * d)
    return work(module.q, call) + work(module.out, call) + pairs + kept(2 * call.rows * d)


def _seen(node: nn.Module, call: Call, queries: int, keys: int, projected: list[int]) -> Work:
    """A node with its context: keys and values are projected once for each of the runs of tokens."""
    assert isinstance(node, _Node)
    read = sum((work(part, call.of(tokens)) for part in (node.k, node.v) for tokens in projected), Work())
    return work(node, call.of(queries, keys)) + read.keeping(call.b * sum(projected) * node.q.in_features)


@formula(Star)
def _star(module: Star, call: Call) -> Work:
    """Five keys for each token, and a relay that asks all: O(cycles n d²)."""
    total, n = Work(), call.n
    for cycle in range(module.cycles):
        total = total + _seen(module.satellites[cycle % len(module.satellites)], call, n, 5, [n, n, 1])
        if cycle < module.cycles - 1:
            total = total + _seen(module.relays[cycle % len(module.relays)], call, 1, n + 1, [n + 1])
    return total


# ---------------------------------------------------------------------------------------------- the tree
def tree_sizes(module: Tree, n: int) -> tuple[int, int, int]:
    """Tokens in a tile, nodes that a tile sees, labels of their places.

    A level more, when tokens double, adds `near` spans to each side.
    """
    short = min(n, PLANNED)
    levels = _levels(module, short)
    offsets = tuple(sum(levels[:i]) for i in range(len(levels)))
    found = plan(0, short, module.near, module.clip, module.causal, offsets)
    more = (module.near * (1 if module.causal else 2)) * (max(0, (n - 1).bit_length() - (short - 1).bit_length()))
    return found.place.shape[1], found.nodes.shape[1] + more, len(found.labels) + more


def _levels(module: Tree, n: int) -> list[int]:
    """How many spans there are of each size."""
    found = [n]
    while found[-1] > 1:
        found.append(found[-1] // 2 if module.causal else (found[-1] + 1) // 2)
    return found


@formula(Tree)
def _tree(module: Tree, call: Call) -> Work:
    """Each token sees near spans finely and far ones coarsely: O(n near log n d)."""
    levels = _levels(module, call.n)
    nodes = sum(levels)
    size, seen, labels = tree_sizes(module, call.n)
    bh, e, padded = call.b * module.heads, module.dim // module.heads, ceil(call.n / size) * size
    states = call.of(nodes)
    projected = work(module.q, call) + work(module.k, states) + work(module.v, states) + work(module.out, call)
    spans = Work()
    if len(levels) > 1:
        first = call.of(2 * levels[1] if module.causal else call.n)
        spans = work(module.v, first) + work(module.out, first)
    told = product(bh, padded, e, labels, saved=bh * padded * (labels + 2 * seen))
    tiles = bh * padded // size
    pairs = product(tiles, size, e, seen) + product(tiles, size, seen, e)
    state = call.b * (module.dim + 1) * sum(min(count, 2 * module.near + 4) for count in levels)
    return (projected + spans + told + pairs).holding(state)
