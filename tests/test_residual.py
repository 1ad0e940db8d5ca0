"""Residuals: formulas, initialisation by depth and data, and training of a deep stack."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard.block import Block
from regard.deep_init import admin_init, deepnorm_init
from regard.ffn import MLP
from regard.norm import LayerNorm, RMSNorm
from regard.residual import (
    RESIDUALS,
    Admin,
    DeepNorm,
    LayerScale,
    PostNorm,
    ReZero,
    deepnorm_scales,
    deepnorm_seq2seq_scales,
    get_residual,
)
from regard.stack import SequentialStack


def stack(name, layers, dim=8, *, cross=False, dropout=0.0, **mixer):
    """Blocks of softmax attention with this residual, in float64."""
    torch.manual_seed(0)
    make = get_residual(name, layers)

    def block():
        first, second = (regard.create("vanilla", dim=dim, heads=2, **mixer) for _ in range(2))
        return Block(
            first, MLP(dim), cross=second if cross else None, residual=make, dropout=dropout
        )

    return SequentialStack([block() for _ in range(layers)]).double()


def normal(x, gain=1.0, bias=0.0):
    """Layer norm, written out."""
    middle = x - x.mean(-1, keepdim=True)
    return middle / (middle.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias


FORMULAS = {
    "post": lambda r, x, f: normal(x + f(x), r.norm.weight, r.norm.bias),
    "pre": lambda r, x, f: x + f(normal(x, r.norm.weight, r.norm.bias)),
    "sandwich": lambda r, x, f: (
        x
        + normal(
            f(normal(x, r.pre_norm.weight, r.pre_norm.bias)), r.post_norm.weight, r.post_norm.bias
        )
    ),
    "rezero": lambda r, x, f: x + r.scale * f(x),
    "layerscale": lambda r, x, f: x + r.scale * f(normal(x, r.norm.weight, r.norm.bias)),
    "admin": lambda r, x, f: normal(r.omega * x + f(x), r.norm.weight, r.norm.bias),
    "deepnorm": lambda r, x, f: normal(6**0.25 * x + f(x), r.norm.weight, r.norm.bias),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_formula(name, rand):
    """Outputs and gradients equal the formula."""
    residual, x, weight = (
        get_residual(name, 3)(8).double(),
        rand(2, 5, 8).requires_grad_(),
        rand(2, 5, 8),
    )
    matrix = rand(8, 8).requires_grad_()
    with torch.no_grad():
        for p in residual.parameters():
            p.copy_(rand(*p.shape, 1)[..., 0])
    inputs = [x, matrix, *residual.parameters()]
    got = residual.add(x, torch.tanh(residual.prepare(x) @ matrix))
    want = FORMULAS[name](residual, x, lambda t: torch.tanh(t @ matrix))
    torch.testing.assert_close(got, want)
    both = [torch.autograd.grad((y * weight).sum(), inputs) for y in (got, want)]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", RESIDUALS)
def test_needs_final_norm(name, rand):
    """`needs_final_norm` says whether the output grows with every layer."""
    residual = get_residual(name, 3)(8).double()
    x, big = rand(2, 5, 8), 1e3 * rand(2, 5, 8)
    grows = (
        residual.add(big, residual.prepare(big)).norm()
        > 10 * residual.add(x, residual.prepare(x)).norm()
    )
    assert residual.needs_final_norm == bool(
        grows and name != "rezero"
    )  # no norm anywhere, so none at the end


@pytest.mark.parametrize("name", RESIDUALS)
def test_norms_get_the_mask(name, rand):
    """A residual passes the mask to each of its norms."""
    seen = []

    class Spy(LayerNorm):
        def forward(self, x, mask=None):
            seen.append(mask)
            return super().forward(x, mask)

    make = get_residual(name, 3, norm=None if name == "rezero" else Spy)
    residual, x, mask = make(8).double(), rand(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    residual.add(x, residual.prepare(x, mask), mask)
    assert len(seen) == {"rezero": 0, "sandwich": 2}.get(name, 1) and all(m is mask for m in seen)


@pytest.mark.parametrize("name", RESIDUALS)
def test_stream_matches_whole(name, rand):
    """A stack with this residual streams as it runs whole."""
    layers, x = stack(name, 2, causal=True), rand(2, 9, 8)
    with torch.no_grad():
        for part_name, p in layers.named_parameters():
            if part_name.endswith(("scale", "omega")):
                p.add_(0.5)  # at the initial value the sub-layer has no effect
    first, state = layers.stream(x[:, :4])
    rest, _ = layers.stream(x[:, 4:], state)
    torch.testing.assert_close(torch.cat((first, rest), 1), layers(x))


def test_rezero_is_initially_the_identity(rand):
    """A ReZero stack is initially the identity, and α has a gradient."""
    layers, x = stack("rezero", 3), rand(2, 5, 8)
    y = layers(x)
    assert torch.equal(y, x)
    (y * rand(2, 5, 8)).sum().backward()
    scales = [p.grad for name, p in layers.named_parameters() if name.endswith("scale")]
    assert len(scales) == 6 and all(g != 0 for g in scales)


# -------------------------------------------------------------------------------------------- Admin
def by_hand(layers, x, mask=None):
    """ω per sub-layer, as in the authors' code: measured in the pass that uses it."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    omega, found = 1.0, []
    for block in layers.layers:
        for f in (lambda t, block=block: block.mixer(t, mask=mask), block.ffn):
            y = f(x)
            found.append(omega)
            numbers = [
                [t[a, i, c].item() for a, i in real.nonzero().tolist() for c in range(8)]
                for t in (omega * x, y)
            ]
            means = [sum(each) / len(each) for each in numbers]
            spread = [
                sum((v - m) ** 2 for v in each) / len(each)
                for each, m in zip(numbers, means, strict=True)
            ]
            x = normal(omega * x + y)
            omega = math.sqrt(sum(spread))
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_admin_init(padded, rand):
    """ω follows the rule, ignores padding, and training modes are restored."""
    layers, x = stack("admin", 3, dropout=0.5).train(), 2 * rand(2, 5, 8)
    layers.layers[1].eval()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if padded else None
    modes = [part.training for part in layers.modules()]
    with torch.no_grad():
        want = by_hand(layers.eval(), x, mask)
    for part, mode in zip(layers.modules(), modes, strict=True):
        part.training = mode
    kwargs = {"mask": mask} if padded else {}
    found = admin_init(layers, x.masked_fill(~mask[..., None], 99.0) if padded else x, **kwargs)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want))
    joins = [part for part in layers.modules() if isinstance(part, Admin)]
    assert [round(join.omega[3].item(), 6) for join in joins] == [round(w, 6) for w in want]
    assert found[0] == 1 and found[1:] == sorted(found[1:])
    assert [part.training for part in layers.modules()] == modes and all(
        join.profiler is None for join in joins
    )
    assert (
        admin_init(layers, x.masked_fill(~mask[..., None], -7.0) if padded else x, **kwargs)
        == found
    )


