"""Family F beside other implementations, by copied weights: outputs, and gradients of the input and
of the weights.

Where a peer departs from the paper, or from itself, the comparison is made where both agree, and
the test says so.
"""

import pytest
import torch
from torch import nn

import regard
from regard.attentions import prob_sparse


def copy(pairs):
    """Give each of ours (a parameter) the numbers of theirs."""
    with torch.no_grad():
        for mine, theirs, view in pairs:
            mine.copy_(view(theirs))


def same(x):
    return x


def linears(mine, theirs):
    """Weights of four projections, whatever they are called."""
    return [(a.weight, b.weight, same) for a, b in zip(mine, theirs, strict=True)]


def parts(mine, theirs):
    """Weights of projections that the peer has in one matrix."""
    return [(a.weight, theirs.weight, lambda t, i=i: t.chunk(3)[i]) for i, a in enumerate(mine)]


def no_bias(*modules):
    """Ours have no bias in their projections; theirs are set to zero, and not trained."""
    for module in modules:
        if module.bias is not None:
            nn.init.zeros_(module.bias)
            module.bias.requires_grad_(False)


def compare(mine, theirs, x, pairs, atol=1e-10):
    """Both of x: the same outputs, and the same gradients of x and of each pair."""
    copy(pairs)
    results = []
    for f in (mine, theirs):
        one = x.clone().requires_grad_()
        y = f(one)
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
        leaves = [one, *(pair[0 if f is mine else 1] for pair in pairs)]
        results.append((y, torch.autograd.grad((y * weight).sum(), leaves)))
    (y, (dx, *grads)), (y2, (dx2, *grads2)) = results
    torch.testing.assert_close(y, y2, rtol=1e-9, atol=atol)
    torch.testing.assert_close(dx, dx2, rtol=1e-9, atol=atol)
    for got, want, (_, _, view) in zip(grads, grads2, pairs, strict=True):
        torch.testing.assert_close(got, view(want), rtol=1e-9, atol=atol)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# -------------------------------------------------------------------------------------- linformer
@pytest.mark.parametrize("n", [1, 17, 24])
@pytest.mark.parametrize("cross", [False, True])
def test_linformer(n, cross, rand):
    """Fails if the projection, or what becomes of shorter inputs, is another.  (Its `share_kv` also
    makes values of keys, which is not the paper's key-value sharing, so that is not compared.)
    """
    peer = (
        pytest.importorskip("linformer")
        .LinformerSelfAttention(dim=16, seq_len=24, k=7, heads=4)
        .double()
    )
    mixer = regard.create("linformer", dim=16, heads=4, length=24, rank=7).double()
    no_bias(peer.to_out)
    context = mixer.inner.compression
    pairs = linears(
        (mixer.q, mixer.k, mixer.v, mixer.out), (peer.to_q, peer.to_k, peer.to_v, peer.to_out)
    )
    pairs += [
        (context.e, peer.proj_k, lambda t: t.T[None]),
        (context.f, peer.proj_v, lambda t: t.T[None]),
    ]
    x, other = rand(2, 5, 16), rand(2, n, 16)
    if cross:
        compare(lambda t: mixer(x, t), lambda t: peer(x, context=t), other, pairs)
    else:
        compare(mixer, peer, other, pairs)


# ---------------------------------------------------------------------------------------- nystrom
def nystrom_pair(heads, iterations, kernel=33):
    peer = (
        pytest.importorskip("nystrom_attention")
        .NystromAttention(
            dim=16,
            dim_head=16 // heads,
            heads=heads,
            num_landmarks=6,
            pinv_iterations=iterations,
            residual=kernel is not None,
            residual_conv_kernel=33,
        )
        .double()
    )
    mixer = regard.create(
        "nystrom", dim=16, heads=heads, landmarks=6, iterations=iterations, kernel=kernel
    ).double()
    no_bias(peer.to_out[0])
    pairs = [(mixer.out.weight, peer.to_out[0].weight, same)]
    if kernel is not None:
        pairs.append((mixer.inner.conv.weight, peer.res_conv.weight, same))
    return mixer, peer, pairs + parts((mixer.q, mixer.k, mixer.v), peer.to_qkv)


@pytest.mark.parametrize("kernel", [None, 33])
def test_nystrom_of_one_head(kernel, rand):
    """Fails if landmarks, the iteration, its start, or the convolution are others.

    One example with one head: the peer starts all pseudo-inverses of a batch by one maximum, so
    that examples and heads touch each other.
    """
    mixer, peer, pairs = nystrom_pair(1, 6, kernel)
    compare(mixer, peer, rand(1, 24, 16), pairs)


