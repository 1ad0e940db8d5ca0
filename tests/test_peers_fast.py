"""Parity with pytorch-fast-transformers, the reference of linear and of clustered attention: the
same queries, keys and values.

It must be built from source, for a quarter of an hour, so that it is not among what `make peers`
installs; CONTRIBUTING.md has the command.  Its compiled parts know float32 alone: what uses them is
compared in it, the rest in float64.
"""

from functools import partial

import pytest
import torch

import regard
from regard import Band, LinearAttention, SoftmaxAttention
from regard.attentions import ImprovedClusteredAttention, LSHAttention, PrototypeAttention
from regard.query_prototypes import QueryClusters
from regard.route import AngularHash

pytest.importorskip(
    "fast_transformers.attention",
    reason="pytorch-fast-transformers is not built: see CONTRIBUTING.md",
    exc_type=ImportError,
)
from fast_transformers import attention as peer
from fast_transformers.attention import (
    clustered_attention,
    improved_clustered_attention,
    reformer_attention,
)
from fast_transformers.clustering.hamming import cluster
from fast_transformers.hashing import compute_hashes
from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

B, HEADS, WIDTH = 2, 3, 8


def heads(n, dtype=torch.float64, m=None):
    """Queries of n tokens, keys and values of m."""
    sizes = (n, m or n, m or n)
    return [
        torch.randn(
            B, HEADS, size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
        ).to(dtype)
        for i, size in enumerate(sizes)
    ]


def theirs(attention, causal=False, lengths=None):
    """The peer as a function of heads (b h n e); lengths: of the keys of each example."""

    def call(q, k, v):
        n, m = q.shape[2], k.shape[2]
        seen = TriangularCausalMask(n) if causal else FullMask(n, m)
        keys = LengthMask(torch.full((B,), m) if lengths is None else lengths, max_len=m)
        parts = [t.transpose(1, 2) for t in (q, k, v)]
        return attention(*parts, seen, LengthMask(torch.full((B,), n)), keys).transpose(1, 2)

    return call


def ours(attention, causal=False, lengths=None):
    def call(q, k, v):
        mask = None if lengths is None else torch.arange(k.shape[2]) < lengths[:, None]
        return attention(q, k, v, causal=causal, mask=mask)[0]

    return call


def agree(mine, other, parts, atol, of=(0, 1, 2)):
    """Outputs and the gradients of queries, keys and values."""
    found = []
    for f in (mine, other):
        leaves = [t.clone().requires_grad_() for t in parts]
        y = f(*leaves)
        weight = torch.randn(
            y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
        ).to(y.dtype)
        grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
        found.append([y, *(grads[i] for i in of)])
    assert found[1][0].abs().max() > 0.01
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=atol)