def test_admin_init_of_decoders(rand):
    """Cross-attention sub-layers are initialised too."""
    layers = stack("admin", 2, cross=True)
    assert len(admin_init(layers, rand(2, 5, 8), rand(2, 3, 8))) == 6


def test_admin_is_initially_post_norm(rand):
    """ω is initially one."""
    x = rand(2, 5, 8)
    torch.testing.assert_close(stack("admin", 2)(x), stack("post", 2)(x))


def test_admin_init_errors(rand):
    """Models without Admin, with unused residuals, or with repeated ones raise an error."""
    x, layers = rand(2, 5, 8), stack("admin", 1)
    with pytest.raises(regard.Unsupported, match="the model has no Admin residual"):
        admin_init(stack("post", 1), x)
    with pytest.raises(regard.Unsupported, match="runs twice"):
        admin_init(SequentialStack([layers, layers]), x)
    joins = [part for part in layers.modules() if isinstance(part, Admin)]
    assert all(join.profiler is None and (join.omega == 1).all() for join in joins)  # unchanged
    idle = SequentialStack([layers])
    idle.spare = Admin(8)
    with pytest.raises(ValueError, match="1 of 3 Admin residuals did not run"):
        admin_init(idle, x)
    for tells_nothing in (x[:, :0], x * torch.nan):
        with pytest.raises(ValueError, match="standard deviation of this batch is nan"):
            admin_init(layers, tells_nothing)
    assert all((join.omega == 1).all() for join in joins)