def test_nystrom_of_many_heads(rand):
    """Fails if heads are mixed up.

    After many iterations the start no longer matters, so all of a batch agree.
    """
    mixer, peer, pairs = nystrom_pair(4, 40)
    compare(mixer, peer, rand(2, 24, 16), pairs, atol=1e-6)


def test_nystrom_of_hugging_face(rand):
    """Fails if we differ from the option of Hugging Face that starts each pseudo-inverse by itself
    (`init_option` is set by hand: asking for it in the configuration raises there).
    """
    transformers = pytest.importorskip("transformers")
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = transformers.NystromformerConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_landmarks=6,
        segment_means_seq_len=24,
        conv_kernel_size=33,
        attention_probs_dropout_prob=0.0,
    )
    peer = NystromformerSelfAttention(config).double().eval()
    peer.init_option = "exact"
    torch.set_default_dtype(torch.float64)  # its identity is of the default type
    try:
        mixer = regard.create("nystrom", dim=16, heads=4, landmarks=6, kernel=33).double()
        no_bias(peer.query, peer.key, peer.value)
        pairs = linears((mixer.q, mixer.k, mixer.v), (peer.query, peer.key, peer.value))
        pairs.append((mixer.inner.conv.weight, peer.conv.weight, same))
        mixer.out = nn.Identity()  # theirs stands outside
        compare(mixer, lambda t: peer(t)[0], rand(2, 24, 16), pairs)
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------ memory-compressed
@pytest.mark.parametrize("n", [3, 12, 24])
def test_memory_compressed(n, rand):
    """Fails if the convolution, the causal rule or the null key is another.

    Whole strides only: the peer fills up at the front, which shifts all blocks.  It scales by the
    whole width, not by that of a head, and has one convolution for keys and values.  Its other form
    has a null key too, which the paper has not.
    """
    peer = (
        pytest.importorskip("memory_compressed_attention")
        .MemoryCompressedAttention(dim=16, heads=4, causal=True)
        .double()
    )
    mixer = regard.create("memory_compressed", dim=16, heads=4, causal=True).double()
    no_bias(peer.to_out, peer.compress_fn.conv)
    nn.init.normal_(peer.null_k)
    nn.init.normal_(peer.null_v)
    inner = mixer.inner
    copy(
        [
            (part.weight, peer.compress_fn.conv.weight, same)
            for part in (inner.blocks.k, inner.blocks.v)
        ]
    )
    copy([(inner.blocks.v.bias, torch.zeros(16), same)])
    pairs = parts((mixer.q, mixer.k, mixer.v), peer.to_qkv)
    copy(pairs)
    with torch.no_grad():
        mixer.q.weight *= 0.5  # 1/√16 = 0.5/√4
    copy(
        [
            (inner.null[i], null, lambda t: t.reshape(4, 1, 4))
            for i, null in enumerate((peer.null_k, peer.null_v))
        ]
    )
    compare(mixer, peer, rand(2, n, 16), [(mixer.out.weight, peer.to_out.weight, same), *pairs[1:]])


# --------------------------------------------------------------------------------------- informer
def test_prob_sparse(rand, monkeypatch):
    """Fails if the measure, the choice, or what the others get is another.

    Both are given every key once as the sample: Hugging Face draws one sample for all queries (of
    about as many keys as there are, so that its cost is quadratic), and divides the sum by the
    number of keys; the paper draws for each query, and takes the mean of what was drawn.  There are
    other logarithms too, ln(n + 1): 40 queries give the same.
    """
    pytest.importorskip("transformers")
    from transformers.models.informer.modeling_informer import InformerProbSparseAttention

    peer = InformerProbSparseAttention(16, 4, sampling_factor=5).double().eval()
    mixer = regard.create("prob_sparse", dim=16, heads=4).double()
    theirs = (peer.q_proj, peer.k_proj, peer.v_proj, peer.out_proj)
    no_bias(*theirs)
    context = rand(2, 15, 16)
    monkeypatch.setattr(
        prob_sparse,
        "_uniform",
        lambda seed, draw, n: torch.full((n,), (draw + 0.5) / 15, dtype=torch.float64),
    )
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.arange(high))
    pairs = linears((mixer.q, mixer.k, mixer.v, mixer.out), theirs)
    x = rand(2, 40, 16)
    compare(lambda t: mixer(t, context), lambda t: peer(t, context)[0], x, pairs)
    attends = mixer.attention_map(x, context).std(-1) > 1e-9
    assert (attends.sum(-1) == 20).all(), "half of the queries attend, or this says nothing"


