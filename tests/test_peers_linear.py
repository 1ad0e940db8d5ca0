"""Parity with packages that people use, by copied weights: outputs and gradients, in float64.

Where a peer leaves the paper, it is set to what the paper says, and the difference as shipped is
tested to be there.
"""

from functools import partial

import pytest
import torch

import regard
from peers import agree
from regard.mixer import split_heads
from regard.update import decay, delta

DIM, HEADS, FEATURES = 32, 4, 24


def tokens(n=50, b=2, seed=1):
    return torch.randn(
        b, n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def paired(ours, theirs):
    """The peer's weights put into ours, and the pairs."""
    pairs = [
        (ours.q.weight, theirs.to_q.weight),
        (ours.k.weight, theirs.to_k.weight),
        (ours.v.weight, theirs.to_v.weight),
    ]
    pairs.append((ours.out.weight, theirs.to_out.weight))
    with torch.no_grad():
        if theirs.to_out.bias is not None:
            theirs.to_out.bias.zero_()
        for mine, other in pairs:
            mine.copy_(other)
    return pairs


# ------------------------------------------------------------------------------ performer-pytorch
def performers(monkeypatch, causal=False, exact=True, kernel="positive"):
    """Ours and theirs, with the same projection; `exact` removes the small numbers they add."""
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    more = {"generalized_attention": True} if kernel == "relu" else {}
    theirs = peer.SelfAttention(
        DIM, heads=HEADS, dim_head=DIM // HEADS, causal=causal, nb_features=FEATURES, **more
    ).double()
    ours = regard.create(
        "performer", dim=DIM, heads=HEADS, features=FEATURES, causal=causal, kernel=kernel
    ).double()
    ours.inner.feature.rows.copy_(theirs.fast_attention.projection_matrix)
    if exact:
        monkeypatch.setattr(peer, "softmax_kernel", partial(peer.softmax_kernel, eps=0.0))
    if causal:
        theirs.fast_attention.causal_linear_fn = partial(
            peer.causal_linear_attention_noncuda, eps=0.0 if exact else 1e-6
        )
    return ours, theirs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["positive", "relu"])
def test_performer(kernel, causal, monkeypatch):
    """Fails if, with one projection and nothing added, ours is not theirs."""
    ours, theirs = performers(monkeypatch, causal, kernel=kernel)
    agree(ours, theirs, tokens(), paired(ours, theirs))


def test_performer_as_shipped_is_a_little_off(monkeypatch):
    """Fails if what they add to the features no longer shows: then the docs are out of date."""
    ours, theirs = performers(monkeypatch, exact=False)
    paired(ours, theirs)
    off = [(ours(x) - theirs(x)).norm() / ours(x).norm() for x in (tokens(), 4 * tokens())]
    assert (
        1e-4 < off[0] < 0.1 < off[1]
    )  # 0.6 % and 96 %: where scores are large, features are small beside 0.0001


def test_performer_keeps_pads_in_the_sum_below_and_we_do_not(monkeypatch):
    """Fails if padding counts with us, or no longer counts with them."""
    ours, theirs = performers(monkeypatch)
    paired(ours, theirs)
    x, mask = tokens(), torch.arange(50).expand(2, 50) < 30
    assert (theirs(x, mask=mask)[:, :30] - theirs(x[:, :30])).abs().max() > 1e-2
    torch.testing.assert_close(ours(x, mask=mask)[:, :30], ours(x[:, :30]))


def test_performer_looks_ahead_and_we_do_not(monkeypatch):
    """Fails if a later key shows in an earlier output with us, or no longer does with them."""
    ours, theirs = performers(monkeypatch, causal=True, exact=False)
    paired(ours, theirs)
    x = tokens()
    other = torch.cat((x[:, :30], 5 * x[:, 30:]), 1)
    assert (theirs(x) - theirs(other))[:, :30].abs().max() > 1e-5
    assert torch.equal(ours(x)[:, :30], ours(other)[:, :30])


# ------------------------------------------------------------------- linear-attention-transformer
@pytest.mark.parametrize("masked", [False, True])
def test_efficient_attention(masked):
    """Fails if ours is not theirs, which divides by √e on top."""
    peer = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")
    torch.manual_seed(0)
    theirs = peer.SelfAttention(DIM, heads=HEADS).double()
    ours = regard.create("efficient", dim=DIM, heads=HEADS).double()
    pairs, mask = paired(ours, theirs), torch.arange(50).expand(2, 50) % 4 != 1
    given, kept = ({"mask": mask}, {"input_mask": mask}) if masked else ({}, {})
    scale = (DIM // HEADS) ** 0.5
    agree(
        lambda x: ours(x, **given),
        lambda x: scale * theirs(x, **kept),
        tokens(),
        pairs,
        rows=mask if masked else None,
    )


def test_efficient_attention_to_another_sequence():
    """Fails if ours is not theirs."""
    peer = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")
    torch.manual_seed(0)
    theirs = peer.SelfAttention(DIM, heads=HEADS, receives_context=True).double()
    ours = regard.create("efficient", dim=DIM, heads=HEADS).double()
    pairs, context = paired(ours, theirs), tokens(70, seed=2)
    scale = (DIM // HEADS) ** 0.5
    agree(lambda x: ours(x, context), lambda x: scale * theirs(x, context=context), tokens(), pairs)


# ----------------------------------------------------------------------------------- Hugging Face
def test_delta_rule():
    """Fails if our chunks are not the recurrence of Qwen3-Next, with its decay set to 1; it
    computes in float32.
    """
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = (
        torch.randn(2, 4, 150, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)
    )
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    beta = torch.rand(2, 4, 150, generator=torch.Generator().manual_seed(4))
    parts = [t.transpose(1, 2) for t in (q * 8**0.5, k, v, torch.zeros_like(beta), beta)]
    want, last = peer.torch_recurrent_gated_delta_rule(*parts, output_final_state=True)
    got, state = delta(q, k, v, beta, None, 64)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-5)


def test_decay():
    """Fails if our chunks are not the lightning attention of MiniMax, without its norm and gate;
    its decay is of float32.
    """
    peer = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = peer.MiniMaxConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM // HEADS,
        num_hidden_layers=2,
        block_size=16,
    )
    torch.manual_seed(0)
    theirs = peer.MiniMaxLightningAttention(config, 0).double()
    theirs.norm = theirs.out_proj = torch.nn.Identity()
    torch.nn.init.zeros_(theirs.output_gate.weight)  # sigmoid(0) is a half
    x = tokens()
    parts = split_heads(theirs.act_fn(theirs.qkv_proj(x)), HEADS).chunk(3, -1)
    gate = -theirs.slope_rate.view(1, HEADS, 1).expand(2, HEADS, 50)
    want = 2 * theirs(x, position_embeddings=None, attention_mask=None)[0]
    torch.testing.assert_close(
        decay(*parts, gate, None, 7)[0].transpose(1, 2).flatten(2), want, rtol=0, atol=1e-6
    )  # its decay is of float32
