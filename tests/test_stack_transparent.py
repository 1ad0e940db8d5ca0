"""Transparent attention and RealFormer: layers that see more than the previous layer."""

import pytest
import torch

import naive
import regard
from regard.block import Block
from regard.ffn import MLP
from regard.residual import PostNorm, PreNorm
from regard.stack import (
    PerLayerContextStack,
    RealFormerStack,
    SequentialStack,
    TransparentAttention,
)
from stacks import block, chunks, inside, same_gradients


# ---------------------------------------------------------------------------- transparent attention
def seq2seq(*names):
    """An encoder of three layers, a decoder of two, and transparent attention."""
    encoder = SequentialStack([block(seed=i) for i in range(3)]).double().eval()
    decoder = PerLayerContextStack(
        [
            block(names[i] if names else "vanilla", causal=True, cross=True, seed=5 + i)
            for i in range(2)
        ]
    )
    between = TransparentAttention(3, 2).double().eval()
    between.logits.data = torch.randn(
        4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return encoder, between, decoder.double().eval()


def test_transparent_attention_matches_loops(rand):
    """Outputs and gradients of the mixtures equal those of loops."""
    encoder, between, decoder = seq2seq()
    source, x, weight = rand(1, 5, 8).requires_grad_(), rand(1, 4, 8).requires_grad_(), rand(4, 8)
    mask = torch.tensor([[True] * 4 + [False]])
    found = decoder(x, between(encoder.hidden_states(source, mask=mask), mask), context_mask=mask)[
        0
    ]
    states = [source[0]]
    for i in range(3):
        states.append(
            naive.block(naive.under(inside(encoder), f"layers.{i}"), states[-1], 2, mask=mask[0])
        )
    wanted = x[0]
    for j in range(2):
        shares = between.logits[:, j].exp() / between.logits[:, j].exp().sum()
        context = sum(share * state for share, state in zip(shares, states, strict=True))
        p = naive.under(inside(decoder), f"layers.{j}")
        wanted = naive.block(p, wanted, 2, causal=True, context=context, context_mask=mask[0])
    torch.testing.assert_close(found, wanted)
    tensors = [source, x, *encoder.parameters(), *between.parameters(), *decoder.parameters()]
    same_gradients((found * weight).sum(), (wanted * weight).sum(), tensors)


def test_hidden_states(rand):
    """The last hidden state is the output; the others are those of shorter stacks."""
    encoder, x = seq2seq()[0], rand(2, 5, 8)
    every = encoder.hidden_states(x)
    assert every.shape == (4, 2, 5, 8) and torch.equal(every[0], x)
    torch.testing.assert_close(every[2], SequentialStack(list(encoder.layers)[:2])(x))
    torch.testing.assert_close(encoder(x), every[-1])


def test_initial_weights_are_equal(rand):
    """Initially all encoder layers have the same weight."""
    outputs = rand(4, 2, 5, 8)
    torch.testing.assert_close(
        TransparentAttention(3, 2).double()(outputs), outputs.mean(0).expand(2, -1, -1, -1)
    )


def test_dropout_of_the_weights(rand):
    """Dropout is off in evaluation, and weights sum to one in training."""
    torch.manual_seed(0)
    between = TransparentAttention(3, 50, dropout=0.5).double()
    between.logits.data = torch.randn(4, 50).double()
    ones, plain = torch.ones(4, 1, 1, 1).double(), between.eval()(rand(4, 1, 2, 8))
    torch.testing.assert_close(between.train()(ones), torch.ones(50, 1, 1, 1).double())
    assert not torch.allclose(between(rand(4, 1, 2, 8)), plain)


@pytest.mark.parametrize("name", ["local", "linear", "retnet"])
def test_decoder_streams(name, rand):
    """A chunk gets the same contexts as the whole sequence."""
    encoder, between, decoder = seq2seq(name, "vanilla")
    contexts, x = between(encoder.hidden_states(rand(2, 6, 8))), rand(2, 9, 8)
    torch.testing.assert_close(
        chunks(decoder, x, (1, 5, 3), context=contexts), decoder(x, contexts)
    )


def test_source_padding_has_no_influence(rand):
    """NaN in the source's padding does not reach the target."""
    encoder, between, decoder = seq2seq()
    source, x, mask = rand(1, 5, 8), rand(1, 4, 8), torch.tensor([[True] * 3 + [False] * 2])

    def out(source):
        return decoder(
            x, between(encoder.hidden_states(source, mask=mask), mask), context_mask=mask
        )

    torch.testing.assert_close(out(source.masked_fill(~mask[..., None], torch.nan)), out(source))


def test_invalid_contexts(rand):
    """A context without one entry per layer raises an error."""
    encoder, between, decoder = seq2seq()
    with pytest.raises(
        ValueError, match=r"context must be \(2, b, m, d\), one per layer, not \(1, 3, 8\)"
    ):
        decoder(rand(1, 4, 8), rand(1, 3, 8))
    with pytest.raises(ValueError, match="give a context"):
        decoder(rand(1, 4, 8))
    with pytest.raises(ValueError, match=r"hidden_states must be \(4, b, m, d\)"):
        between(rand(3, 1, 5, 8))
    with pytest.raises(regard.Unsupported, match="PerLayerContextStack needs cross-attention"):
        PerLayerContextStack([block()])
    with pytest.raises(regard.Unsupported, match="does not support context"):
        encoder.hidden_states(rand(1, 4, 8), rand(1, 4, 8))


# --------------------------------------------------------------------------------------- RealFormer
def carry(depth=3, *, causal=False, cross=False, residual=PreNorm, ffn=MLP):
    torch.manual_seed(0)
    ask = {"cross": regard.create("vanilla", dim=8, heads=2)} if cross else {}
    make = regard.create
    blocks = [
        Block(
            make("realformer", dim=8, heads=2, causal=causal),
            ffn and ffn(8),
            residual=residual,
            **ask,
        )
        for _ in range(depth)
    ]
    return RealFormerStack(blocks).double().eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
def test_realformer_matches_loops(causal, residual, rand):
    """Outputs and gradients with scores passed on equal those of loops, with padding."""
    stack, x, weight = (
        carry(causal=causal, residual=residual),
        rand(2, 5, 8).requires_grad_(),
        rand(2, 5, 8),
    )
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    p, rows, pre = inside(stack), [], residual is PreNorm
    for one, real in zip(x, mask, strict=True):
        scores = None
        for i in range(3):
            mine = naive.under(p, f"blocks.{i}")
            around, then = (
                naive.under(mine, "mixer_residual.norm"),
                naive.under(mine, "ffn_residual.norm"),
            )
            y = naive.norm(around, one) if pre else one
            y, scores = naive.attention(
                naive.under(mine, "mixer.heads"), y, y, 2, causal=causal, mask=real, before=scores
            )
            one = one + y if pre else naive.norm(around, one + y)
            fed = naive.mlp(naive.under(mine, "ffn"), naive.norm(then, one) if pre else one)
            one = one + fed if pre else naive.norm(then, one + fed)
        rows.append(one)
    wanted, found = torch.stack(rows), stack(x, mask=mask)
    torch.testing.assert_close(found[mask], wanted[mask])
    weight = weight * mask[..., None]
    same_gradients((found * weight).sum(), (wanted * weight).sum(), [x, *p.values()])
    apart = x
    for layer in stack.blocks:
        apart = layer(apart, mask=mask)
    assert not torch.allclose(found[0], apart[0])


@pytest.mark.parametrize("cross", [False, True])
def test_realformer_streams(cross, rand):
    """Scores of a chunk fit the cache of the next layer."""
    stack, x = carry(causal=True, cross=cross), rand(2, 80, 8)
    kwargs = {"context": rand(2, 4, 8)} if cross else {}
    torch.testing.assert_close(chunks(stack, x, (1, 7, 1, 71), **kwargs), stack(x, **kwargs))


def test_realformer_empty_input(rand):
    """Empty sequences and chunks are valid and change nothing."""
    stack, x = carry(causal=True), rand(2, 5, 8)
    assert stack(x[:, :0]).shape == (2, 0, 8)
    torch.testing.assert_close(chunks(stack, x, (0, 3, 0, 2)), stack(x))


def test_realformer_padding_has_no_influence(rand):
    """NaN in padding is not passed on with the scores."""
    stack, x, mask = carry(), rand(2, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    poisoned = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(stack(poisoned, mask=mask)[mask], stack(x, mask=mask)[mask])
    torch.testing.assert_close(stack(x, mask=mask)[1:, :3], stack(x[1:, :3]))


def test_realformer_one_layer_without_ffn(rand):
    """The first layer is ordinary attention; blocks may have no feed-forward layer."""
    stack, x = carry(1, ffn=None), rand(2, 5, 8)
    torch.testing.assert_close(stack(x), stack.blocks[0](x))


def test_realformer_invalid_arguments():
    """Other mixers, and unequal numbers of heads, raise an error."""
    with pytest.raises(regard.Unsupported, match="LinearAttention cannot pass on attention scores"):
        RealFormerStack([block("linear")])
    two, four = (Block(regard.create("realformer", dim=8, heads=h)) for h in (2, 4))
    with pytest.raises(ValueError, match="the same number of heads"):
        RealFormerStack([two, four])
    with pytest.raises(regard.Unsupported, match="global_attention_mask"):
        RealFormerStack([two])(
            torch.zeros(1, 3, 8), global_attention_mask=torch.ones(1, 3, dtype=torch.bool)
        )
