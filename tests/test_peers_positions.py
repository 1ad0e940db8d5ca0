"""Parity with Hugging Face by copied weights: T5's buckets and biases, rotary embeddings, XLNet's
relative attention.
"""

import pytest
import torch

from peers import agree, copied
from regard import MultiHead, SoftmaxAttention
from regard.mixer import merge_heads
from regard.position import Rope, T5Bias, TransformerXLBias
from regard.position.bias import relative_position_bucket
from regard.position.embedding import fourier_features
from regard.prior import ALiBi

pytest.importorskip("transformers")


def test_alibi_slopes():
    """Fails if the slopes of a number of heads, power of two or not, differ from Bloom's."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in range(1, 41):
        bias = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
        torch.testing.assert_close(ALiBi(heads).slopes, bias[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 64), (16, 100), (8, 9), (64, 1000)]
)
def test_buckets(buckets, max_distance, causal):
    """Fails if one distance of 4,001 falls into another bucket than T5's."""
    from transformers.models.t5.modeling_t5 import T5Attention

    gaps = torch.arange(-2000, 2001)
    want = T5Attention._relative_position_bucket(gaps, not causal, buckets, max_distance)
    assert torch.equal(relative_position_bucket(gaps, buckets, max_distance, causal=causal), want)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_attention(decoder, rand):
    """Fails if bias, scores, outputs or gradients differ from T5's encoder, or decoder."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    config = T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        is_decoder=decoder,
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    prior = T5Bias(4, buckets=8, max_distance=12, causal=decoder)
    ours = MultiHead(16, 4, SoftmaxAttention(prior=prior, scale=1.0), causal=decoder).double()
    pairs = copied(
        [
            (ours.q.weight, theirs.q.weight),
            (ours.k.weight, theirs.k.weight),
            (ours.v.weight, theirs.v.weight),
            (ours.out.weight, theirs.o.weight),
        ]
    )
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
        prior.table.copy_(theirs.relative_attention_bias.weight.T)
    real = torch.arange(25).expand(2, 25) < torch.tensor([[25], [17]])
    keep = real[:, None, None, :] & (
        torch.ones(25, 25, dtype=torch.bool).tril() if decoder else True
    )
    keep = keep.expand(2, 1, 25, 25)
    addend = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(
        ~keep, torch.finfo(torch.float64).min
    )
    at = torch.arange(25)
    torch.testing.assert_close(
        prior(at[:, None], at[None], rand(1), rand(1)), theirs.compute_bias(25, 25)[0]
    )
    agree(
        lambda x: ours(x, mask=real),
        lambda x: theirs(x, mask=addend)[0],
        rand(2, 25, 16),
        pairs,
        rows=real,
    )
    x, weight = rand(2, 25, 16), rand(2, 25, 16) * real[..., None]
    mine = torch.autograd.grad((ours(x, mask=real) * weight).sum(), prior.table)[0]
    other = torch.autograd.grad(
        (theirs(x, mask=addend)[0] * weight).sum(), theirs.relative_attention_bias.weight
    )[0]
    torch.testing.assert_close(mine, other.T)


@pytest.mark.parametrize("start", [0, 37])
def test_llama_turns_halves(start, rand):
    """Fails if queries or keys are turned otherwise than Llama does."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    q, k = rand(2, 4, 11, 8).float(), rand(2, 2, 11, 8).float()
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(start, start + 11)[None])
    for got, want in zip(
        Rope(base=500.0)(q, k, start, start), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_llama_scales_linearly(rand):
    """Fails if positions are multiplied where they are to be divided."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=scaled)
    q = rand(2, 4, 11, 8).float()
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(11)[None])
    torch.testing.assert_close(
        Rope(linear=4.0)(q, q)[0], apply_rotary_pos_emb(q, q, cos, sin)[0], rtol=0, atol=1e-5
    )


def test_ntk_scaling_is_that_of_dynamic_scaling_at_its_length(rand):
    """Fails if the base grows otherwise than in Hugging Face: there by factor · n / trained −
    (factor − 1), here as given.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=64, rope_parameters=scaled
    )
    rates, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, device="cpu", seq_len=128)
    torch.testing.assert_close(Rope(ntk=3.0).angles(torch.tensor([1]), 8)[0].float(), rates)


