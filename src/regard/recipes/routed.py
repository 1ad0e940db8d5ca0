"""Sparse by content: who may look at whom is decided by what the tokens say."""

from __future__ import annotations

from math import ceil

from regard.attentions import LSHAttention, MaterializedAttention, RoutedAttention
from regard.errors import check_int
from regard.mixer import Mixer, MultiHead, check_heads
from regard.mixers import Sinkhorn
from regard.registry import recipe
from regard.route import AngularHash, BlockSort, KMeans
from regard.score_weights import TopK


@recipe(
    "Kitaev et al. 2020",
    arxiv="2001.04451",
    family="routed",
    formula="softmax over j ≠ i with h_r(q_j) = h_r(q_i) for some r, within reach; k_j = q_j / |q_j|",
    example_kwargs={"buckets": 4, "chunk": 3, "rounds": 2},
)
def reformer(
    dim: int,
    heads: int,
    *,
    buckets: int = 64,
    chunk: int = 64,
    rounds: int = 4,
    same_bucket: bool = True,
    once: bool = True,
    scale: float | None = None,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Reformer: tokens see those that fall into the same bucket of a hash, in one of several rounds.

    Keys are the queries, made of length one.  Tokens are sorted by bucket and cut into chunks of `chunk`, each of which sees
    itself and the chunk before it.  Causal, chunks are counted inside each bucket, so that no later token moves their borders.

    buckets      of a round, an even number; whatever the length
    same_bucket  False: tokens of other buckets in those chunks are seen too, as in most implementations
    once         False: a key that is met in several rounds counts so many times, as in most implementations
    scale        of the scores, 1/√e unless given
    """
    check_heads(dim, heads)
    hashing = AngularHash(heads, dim // heads, buckets=buckets, rounds=rounds, seed=seed)
    return MultiHead(
        dim,
        heads,
        LSHAttention(hashing, chunk=chunk, same_bucket=same_bucket, once=once, scale=scale),
        causal=causal,
    )


@recipe(
    "Roy et al. 2020",
    arxiv="2003.05997",
    family="routed",
    formula="softmax over the ⌈n/c⌉ keys nearest to a centroid that took i",
    example_kwargs={"clusters": 4},
)
def routing(
    dim: int,
    heads: int,
    *,
    clusters: int = 16,
    decay: float = 0.999,
    shared: bool = False,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Routing Transformer: each of `clusters` centroids takes the queries and keys nearest to it, the same number for all.

    Centroids follow the tokens while training, by a moving average with `decay`.

    shared   keys are the queries, as in the left-to-right form of the paper
    """
    check_heads(dim, heads)
    route = KMeans(heads, dim // heads, clusters=clusters, decay=decay, shared=shared, seed=seed)
    return MultiHead(
        dim, heads, RoutedAttention(route, shared_qk=shared, level=True), causal=causal
    )


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
    """Sparse Sinkhorn attention: each block sees itself, and the block that a learned sorting puts in its place.

    length   the longest sequence, rounded up to whole blocks
    cut      SortCut: all tokens see the first `cut` sorted blocks, and nothing else
    seed     of the Gumbel noise, which is drawn while training only
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
def top_k(dim: int, heads: int, *, k: int = 8, causal: bool = False) -> Mixer:
    """Each query keeps the keys with its `k` highest scores, and those that equal the last of them."""
    return MultiHead(dim, heads, MaterializedAttention(normalize=TopK(k)), causal=causal)


if __name__ == "__main__":
    from regard.show import draw_family

    draw_family("D")
