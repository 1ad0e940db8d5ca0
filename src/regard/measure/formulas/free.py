"""Mixers without attention: transforms, networks over positions, convolutions, windows."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from regard.measure.formulas.mixers import linear
from regard.measure.formulas.softmax import masked, over_pairs
from regard.measure.work import Call, Work, formula, kept, one_sided, product, work
from regard.mixers.aft import AFT, PositionBias
from regard.mixers.average import Average
from regard.mixers.dynamic_conv import DynamicConv, _Learned
from regard.mixers.fourier import Fourier
from regard.mixers.glimpse import GlimpseRead, GlimpseWrite
from regard.mixers.gmlp import GatedMLP, TinyAttention
from regard.mixers.pool import AveragePool
from regard.mixers.synthesizer import Dense, DotProduct, FactorisedDense, FactorisedRandom, Random, Synthesizer, _Rows
from regard.mixers.token_mlp import TokenMLP
from regard.mixers.window import GaussianWindow
from regard.mixers.xcit import CrossCovariance, LocalPatches, XCiT
from regard.pattern import Causal, Full


@formula(Fourier)
def _fourier(module: Fourier, call: Call) -> Work:
    """Half a transform over n d numbers: 5/2 n d log₂(n d), and the same once more backward.  Nothing is kept."""
    numbers = call.n * module.dim
    flops = round(call.b * 2.5 * numbers * log2(max(2, numbers)))
    return Work(flops, flops)


@formula(TokenMLP)
def _token_mlp(module: TokenMLP, call: Call) -> Work:
    """A network over positions: O(n hidden d)."""
    rows, n, hidden = call.b * module.dim, call.n, module.up.out_features
    up, down = product(1, rows, n, hidden, saved=rows * n), product(1, rows, hidden, n, saved=2 * rows * hidden)
    return up + down


@formula(TinyAttention)
def _tiny(module: TinyAttention, call: Call) -> Work:
    """One narrow head: O(n² width)."""
    width = module.q.out_features
    inside = over_pairs(Causal() if call.causal else Full(), Call(call.b, call.n, call.n, 1, width, width))
    asked = sum((work(part, call) for part in (module.q, module.k, module.v)), Work()).keeping(0)
    return (asked + inside + work(module.out, call)).holding(2 * call.rows * width)


@formula(GatedMLP)
def _gated_mlp(module: GatedMLP, call: Call) -> Work:
    """A matrix over positions: O(n² hidden)."""
    half = module.down.in_features
    spatial = product(call.b, call.n, call.n, half, saved=call.rows * half + (call.n * call.n if module.causal else 0))
    more = kept(call.rows * (2 * half + 3 * half))
    total = work(module.up, call) + work(module.down, call) + spatial + more
    tiny = Work() if module.attend is None else work(module.attend, Call(call.b, call.n, call.n, causal=module.causal))
    return (total + tiny).holding(tiny.state + call.rows * half)


@formula(CrossCovariance)
def _covariance(module: CrossCovariance, call: Call) -> Work:
    """Channels attend to channels: O(n d e)."""
    d = module.q.in_features
    bh, e = call.b * module.heads, d // module.heads
    return linear(call, module.q, module.k, module.v, module.out) + product(bh, e, call.n, e) + product(bh, call.n, e, e)


@formula(LocalPatches)
def _patches(module: LocalPatches, call: Call) -> Work:
    """Two depth-wise convolutions of 3 x 3: O(n d)."""
    d, tokens = module.first.in_channels, ceil(call.n / module.width) * module.width
    return 2 * product(call.b, tokens * d, 9, 1, saved=call.b * tokens * d) + kept(4 * call.rows * d)


@formula(XCiT)
def _xcit(module: XCiT, call: Call) -> Work:
    return work(module.covariance, call) + work(module.patches, call) + kept(2 * call.rows * module.dim)


@formula(AFT)
def _aft(module: AFT, call: Call) -> Work:
    """exp(w) times keys and values, in chunks as long as the bias reaches: O(n chunk d); without one sums alone, O(n d)."""
    tokens = linear(call, module.q, module.k, module.v)
    d, size = module.dim, module.size(call.n)
    chunks, steps, bias = ceil(call.n / size), size.bit_length(), module.bias
    reach = 0 if bias is None else bias.reach
    held = call.n if reach is None else min(call.n, reach)
    tokens = tokens.holding(call.b * (held * (module.k.out_features + d) + 3 * d))
    rows = call.b * chunks * size
    if bias is None:
        return tokens + kept(6 * (steps if module.causal else 1) * rows * d)
    beside = 0 if chunks == 1 else 1 if module.causal else 2  # chunks whose keys it tells apart, besides a token's own
    rank = bias.u.shape[1] if isinstance(bias, PositionBias) else 0
    table = product(chunks * (1 + beside), size, rank, size, saved=2 * chunks * (1 + beside) * size * size)
    others = 2 * product(call.b * chunks, size, size, beside * d, saved=beside * rows * d)
    if not module.causal:
        return tokens + table + others + 2 * product(call.b * chunks, size, size, d, saved=rows * d)
    pairs = rows + rows * (size - 1) // 2  # each with itself, then halves of all sizes
    merged = product(1, 2 * rows * d * (steps - 1), 1, 1, saved=0)  # of two sums of each token, level by level
    return tokens + table + others + merged + 2 * product(pairs, 1, 1, d, saved=3 * steps * rows * d // 2)


@formula(Average)
def _average(module: Average, call: Call) -> Work:
    """A network and a gate: O(n d²)."""
    d = module.dim
    return (work(module.ffn, call) + work(module.gate, call) + kept(5 * call.rows * d)).holding(call.b * d)


@formula(AveragePool)
def _pool(module: AveragePool, call: Call) -> Work:
    """A fixed kernel of ones: O(n d window), or window² on a grid; and one more channel that counts."""
    rows, columns = module.kernel.shape[2:]
    tokens = call.n if module.width is None else ceil(call.n / module.width) * module.width
    slid = one_sided(call.b, tokens * module.dim, rows * columns, 1, saved=call.rows * module.dim)
    counted = Work(2 * tokens * rows * columns)
    return (slid + counted).holding(call.b * module.dim * min(call.n, module._needed(call.n)))


@formula(_Learned)
def _learned_taps(module: _Learned, call: Call) -> Work:
    """The same for all tokens: nothing to compute."""
    return Work()


@formula(DynamicConv)
def _dynamic_conv(module: DynamicConv, call: Call) -> Work:
    """Kernels of each token, tap by tap: O(n d (d + kernel))."""
    d, taps = module.dim, module.kernel
    layers = work(module.up, call) + work(module.taps, call) + work(module.out, call)
    slid = product(1, call.rows * d, taps, 1, saved=call.rows * (2 * d + module.heads * taps + d))
    return (layers + slid).holding(call.b * module.before * d)


@formula(GaussianWindow)
def _window(module: GaussianWindow, call: Call) -> Work:
    """Bells over the memory: O(n m (mixtures + d))."""
    mixtures = module.shape.shape.out_features // 3
    bells = kept(call.b * call.n * call.m * 3 * mixtures)
    values = product(call.b, call.n, call.m, module.dim)
    summed = product(call.b, call.n * call.m, mixtures, 1, saved=0)
    return (work(module.shape.shape, call) + values + summed + bells).holding(call.rows * module.dim)


# ---------------------------------------------------------------------------------------------- glimpses
def _laid(b: int, channels: int, patch: int, height: int, width: int) -> Work:
    """F_Yᵀ w F_X of each channel."""
    image = b * channels * (patch * width + patch * patch)
    return product(b * channels, height, patch, patch, saved=image) + product(b * channels, height, patch, width, saved=image)


@formula(GlimpseRead)
def _read(module: GlimpseRead, call: Call) -> Work:
    """Filters over rows and over columns: O(n patch d)."""
    b, d, patch, width = call.b, module.dim, module.bank.patch, module.width
    there, here = ceil(call.m / width), ceil(call.n / width)
    place = work(module.bank.place, call.of(1))
    seen = product(b * d, patch, there, width, saved=b * d * there * width) + product(b * d, patch, width, patch, saved=0)
    return place + seen + _laid(b, d, patch, here, width) + kept(call.rows * d)


@formula(GlimpseWrite)
def _write(module: GlimpseWrite, call: Call) -> Work:
    """A patch is drawn from one vector, and laid: O(n patch d)."""
    place = work(module.bank.place, call.of(1)) + work(module.draw, call.of(1))
    height = ceil(call.n / module.width)
    return place + _laid(call.b, module.dim, module.bank.patch, height, module.width) + kept(call.rows * module.dim)


# ---------------------------------------------------------------------------------------------- synthesizers
@formula(_Rows)
def _rows(module: _Rows, call: Call) -> Work:
    """A linear layer for each head, of at most m outputs."""
    _, out, width = module.weight.shape
    return product(call.b * module.heads, call.n, width, min(out, call.m), saved=call.b * module.heads * call.n * width)


@formula(Dense)
def _dense(module: Dense, call: Call) -> Work:
    """O(n d (d + length))."""
    return work(module.up, call) + work(module.down, call)


@formula(FactorisedDense)
def _factorised(module: FactorisedDense, call: Call) -> Work:
    """Two rows whose product is the row of logits: O(n d (d + √length))."""
    far = call.of(call.n, 1 << 62)
    rows = [part.weight.shape[1] * call.b * part.heads * call.n for part in (module.first, module.second)]
    return work(module.up, call) + work(module.first, far) + work(module.second, far) + kept(sum(rows))


@formula(Random)
def _random_logits(module: Random, call: Call) -> Work:
    """A table: nothing to compute.  Its softmax is kept once for all examples."""
    return kept(module.table.shape[0] * call.n * call.m)


@formula(FactorisedRandom)
def _factorised_random(module: FactorisedRandom, call: Call) -> Work:
    """Two tables: O(n² rank h), once for all examples."""
    h, _, rank = module.left.shape
    return product(h, call.n, rank, call.m, saved=h * call.n * call.m)


@formula(DotProduct)
def _dot(module: DotProduct, call: Call) -> Work:
    """The scores of plain attention: O(n² d)."""
    d = module.q.in_features
    scores = product(call.b * module.heads, call.n, d // module.heads, call.m)
    return work(module.q, call).keeping(0) + work(module.k, call).keeping(0) + scores


@formula(Synthesizer)
def _synthesizer(module: Synthesizer, call: Call) -> Work:
    """Logits, and values weighed by them: O(n² d)."""
    logits = sum((work(part, call) for part in module.parts), Work())
    bh, e = call.b * module.heads, module.dim // module.heads
    values = product(bh, call.n, call.n, e)
    more = kept(0 if module.shares is None else len(module.parts) * bh * call.n * call.n)
    keys = sum(call.rows * part.q.in_features for part in module.parts if isinstance(part, DotProduct))
    layers = work(module.v, call) + work(module.out, call)
    return (logits + values + more + layers + masked(replace(call, causal=module.causal), module.heads)).holding(
        call.rows * module.dim + keys
    )