def test_gpt_neox_turns_a_part(rand):
    """Fails if a part of the width is turned otherwise than GPT-NeoX does."""
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    q, k = rand(2, 4, 11, 16).float(), rand(2, 4, 11, 16).float()
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, torch.arange(11)[None])
    assert cos.shape[-1] == 4
    for got, want in zip(
        Rope(fraction=0.25)(q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_gpt_j_turns_pairs(rand):
    """Fails if adjacent pairs are rotated differently from GPT-J, or the rest changes."""
    from transformers.models.gptj.modeling_gptj import (
        apply_rotary_pos_emb,
        create_sinusoidal_positions,
    )

    q, k = rand(2, 4, 11, 16).float(), rand(2, 4, 11, 16).float()
    sin, cos = create_sinusoidal_positions(64, 8)[5:16][None].chunk(2, -1)
    for got, x in zip(Rope(fraction=0.5, layout="pairs")(q, k, 5, 5), (q, k), strict=True):
        want = torch.cat(
            (
                apply_rotary_pos_emb(x[..., :8].transpose(1, 2), sin, cos).transpose(1, 2),
                x[..., 8:],
            ),
            -1,
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_xlnet_relative_attention(causal, rand):
    """Fails if Transformer-XL's terms are not those that XLNet finds by shifting, or a gradient
    differs.
    """
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    torch.manual_seed(0)
    n, heads, d = 13, 4, 16
    theirs = (
        XLNetRelativeAttention(XLNetConfig(d_model=d, n_head=heads, dropout=0.0)).double().eval()
    )
    for p in theirs.parameters():
        p.data.normal_(std=0.5)
    prior = TransformerXLBias(heads, d // heads, d)
    ours = MultiHead(d, heads, SoftmaxAttention(prior=prior), causal=causal).double()
    with torch.no_grad():
        for mine, other in ((ours.q, theirs.q), (ours.k, theirs.k), (ours.v, theirs.v)):
            mine.weight.copy_(other.flatten(1).T)
        prior.u.copy_(theirs.r_w_bias)
        prior.v.copy_(theirs.r_r_bias)
        halves = torch.cat(
            (torch.arange(0, d, 2), torch.arange(1, d, 2))
        )  # theirs: all sines, then all cosines
        prior.w[..., halves] = theirs.r.permute(1, 2, 0)
    rates = 10000.0 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(n, -n, -1, dtype=torch.float64)[:, None] * rates
    places = torch.cat((angle.sin(), angle.cos()), -1)[:, None]
    hidden = torch.ones(n, n, dtype=torch.float64).triu(1)[:, :, None, None] if causal else None

    def peer(x):
        q, k, v, r = (
            torch.einsum("ibh,hnd->ibnd", t, w)
            for t, w in (
                (x.transpose(0, 1), theirs.q),
                (x.transpose(0, 1), theirs.k),
                (x.transpose(0, 1), theirs.v),
                (places, theirs.r),
            )
        )
        mixed = theirs.rel_attn_core(q, k, v, r.expand(-1, x.shape[0], -1, -1), attn_mask=hidden)
        return mixed.flatten(2).transpose(0, 1)

    x, weight = rand(2, n, d).requires_grad_(), rand(2, n, d)
    got, want = ours.mix_heads(x, None, None, None)[0], peer(x)
    torch.testing.assert_close(got, want)
    mine = torch.autograd.grad((got * weight).sum(), [x, prior.u, prior.v, prior.w])
    others = torch.autograd.grad(
        (want * weight).sum(), [x, theirs.r_w_bias, theirs.r_r_bias, theirs.r]
    )
    for a, b in zip(
        (*mine[:3], mine[3][..., halves]), (*others[:3], others[3].permute(1, 2, 0)), strict=True
    ):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(merge_heads(ours.attention_map(x) @ ours.project(x, None)[2]), want)


def test_perceiver_fourier_features():
    """Fails if bands or their order differ from the Perceiver's, on a line or on an image."""
    from transformers.models.perceiver.modeling_perceiver import (
        build_linear_positions,
        generate_fourier_features,
    )

    line = build_linear_positions((9,))[None]
    want = generate_fourier_features(line.view(1, 9, 1), 5, (9,))[0]
    torch.testing.assert_close(
        fourier_features([(torch.arange(9), 9, 9)], 5).float(), want, rtol=0, atol=1e-5
    )
    image = build_linear_positions((3, 4)).view(1, 12, 2)
    want = generate_fourier_features(image, 5, (6, 8))[0]
    at = torch.arange(12)
    torch.testing.assert_close(
        fourier_features([(at // 4, 3, 6), (at % 4, 4, 8)], 5).float(), want, rtol=0, atol=1e-5
    )