# ----------------------------------------------------------------------------------------- linear
@pytest.mark.parametrize(("n", "m"), [(1, 1), (37, 37), (20, 90)])
@pytest.mark.parametrize("masked", [False, True])
def test_linear(n, m, masked):
    """Fails if linear attention without their 1e-6 below the fraction is another, with padding or
    across sequences.
    """
    lengths = torch.tensor([m, max(1, m // 2)]) if masked else None
    agree(
        ours(LinearAttention(), lengths=lengths),
        theirs(peer.LinearAttention(WIDTH, eps=0.0), lengths=lengths),
        heads(n, m=m),
        1e-12,
    )


@pytest.mark.parametrize("n", [1, 64, 100, 333])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_linear(n, masked):
    """Fails if our chunks are not their loop over tokens; gradients too."""
    lengths = torch.tensor([n, max(1, n // 2)]) if masked else None
    other = theirs(peer.CausalLinearAttention(WIDTH, eps=0.0), causal=True, lengths=lengths)
    agree(
        ours(LinearAttention(), causal=True, lengths=lengths), other, heads(n, torch.float32), 2e-5
    )


def test_causal_linear_as_an_oracle_of_digits():
    """Fails if, of 5,000 tokens, our float32 is further from float64 than theirs."""
    parts = heads(5000)
    exact = ours(LinearAttention(), causal=True)(*parts)
    single = [t.float() for t in parts]
    mine, other = (
        f(*single)
        for f in (
            ours(LinearAttention(), causal=True),
            theirs(peer.CausalLinearAttention(WIDTH), causal=True),
        )
    )
    assert (mine - exact).abs().max() < 1.5 * (other - exact).abs().max() < 1e-4


# -------------------------------------------------------------------------------------- clustered
def given(monkeypatch, module, clusters):
    """The peer draws its planes and first centres anew at each call; it is given our groups
    instead.
    """
    grouped = {}

    def assign(hashes, lengths, *, clusters, **_):
        groups = grouped["now"].int()
        counts = torch.zeros(*groups.shape[:2], clusters, dtype=torch.int64).scatter_add(
            2, groups.long(), torch.ones_like(groups).long()
        )
        return groups, counts.int()

    monkeypatch.setattr(module, "cluster", assign)

    def take(f):
        def call(q, k, v):
            grouped["now"] = clusters.assign(q, None)
            return f(q, k, v)

        return call

    return take


@pytest.mark.parametrize("masked", [False, True])
def test_clustered(masked, monkeypatch):
    """Fails if, in the same clusters, the mean of the queries does not ask, or its answer does not
    come back to all of them.
    """
    clusters = QueryClusters(WIDTH, 6)
    lengths = torch.tensor([50, 31]) if masked else None
    other = theirs(peer.ClusteredAttention(6, attention_dropout=0.0), lengths=lengths)
    take = given(monkeypatch, clustered_attention, clusters)
    agree(
        ours(PrototypeAttention(clusters, SoftmaxAttention()), lengths=lengths),
        take(other),
        heads(70, torch.float32, 50),
        1e-5,
    )


def test_improved_clustered(monkeypatch):
    """Fails if the keys that matter are weighed otherwise.

    Of gradients those of the values are compared: the peer passes none through the share that these
    keys have of a cluster's attention.
    """
    clusters = QueryClusters(WIDTH, 6)
    other = theirs(peer.ImprovedClusteredAttention(6, topk=9, attention_dropout=0.0))
    take = given(monkeypatch, improved_clustered_attention, clusters)
    agree(
        ours(ImprovedClusteredAttention(clusters, 9)),
        take(other),
        heads(70, torch.float32),
        1e-5,
        of=(2,),
    )


def test_clusters_are_as_tight():
    """Fails if, from the same signs and first centres, our k-means leaves queries further from
    their centre than theirs does. Not the groups themselves: ties between centres, and bits without
    a majority, are settled otherwise.
    """
    clusters = QueryClusters(WIDTH, 10, bits=31)
    q, _, _ = heads(400, torch.float32)
    planes = torch.cat((clusters.planes, torch.zeros(31, 1)), 1)
    hashes = compute_hashes(q.reshape(-1, WIDTH).contiguous(), planes).view(B, HEADS, 400)
    centres = hashes[:, :, torch.arange(10) * 40].contiguous()
    lengths = torch.full((B,), 400, dtype=torch.int32)
    groups, _ = cluster(hashes, lengths, centroids=centres, iterations=10, bits=31)
    signs = (q @ clusters.planes.T >= 0).float()
    spread = [_spread(signs, index.long()) for index in (clusters.assign(q, None), groups)]
    one = _spread(signs, torch.zeros_like(groups).long())
    assert spread[0] < 1.02 * spread[1] < 0.9 * one


def _spread(signs, index):
    """The mean distance of a query's bits to the majority of its cluster."""
    shape = (*index.shape[:2], 10, signs.shape[-1])
    votes = torch.zeros(shape).scatter_add(2, index[..., None].expand_as(signs), 2 * signs - 1)
    majority = (votes > 0).float().gather(2, index[..., None].expand_as(signs))
    return (signs - majority).abs().sum(-1).mean()


# ----------------------------------------------------------------------------------------- others
@pytest.mark.parametrize("causal", [False, True])
def test_exact_topk(causal):
    """Fails if the softmax is over other keys than the k largest."""
    mixer = regard.create("top_k", dim=HEADS * WIDTH, heads=HEADS, k=5, causal=causal)
    agree(
        ours(mixer.inner, causal),
        theirs(peer.ExactTopKAttention(5, attention_dropout=0.0), causal),
        heads(40),
        1e-9,
    )


@pytest.mark.parametrize("context", [1, 7, 31])
@pytest.mark.parametrize("causal", [False, True])
def test_local(context, causal):
    """Fails if the window, of odd width around the query, is another."""
    side = context // 2
    pattern = Band(side, side) & regard.Causal() if causal else Band(side, side)
    other = theirs(peer.LocalAttention(context, attention_dropout=0.0), causal)
    agree(
        lambda q, k, v: regard.attend(q, k, v, pattern=pattern),
        other,
        heads(64, torch.float32),
        1e-5,
    )


def test_reformer(monkeypatch):
    """Fails if one round of LSH attention, over sorted chunks that see other buckets too, is
    another.  Of one round: they give every round the same weight, where the paper goes by its
    log-sum-exp.
    """
    monkeypatch.setattr(reformer_attention.torch, "argsort", partial(torch.argsort, stable=True))
    attention = peer.ReformerAttention(
        chunk_size=8, bits=4, rounds=1, masked=True, attention_dropout=0.0
    )
    hashing = AngularHash(HEADS, WIDTH, buckets=8, rounds=1).double()
    torch.manual_seed(5)
    planes = torch.randn(4, WIDTH, dtype=torch.float64)
    hashing.rotations.copy_(planes.T.expand(HEADS, 1, WIDTH, 4))
    mine = LSHAttention(hashing, chunk=8, same_bucket=False, once=False)

    def drawn(q, k, v):
        torch.manual_seed(5)
        return theirs(attention)(q, q, v)

    agree(lambda q, k, v: ours(mine)(q, q, v), drawn, heads(64), 1e-9, of=(0, 2))
