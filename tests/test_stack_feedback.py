"""Feedback: every layer attends to memory vectors that combine all layers."""

import pytest
import torch

import regard
from oracles import stacks
from regard import SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.mixer import MultiHead
from regard.pattern import Band, Full
from regard.position import Rope
from regard.prior import ALiBi
from regard.residual import PostNorm, PreNorm
from regard.stack import FeedbackStack

DIM, HEADS, N = 8, 2, 11


def blocks(count=2, *, pattern=Full(), prior=None, residual=PreNorm, kv_heads=None, **more):
    torch.manual_seed(0)
    mixers = [
        MultiHead(DIM, HEADS, SoftmaxAttention(pattern, prior), kv_heads=kv_heads, causal=True)
        for _ in range(count)
    ]
    return [Block(mixer, MLP(DIM), residual=residual, **more).double() for mixer in mixers]


def feedback(count=2, *, span=None, shared=True, **more):
    stack = FeedbackStack(blocks(count, **more), span=span, share_kv=shared).double()
    torch.nn.init.normal_(stack.weights)
    return stack


def naive(stack, x, mask, slopes, pre):
    """Token by token, layer by layer."""
    results = []
    for row, keep in zip(x, mask, strict=True):
        memories, done = [], []
        for t, token in enumerate(row):
            first = 0 if stack.span is None else max(0, t - stack.span)
            places = [j for j in range(first, t) if keep[j]]
            every = [token]
            for layer in stack.layers:
                seen, gaps = [memories[j] for j in places], [t - j for j in places]
                reader = stack.layers[0] if stack.share_kv else layer
                every.append(stacks.token(layer, every[-1], seen, gaps, slopes, pre, reader))
            weights = stack.weights.exp() / stack.weights.exp().sum()
            memories.append(sum(w * h for w, h in zip(weights, every, strict=True)))
            done.append(every[-1])
        results.append(torch.stack(done))
    return torch.stack(results)


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("span", [None, 1, 3])
def test_matches_loops(span, shared, residual, rand):
    """Outputs and gradients through time equal those of loops."""
    prior = ALiBi(HEADS)
    stack = feedback(span=span, shared=shared, residual=residual, prior=prior)
    x, weight, mask = rand(2, N, DIM), rand(2, N, DIM), torch.ones(2, N, dtype=torch.bool)
    mask[0, 3], mask[1, :2], mask[1, 9:] = False, False, False
    found = []
    for f in (
        lambda t: stack(t, mask=mask),
        lambda t: naive(stack, t, mask, prior.slopes.double(), residual is PreNorm),
    ):
        t = x.clone().requires_grad_()
        y = f(t) * mask[..., None]
        found.append([y, *torch.autograd.grad((y * weight).sum(), [t, *stack.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_low_layers_see_high_layers(rand):
    """With all memory weight on the last layer, changing that layer changes the first."""
    stack, x = feedback(), rand(1, 4, DIM)
    outputs = []
    with torch.no_grad():
        stack.weights.copy_(torch.tensor([-50.0, -50.0, 50.0]))
    finish = stack.layers[0].finish
    stack.layers[0].finish = lambda x, y, inputs: outputs.append(y) or finish(x, y, inputs)
    stack(x)
    with torch.no_grad():
        stack.layers[1].ffn.down.bias.copy_(rand(DIM))
    stack(x)
    assert torch.equal(outputs[0], outputs[4]) and not torch.allclose(outputs[1], outputs[5])


def test_gradients_through_time(rand):
    """The last token has a gradient for the first, and none for later tokens."""
    jacobian = (
        torch.autograd.functional.jacobian(feedback(span=1), rand(1, 6, DIM))[0, :, :, 0]
        .abs()
        .sum((1, 3))
    )
    assert (
        (jacobian > 0) == torch.ones(6, 6).tril().bool()
    ).all()  # a span of one, but the whole past


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("span", [None, 5])
def test_stream_matches_whole(span, shared, rand):
    """Chunks give the outputs and gradients of the whole sequence."""
    stack, weight = feedback(span=span, shared=shared, prior=ALiBi(HEADS)), rand(2, 23, DIM)
    x, state, parts = rand(2, 23, DIM).requires_grad_(), None, []
    for chunk in x.split((1, 7, 1, 14), 1):
        y, state = stack.stream(chunk, state)
        parts.append(y)
    found = []
    for y in (torch.cat(parts, 1), stack(x)):
        found.append([y, *torch.autograd.grad((y * weight).sum(), [x, *stack.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert (
        state.position == 23
        and state.k[0].shape[2] == (span or 23)
        and len(state.k) == (1 if shared else 2)
    )


def test_shared_projections_are_one_parameter():
    """Shared projections are counted and trained once."""
    apart, shared = (
        sum(p.numel() for p in feedback(3, shared=s).parameters()) for s in (False, True)
    )
    assert apart - shared == 2 * 2 * DIM * DIM


def test_pattern_and_grouped_heads(rand):
    """The pattern of the blocks (a band is a span) and grouped heads are respected."""
    by_band = feedback(pattern=Band(3, 0), kv_heads=1, shared=False)
    by_span = feedback(kv_heads=1, shared=False, span=3)
    by_span.load_state_dict(by_band.state_dict())
    x = rand(2, N, DIM)
    torch.testing.assert_close(by_band(x), by_span(x))


@pytest.mark.parametrize("shared", [True, False])
def test_rotary_embedding(shared, rand):
    """Memory vectors are rotated by their positions: a shift of all changes nothing."""
    torch.manual_seed(0)
    mixers = [
        MultiHead(DIM, HEADS, SoftmaxAttention(), causal=True, rotary=Rope()) for _ in range(2)
    ]
    stack, x = (
        FeedbackStack([Block(mixer, MLP(DIM)) for mixer in mixers], share_kv=shared).double(),
        rand(2, 6, DIM),
    )
    moved, _ = stack.stream(x, stack.initial_state()._replace(position=3))
    torch.testing.assert_close(moved, stack(x))
    for mixer in mixers:
        mixer.rotary = None
    assert not torch.allclose(stack(x), moved)


def test_nan_in_padding(rand):
    """Masked tokens, even NaN, reach neither a real token nor a gradient."""
    stack, x, mask = feedback(), rand(2, N, DIM), torch.ones(2, N, dtype=torch.bool)
    mask[0, 2:4] = False
    poisoned = x.masked_fill(~mask[..., None], torch.nan)
    got = stack(poisoned, mask=mask)[mask]
    torch.testing.assert_close(got, stack(x, mask=mask)[mask])
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), list(stack.parameters())))


def test_first_token_sees_persistent_vectors(rand):
    """The first token has no memory, but sees learned vectors."""
    mixer = regard.create("all_attention", dim=DIM, heads=HEADS, causal=True, count=3)
    stack, x = FeedbackStack([Block(mixer, residual=PostNorm)]).double(), rand(2, 1, DIM)
    alone = mixer(
        torch.zeros_like(x), mask=torch.zeros(2, 1, dtype=torch.bool)
    )  # a query of zero, and no token
    torch.testing.assert_close(
        stack(torch.zeros_like(x)), stack.layers[0].mixer_residual.norm(alone)
    )
    assert alone.abs().max() > 0


def test_context(rand):
    """Each token attends to the context, with its mask."""
    stack = feedback(cross=regard.create("vanilla", dim=DIM, heads=HEADS))
    x, context, real = (
        rand(2, 5, DIM),
        rand(2, 4, DIM),
        torch.tensor([[True] * 4, [True] * 2 + [False] * 2]),
    )
    cut = stack(x[1:], context[1:, :2])
    torch.testing.assert_close(stack(x, context, context_mask=real)[1:], cut)
    assert stack(rand(2, 0, DIM), context).shape == (2, 0, DIM)


def test_bad_input(rand):
    """Invalid arguments raise an error."""
    linear = Block(regard.create("linear", dim=DIM, heads=HEADS, causal=True))
    with pytest.raises(ValueError, match="span must be an integer >= 1, not 0"):
        FeedbackStack(blocks(), span=0)
    with pytest.raises(regard.Unsupported, match=r"needs causal layers: build layer 0 \(vanilla\)"):
        FeedbackStack([Block(regard.create("vanilla", dim=DIM, heads=HEADS))])
    with pytest.raises(
        regard.Unsupported, match="linear cannot attend to the memory of FeedbackStack"
    ):
        FeedbackStack([linear])
    with pytest.raises(
        ValueError, match=r"one has 4 heads \(4 KV heads\) and the first 2 heads \(2 KV heads\)"
    ):
        FeedbackStack([*blocks(1), Block(MultiHead(DIM, 4, SoftmaxAttention(), causal=True))])
    stack = feedback()
    with pytest.raises(
        regard.Unsupported, match="FeedbackStack does not support global_attention_mask"
    ):
        stack(rand(1, 3, DIM), global_attention_mask=torch.ones(1, 3, dtype=torch.bool))
    _, state = stack.stream(rand(2, 3, DIM))
    with pytest.raises(ValueError, match="the state has 2 examples"):
        stack.stream(rand(1, 3, DIM), state)
