"""Universal Transformer, compared with loops over steps and tokens."""

import math

import pytest
import torch

import naive
import regard
from regard.stack import Halting, SequentialStack, UniversalStack
from stacks import block, chunks, inside, same_gradients

MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


def universal(
    steps=4,
    *,
    name="vanilla",
    halting=True,
    signal=True,
    spread=8.0,
    bias=-1.0,
    epsilon=0.01,
    **more,
):
    """Build a stack in which tokens halt at different steps, by large halting weights."""
    layer = block(name, **more)
    torch.manual_seed(1)
    asks = Halting(8, loss_weight=0.1, bias=bias, epsilon=epsilon) if halting else None
    stack = UniversalStack(layer, steps, halting=asks, timing_signal=signal).double().eval()
    if asks is not None:
        asks.proj.weight.data *= spread
        asks.proj.weight.data[:, 1::2] = 0  # the cosines of the signal would dominate the tokens
    return stack


def signal(i, t, d=8):
    """Dehghani et al. 2018, equations 6 and 7."""
    row = torch.zeros(d, dtype=torch.float64)
    for c in range(d):
        turn, rate = (math.cos if c % 2 else math.sin), 10000 ** ((c - c % 2) / d)
        row[c] = turn(i / rate) + turn(t / rate)
    return row


def by_hand(p, x, steps, *, causal, real, epsilon=0.01, **more):
    """One example (n, d), token by token: outputs, N, R, and whether it was unhalted."""
    n = len(x)
    h, out = x * real[:, None], [torch.zeros(8, dtype=x.dtype) for _ in range(n)]
    total, count, rest, cut = (
        [torch.zeros((), dtype=x.dtype)] * n,
        [0] * n,
        [torch.zeros((), dtype=x.dtype)] * n,
        [False] * n,
    )
    halted = [not r for r in real]
    for t in range(1, steps + 1):
        if all(halted):
            break
        s = h + torch.stack([signal(i, t) for i in range(n)])
        new = naive.block(naive.under(p, "layer"), s, 2, causal=causal, mask=real, **more)
        rows = []
        for i in range(n):
            if halted[i]:
                rows.append(h[i])
                continue
            chance = torch.sigmoid(naive.linear(p, "halting.proj", s[i])[0])
            count[i] += 1
            enough = (total[i] + chance).item() >= 1 - epsilon
            if enough or t == steps:
                rest[i], halted[i], cut[i] = 1 - total[i], True, not enough
                out[i] = out[i] + rest[i] * new[i]
            else:
                total[i] = total[i] + chance
                out[i] = out[i] + chance * new[i]
            rows.append(new[i])
        h = torch.stack(rows)
    return torch.stack(out), count, torch.stack(rest), cut


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_matches_loops(causal, steps, rand):
    """Outputs, steps, remainders, loss and gradients equal those of ACT loops, with padding."""
    stack, x, weight = (
        universal(steps, causal=causal, bias=-3.0),
        rand(2, 5, 8).requires_grad_(),
        rand(2, 5, 8),
    )
    with regard.collect_aux() as aux:
        found = stack(x, mask=MASK)
    p = inside(stack)
    examples = [
        by_hand(p, one, steps, causal=causal, real=real) for one, real in zip(x, MASK, strict=True)
    ]
    outs, counts, rests, cuts = zip(*examples, strict=True)
    expected = torch.stack(outs)
    torch.testing.assert_close(found, expected)
    assert aux.all("steps")[0].tolist() == list(map(list, counts))
    if steps == 6:
        taken = {n for row in counts for n in row if n}
        assert max(taken) - min(taken) > 1, (
            "otherwise no token sees the state of a halted one, and the test is weak"
        )
    loss = 0.1 * (sum(map(sum, counts)) + torch.stack(rests).sum()) / 8
    torch.testing.assert_close(aux.loss(), loss)
    torch.testing.assert_close(aux.all("unhalted")[0].item(), sum(map(sum, cuts)) / 8)
    same_gradients(
        (found * weight).sum() + aux.loss(), (expected * weight).sum() + loss, [x, *p.values()]
    )


def test_decoder_matches_loops(rand):
    """Every step sees the context, and its gradients equal those of loops."""
    stack, x, context, weight = (
        universal(5, causal=True, cross=True),
        rand(1, 5, 8),
        rand(1, 4, 8).requires_grad_(),
        rand(5, 8),
    )
    seen = torch.tensor([[True, True, True, False]])
    found = stack(x, context, context_mask=seen)[0]
    real = torch.ones(5, dtype=torch.bool)
    expected = by_hand(
        inside(stack), x[0], 5, causal=True, real=real, context=context[0], context_mask=seen[0]
    )[0]
    torch.testing.assert_close(found, expected)
    same_gradients(
        (found * weight).sum(), (expected * weight).sum(), [context, *stack.parameters()]
    )


def test_only_the_remainder_has_a_gradient(rand):
    """N has no gradient: the gradient of the loss is that of −Σ p before the last step."""
    stack, x = universal(4), rand(1, 5, 8)
    with regard.collect_aux() as aux:
        stack(x)
    rests = by_hand(inside(stack), x[0], 4, causal=False, real=torch.ones(5, dtype=torch.bool))[2]
    same_gradients(aux.loss(), 0.1 * rests.mean(), list(stack.parameters()))


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_stream_matches_whole(name, rand):
    """A chunk that halts early is still visible to deeper steps of later chunks."""
    stack, x = universal(5, name=name, causal=True), rand(2, 20, 8)
    with regard.collect_aux() as aux:
        whole = stack(x)
    steps = aux.all("steps")[0]
    assert steps.max() - steps.min() > 1
    with regard.collect_aux() as aux:
        torch.testing.assert_close(chunks(stack, x, (1, 7, 1, 11)), whole)
    assert torch.equal(torch.cat(aux.all("steps"), 1), steps)


