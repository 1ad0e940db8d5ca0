"""Norms: compared with loops over tokens; padding, chunks and precision."""

import math

import pytest
import torch

from regard.block import Block
from regard.ffn import MLP
from regard.norm import (
    NORMS,
    BatchNorm,
    GroupNorm,
    LayerNorm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    get_norm,
)
from regard.registry import get_recipe
from regard.residual import RESIDUALS, get_residual
from regard.stack import SequentialStack

MASK = torch.tensor(
    [[True, True, True, False, False], [True, False, True, True, True], [False] * 5]
)


def moved(norm, seed=1):
    """Change all parameters and statistics from their initial values."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in (*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())):
            t.copy_(torch.rand(t.shape, generator=draw) + 0.5)
    return norm.double()


# -------------------------------------------------------------------------- oracles, token by token
def layer(norm, token):
    mean = sum(token) / len(token)
    variance = sum((a - mean) ** 2 for a in token) / len(token)
    return (
        torch.stack([(a - mean) / (variance + norm.eps) ** 0.5 for a in token]) * norm.weight
        + norm.bias
    )


def rms(norm, token):
    return (
        torch.stack([a / (sum(b * b for b in token) / len(token) + norm.eps) ** 0.5 for a in token])
        * norm.weight
    )


def scale(norm, token):
    return token * norm.weight / sum(b * b for b in token) ** 0.5


def group(norm, token):
    parts = []
    for part in token.split(len(token) // norm.groups):
        mean = sum(part) / len(part)
        variance = sum((a - mean) ** 2 for a in part) / len(part)
        parts.append((part - mean) / (variance + norm.eps) ** 0.5)
    return torch.cat(parts) * norm.weight + norm.bias


def batch_evaluated(norm, token):
    unit = [
        (a - m) / (v + norm.eps) ** 0.5
        for a, m, v in zip(token, norm.running_mean, norm.running_var, strict=True)
    ]
    return torch.stack(unit) * norm.weight + norm.bias


def power_evaluated(norm, token):
    unit = [a / (p + norm.eps) ** 0.5 for a, p in zip(token, norm.running_square, strict=True)]
    return torch.stack(unit) * norm.weight + norm.bias


def none(norm, token):
    return token


ORACLES = {
    "layer": layer,
    "rms": rms,
    "scale": scale,
    "batch": batch_evaluated,
    "group": group,
    "power": power_evaluated,
    "none": none,
}


def gradients(y, weight, inputs):
    return torch.autograd.grad((y * weight).sum(), inputs)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", NORMS)
def test_evaluation_matches_formula(name, length, rand):
    """Outputs and gradients equal the formula for one token."""
    norm, x, weight = (
        moved(NORMS[name](8)).eval(),
        rand(3, length, 8).requires_grad_(),
        rand(3, length, 8),
    )
    want = torch.stack([torch.stack([ORACLES[name](norm, token) for token in row]) for row in x])
    got = norm(x)
    torch.testing.assert_close(got, want)
    inputs = [x, *norm.parameters()]
    for a, b in zip(gradients(got, weight, inputs), gradients(want, weight, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NORMS)
def test_padding_has_no_influence(name, rand):
    """Masked tokens, even NaN, change no output, gradient or statistic, also in training."""
    x, weight = rand(3, 5, 8), rand(3, 5, 8) * MASK[..., None]
    found = []
    for fill in (0.0, 1e3, torch.nan):
        norm, y = moved(NORMS[name](8)), x.masked_fill(~MASK[..., None], fill).requires_grad_()
        out = norm(y, MASK)
        found.append([out[MASK], *gradients(out, weight, [y, *norm.parameters()]), *norm.buffers()])
        assert not found[-1][1][~MASK].any()  # no gradient for masked tokens
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("residual", ["post", "pre"])
def test_nan_padding_in_a_stack(residual, rand):
    """NaN in padding does not reach gradients of parameters."""
    torch.manual_seed(0)
    make = get_residual(residual, 2)
    layers = SequentialStack(
        [Block(get_recipe("vanilla").example(8), MLP(8), residual=make) for _ in range(2)]
    ).double()
    x, mask, found = rand(2, 5, 8), MASK[:2], []
    for fill in (0.0, torch.nan):
        out = layers(x.masked_fill(~mask[..., None], fill), mask=mask)
        found.append(torch.autograd.grad(out[mask].square().sum(), list(layers.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_batch_norm_matches_loop(rand):
    """Mean, variance, running statistics and gradients are those of the real tokens."""
    norm, x, weight = (
        moved(BatchNorm(8)),
        rand(3, 5, 8).requires_grad_(),
        rand(3, 5, 8) * MASK[..., None],
    )
    old = norm.running_mean.clone(), norm.running_var.clone()
    real = [x[a, i] for a in range(3) for i in range(5) if MASK[a, i]]
    mean = sum(real) / len(real)
    variance = sum((t - mean) ** 2 for t in real) / len(real)
    want = torch.stack(
        [(t - mean) / (variance + 1e-5) ** 0.5 * norm.weight + norm.bias for t in real]
    )
    inputs = [x, norm.weight, norm.bias]
    expected = gradients(want, weight[MASK], inputs)
    got = norm(x, MASK)
    torch.testing.assert_close(got[MASK], want)
    for a, b in zip(gradients(got, weight, inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(norm.running_mean, 0.9 * old[0] + 0.1 * mean.detach())
    torch.testing.assert_close(
        norm.running_var, 0.9 * old[1] + 0.1 * variance.detach() * len(real) / (len(real) - 1)
    )


def test_batch_norm_matches_torch(rand):
    """Three training steps and an evaluation equal torch.nn.BatchNorm1d."""
    ours, theirs = BatchNorm(8).double(), torch.nn.BatchNorm1d(8).double()
    for _ in range(3):
        x = rand(2, 5, 8)
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 2, dtype=torch.bool), torch.tensor([[False, True]])]
)
@pytest.mark.parametrize("name", ["batch", "power"])
def test_too_few_tokens(name, mask, rand):
    """Batches with too few real tokens do not change the statistics."""
    norm = NORMS[name](4).double()
    before = [b.clone() for b in norm.buffers() if b.is_floating_point()]
    assert norm(rand(1, 2, 4), mask).isfinite().all()
    after = [b for b in norm.buffers() if b.is_floating_point()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same == (name == "batch" or not mask.any())
    assert norm(torch.zeros(1, 0, 4).double()).shape == (1, 0, 4) and all(
        b.isfinite().all() for b in norm.buffers()
    )


def test_power_norm_matches_algorithm(rand):
    """Over several steps, outputs, ψ, ν and gradients equal a loop over real tokens."""
    norm, alpha = PowerNorm(4, alpha=0.8).double(), 0.8
    with torch.no_grad():
        norm.weight.copy_(rand(4)), norm.bias.copy_(rand(4))
    square, nu = torch.ones(4).double(), torch.zeros(4).double()
    for _ in range(4):
        x, grad = (2 * rand(3, 5, 4)).requires_grad_(), rand(3, 5, 4) * MASK[..., None]
        real = [(a, i) for a in range(3) for i in range(5) if MASK[a, i]]
        out = norm(x, MASK)
        got = gradients(out, grad, [x, norm.weight, norm.bias])
        want, by_gain, power, along, mean = torch.zeros(3, 5, 4).double(), 0.0, 0.0, 0.0, 0.0
        for a, i in real:
            unit, g = x[a, i].detach() / (square + 1e-5) ** 0.5, grad[a, i] * norm.weight.detach()
            torch.testing.assert_close(out[a, i], unit * norm.weight + norm.bias)
            want[a, i] = (g - nu * unit) / (square + 1e-5) ** 0.5
            by_gain += grad[a, i] * unit
            power, along = power + unit**2 / len(real), along + g * unit / len(real)
            mean += x[a, i].detach() ** 2 / len(real)
        for mine, other in zip(got, (want, by_gain, grad.sum((0, 1))), strict=True):
            torch.testing.assert_close(mine, other)
        square, nu = (
            alpha * square + (1 - alpha) * mean,
            nu * (1 - (1 - alpha) * power) + (1 - alpha) * along,
        )
        torch.testing.assert_close(norm.running_square, square)
        torch.testing.assert_close(norm.nu, nu)
    assert nu.abs().max() > 0.1  # the correction is not negligible
    torch.testing.assert_close(norm.eval()(x), x / (square + 1e-5) ** 0.5 * norm.weight + norm.bias)


def test_power_norm_warmup(rand):
    """Warm-up steps use the batch's quadratic mean, with its exact gradient."""
    norm = PowerNorm(4, warmup=1).double()
    x = rand(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: PowerNorm(4, warmup=1).double()(t), x)
    torch.testing.assert_close(norm(x), x / (x.square().mean((0, 1)) + 1e-5).sqrt())
    last = norm.running_square.clone()
    torch.testing.assert_close(norm(x), x / (last + 1e-5).sqrt())


