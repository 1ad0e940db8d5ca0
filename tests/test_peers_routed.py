"""Parity with packages that people use, by copied weights: outputs and gradients, in float64.

Where a peer leaves the paper, it is set to what the paper says; where it cannot be, the places that
agree are compared.
"""

import pytest
import torch
import torch.nn.functional as F

from peers import agree, copied
from regard import Chunks, MultiHead, RoutedAttention, SoftmaxAttention
from regard.attentions import LSHAttention
from regard.registry import create
from regard.route import AngularHash, KMeans
from regard.route.lsh import chunk_by_sorted_bucket
from regard.route.sort import sinkhorn

TOLERANCE = 1e-9


# --------------------------------------------------------------------------------------- Reformer
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("once", [True, False])
def test_reformer_pytorch(rounds, once, rand):
    """Fails if LSH attention with the masks of the paper is another: same buckets only, itself
    last, keys once or not.
    """
    peer = pytest.importorskip("reformer_pytorch")
    n, dim, heads, chunk = 48, 16, 2, 6
    buckets = n // chunk
    theirs = peer.LSHSelfAttention(
        dim,
        heads=heads,
        bucket_size=chunk,
        n_hashes=rounds,
        attend_across_buckets=False,
        allow_duplicate_attention=not once,
    )
    theirs = theirs.double().eval()
    ours = create(
        "reformer", dim=dim, heads=heads, buckets=buckets, chunk=chunk, rounds=rounds, once=once
    ).double()
    torch.manual_seed(7)  # the peer draws its rotations at each call
    ours.inner.hashing.rotations.copy_(
        torch.randn(1, dim // heads, rounds, buckets // 2, dtype=torch.float64)[0].transpose(0, 1)
    )

    def drawn(x):
        torch.manual_seed(7)
        return theirs(x) - theirs.to_out.bias

    pairs = [(ours.q, theirs.toqk), (ours.v, theirs.tov), (ours.out, theirs.to_out)]
    agree(
        ours, drawn, rand(2, n, dim), copied([(a.weight, b.weight) for a, b in pairs]), atol=1e-7
    )  # it adds 1e-9 to counts


def hugging_face(rounds, causal, kind="lsh"):
    """The bare attention layer, and ours beside it."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.reformer import modeling_reformer as modeling

    config = transformers.ReformerConfig(
        attn_layers=[kind],
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        num_hashes=rounds,
        num_buckets=8,
        lsh_attn_chunk_length=6,
        local_attn_chunk_length=6,
        is_decoder=causal,
        hash_seed=5,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    )
    if kind == "local":
        return modeling.LocalSelfAttention(config).double()
    layer = modeling.LSHSelfAttention(config).double()
    layer._len_norm = lambda x: type(layer)._len_norm(layer, x, epsilon=0.0)
    hashing = AngularHash(2, 8, buckets=8, rounds=rounds).double()
    torch.manual_seed(5)
    hashing.rotations.copy_(torch.randn(2, 8, rounds, 4, dtype=torch.float64).transpose(1, 2))
    attention = LSHAttention(hashing, chunk=6, same_bucket=causal, once=False, scale=1.0)
    return layer, MultiHead(16, 2, attention, causal=causal).double()


@pytest.mark.parametrize("rounds", [1, 2])
def test_hugging_face_lsh(rounds, rand):
    """Fails if chunks that see other buckets too, and count keys in each round, are others.

    The peer lets the first chunk of a round see the last chunk of another round, so its tokens are
    left out.
    """
    theirs, ours = hugging_face(rounds, causal=False)
    pairs = copied([(ours.q.weight, theirs.query_key.weight), (ours.v.weight, theirs.value.weight)])
    ours.out.weight.data = torch.eye(16, dtype=torch.float64)
    x = rand(2, 48, 16)
    bucket = ours.inner.hashing(ours.project(x, None)[0])
    first = (
        chunk_by_sorted_bucket(bucket, None, buckets=8, chunk=6, same_bucket=False)
        .chunks[:, :, :, 0]
        .flatten(1)
    )
    rows = torch.ones(2, 48, dtype=torch.float64).scatter(1, first, 0)
    assert rows.sum() > 20
    agree(ours, lambda t: theirs(t).hidden_states, x, pairs, rows=rows)


@pytest.mark.parametrize("rounds", [1, 2])
def test_hugging_face_lsh_decoder_in_one_bucket(rounds, rand):
    """Fails if the causal forms differ where they can agree: with all tokens in one bucket, no
    later one moves a border.
    """
    theirs, ours = hugging_face(rounds, causal=True)
    x = rand(2, 48, 16) * 0.1 + rand(16) * 3
    with torch.no_grad():
        ours.q.weight.copy_(torch.eye(16))
        theirs.query_key.weight.copy_(torch.eye(16))
    pairs = [
        (ours.q.weight, theirs.query_key.weight),
        *copied([(ours.v.weight, theirs.value.weight)]),
    ]
    ours.out.weight.data = torch.eye(16, dtype=torch.float64)
    bucket = ours.inner.hashing(ours.project(x, None)[0])
    assert (bucket == bucket[..., :1]).all()
    agree(ours, lambda t: theirs(t).hidden_states, x, pairs)


def test_hugging_face_local(rand):
    """Fails if the local layers between Reformer's LSH layers are not a pattern of chunks that see
    the chunk before.
    """
    theirs = hugging_face(1, causal=True, kind="local")
    ours = MultiHead(16, 2, SoftmaxAttention(Chunks(6, back=1)), causal=True).double()
    ours.out.weight.data = torch.eye(16, dtype=torch.float64)
    pairs = copied(
        [
            (ours.q.weight, theirs.query.weight),
            (ours.k.weight, theirs.key.weight),
            (ours.v.weight, theirs.value.weight),
        ]
    )
    agree(ours, lambda t: theirs(t).hidden_states, rand(2, 48, 16), pairs)


# ---------------------------------------------------------------------------- Routing Transformer
def routing_pair(rand):
    """The peer with 6 clusters of 8 tokens, and ours with its centroids; neither has the paper's
    layer norm.
    """
    peer = pytest.importorskip("routing_transformer.routing_transformer")
    theirs = peer.SelfAttention(16, 1, 48, 2, 0, 8, rel_pos_emb=False).double()
    ours = MultiHead(16, 2, RoutedAttention(KMeans(2, 8, clusters=6))).double()
    kmeans = theirs.global_attn.kmeans
    kmeans.means.copy_(F.normalize(rand(2, 6, 8), dim=-1))
    kmeans.initted.fill_(True)
    ours.inner.route.centroids.copy_(kmeans.means)
    names = (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("out", "to_out"))
    return (
        theirs,
        ours,
        copied([(getattr(ours, a).weight, getattr(theirs, b).weight) for a, b in names]),
    )


def test_routing_transformer(rand):
    """Fails if clusters take other tokens, or attend otherwise.

    The peer takes the mean over the clusters of a query where we weigh them, so queries in several
    are left out.  It divides by 1 + 1e-5.
    """
    theirs, ours, pairs = routing_pair(rand)
    ours, theirs, x = ours.eval(), theirs.eval(), rand(2, 48, 16)
    q, k, _ = ours.project(x, None)
    taken = ours.inner.route(q, k, None)[0].q.flatten(2)
    counts = torch.zeros(2, 2, 48, dtype=torch.long).scatter_add(2, taken, torch.ones_like(taken))
    rows = (counts.amax(1) <= 1).double()
    assert rows.sum() > 20 and (counts == 0).any()
    agree(ours, lambda t: theirs(t)[0] * (1 + 1e-5), x, pairs, rows=rows)


def test_routing_transformer_moves_its_centroids_alike(rand):
    """Fails if the moving average is another; ours are then made of length one."""
    theirs, ours, _ = routing_pair(rand)
    for _ in range(3):
        x = rand(2, 48, 16)
        before = ours.inner.route.centroids.clone()
        ours(x)
        theirs.global_attn.kmeans.means.copy_(before)
        theirs(x)
        theirs.global_attn.kmeans.update()
        want = F.normalize(theirs.global_attn.kmeans.means, dim=-1)
        torch.testing.assert_close(ours.inner.route.centroids, want, rtol=0, atol=TOLERANCE)
        assert not torch.equal(before, ours.inner.route.centroids)


# --------------------------------------------------------------------------------------- Sinkhorn
def test_sinkhorn_operator(rand):
    """Fails if rows and columns are balanced otherwise."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    logits, weight = rand(3, 7, 7), rand(3, 7, 7)
    everything = torch.ones(3, 7, 7, dtype=torch.bool)
    results = []
    for f in (lambda r: sinkhorn(r, everything, 5), lambda r: peer.sinkhorn_sorting_operator(r, 5)):
        leaf = logits.clone().requires_grad_()
        results.append((f(leaf), torch.autograd.grad((f(leaf) * weight).sum(), leaf)[0]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def sinkhorn_pair(cut, block, their_block):
    """The peer with our sort network: its own is another (scores of sums of queries and keys,
    log(relu(R) + 1e-6)).
    """
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    ours = create("sinkhorn", dim=16, heads=2, length=48, block=block, cut=cut).double().eval()
    theirs = peer.SinkhornSelfAttention(
        16,
        their_block,
        48,
        heads=2,
        kv_bucket_size=block,
        non_permutative=False,
        n_sortcut=cut or 0,
    ).double()
    del theirs.sinkhorn_attention.sort_net

    def run(x):
        order = ours.sort(
            x.unflatten(1, (-1, block)).sum(2), x.new_ones(len(x), 48 // block, dtype=torch.bool)
        )
        theirs.sinkhorn_attention.sort_net = lambda q, k, topk: order.flatten(0, 1)
        return theirs(x) - theirs.to_out.bias

    with torch.no_grad():
        ours.q.weight.copy_(theirs.to_q.weight)
        ours.out.weight.copy_(theirs.to_out.weight)
        for mine, part in zip((ours.k, ours.v), theirs.to_kv.weight.chunk(2), strict=True):
            mine.weight.copy_(part)
    shared = [(p, p) for p in ours.sort.parameters()]
    return (
        ours,
        theirs,
        run,
        [(ours.q.weight, theirs.to_q.weight), (ours.out.weight, theirs.to_out.weight), *shared],
    )


def test_sortcut(rand):
    """Fails if SortCut is another.

    The peer adds the own block wherever there are as many blocks of queries as of keys, which the
    paper does not; with other blocks of queries it does not either.
    """
    ours, _, run, pairs = sinkhorn_pair(cut=2, block=6, their_block=24)
    agree(ours, run, rand(2, 48, 16), pairs)


def test_sinkhorn_transformer(rand):
    """Fails if sorted and own blocks are seen otherwise.

    The peer takes sorted keys for sorted values, by mistake, so both have the same weights here.
    """
    ours, theirs, run, pairs = sinkhorn_pair(cut=None, block=6, their_block=6)
    with torch.no_grad():
        ours.v.weight.copy_(ours.k.weight)
        theirs.to_kv.weight[16:] = theirs.to_kv.weight[:16]
    agree(ours, run, rand(2, 48, 16), pairs)
