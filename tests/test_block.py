"""Blocks and plain stacks: any mixer, one interface."""

import pytest
import torch

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.registry import get_recipe
from regard.residual import RESIDUALS, PostNorm, PreNorm, get_residual
from regard.stack import CrossAttentionSublayer, SequentialStack, build_sublayers


def stack(*names, causal=False, cross=False, **block):
    torch.manual_seed(0)
    ask = {"cross": regard.create("vanilla", dim=8, heads=2)} if cross else {}
    return (
        SequentialStack(
            [
                Block(get_recipe(name).example(8, causal=causal), MLP(8), **ask, **block)
                for name in names
            ]
        )
        .double()
        .eval()
    )


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_every_mixer_streams_through_a_stack(name, rand):
    """Fails if chunks give anything else than the whole, in a hybrid of two layers."""
    layers, x = stack(name, "vanilla", causal=True), rand(2, 20, 8)
    state, parts = None, []
    for chunk in x.split((1, 7, 1, 11), 1):
        y, state = layers.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), layers(x))


@pytest.mark.parametrize("name", regard.list_recipes(can=["mask"]))
def test_padding_goes_through_a_stack(name, rand):
    """Fails if a left-out token, even NaN, reaches one that is real."""
    layers, x = stack(name, name, causal=get_recipe(name).causal_options()[0]), rand(2, 20, 8)
    mask = torch.arange(20).expand(2, 20) < 17
    other = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(layers(other, mask=mask)[:, :17], layers(x, mask=mask)[:, :17])


@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
def test_a_decoder_streams_with_its_context(residual, rand):
    """Fails if a chunk sees the context otherwise than the whole does, or its mask is ignored."""
    layers = stack("local", "linear", causal=True, cross=True, residual=residual)
    x, context, mask = (
        rand(2, 9, 8),
        rand(2, 5, 8),
        torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )
    whole = layers(x, context, context_mask=mask)
    first, state = layers.stream(x[:, :4], context=context, context_mask=mask)
    rest, _ = layers.stream(x[:, 4:], state, context=context, context_mask=mask)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)
    assert not torch.allclose(whole[1], layers(x, context)[1])


def test_recipes_whose_queries_are_not_independent():
    """Fails if a recipe gains or loses the capability unannounced."""
    independent = regard.list_recipes(can=["independent_queries"])
    assert [name for name in regard.list_recipes(can=["cross"]) if name not in independent] == [
        "draw_read",
        "draw_write",
        "graves_window",
        "global_tokens",
        "clustered",
        "clustered_improved",
        "funnel",
        "nystrom",
        "prob_sparse",
    ]


@pytest.mark.parametrize("name", regard.list_recipes(can=["cross"]))
def test_cross_attention_of_every_mixer(name, rand):
    """Fails if a causal block sees later tokens through its cross-attention, streams otherwise than
    it runs whole, or padded tokens of a block that is not causal have influence."""
    torch.manual_seed(0)
    cross = get_recipe(name).example(8, causal=False)
    x, context, mask = rand(2, 21, 8), rand(2, 9, 8), torch.arange(21).expand(2, 21) < 13
    block = Block(regard.create("vanilla", dim=8, heads=2), MLP(8), cross=cross).double().eval()
    poisoned = x.masked_fill(~mask[..., None], torch.nan)
    cut = block(x[:, :13], context)
    torch.testing.assert_close(block(x, context, mask=mask)[:, :13], cut)
    torch.testing.assert_close(block(poisoned, context, mask=mask)[:, :13], cut)

    causal = regard.create("vanilla", dim=8, heads=2, causal=True)
    if not cross.can.independent_queries:
        message = "does not support cross-attention in a causal block: .*Alternatives.*: vanilla"
        for build in (Block, build_sublayers):
            with pytest.raises(regard.Unsupported, match=message):
                build(causal, cross=cross)
        assert not CrossAttentionSublayer(cross).causal
        return
    block = Block(causal, MLP(8), cross=cross).double().eval()
    whole = block(x, context)
    later = torch.cat((x[:, :13], rand(2, 8, 8)), 1)
    torch.testing.assert_close(block(later, context)[:, :13], whole[:, :13])
    first, state = block.stream(x[:, :13], context=context)
    rest, _ = block.stream(x[:, 13:], state, context=context)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", RESIDUALS)
def test_padding_reaches_no_gradient(name, cross, rand):
    """Fails if NaN in a left-out token reaches the gradient of a weight or of a token."""
    layers = stack("vanilla", "vanilla", cross=cross, residual=get_residual(name, 2))
    x, mask = rand(2, 5, 8), torch.arange(5).expand(2, 5) < 3
    other = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    layers(other, *([rand(2, 4, 8)] if cross else []), mask=mask)[mask].square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (other, *layers.parameters()))


def test_tokens_that_do_not_fit_are_said():
    """Fails if a layer leaves it to an operation deep inside to complain, or takes what it
    should not."""
    layers, x = stack("vanilla", causal=True), torch.zeros(2, 3, 8).double()
    for call in (layers, layers.stream):
        with pytest.raises(ValueError, match="x must have width 8, not 9"):
            call(torch.zeros(2, 3, 9).double())
        with pytest.raises(ValueError, match=r"shape \(b, n, 8\), not \(3, 8\)"):
            call(x[0])
        with pytest.raises(TypeError, match=r"x is torch.float32 but the layer is torch.float64"):
            call(x.float())
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\)"):
        layers(x, mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        layers(x, mask=torch.ones(2, 3))
    with pytest.raises(
        regard.Unsupported, match="SequentialStack does not support global_attention_mask"
    ):
        layers(x, global_attention_mask=torch.ones(2, 3, dtype=torch.bool))


def test_what_does_not_fit_is_said():
    """Fails if a stack accepts what one of its layers cannot do."""
    plain, looking, x = (
        stack("vanilla"),
        stack("vanilla", causal=True, cross=True),
        torch.zeros(1, 3, 8).double(),
    )
    with pytest.raises(
        regard.Unsupported, match="does not support context: it has no cross-attention"
    ):
        plain(x, x)
    with pytest.raises(ValueError, match="give a context"):
        looking(x)
    with pytest.raises(ValueError, match="context_mask without"):
        plain(x, context_mask=x[..., 0] == 0)
    with pytest.raises(regard.Unsupported, match="was not built with causal=True"):
        plain.stream(x)
    with pytest.raises(regard.Unsupported, match="does not support cross-attention"):
        Block(regard.create("vanilla", dim=8, heads=2), cross=regard.create("fnet", dim=8))
    with pytest.raises(ValueError, match="ffn has dim 4 but the mixer has dim 8"):
        Block(regard.create("vanilla", dim=8, heads=2), MLP(4))
    with pytest.raises(ValueError, match="at least one layer"):
        SequentialStack([])
    with pytest.raises(ValueError, match="the same dim"):
        SequentialStack([stack("vanilla"), Block(regard.create("vanilla", dim=4, heads=2))])
    assert "mask" not in repr(stack("vanilla", "fnet").can)
