"""Fewer queries: clusters or neighbours share one, or only the most informative ones attend."""

from __future__ import annotations

from regard.attentions import (
    ImprovedClusteredAttention,
    ProbSparseAttention,
    PrototypeAttention,
    SoftmaxAttention,
)
from regard.mixer import Attention, Mixer
from regard.mixers import FunnelMixer
from regard.query_prototypes import QueryClusters
from regard.registry import recipe


@recipe(
    "Vyas et al. 2020",
    arxiv="2007.04825",
    family="compressed",
    formula="softmax(c(Q) Kᵀ / √e) V,  c the mean of q's cluster",
    example_kwargs={"clusters": 5, "bits": 15},
)
def clustered(
    heads: int,
    head_dim: int,
    *,
    clusters: int = 100,
    bits: int = 63,
    iterations: int = 10,
    seed: int = 0,
) -> Attention:
    """Clustered attention: queries are clustered, and the mean of each cluster attends for all of
    them.

    Args:
        clusters: Number of clusters.
        bits: Hash bits per query.
        iterations: Iterations of k-means over the hashes.
        seed: Seed of the hash planes.
    """
    queries = QueryClusters(head_dim, clusters, bits=bits, iterations=iterations, seed=seed)
    return PrototypeAttention(queries, SoftmaxAttention())


@recipe(
    "Vyas et al. 2020",
    arxiv="2007.04825",
    family="compressed",
    formula="as clustered, but q itself weighs the top keys of its cluster",
    example_kwargs={"clusters": 5, "bits": 15, "top": 4},
)
def clustered_improved(
    heads: int,
    head_dim: int,
    *,
    clusters: int = 100,
    top: int = 32,
    bits: int = 63,
    iterations: int = 10,
    seed: int = 0,
) -> Attention:
    """Improved clustered attention: each query recomputes the weights of the top keys of its
    cluster.

    Args:
        clusters: Number of clusters.
        top: Keys per cluster that are recomputed.
        bits: Hash bits per query.
        iterations: Iterations of k-means over the hashes.
        seed: Seed of the hash planes.
    """
    queries = QueryClusters(head_dim, clusters, bits=bits, iterations=iterations, seed=seed)
    return ImprovedClusteredAttention(queries, top)


@recipe(
    "Zhou et al. 2021",
    arxiv="2012.07436",
    family="compressed",
    formula="softmax(q Kᵀ / √e) V for the q with largest M(q), else mean V",
    example_kwargs={"factor": 2},
)
def prob_sparse(heads: int, head_dim: int, *, factor: int = 5, seed: int = 0) -> Attention:
    """Informer's ProbSparse attention: only the queries with the most uneven scores attend; the
    others take the mean.

    Args:
        factor: `factor` ⌈ln n⌉ queries attend, selected with as many sampled keys.
        seed: Seed of the sample.
    """
    return ProbSparseAttention(factor=factor, seed=seed)


@recipe(
    "Dai et al. 2020",
    arxiv="2006.03236",
    family="compressed",
    formula="up(softmax(pool(Q) Kᵀ / √e) V)",
)
def funnel(
    dim: int, heads: int, *, stride: int = 2, cls: bool = False, causal: bool = False
) -> Mixer:
    """Funnel-Transformer: queries are mean-pooled over `stride` tokens, and the outputs repeated.

    Args:
        stride: Tokens per query.
        cls: Keep the first token unpooled.
    """
    return FunnelMixer(dim, heads, stride=stride, cls=cls, causal=causal)