# ----------------------------------------------------------------------------------------- funnel
@pytest.mark.parametrize("cls", [False, True])
@pytest.mark.parametrize("n", [1, 8, 11])
def test_funnel(cls, n, rand):
    """Fails if pooling, with or without [cls] by itself, or the attention of the pooled queries is
    another.  The relative positions of Hugging Face are set to zero: they are a prior of their own.
    """
    transformers = pytest.importorskip("transformers")
    from transformers.models.funnel.modeling_funnel import (
        FunnelAttentionStructure,
        FunnelRelMultiheadAttention,
    )

    config = transformers.FunnelConfig(
        d_model=16,
        n_head=4,
        d_head=4,
        separate_cls=cls,
        truncate_seq=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_type="factorized",
    )
    peer = FunnelRelMultiheadAttention(config, 0).double().eval()
    structure = FunnelAttentionStructure(config)
    mixer = regard.create("funnel", dim=16, heads=4, cls=cls).double()
    theirs = (peer.q_head, peer.k_head, peer.v_head, peer.post_proj)
    no_bias(*theirs)

    def run(t):
        short = structure.pool_tensor(t)
        nothing = tuple(
            torch.zeros(m, 16, dtype=t.dtype) for m in (short.shape[1], short.shape[1], n, n)
        )
        return peer(short, t, t, (nothing, None, None, None))[0]

    def mine(t):
        return nn.functional.layer_norm(mixer.shorten(t)[0], (16,), eps=config.layer_norm_eps)

    ours = mixer.attention
    pairs = linears((ours.q, ours.k, ours.v, ours.out), theirs)
    compare(mine, run, rand(2, n, 16), pairs, atol=3e-5)  # they take the softmax in float32


# -------------------------------------------------------------------------------------- perceiver
def perceiver_pairs(mine, theirs):
    attention = theirs.attention.self
    no_bias(attention.query, attention.key, attention.value, theirs.attention.output.dense)
    ours = mine.attention
    inner = (attention.query, attention.key, attention.value, theirs.attention.output.dense)
    pairs = linears((ours.q, ours.k, ours.v, ours.out), inner)
    norms = [(mine.norm, attention.layernorm1), (mine.norm_mlp, theirs.layernorm)]
    if mine.norm_source is not None:
        norms.append((mine.norm_source, attention.layernorm2))
    layers = [*norms, (mine.mlp[0], theirs.mlp.dense1), (mine.mlp[2], theirs.mlp.dense2)]
    for a, b in layers:
        nn.init.normal_(b.bias)
        pairs += [(a.weight, b.weight, same), (a.bias, b.bias, same)]
    return pairs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_perceiver(masked, cross, rand):
    """Fails if read, process, write, or the place of their norms differs from Perceiver IO."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.perceiver.modeling_perceiver import PerceiverEncoder, PerceiverLayer

    config = transformers.PerceiverConfig(
        num_latents=5,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        attention_probs_dropout_prob=0.0,
        self_attention_widening_factor=2,
        cross_attention_widening_factor=2,
    )
    encoder = PerceiverEncoder(config, kv_dim=16).double().eval()
    writer = PerceiverLayer(
        config,
        is_cross_attention=True,
        num_heads=4,
        q_dim=16,
        kv_dim=16,
        widening_factor=2,
        use_query_residual=False,
    )
    writer = writer.double().eval()
    mixer = regard.create("perceiver", dim=16, heads=4, latents=5, depth=2, widening=2).double()
    pairs = perceiver_pairs(mixer.read, encoder.cross_attention) + perceiver_pairs(
        mixer.write, writer
    )
    for mine, theirs in zip(mixer.process, encoder.self_attends, strict=True):
        pairs += perceiver_pairs(mine, theirs)
    other = rand(2, 9, 16) if cross else None
    mask = torch.arange(9)[None].expand(2, 9) < torch.tensor([[9], [6]]) if masked else None
    bias = None if mask is None else torch.where(mask, 0.0, -1e9)[:, None, None].double()

    def run(t):
        source = t if other is None else other
        z = encoder(
            mixer.latents.expand(2, -1, -1), inputs=source, inputs_mask=bias
        ).last_hidden_state
        y = writer(t, inputs=z)[0]
        return y if mask is None or cross else y * mask[..., None]

    def mine(t):
        y = mixer(t, other, mask=mask)
        return y if mask is None or cross else y * mask[..., None]

    compare(mine, run, rand(2, 9, 16), pairs)
