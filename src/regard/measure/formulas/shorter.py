"""Attentions that are cheaper since queries or keys were made fewer, or sorted into groups."""

from __future__ import annotations

from math import ceil, exp, log, sqrt

from regard.attentions import (
    BlockCompressedAttention,
    CompressedAttention,
    ImprovedClusteredAttention,
    LSHAttention,
    NystromAttention,
    ProbSparseAttention,
    PrototypeAttention,
    RoutedAttention,
)
from regard.attentions.clustered import TILE
from regard.attentions.prob_sparse import MAX_KEYS_PER_SAMPLE
from regard.compression import ConvCompression, LengthProjection, MeanCompression
from regard.measure.formulas.softmax import over_pairs, short
from regard.measure.work import CallShape, ModuleCost, blind, formula, kept, module_cost, product
from regard.query_prototypes import QueryClusters
from regard.route import KMeans


@formula(LengthProjection)
def _projected(module: LengthProjection, call: CallShape) -> ModuleCost:
    """E k and F v: O(n rank d)."""
    keys, values = (call.bh * call.m * width for width in (call.e, call.f))
    projected = product(call.bh, module.rank, call.m, call.e, saved=keys)
    return projected + product(call.bh, module.rank, call.m, call.f, saved=values)


@formula(CompressedAttention)
def _compressed(module: CompressedAttention, call: CallShape) -> ModuleCost:
    """Linformer: O(n rank d)."""
    rank = module.compression.rank if isinstance(module.compression, LengthProjection) else call.m
    return module_cost(module.compression, call) + module_cost(module.inner, call.of(call.n, rank))


@formula(ConvCompression)
def _convolved(module: ConvCompression, call: CallShape) -> ModuleCost:
    """Each block of a head by a matrix: O(n d e), for keys and for values."""
    blocks = ceil(call.m / module.stride)
    each = product(
        call.bh,
        blocks,
        module.kernel * call.e,
        call.e,
        saved=call.bh * blocks * (module.kernel + 1) * call.e,
    )
    return each * 2


@formula(MeanCompression)
def _mean(module: MeanCompression, call: CallShape) -> ModuleCost:
    """Sums, element by element."""
    return ModuleCost()


@formula(BlockCompressedAttention)
def _strided(module: BlockCompressedAttention, call: CallShape) -> ModuleCost:
    """Blocks, and attention to them: O(n² d / stride), or O(n window d / stride)."""
    blocks = ceil(call.m / module.blocks.stride)
    keys = blocks + (module.null is not None)
    inside = over_pairs(module._pattern(call.causal), call.of(call.n, keys))
    kept_blocks = min(
        keys, ceil(module.window / module.blocks.stride) if module.window is not None else keys
    )
    state = (
        call.b
        * call.h
        * (call.e + call.f)
        * (kept_blocks + module.blocks.kernel - module.blocks.stride)
    )
    return (module_cost(module.blocks, call) + inside).holding(state)


@formula(NystromAttention)
def _nystrom(module: NystromAttention, call: CallShape) -> ModuleCost:
    """Landmarks between: O(n landmarks d), and a pseudo-inverse O(landmarks³) of each head."""
    bh, p, q = call.bh, min(module.landmarks, call.n), min(module.landmarks, call.m)
    conv = ModuleCost()
    if module.conv is not None:
        conv = product(
            call.b,
            call.h * call.n * call.f,
            module.conv.kernel_size[0],
            1,
            saved=bh * call.n * call.f,
        )
    if call.n <= module.landmarks:
        return short(call, call.n, call.m) + conv
    between = over_pairs_of(call, p, q, q)
    asked, answer = short(call, p, call.m), short(call, call.n, q)
    steps = product(bh, p, q, p) + 2 * product(bh, p, p, p) + product(bh, q, p, p)
    inverse = steps * module.iterations + product(bh, q, p, call.f)
    return between + asked + inverse + answer + conv


def over_pairs_of(call: CallShape, n: int, m: int, f: int) -> ModuleCost:
    """Attention of n to m with values of width f."""
    return short(CallShape(call.b, n, m, call.h, call.e, f), n, m)


def _assigned(clusters: QueryClusters, call: CallShape) -> ModuleCost:
    """Hash, and Lloyd's algorithm on the bits: O(n clusters bits), without gradients."""
    bits, width = clusters.planes.shape
    rounds = clusters.iterations + 1
    return blind(2 * call.bh * call.n * bits * (width + rounds * clusters.clusters))


