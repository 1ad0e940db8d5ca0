"""Mixers without attention: transforms, networks over positions, convolutions, windows."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from regard.measure.formulas.mixers import linear
from regard.measure.formulas.softmax import masked, over_pairs
from regard.measure.work import (
    CallShape,
    ModuleCost,
    formula,
    kept,
    module_cost,
    one_sided,
    product,
)
from regard.mixers.aft import AFT, PositionBias
from regard.mixers.average import Average
from regard.mixers.dynamic_conv import DynamicConv, StaticKernels
from regard.mixers.fourier import FourierMixer
from regard.mixers.glimpse import GlimpseRead, GlimpseWrite
from regard.mixers.gmlp import GatedMLP, TinyAttention
from regard.mixers.graves_window import GaussianWindow
from regard.mixers.pool import AveragePool
from regard.mixers.synthesizer import (
    DenseLogits,
    DotProductLogits,
    FactorisedDenseLogits,
    FactorisedRandomLogits,
    PerHeadLinear,
    RandomLogits,
    Synthesizer,
)
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.xcit import CrossCovarianceAttention, LocalPatchInteraction, XCiT
from regard.pattern import Causal, Full


@formula(FourierMixer)
def _fourier(module: FourierMixer, call: CallShape) -> ModuleCost:
    """Half a transform over n d numbers: 5/2 n d log₂(n d), and the same once more backward.  Nothing is kept."""
    numbers = call.n * module.dim
    flops = round(call.b * 2.5 * numbers * log2(max(2, numbers)))
    return ModuleCost(flops, flops)


@formula(TokenMLP)
def _token_mlp(module: TokenMLP, call: CallShape) -> ModuleCost:
    """A network over positions: O(n hidden d)."""
    rows, n, hidden = call.b * module.dim, call.n, module.up.out_features
    up, down = (
        product(1, rows, n, hidden, saved=rows * n),
        product(1, rows, hidden, n, saved=2 * rows * hidden),
    )
    return up + down


@formula(TinyAttention)
def _tiny(module: TinyAttention, call: CallShape) -> ModuleCost:
    """One narrow head: O(n² width)."""
    width = module.q.out_features
    inside = over_pairs(
        Causal() if call.causal else Full(), CallShape(call.b, call.n, call.n, 1, width, width)
    )
    asked = sum(
        (module_cost(part, call) for part in (module.q, module.k, module.v)), ModuleCost()
    ).keeping(0)
    return (asked + inside + module_cost(module.out, call)).holding(2 * call.rows * width)


@formula(GatedMLP)
def _gated_mlp(module: GatedMLP, call: CallShape) -> ModuleCost:
    """A matrix over positions: O(n² hidden)."""
    half = module.down.in_features
    spatial = product(
        call.b,
        call.n,
        call.n,
        half,
        saved=call.rows * half + (call.n * call.n if module.causal else 0),
    )
    more = kept(call.rows * (2 * half + 3 * half))
    total = module_cost(module.up, call) + module_cost(module.down, call) + spatial + more
    tiny = (
        ModuleCost()
        if module.attend is None
        else module_cost(module.attend, CallShape(call.b, call.n, call.n, causal=module.causal))
    )
    return (total + tiny).holding(tiny.state + call.rows * half)


@formula(CrossCovarianceAttention)
def _covariance(module: CrossCovarianceAttention, call: CallShape) -> ModuleCost:
    """Channels attend to channels: O(n d e)."""
    d = module.q.in_features
    bh, e = call.b * module.heads, d // module.heads
    return (
        linear(call, module.q, module.k, module.v, module.out)
        + product(bh, e, call.n, e)
        + product(bh, call.n, e, e)
    )


@formula(LocalPatchInteraction)
def _patches(module: LocalPatchInteraction, call: CallShape) -> ModuleCost:
    """Two depth-wise convolutions of 3 x 3: O(n d)."""
    d, tokens = module.first.in_channels, ceil(call.n / module.width) * module.width
    return 2 * product(call.b, tokens * d, 9, 1, saved=call.b * tokens * d) + kept(
        4 * call.rows * d
    )


@formula(XCiT)
def _xcit(module: XCiT, call: CallShape) -> ModuleCost:
    return (
        module_cost(module.covariance, call)
        + module_cost(module.patches, call)
        + kept(2 * call.rows * module.dim)
    )


@formula(AFT)
def _aft(module: AFT, call: CallShape) -> ModuleCost:
    """exp(w) times keys and values, in chunks as long as the bias reaches: O(n chunk d); without one sums alone, O(n d)."""
    tokens = linear(call, module.q, module.k, module.v)
    d, size = module.dim, module.chunk_size(call.n)
    chunks, steps, bias = ceil(call.n / size), size.bit_length(), module.bias
    reach = 0 if bias is None else bias.reach
    held = call.n if reach is None else min(call.n, reach)
    tokens = tokens.holding(call.b * (held * (module.k.out_features + d) + 3 * d))
    rows = call.b * chunks * size
    if bias is None:
        return tokens + kept(6 * (steps if module.causal else 1) * rows * d)
    beside = (
        0 if chunks == 1 else 1 if module.causal else 2
    )  # chunks whose keys it tells apart, besides a token's own
    rank = bias.u.shape[1] if isinstance(bias, PositionBias) else 0
    table = product(
        chunks * (1 + beside), size, rank, size, saved=2 * chunks * (1 + beside) * size * size
    )
    others = 2 * product(call.b * chunks, size, size, beside * d, saved=beside * rows * d)
    if not module.causal:
        return tokens + table + others + 2 * product(call.b * chunks, size, size, d, saved=rows * d)
    pairs = rows + rows * (size - 1) // 2  # each with itself, then halves of all sizes
    merged = product(
        1, 2 * rows * d * (steps - 1), 1, 1, saved=0
    )  # of two sums of each token, level by level
    return (
        tokens
        + table
        + others
        + merged
        + 2 * product(pairs, 1, 1, d, saved=3 * steps * rows * d // 2)
    )


@formula(Average)
def _average(module: Average, call: CallShape) -> ModuleCost:
    """A network and a gate: O(n d²)."""
    d = module.dim
    return (
        module_cost(module.ffn, call) + module_cost(module.gate, call) + kept(5 * call.rows * d)
    ).holding(call.b * d)


@formula(AveragePool)
def _pool(module: AveragePool, call: CallShape) -> ModuleCost:
    """A fixed kernel of ones: O(n d window), or window² on a grid; and one more channel that counts."""
    rows, columns = module.kernel.shape[2:]
    tokens = call.n if module.width is None else ceil(call.n / module.width) * module.width
    slid = one_sided(call.b, tokens * module.dim, rows * columns, 1, saved=call.rows * module.dim)
    counted = ModuleCost(2 * tokens * rows * columns)
    return (slid + counted).holding(call.b * module.dim * min(call.n, module._needed(call.n)))


@formula(StaticKernels)
def _learned_taps(module: StaticKernels, call: CallShape) -> ModuleCost:
    """The same for all tokens: nothing to compute."""
    return ModuleCost()


@formula(DynamicConv)
def _dynamic_conv(module: DynamicConv, call: CallShape) -> ModuleCost:
    """Kernels of each token, tap by tap: O(n d (d + kernel))."""
    d, taps = module.dim, module.kernel
    layers = (
        module_cost(module.up, call)
        + module_cost(module.taps, call)
        + module_cost(module.out, call)
    )
    slid = product(1, call.rows * d, taps, 1, saved=call.rows * (2 * d + module.heads * taps + d))
    return (layers + slid).holding(call.b * module.before * d)


@formula(GaussianWindow)
def _window(module: GaussianWindow, call: CallShape) -> ModuleCost:
    """Bells over the memory: O(n m (mixtures + d))."""
    mixtures = module.shape.shape.out_features // 3
    bells = kept(call.b * call.n * call.m * 3 * mixtures)
    values = product(call.b, call.n, call.m, module.dim)
    summed = product(call.b, call.n * call.m, mixtures, 1, saved=0)
    return (module_cost(module.shape.shape, call) + values + summed + bells).holding(
        call.rows * module.dim
    )


# ---------------------------------------------------------------------------------------------- glimpses
def _laid(b: int, channels: int, patch: int, height: int, width: int) -> ModuleCost:
    """F_Yᵀ w F_X of each channel."""
    image = b * channels * (patch * width + patch * patch)
    return product(b * channels, height, patch, patch, saved=image) + product(
        b * channels, height, patch, width, saved=image
    )


@formula(GlimpseRead)
def _read(module: GlimpseRead, call: CallShape) -> ModuleCost:
    """Filters over rows and over columns: O(n patch d)."""
    b, d, patch, width = call.b, module.dim, module.bank.patch, module.width
    there, here = ceil(call.m / width), ceil(call.n / width)
    place = module_cost(module.bank.place, call.of(1))
    seen = product(b * d, patch, there, width, saved=b * d * there * width) + product(
        b * d, patch, width, patch, saved=0
    )
    return place + seen + _laid(b, d, patch, here, width) + kept(call.rows * d)


@formula(GlimpseWrite)
def _write(module: GlimpseWrite, call: CallShape) -> ModuleCost:
    """A patch is drawn from one vector, and laid: O(n patch d)."""
    place = module_cost(module.bank.place, call.of(1)) + module_cost(module.draw, call.of(1))
    height = ceil(call.n / module.width)
    return (
        place
        + _laid(call.b, module.dim, module.bank.patch, height, module.width)
        + kept(call.rows * module.dim)
    )


# ---------------------------------------------------------------------------------------------- synthesizers
@formula(PerHeadLinear)
def _rows(module: PerHeadLinear, call: CallShape) -> ModuleCost:
    """A linear layer for each head, of at most m outputs."""
    _, out, width = module.weight.shape
    return product(
        call.b * module.heads,
        call.n,
        width,
        min(out, call.m),
        saved=call.b * module.heads * call.n * width,
    )


@formula(DenseLogits)
def _dense(module: DenseLogits, call: CallShape) -> ModuleCost:
    """O(n d (d + length))."""
    return module_cost(module.up, call) + module_cost(module.down, call)


@formula(FactorisedDenseLogits)
def _factorised(module: FactorisedDenseLogits, call: CallShape) -> ModuleCost:
    """Two rows whose product is the row of logits: O(n d (d + √length))."""
    far = call.of(call.n, 1 << 62)
    rows = [
        part.weight.shape[1] * call.b * part.heads * call.n
        for part in (module.first, module.second)
    ]
    return (
        module_cost(module.up, call)
        + module_cost(module.first, far)
        + module_cost(module.second, far)
        + kept(sum(rows))
    )


@formula(RandomLogits)
def _random_logits(module: RandomLogits, call: CallShape) -> ModuleCost:
    """A table: nothing to compute.  Its softmax is kept once for all examples."""
    return kept(module.table.shape[0] * call.n * call.m)


@formula(FactorisedRandomLogits)
def _factorised_random(module: FactorisedRandomLogits, call: CallShape) -> ModuleCost:
    """Two tables: O(n² rank h), once for all examples."""
    h, _, rank = module.left.shape
    return product(h, call.n, rank, call.m, saved=h * call.n * call.m)


@formula(DotProductLogits)
def _dot(module: DotProductLogits, call: CallShape) -> ModuleCost:
    """The scores of plain attention: O(n² d)."""
    d = module.q.in_features
    scores = product(call.b * module.heads, call.n, d // module.heads, call.m)
    return module_cost(module.q, call).keeping(0) + module_cost(module.k, call).keeping(0) + scores


@formula(Synthesizer)
def _synthesizer(module: Synthesizer, call: CallShape) -> ModuleCost:
    """Logits, and values weighed by them: O(n² d)."""
    logits = sum((module_cost(part, call) for part in module.parts), ModuleCost())
    bh, e = call.b * module.heads, module.dim // module.heads
    values = product(bh, call.n, call.n, e)
    more = kept(0 if module.shares is None else len(module.parts) * bh * call.n * call.n)
    keys = sum(
        call.rows * part.q.in_features
        for part in module.parts
        if isinstance(part, DotProductLogits)
    )
    layers = module_cost(module.v, call) + module_cost(module.out, call)
    return (
        logits + values + more + layers + masked(replace(call, causal=module.causal), module.heads)
    ).holding(call.rows * module.dim + keys)
