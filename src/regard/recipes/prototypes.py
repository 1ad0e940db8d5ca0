"""Fewer queries: those that are alike, or neighbours, ask once, or only those that stand out ask at all."""

from __future__ import annotations

from regard.attentions import (
    ImprovedClusteredAttention,
    ProbSparseAttention,
    PrototypeAttention,
    SoftmaxAttention,
)
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import FunnelMixer
from regard.query_prototypes import QueryClusters
from regard.registry import recipe


def _clusters(
    dim: int, heads: int, clusters: int, bits: int, iterations: int, seed: int
) -> QueryClusters:
    check_heads(dim, heads)
    return QueryClusters(dim // heads, clusters, bits=bits, iterations=iterations, seed=seed)


@recipe(
    "Vyas et al. 2020",
    arxiv="2007.04825",
    family="compressed",
    formula="softmax(c(Q) Kᵀ / √e) V,  c the mean of q's cluster",
    example_kwargs={"clusters": 5, "bits": 15},
)
def clustered(
    dim: int,
    heads: int,
    *,
    clusters: int = 100,
    bits: int = 63,
    iterations: int = 10,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Queries are clustered, and each cluster asks once, by its mean.

    bits         signs that a query is hashed to, by planes drawn with `seed`
    iterations   of k-means over the hashes
    """
    found = _clusters(dim, heads, clusters, bits, iterations, seed)
    return MultiHead(dim, heads, PrototypeAttention(found, SoftmaxAttention()), causal=causal)


@recipe(
    "Vyas et al. 2020",
    arxiv="2007.04825",
    family="compressed",
    formula="as clustered, but q itself weighs the top keys of its cluster",
    example_kwargs={"clusters": 5, "bits": 15, "top": 4},
)
def clustered_improved(
    dim: int,
    heads: int,
    *,
    clusters: int = 100,
    top: int = 32,
    bits: int = 63,
    iterations: int = 10,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Clustered attention, in which each query weighs anew the `top` keys that matter most to its cluster.

    bits         signs that a query is hashed to, by planes drawn with `seed`
    iterations   of k-means over the hashes
    """
    found = _clusters(dim, heads, clusters, bits, iterations, seed)
    return MultiHead(dim, heads, ImprovedClusteredAttention(found, top), causal=causal)


@recipe(
    "Zhou et al. 2021",
    arxiv="2012.07436",
    family="compressed",
    formula="softmax(q Kᵀ / √e) V for the q with largest M(q), else mean V",
    example_kwargs={"factor": 2},
)
def prob_sparse(
    dim: int, heads: int, *, factor: int = 5, seed: int = 0, causal: bool = False
) -> Mixer:
    """Informer's ProbSparseAttention attention: only the queries whose scores stand out attend; the others take the mean.

    factor   `factor` ⌈ln n⌉ queries attend, chosen by as many keys, drawn with `seed`
    """
    return MultiHead(dim, heads, ProbSparseAttention(factor=factor, seed=seed), causal=causal)


@recipe(
    "Dai et al. 2020",
    arxiv="2006.03236",
    family="compressed",
    formula="up(softmax(pool(Q) Kᵀ / √e) V)",
)
def funnel(
    dim: int, heads: int, *, stride: int = 2, cls: bool = False, causal: bool = False
) -> Mixer:
    """Funnel-Transformer: the mean of `stride` tokens asks for all of them.

    cls   the first token is not pooled
    """
    return FunnelMixer(dim, heads, stride=stride, cls=cls, causal=causal)