@formula(PrototypeAttention)
def _prototype(module: PrototypeAttention, call: CallShape) -> ModuleCost:
    """A cluster asks once: O(clusters n d)."""
    assert isinstance(module.query, QueryClusters)
    return _assigned(module.query, call) + module_cost(
        module.inner, call.of(module.query.clusters, call.m)
    )


@formula(ImprovedClusteredAttention)
def _improved(module: ImprovedClusteredAttention, call: CallShape) -> ModuleCost:
    """Clusters ask, and each query asks the `top` keys anew: O((clusters + top) n d)."""
    clusters, top = module.clusters.clusters, min(module.top, call.m)
    shared = product(call.bh, clusters, call.e, call.m) + product(call.bh, clusters, call.m, call.f)
    tiles = call.bh * (
        call.n // TILE + min(clusters, call.n)
    )  # of queries of one cluster, the last of each not full
    own = product(tiles, TILE, call.e, top) + product(tiles, TILE, top, call.f)
    return _assigned(module.clusters, call) + shared + own + kept(3 * call.bh * call.n * top)


@formula(ProbSparseAttention)
def _prob_sparse(module: ProbSparseAttention, call: CallShape) -> ModuleCost:
    """factor ⌈ln n⌉ keys are drawn for each query, and as many queries attend: O(n ln n d).  Of few keys all are scored."""
    drawn, asking = (min(max(1, module.factor * ceil(log(r))), r) for r in (call.m, call.n))
    indices = 2 * call.bh * asking * (call.e + 2 * call.f)
    scored = call.m if call.m <= MAX_KEYS_PER_SAMPLE * drawn else drawn
    return (
        blind(2 * call.bh * call.n * scored * call.e) + short(call, asking, call.m) + kept(indices)
    )


def grouped(call: CallShape, groups: int, s: int, t: int, *, masked: bool) -> ModuleCost:
    """Attention of s queries to t keys in each of so many groups.  Kept are who they are and what hides pairs, not scores."""
    pairs = product(call.bh * groups, s, call.e, t, saved=0) + product(
        call.bh * groups, s, t, call.f, saved=0
    )
    numbers = 2 * (s + t) + (s * t if masked else 0)
    return pairs + kept(
        call.bh * groups * numbers + call.bh * (call.n + call.m) * (call.e + call.f)
    )


@formula(RoutedAttention)
def _routed(module: RoutedAttention, call: CallShape) -> ModuleCost:
    """Each cluster takes its n / clusters nearest tokens: O(n² d / clusters + n clusters d)."""
    assert isinstance(module.route, KMeans)
    clusters, shared = module.route.clusters, module.route.shared
    passes = (1 if shared else 2) * (
        2 if module.training else 1
    )  # centroids follow the tokens while training
    size = ceil(call.n / clusters)
    return blind(2 * call.bh * clusters * call.n * call.e * passes) + grouped(
        call, clusters, size, size, masked=call.causal
    )


def _chunks_in_buckets(n: int, buckets: int, chunk: int) -> int:
    """Σ ⌈tokens / chunk⌉ over buckets, for tokens that fall evenly: Σ_j P(more than j chunks), of a Poisson number."""
    mean = n / buckets
    if mean > 500:  # far from the first chunk, half of the last one is empty in the mean
        return ceil(n / chunk + buckets / 2)
    below, term, expected = 0.0, exp(-mean), 0.0
    for tokens in range(ceil(mean + 12 * sqrt(mean) + 12)):
        below += term
        expected += 1 - below if tokens % chunk == 0 else 0.0
        term *= mean / (tokens + 1)
    return ceil(buckets * expected)


@formula(LSHAttention)
def _hashed(module: LSHAttention, call: CallShape) -> ModuleCost:
    """In each round each chunk looks at itself and at the one before: O(n chunk rounds d).

    Causal, chunks are counted inside each bucket, and how many there are depends on the tokens.
    """
    rounds, buckets, chunk = module.hashing.rounds, module.hashing.buckets, module.chunk
    hashing = blind(call.bh * rounds * call.n * call.e * buckets)
    chunks = _chunks_in_buckets(call.n, buckets, chunk) if call.causal else ceil(call.n / chunk)
    state = call.b * call.h * (call.e + call.f) * min(call.n, 2 * chunk * buckets * rounds)
    return (hashing + grouped(call, rounds * chunks, chunk, 2 * chunk, masked=True)).holding(state)