def test_power_norm_gradient_is_corrected(rand):
    """The gradient of PN is not that of x / ψ alone."""
    norm, x, grad = PowerNorm(4).double(), rand(2, 3, 4).requires_grad_(), rand(2, 3, 4)
    first = gradients(norm(x), grad, x)[0]
    second = gradients(norm(x), grad, x)[0]
    assert not torch.allclose(first, second) and norm.nu.abs().sum() > 0


@pytest.mark.parametrize("name", NORMS)
def test_uses_batch_statistics(name, rand):
    """`uses_batch_statistics` says whether tokens depend on each other in training."""
    x = 3 * rand(2, 6, 8)
    whole, parts = moved(NORMS[name](8)), moved(NORMS[name](8))
    chunks = torch.cat([parts(chunk) for chunk in x.split((1, 5), 1)], 1)
    assert torch.allclose(whole(x), chunks) != NORMS[name].uses_batch_statistics
    assert any(True for _ in whole.buffers()) == NORMS[name].uses_batch_statistics


@pytest.mark.parametrize(
    "residual", [residual for residual in RESIDUALS if residual != "rezero"]
)  # which has no norm
@pytest.mark.parametrize("name", NORMS)
def test_stream_matches_whole(name, residual, rand):
    """In evaluation, chunks give the result of the whole sequence."""
    make = get_residual(residual, 2, norm=NORMS[name])
    torch.manual_seed(0)
    layers = SequentialStack(
        [
            Block(get_recipe("vanilla").example(8, causal=True), MLP(8), residual=make)
            for _ in range(2)
        ]
    ).double()
    x = rand(2, 12, 8)
    layers(x)  # move the running statistics
    state, parts = None, []
    for chunk in x.split((1, 6, 5), 1):
        y, state = layers.eval().stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), layers(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_half_precision_uses_float32(name, dtype, rand):
    """Squares do not overflow float16, and only the result is rounded."""
    x = (300 * rand(2, 3, 8)).to(dtype)
    norm = NORMS[name](8).eval().to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), norm.double()(x.double()), rtol=2 * step, atol=2 * step)
    trained = NORMS[name](8)(x)  # statistics in single, tokens in half
    assert trained.dtype == dtype and trained.isfinite().all()