# ----------------------------------------------------------------------------------------- DeepNorm
def test_deepnorm_scales():
    """α and β equal the paper's, for 12 layers, and for 100 with a decoder of 6."""
    assert deepnorm_scales(12) == pytest.approx((2.213364, 0.319472), abs=1e-6)
    encoder, decoder = deepnorm_seq2seq_scales(100, 6)
    assert encoder == pytest.approx(
        (0.81 * 100**0.25 * 6 ** (1 / 16), 0.87 * 100**-0.25 * 6 ** (-1 / 16))
    )
    assert decoder == pytest.approx((18**0.25, 72**-0.25))
    assert get_residual("deepnorm", 12)(8).alpha == deepnorm_scales(12).alpha


def test_deepnorm_init():
    """Weights have Xavier's distribution with their gains, and biases are zero."""
    torch.manual_seed(1)
    attention = [regard.create("vanilla", dim=64, heads=4) for _ in range(2)]
    block = Block(attention[0], MLP(64), cross=attention[1], residual=get_residual("deepnorm", 6))
    before = {name: p.clone() for name, p in block.named_parameters() if "norm" in name}
    deepnorm_init(block, 0.25)
    for mixer in attention:
        for name, gain in (("q", 1.0), ("k", 1.0), ("v", 0.25), ("out", 0.25)):
            weight = mixer.get_submodule(name).weight
            assert weight.std().item() == pytest.approx(gain * math.sqrt(2 / 128), rel=0.05)
    for part in (block.ffn.up, block.ffn.down):
        assert part.weight.std().item() == pytest.approx(0.25 * math.sqrt(2 / 320), rel=0.05)
        assert not part.bias.any()
    assert all(torch.equal(p, block.get_parameter(name)) for name, p in before.items())


def test_deepnorm_init_errors():
    """Mixers without weights to scale by β raise an error."""
    with pytest.raises(
        regard.Unsupported,
        match="fnet does not support deepnorm: it has no value or output projection",
    ):
        deepnorm_init(Block(regard.create("fnet", dim=8)), 0.5)
    with pytest.raises(regard.Unsupported, match="the model has no Block"):
        deepnorm_init(nn.Linear(3, 3), 0.5)
    with pytest.raises(ValueError, match="beta must be a finite number above 0"):
        deepnorm_init(stack("deepnorm", 1), 0.0)


# -------------------------------------------------------------------------------- tables and errors
def test_invalid_arguments():
    """Invalid names, numbers and norms raise an error."""
    with pytest.raises(ValueError, match="no residual 'deep_norm': did you mean 'deepnorm'"):
        get_residual("deep_norm", 3)
    with pytest.raises(regard.Unsupported, match="rezero has no norm"):
        get_residual("rezero", 3, norm=RMSNorm)
    with pytest.raises(ValueError, match="layers must be an integer >= 1"):
        get_residual("post", 0)
    with pytest.raises(ValueError, match="alpha must be a finite number above 0"):
        DeepNorm(8, alpha=-1.0)
    with pytest.raises(ValueError, match="init_value must be a finite number above 0"):
        LayerScale(8, init_value=0.0)
    with pytest.raises(ValueError, match="decoder must be an integer"):
        deepnorm_seq2seq_scales(6, 0)
    assert isinstance(get_residual("post", 3, norm=RMSNorm)(8).norm, RMSNorm)
    assert RESIDUALS["rezero"] is ReZero and isinstance(get_residual("post", 9)(8), PostNorm)


@pytest.mark.parametrize(("layers", "start"), [(18, 0.1), (24, 1e-5), (36, 1e-6)])
def test_layer_scale_init(layers, start):
    """λ is initialised by depth as in the paper."""
    assert torch.equal(get_residual("layerscale", layers)(4).scale, torch.full((4,), start))


# ----------------------------------------------------------------------------------------- training
def test_deep_stacks_without_warmup():
    """24 layers train with Admin and DeepNorm, not with post-norm; see benchmarks/depth.py."""
    spec = importlib.util.spec_from_file_location(
        "depth", Path(__file__).parents[1] / "benchmarks" / "depth.py"
    )
    depth = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(depth)
    last = {
        name: sum(depth.train(name, rate=3e-3, steps=40, seed=0)[-5:]) / 5
        for name in ("post", "admin", "deepnorm")
    }
    assert last["post"] > 0.9 * depth.NOTHING  # loss of a uniform prediction
    assert last["admin"] < 0.5 * depth.NOTHING
    assert last["deepnorm"] < 0.5 * depth.NOTHING
