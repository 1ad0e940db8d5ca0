"""Linear attention and recurrences: products of features with values, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from torch import nn

from regard.attentions import EfficientAttention, LinearAttention
from regard.feature import (
    CosineFeatures,
    EluFeatures,
    FeatureMap,
    PositiveFeatures,
    RandomFeatures,
    ReluFeatures,
    TrigonometricFeatures,
)
from regard.measure.work import (
    CallShape,
    ModuleCost,
    formula,
    kept,
    module_cost,
    one_sided,
    product,
)
from regard.mixers.delta import DeltaRule
from regard.mixers.gated import GatedLinear, GatedRandomFeatures
from regard.mixers.recurrence import Recurrence
from regard.mixers.retention import Retention
from regard.update import add, decay, delta, diagonal_decay


class Sizes(NamedTuple):
    """Of an update: b h heads, n tokens, keys of width r, values of width f, chunks of c tokens."""

    bh: int
    n: int
    r: int
    f: int
    c: int


def sized(bh: int, n: int, r: int, f: int, chunk: int) -> Sizes:
    """The last chunk is filled up."""
    c = min(chunk, n)
    return Sizes(bh, ceil(n / c) * c, r, f, c)


def _add(s: Sizes) -> ModuleCost:
    """Inside a chunk by masked products, before it by the state: O(n (c + r) f).  Scores and states are computed again."""
    again = 2 * s.bh * s.n * s.r * (s.c + s.f)
    done = chunked(s)
    return replace(
        done, backward=done.backward + again, again=again, saved=s.bh * s.n * (2 * s.r + s.f)
    )


def chunked(s: Sizes) -> ModuleCost:
    """The products of a chunked update, where all is kept that they need."""
    chunks = s.bh * s.n // s.c
    inside = product(chunks, s.c, s.r, s.c) + product(chunks, s.c, s.c, s.f)
    before = product(chunks, s.r, s.c, s.f, saved=0) + product(
        chunks, s.c, s.r, s.f, saved=chunks * s.r * s.f
    )
    return inside + before


def _decay(s: Sizes) -> ModuleCost:
    """As `add`, and the gates keep what they multiply."""
    chunks = s.bh * s.n // s.c
    return chunked(s) + kept(chunks * (2 * s.c * s.c + 2 * s.c * s.f + s.r * s.f))


def _decay_each(s: Sizes) -> ModuleCost:
    """By halves of halves inside a chunk: O(n (c + r) f), with c a power of two."""
    c = 1 << (s.c - 1).bit_length()
    n = ceil(s.n / c) * c
    chunks = s.bh * n // c
    state = product(chunks, s.r, c, s.f) + product(chunks, c, s.r, s.f)
    halves, size = ModuleCost(), c // 2
    while size:
        many = chunks * c // (2 * size)
        halves, size = (
            halves + product(many, size, s.r, size) + product(many, size, size, s.f),
            size // 2,
        )
    return state + halves + product(s.bh * n, 1, s.r, 1)


def _delta(s: Sizes) -> ModuleCost:
    """The WY form: as `add`, and a triangular system of each chunk, O(n c (r + f))."""
    chunks = s.bh * s.n // s.c
    mixed, inside = product(chunks, s.c, s.r, s.c), product(chunks, s.c, s.r, s.c)
    solved = ModuleCost(
        chunks * s.c * s.c * (s.r + s.f),
        2 * chunks * s.c * s.c * (s.r + s.f),
        saved=chunks * s.c * (s.r + s.f),
    )
    written = (
        product(chunks, s.r, s.c, s.f + s.r)
        + product(chunks, s.c, s.c, s.f + s.r)
        + product(chunks, s.c, s.r, s.f)
    )
    return mixed + inside + solved + written + product(chunks, s.r, s.r, s.f)


UPDATES: dict[object, Callable[[Sizes], ModuleCost]] = {
    add: _add,
    decay: _decay,
    diagonal_decay: _decay_each,
    delta: _delta,
}


# ---------------------------------------------------------------------------------------------- features
@formula(EluFeatures)
def _elu(module: EluFeatures, call: CallShape) -> ModuleCost:
    """Element by element."""
    return kept(call.bh * call.n * call.e)


@formula(CosineFeatures)
def _cosine(module: CosineFeatures, call: CallShape) -> ModuleCost:
    return kept(call.bh * call.n * call.e)


@formula(RandomFeatures)
def _random(module: RandomFeatures, call: CallShape) -> ModuleCost:
    """w · x for every row w: O(n features e).  The rows are fixed, so that the backward pass has one product."""
    rows, width = module.rows.shape[-2:]
    waves = width_of(module, width) > rows  # sine and cosine keep what they are taken of
    return one_sided(
        call.bh, call.n, width, rows, saved=call.bh * call.n * (2 * rows if waves else width)
    )


def width_of(feature: FeatureMap, e: int) -> int:
    """How many features there are of a token of width e."""
    if isinstance(feature, RandomFeatures):
        rows = feature.rows.shape[-2]
        return rows if isinstance(feature, PositiveFeatures | ReluFeatures) else 2 * rows
    return 2 * e if isinstance(feature, CosineFeatures) else e


@formula(LinearAttention)
def _linear(module: LinearAttention, call: CallShape) -> ModuleCost:
    """Σ phi(k) (v 1)ᵀ first: O(n features d)."""
    r, f, bh = width_of(module.feature, call.e), call.f + 1, call.bh
    features = module_cost(module.feature, call) + module_cost(module.feature, call.of(call.m))
    divided = kept(bh * call.n * (f + 1))
    state = call.b * call.h * r * f
    if call.causal:
        level = isinstance(module.feature, PositiveFeatures | TrigonometricFeatures)
        update = UPDATES[decay if level else add](
            sized(bh, call.n, r, f if level else f - 1, module.chunk)
        )
        return (features + update + divided).holding(state)
    sums = product(bh, r, call.m, f, saved=bh * call.m * (r + f))
    return features + sums + product(bh, call.n, r, f) + divided


@formula(EfficientAttention)
def _efficient(module: EfficientAttention, call: CallShape) -> ModuleCost:
    """e summaries of all values: O(n d e)."""
    return product(call.bh, call.e, call.m, call.f) + product(call.bh, call.n, call.e, call.f)


# ---------------------------------------------------------------------------------------------- recurrences
def _projections(module: Recurrence, call: CallShape) -> ModuleCost:
    """All linear layers of a recurrence, each over all tokens.  Those that read x share it."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    total = sum((module_cost(part, call) for part in linear), ModuleCost())
    inner = sum(part.in_features for part in linear if part.in_features != module.dim)
    return total.keeping(call.rows * (2 * module.dim + inner))