def test_matches_torch(rand):
    """Layer, RMS and group norm equal torch's; ScaleNorm equals its initial formula."""
    x = rand(2, 5, 8)
    torch.testing.assert_close(
        RMSNorm(8, eps=1e-6).double()(x), torch.nn.RMSNorm(8, eps=1e-6).double()(x)
    )
    torch.testing.assert_close(LayerNorm(8).double()(x), torch.nn.LayerNorm(8).double()(x))
    group = torch.nn.GroupNorm(2, 8).double()
    torch.testing.assert_close(GroupNorm(8, groups=2).double()(x)[0], group(x[0]))
    torch.testing.assert_close(GroupNorm(8, groups=1).double()(x), LayerNorm(8).double()(x))
    torch.testing.assert_close(
        ScaleNorm(8).double()(x).norm(dim=-1), torch.full((2, 5), math.sqrt(8)).double()
    )


def test_groups_of_one_channel(rand):
    """A single token is valid if all groups have one channel."""
    assert torch.equal(
        GroupNorm(4, groups=4).double()(rand(1, 1, 4)), torch.zeros(1, 1, 4).double()
    )


@pytest.mark.parametrize("name", sorted(set(NORMS) - {"none"}))
def test_invalid_epsilon(name):
    """An invalid epsilon raises an error."""
    for eps in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="eps must be a finite number above 0"):
            NORMS[name](8, eps=eps)


def test_zero_token_is_finite(rand):
    """A token of zeros gives no NaN, forward or backward."""
    for kind in NORMS.values():
        x = torch.zeros(1, 3, 8).requires_grad_()
        y = kind(8)(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()


def test_invalid_arguments():
    """Invalid names and numbers raise an error."""
    with pytest.raises(ValueError, match="no norm 'layers': did you mean 'layer'"):
        get_norm("layers")
    assert get_norm("rms") is RMSNorm
    with pytest.raises(ValueError, match="groups must divide dim 6, not 4: try groups=3"):
        GroupNorm(6)
    with pytest.raises(ValueError, match="momentum must be below 1"):
        BatchNorm(4, momentum=1.0)
    with pytest.raises(ValueError, match="alpha must be a finite number above 0"):
        PowerNorm(4, alpha=0.0)
    with pytest.raises(ValueError, match="warmup must be an integer >= 0"):
        PowerNorm(4, warmup=-1)
    for kind in NORMS.values():
        with pytest.raises(ValueError, match="dim must be an integer >= 1"):
            kind(0)
