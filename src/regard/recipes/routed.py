"""Sparse by content: the tokens themselves decide which pairs attend."""

from __future__ import annotations

from math import ceil

from regard.attentions import (
    LSHAttention,
    MaterializedAttention,
    RoutedAttention,
    SharedQKRoutedAttention,
)
from regard.attentions.materialized import TopK
from regard.errors import check_int
from regard.mixer import Attention, Mixer
from regard.mixers import Sinkhorn
from regard.registry import recipe
from regard.route import AngularHash, BlockSort, KMeans


@recipe(
    "Kitaev et al. 2020",
    arxiv="2001.04451",
    family="routed",
    formula="softmax over j ≠ i with h_r(q_j) = h_r(q_i) for some r, within reach; "
    "k_j = q_j / |q_j|",
    example_kwargs={"buckets": 4, "chunk": 3, "rounds": 2},
)
def reformer(
    heads: int,
    head_dim: int,
    *,
    buckets: int = 64,
    chunk: int = 64,
    rounds: int = 4,
    same_bucket: bool = True,
    once: bool = True,
    seed: int = 0,
) -> Attention:
    """Reformer: locality-sensitive hashing; tokens attend to tokens in the same hash bucket, in one
    of several rounds.

    Keys are the normalised queries. Tokens are sorted by bucket and cut into chunks; each chunk
    attends to itself and the one before it. If causal, chunks are counted within each bucket, so
    that later tokens cannot move their borders.

    Args:
        buckets: Hash buckets per round, even.
        chunk: Tokens per chunk.
        rounds: Hash rounds.
        same_bucket: If False, tokens of other buckets in these chunks are visible too, as in most
            implementations.
        once: If False, a key that is met in several rounds counts several times, as in most
            implementations.
        seed: Seed of the hashes.
    """
    hashing = AngularHash(heads, head_dim, buckets=buckets, rounds=rounds, seed=seed)
    return LSHAttention(hashing, chunk=chunk, same_bucket=same_bucket, once=once)


@recipe(
    "Roy et al. 2020",
    arxiv="2003.05997",
    family="routed",
    formula="softmax over the ⌈n/c⌉ keys nearest to a centroid that took i",
    example_kwargs={"clusters": 4},
)
def routing(
    heads: int,
    head_dim: int,
    *,
    clusters: int = 16,
    decay: float = 0.999,
    shared: bool = False,
    local_heads: int = 0,
    window: int = 128,
    seed: int = 0,
) -> Attention:
    """Routing Transformer: k-means centroids; each takes the same number of nearest queries and
    keys, which attend.

    Args:
        clusters: Number of centroids.
        decay: Decay of the moving average by which centroids follow the tokens in training.
        shared: Use the queries as keys, as in the paper's autoregressive models.
        local_heads: Heads that attend to a window instead; half of all heads in most of the
            paper's models.
        window: Tokens on each side that local heads attend to (±window).
        seed: Seed of the centroids.
    """
    check_int(0, heads - 1, local_heads=local_heads)
    routed = heads - local_heads
    route = KMeans(routed, head_dim, clusters=clusters, decay=decay, shared=shared, seed=seed)
    kind = SharedQKRoutedAttention if shared else RoutedAttention
    return kind(route, normalize=True, local_heads=local_heads, window=window)


@recipe(
    "Tay et al. 2020",
    arxiv="2002.11296",
    family="routed",
    formula="softmax over i's block and block i of S K, S = Sinkhorn(R)",
    example_kwargs={"length": 32, "block": 4},
)
def sinkhorn(
    dim: int,
    heads: int,
    *,
    length: int,
    block: int = 64,
    cut: int | None = None,
    iterations: int = 5,
    temperature: float = 0.75,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Sparse Sinkhorn attention: each block attends to itself and to the block that a learned
    sorting matches with it.

    Args:
        length: Maximum length, rounded up to whole blocks.
        block: Block size.
        cut: SortCut: all tokens attend to the first `cut` sorted blocks only. Default: off.
        iterations: Sinkhorn iterations.
        temperature: Temperature of the sorting.
        seed: Seed of the Gumbel noise in training.
    """
    check_int(1, length=length, block=block)
    sort = BlockSort(
        dim,
        heads,
        blocks=ceil(length / block),
        iterations=iterations,
        temperature=temperature,
        seed=seed,
        causal=causal,
    )
    return Sinkhorn(dim, heads, sort, block=block, cut=cut, causal=causal)


@recipe(
    "Zhao et al. 2019",
    arxiv="1912.11637",
    family="routed",
    formula="softmax over the k largest of q_i·k_j / √e",
    example_kwargs={"k": 4},
)
def top_k(heads: int, head_dim: int, *, k: int = 8) -> Attention:
    """Top-k attention: each query keeps its `k` largest scores, and those equal to the smallest of
    them.

    Args:
        k: Keys per query.
    """
    return MaterializedAttention(normalize=TopK(k))