def _recurrent(module: Recurrence, call: CallShape, r: int, f: int) -> ModuleCost:
    bh = call.b * module.heads
    update = UPDATES[module.update](sized(bh, call.n, r, f, module.chunk))
    return (_projections(module, call) + update).holding(bh * r * f)


@formula(DeltaRule)
def _delta_rule(module: DeltaRule, call: CallShape) -> ModuleCost:
    """O(n d (d + c))."""
    e = module.dim // module.heads
    total = _recurrent(module, call, e, e) + kept(10 * call.rows * module.dim)
    if module.convolution is None:
        return total
    taps = len(module.convolution.weight)
    slid = product(1, call.rows * 3 * module.dim, taps, 1, saved=0)
    return (total + slid).holding(total.state + call.b * (taps - 1) * 3 * module.dim)


@formula(GatedLinear)
def _gated_linear(module: GatedLinear, call: CallShape) -> ModuleCost:
    """O(n d (d + c))."""
    r = module.q.out_features // module.heads
    return _recurrent(module, call, r, module.dim // module.heads) + kept(
        10 * call.rows * module.dim
    )


@formula(GatedRandomFeatures)
def _gated_random(module: GatedRandomFeatures, call: CallShape) -> ModuleCost:
    """O(n d (d + features))."""
    e = module.dim // module.heads
    features = 2 * module_cost(
        module.feature, CallShape(call.b, call.n, call.n, module.heads, e, e)
    )
    state = call.b * module.heads
    total = _recurrent(module, call, width_of(module.feature, e), e + 1) + features
    return total.holding(total.state + state)


@formula(Retention)
def _retention(module: Retention, call: CallShape) -> ModuleCost:
    """O(n d (d + c))."""
    expand = module.v.out_features // module.dim
    e = module.dim // module.heads
    return _recurrent(module, call, e, expand * e) + kept(3 * expand * call.rows * module.dim)
