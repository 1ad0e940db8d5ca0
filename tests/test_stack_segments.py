"""Segment recurrence: values flow from segment to segment, gradients do not."""

import pytest
import torch

import regard
from oracles import stacks
from regard import SoftmaxAttention
from regard.block import Block, LayerInputs
from regard.ffn import MLP
from regard.mixer import Can, Mixer, MultiHead
from regard.pattern import Band, Chunks, Full
from regard.position import Rope, T5Bias, TransformerXLBias
from regard.prior import ALiBi
from regard.registry import get_recipe
from regard.residual import PostNorm, PreNorm
from regard.stack import HiddenStateMemory, SegmentStack, SequentialStack
from regard.state import detach

DIM, HEADS = 8, 2


def block(pattern=Full(), prior=None, residual=PreNorm, **more):
    return Block(
        MultiHead(DIM, HEADS, SoftmaxAttention(pattern, prior), causal=True),
        MLP(DIM),
        residual=residual,
        **more,
    )


def blocks(count=2, **more):
    torch.manual_seed(0)
    return [block(**more).double() for _ in range(count)]


def streamed(layers, x, sizes):
    state, parts = None, []
    for chunk in x.split(sizes, 1):
        y, state = layers.stream(chunk, state)
        parts.append(y)
    return torch.cat(parts, 1), state