@pytest.mark.parametrize(
    "more",
    [{"halting": False}, {"signal": False}, {"halting": False, "signal": False}, {"cross": True}],
)
def test_stream_with_signal_and_context(more, rand):
    """The timing signal continues in the stream, and all steps see the context."""
    stack, x = universal(3, causal=True, **more), rand(2, 9, 8)
    kwargs = {"context": rand(2, 3, 8)} if "cross" in more else {}
    whole = stack(x, **kwargs)
    torch.testing.assert_close(chunks(stack, x, (2, 1, 6), **kwargs), whole)


def test_stream_runs_steps_on_demand(rand):
    """Deeper steps read pending tokens only when a later token gets there."""
    stack, x = universal(4, name="linear", causal=True, signal=False, spread=0.0), rand(1, 6, 8)
    stack.halting.proj.bias.data.fill_(20.0)
    _, state = stack.stream(x[:, :5])
    waits = [0 if late.pending is None else late.pending.shape[1] for late in state.steps]
    assert waits == [0, 5, 5, 5]
    stack.halting.proj.bias.data.fill_(0.2)  # p = 0.55: two steps
    _, state = stack.stream(x[:, 5:], state)
    assert [0 if late.pending is None else late.pending.shape[1] for late in state.steps] == [
        0,
        0,
        6,
        6,
    ]


def test_no_steps_after_halting(rand):
    """No step runs after the last token has halted."""
    stack, x, calls = universal(6, spread=0.0), rand(2, 5, 8), []
    stack.layer.mixer.register_forward_hook(lambda *_: calls.append(1))
    for bias, steps in ((20.0, 1), (0.0, 2), (-20.0, 6)):
        calls.clear()
        stack.halting.proj.bias.data.fill_(bias)
        with regard.collect_aux() as aux:
            stack(x)
        assert len(calls) == steps
        assert aux.all("unhalted")[0].item() == (1 if bias == -20 else 0), (
            "tokens that never halt must be recorded"
        )


def test_padding_takes_no_steps(rand):
    """Padding, even NaN, takes no step and changes neither tokens nor loss."""
    stack, x = universal(4), rand(2, 5, 8)
    poisoned = x.masked_fill(~MASK[..., None], torch.nan)
    with regard.collect_aux() as clean:
        want = stack(x, mask=MASK)
    with regard.collect_aux() as aux:
        found = stack(poisoned, mask=MASK)
    torch.testing.assert_close(found, want)
    assert not found[~MASK].any() and not aux.all("steps")[0][~MASK].any()
    assert torch.equal(aux.loss(), clean.loss())
    with regard.collect_aux() as cut:
        torch.testing.assert_close(stack(x[1:, :3]), want[1:, :3])
    torch.testing.assert_close(cut.all("steps")[0], aux.all("steps")[0][1:, :3])
    stack(poisoned, mask=MASK).sum().backward()
    assert all(p.grad.isfinite().all() for p in stack.parameters())


def test_only_padding(rand):
    """Without real tokens the loss is zero, not NaN."""
    stack, x = universal(3), rand(2, 4, 8)
    with regard.collect_aux() as aux:
        assert not stack(x, mask=torch.zeros(2, 4, dtype=torch.bool)).any()
    assert aux.loss() == 0


def test_without_halting(rand):
    """Without halting, step t is layer(h + P_t)."""
    stack, x = universal(3, halting=False), rand(2, 5, 8)
    h = x
    for t in (1, 2, 3):
        h = stack.layer(h + torch.stack([signal(i, t) for i in range(5)]))
    torch.testing.assert_close(stack(x), h)


def test_step_of_several_layers(rand):
    """The layer of a step may be a stack."""
    torch.manual_seed(0)
    inner = SequentialStack([block(causal=True), block("linear", causal=True)])
    stack, x = UniversalStack(inner, 3, halting=Halting(8)).double().eval(), rand(2, 9, 8)
    torch.testing.assert_close(chunks(stack, x, (4, 5)), stack(x))


def test_bfloat16(rand):
    """Probabilities are not summed in bfloat16."""
    stack, x = universal(4, spread=0.5, bias=0.3), rand(2, 5, 8)
    want = stack(x)
    found = stack.bfloat16()(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.double() - want).abs().mean() / want.abs().mean() < 0.05


def test_invalid_arguments():
    """Invalid arguments raise an error."""
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        universal(0)
    with pytest.raises(ValueError, match="epsilon must be a number between 0 and 1"):
        Halting(8, epsilon=1.0)
    with pytest.raises(ValueError, match="loss_weight must be a finite number above 0"):
        Halting(8, loss_weight=0.0)
    with pytest.raises(ValueError, match="halting has dim 4 but the layer has dim 8"):
        UniversalStack(block(), 2, halting=Halting(4))
    with pytest.raises(regard.Unsupported, match="was not built with causal=True"):
        universal(2).stream(torch.zeros(1, 2, 8).double())