# --------------------------------------------------------------------------------------- the oracle
def naive(layers, x, segment, memory, slopes, mask, pre):
    """All segments of all examples."""
    results = []
    for row, keep in zip(x, mask, strict=True):
        held, done = [[] for _ in layers], []
        for start in range(0, len(row), segment):
            now = list(row[start : start + segment])
            for i, layer in enumerate(layers):
                past = held[i][-memory:] if memory else []
                after = stacks.block(layer, past, now, keep[start - len(past) :], slopes, pre)
                held[i] += [t.detach() for t in now]
                now = after
            done += now
        results.append(torch.stack(done))
    return torch.stack(results)


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
@pytest.mark.parametrize(("segment", "memory"), [(4, 6), (4, 4), (3, 0), (1, 3), (5, 2), (20, 4)])
def test_matches_loops(segment, memory, residual, rand):
    """Outputs and gradients equal those of loops that follow the paper."""
    prior = ALiBi(HEADS)
    layers, x = blocks(prior=prior, residual=residual), rand(2, 13, DIM)
    stack, slopes = (
        SegmentStack(layers, segment_length=segment, memory=memory),
        prior.slopes.double(),
    )
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 9:], mask[1, 2] = False, False
    rows, weight = mask[..., None], rand(2, 13, DIM)
    found = []
    for f in (
        lambda t: stack(t, mask=mask),
        lambda t: naive(layers, t, segment, memory, slopes, mask, residual is PreNorm),
    ):
        t = x.clone().requires_grad_()
        y = f(t) * rows
        found.append([y, *torch.autograd.grad((y * weight).sum(), [t, *stack.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------ visibility
@pytest.mark.parametrize(("segment", "back"), [(4, 0), (4, 1), (4, 3), (1, 5)])
def test_matches_chunks_pattern(segment, back, rand):
    """Values equal those of a sequential stack over chunks that see `back` chunks."""
    layers, x = blocks(count=3, prior=ALiBi(HEADS)), rand(2, 22, DIM)
    same = SequentialStack(blocks(count=3, pattern=Chunks(segment, back=back), prior=ALiBi(HEADS)))
    same.load_state_dict(SequentialStack(layers).state_dict())
    torch.testing.assert_close(
        SegmentStack(layers, segment_length=segment, memory=segment * back)(x), same(x)
    )


def test_window_in_blocks(rand):
    """A window narrower than the memory is respected across segments."""
    layers, x = blocks(pattern=Band(3, 0)), rand(1, 22, DIM)
    torch.testing.assert_close(
        SegmentStack(layers, segment_length=4, memory=8)(x), SequentialStack(layers)(x)
    )


def test_no_gradient_between_segments(rand):
    """Earlier segments influence later ones (replacement) but get no gradient (Jacobian)."""
    stack, x = SegmentStack(blocks(), segment_length=4, memory=4), rand(1, 12, DIM)
    other = x.clone()
    other[:, 2] = rand(DIM)
    changed = (stack(other) != stack(x)).any(-1)[0]
    assert changed.tolist() == [False] * 2 + [True] * 10  # two layers of memory reach two segments
    jacobian = torch.autograd.functional.jacobian(stack, x)[0, :, :, 0].abs().sum((1, 3))
    allowed = torch.block_diag(*[torch.ones(4, 4).tril()] * 3).bool()
    assert ((jacobian > 0) == allowed).all()


def test_gradients_reach_the_weights_through_the_memory(rand):
    """Keys of the memory are recomputed: a detached KV cache gives W_k a smaller gradient."""
    (layer,), x = blocks(count=1), rand(1, 8, DIM)
    stack = SegmentStack([layer], segment_length=4, memory=4)
    _, state = stack.stream(x[:, :4])
    (mine,) = torch.autograd.grad(stack.stream(x[:, 4:], state)[0].sum(), layer.mixer.v.weight)
    _, cache = layer.stream(x[:, :4])
    (other,) = torch.autograd.grad(
        layer.stream(x[:, 4:], detach(cache))[0].sum(), layer.mixer.v.weight
    )
    assert (mine - other).abs().max() > 1e-3
    (whole,) = torch.autograd.grad(layer(x)[:, 4:].sum(), layer.mixer.v.weight)
    torch.testing.assert_close(
        mine, whole
    )  # one layer: its memory is the input, so nothing is lost


@pytest.mark.parametrize(
    "places",
    [
        {"rotary": Rope()},
        {"prior": TransformerXLBias(HEADS, DIM // HEADS, DIM)},
        {"prior": T5Bias(HEADS)},
    ],
)
def test_positions_continue_in_memory(places, rand):
    """Queries, keys and memory have the positions of one sequence, also with rotary."""
    torch.manual_seed(0)
    attention, rotary = SoftmaxAttention(prior=places.get("prior")), places.get("rotary")
    layers = [
        Block(MultiHead(DIM, HEADS, attention, causal=True, rotary=rotary), MLP(DIM)).double()
        for _ in range(2)
    ]
    stack, x = SegmentStack(layers, segment_length=4, memory=20), rand(2, 19, DIM)
    torch.testing.assert_close(stack(x), SequentialStack(layers)(x))
    torch.testing.assert_close(streamed(stack, x, (1, 7, 1, 10))[0], stack(x))
    assert not torch.allclose(SegmentStack(layers, segment_length=4, memory=4)(x), stack(x))


# ------------------------------------------------------------------------------------------- chunks
@pytest.mark.parametrize("sizes", [(1, 7, 1, 14), (4, 4, 4, 4, 4, 3), (23,), (0, 5, 0, 18)])
def test_stream_matches_whole(sizes, rand):
    """Chunks do not change where segments end, nor gradients inside a segment."""
    stack, weight = (
        SegmentStack(blocks(prior=ALiBi(HEADS)), segment_length=4, memory=6),
        rand(2, 23, DIM),
    )
    x = rand(2, 23, DIM).requires_grad_()
    found = []
    for y in (stack(x), streamed(stack, x, sizes)[0]):
        found.append([y, *torch.autograd.grad((y * weight).sum(), [x, *stack.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_every_mixer_that_streams(name, rand):
    """Every streaming mixer passes values, but no gradients, to the next segment."""
    torch.manual_seed(0)
    mixer = get_recipe(name).example(DIM, causal=True)
    layers = [Block(mixer, MLP(DIM)), block()]
    stack = SegmentStack(layers, segment_length=5, memory=20).double().eval()
    x = rand(2, 20, DIM).requires_grad_()
    y, state = streamed(stack, x, (1, 7, 1, 11))
    torch.testing.assert_close(y, stack(x))
    torch.testing.assert_close(
        y, SequentialStack(layers)(x)
    )  # the memory is long enough to lose nothing
    (reach,) = torch.autograd.grad(y[:, 15:].sum(), x)
    assert not reach[:, :15].any() and reach[:, 15:].any()
    assert not any(t.requires_grad for t in tensors(state))


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for part in state for t in tensors(part)] if isinstance(state, tuple | list) else []


def test_state_is_bounded(rand):
    """A layer stores at most its memory, and inside a segment also the segment."""
    stack, state = SegmentStack(blocks(), segment_length=4, memory=6), None
    for i, token in enumerate(rand(1, 40, DIM).split(1, 1)):
        _, state = stack.stream(token, state)
        assert all(held.length <= 6 + (i + 1) % 4 for held in state.layers)
    assert state.position == 40 and state.layers[0].x.shape == (1, 6, DIM)


def test_training_with_state_between_batches(rand):
    """The state of a step has no graph: a second backward pass would fail."""
    stack, state = SegmentStack(blocks(), segment_length=4, memory=4), None
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    for _ in range(3):
        y, state = stack.stream(rand(2, 8, DIM), state)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
    assert state.position == 24


# ----------------------------------------------------------------------------------------- the rest
def test_nan_in_padding(rand):
    """Masked tokens, even NaN, reach no real token or gradient through the memory."""
    stack, x = SegmentStack(blocks(), segment_length=4, memory=8), rand(2, 12, DIM)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3:6] = False
    poisoned = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(stack(poisoned, mask=mask)[mask], stack(x, mask=mask)[mask])
    assert not torch.allclose(stack(x)[0, 8:], stack(x, mask=mask)[0, 8:])


def test_context_in_every_segment(rand):
    """Every segment attends to the context, with its mask."""
    layers = blocks(cross=regard.create("vanilla", dim=DIM, heads=HEADS))
    x, context = rand(2, 9, DIM), rand(2, 5, DIM)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    got = SegmentStack(layers, segment_length=4, memory=12)(x, context, context_mask=real)
    torch.testing.assert_close(got, SequentialStack(layers)(x, context, context_mask=real))


def test_empty_batches_and_lengths(rand):
    """Empty inputs are valid; a state of another batch size is not."""
    stack = SegmentStack(blocks(), segment_length=4, memory=4)
    assert stack(rand(2, 0, DIM)).shape == (2, 0, DIM) and stack(rand(1, 1, DIM)).shape == (
        1,
        1,
        DIM,
    )
    _, state = stack.stream(rand(2, 3, DIM))
    with pytest.raises(ValueError, match="the state has 2 examples"):
        stack.stream(rand(1, 3, DIM), state)


def test_bad_input(rand):
    """Invalid or inapplicable arguments raise an error."""
    plain = Block(regard.create("vanilla", dim=DIM, heads=HEADS))
    linear = Block(regard.create("linear", dim=DIM, heads=HEADS, causal=True)).double()
    with pytest.raises(ValueError, match="segment_length must be an integer >= 1, not 0"):
        SegmentStack(blocks(), segment_length=0, memory=4)
    with pytest.raises(ValueError, match="memory must be an integer >= 0, not -1"):
        SegmentStack(blocks(), segment_length=4, memory=-1)
    with pytest.raises(regard.Unsupported, match=r"needs causal layers: build layer 1 \(vanilla\)"):
        SegmentStack([block(), plain], segment_length=4, memory=4)
    with pytest.raises(ValueError, match="needs a memory: set it, as in memory=128"):
        SegmentStack(blocks(), segment_length=4)
    with pytest.raises(ValueError, match="leave memory out"):
        SegmentStack([linear], segment_length=4, memory=4)
    with pytest.raises(ValueError, match="at least one layer"):
        SegmentStack([], segment_length=4, memory=4)
    with pytest.raises(
        regard.Unsupported,
        match="does not support mask: one of its layers carries a recurrent state",
    ):
        SegmentStack([linear], segment_length=4)(
            rand(1, 3, DIM), mask=torch.ones(1, 3, dtype=torch.bool)
        )
    stack = SegmentStack(blocks(), segment_length=4, memory=4)
    with pytest.raises(regard.Unsupported, match="does not support global_attention_mask"):
        stack(rand(1, 3, DIM), global_attention_mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must have shape \(1, 3\)"):
        stack(rand(1, 3, DIM), mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="x must have width 8, not 4"):
        stack(rand(1, 3, 4))
    with pytest.raises(regard.Unsupported, match="cannot attend to the memory of SegmentStack"):
        HiddenStateMemory(4).step(
            linear, rand(1, 3, DIM), LayerInputs(), HiddenStateMemory(4).initial_state(linear), 0
        )


class NonStreamingMixer(Mixer):
    """A causal mixer that cannot stream."""

    def __init__(self):
        super().__init__(DIM, can=Can(stream="it forgets"), causal=True)

    def mix(self, x, memory, mask, state):
        return x, None


def test_mixer_without_memory_or_stream():
    """A causal mixer with neither a pattern nor a stream raises an error."""
    with pytest.raises(
        regard.Unsupported,
        match="NonStreamingMixer can neither attend to a memory nor stream: it forgets",
    ):
        SegmentStack([Block(NonStreamingMixer()), block()], segment_length=4, memory=4)
