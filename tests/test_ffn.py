"""Feed-forward layers: activations, gates, names, and blocks without one."""

import math

import pytest
import torch

import regard
from regard.block import Block
from regard.ffn import (
    ACTIVATIONS,
    FEED_FORWARDS,
    GLU,
    MLP,
    FeedForward,
    build_feed_forward,
    get_activation,
)
from regard.registry import get_recipe
from regard.stack import SequentialStack

FORMULAS = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "identity": lambda x: x,
}
GATES = {
    "glu": "sigmoid",
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "bilinear": "identity",
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def affine(layer, token):
    """W x + b, element by element."""
    bias = [0.0] * len(layer.weight) if layer.bias is None else layer.bias.tolist()
    return [
        sum(w * t for w, t in zip(row, token, strict=True)) + b
        for row, b in zip(layer.weight.tolist(), bias, strict=True)
    ]


class FixedLinear(torch.nn.Module):
    """A linear layer with given numbers, for `affine`."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = (
            layer.weight.detach(),
            None if layer.bias is None else layer.bias.detach(),
        )


# -------------------------------------------------------------------------------------- activations
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, rand):
    """Activations equal their formulas."""
    x = rand(50) * 2
    want = torch.tensor([FORMULAS[name](value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(get_activation(name)(x), want)


def test_exact_and_approximate_gelu_differ(rand):
    """`gelu` and `gelu_tanh` are different functions."""
    x = rand(50)
    assert not torch.allclose(get_activation("gelu")(x), get_activation("gelu_tanh")(x), atol=1e-6)


def test_activation_as_function(rand):
    """A function is a valid activation, and a wrong name gets a suggestion."""
    layer, x = MLP(4, activation=torch.tanh).double(), rand(1, 3, 4)
    torch.testing.assert_close(layer(x), layer.down(torch.tanh(layer.up(x))))
    with pytest.raises(ValueError, match=r"no activation 'gellu': did you mean 'gelu'"):
        MLP(4, activation="gellu")
    with pytest.raises(ValueError, match="no activation 3"):
        GLU(4, activation=3)


# ------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["relu", "gelu", "relu2"])
def test_mlp(name, bias, rand):
    """The layer is W₂ σ(W₁ x + b₁) + b₂, token by token."""
    torch.manual_seed(0)
    layer, x = MLP(4, 7, activation=name, bias=bias).double(), rand(2, 3, 4)
    up, down = FixedLinear(layer.up), FixedLinear(layer.down)
    want = [
        [affine(down, [FORMULAS[name](u) for u in affine(up, token)]) for token in row]
        for row in x.tolist()
    ]
    torch.testing.assert_close(layer(x), torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_glu(kind, bias, rand):
    """The layer is W₂ (σ(W x) ⊙ V x) with the named gate, token by token."""
    torch.manual_seed(0)
    layer, x = build_feed_forward(kind, 4, hidden=5, bias=bias).double(), rand(2, 3, 4)
    gate, up, down, bend = (
        FixedLinear(layer.gate),
        FixedLinear(layer.up),
        FixedLinear(layer.down),
        FORMULAS[GATES[kind]],
    )

    def one(token):
        return affine(
            down, [bend(g) * u for g, u in zip(affine(gate, token), affine(up, token), strict=True)]
        )

    want = torch.tensor([[one(token) for token in row] for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(layer(x), want)


def test_gradcheck(rand):
    """Gradients equal finite differences."""
    torch.manual_seed(0)
    for kind in ("mlp", *GATES):
        layer = build_feed_forward(kind, 3, hidden=4, activation="gelu_tanh").double()
        assert torch.autograd.gradcheck(layer, (rand(1, 2, 3).requires_grad_(),))


@pytest.mark.parametrize("dim", [1, 2, 3, 48, 50, 64])
def test_default_glu_width(dim):
    """The default width is two thirds of the MLP's, rounded."""
    plain, gated = count(MLP(dim, bias=False)), count(GLU(dim))
    assert abs(plain - gated) <= 1.5 * dim
    assert dim % 3 or plain == gated
    assert abs(count(MLP(dim)) - count(GLU(dim, bias=True))) <= 3 * dim


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_build_by_name(kind, rand):
    """Every kind can be built by name, handles short inputs, and ignores masked tokens."""
    more = {
        "switch": {"num_experts": 3},
        "top_k": {"num_experts": 3},
        "product_keys": {"keys": 4, "top_k": 2},
    }
    torch.manual_seed(0)
    layer = build_feed_forward(kind, 6, **more.get(kind, {})).double().eval()
    assert isinstance(layer, FeedForward)
    for n in (0, 1, 7):
        y = layer(rand(2, n, 6))
        assert y.shape == (2, n, 6) and y.isfinite().all()
    x, mask = rand(2, 7, 6), torch.arange(7).expand(2, 7) < 5
    poisoned = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(layer(poisoned, mask)[:, :5], layer(x[:, :5]))


def test_parameter_table():
    """Parameter counts equal the table in docs/feed-forward.md."""
    with torch.device("meta"):
        experts = [build_feed_forward(kind, 512, num_experts=16) for kind in ("switch", "top_k")]
        memory = build_feed_forward("product_keys", 512, keys=512, query_batch_norm=False)
        attention = [regard.create(name, dim=512, heads=8) for name in ("all_attention", "vanilla")]
    assert count(MLP(512, bias=False)) == 2 * 512 * 2048
    assert [count(layer) for layer in experts] == 2 * [2 * 512 * 2048 * 16 + 512 * 16]
    assert count(memory) - memory.query.bias.numel() == 512 * 4 * 512 + 4 * 512 * 512 + 512**2 * 512
    assert count(attention[0]) - count(attention[1]) == 2 * 512 * 2048


def test_invalid_arguments():
    """Invalid names and widths raise an error."""
    with pytest.raises(ValueError, match="no feed-forward layer 'swigluu': did you mean 'swiglu'"):
        build_feed_forward("swigluu", 8)
    with pytest.raises(TypeError, match="hiden"):
        build_feed_forward("geglu", 8, hiden=3)
    with pytest.raises(ValueError, match="hidden must be an integer >= 1, not 0"):
        GLU(8, 0)
    with pytest.raises(ValueError, match="dim must be"):
        MLP(0)


# ---------------------------------------------------------------------------- no feed-forward layer
def decoder(ffn):
    torch.manual_seed(0)
    ask = regard.create("vanilla", dim=12, heads=2)
    return (
        SequentialStack(
            [
                Block(get_recipe("vanilla").example(12, causal=True), ffn and MLP(12), cross=ask),
                Block(get_recipe("local").example(12, causal=True), ffn and MLP(12), cross=ask),
            ]
        )
        .double()
        .eval()
    )


def test_decoder_without_feed_forward(rand):
    """A decoder without feed-forward layers trains, streams and attends to its context."""
    with_them, without = decoder(True), decoder(None)
    each = count(MLP(12)) + 2 * 12  # and the norm in front of it
    assert count(with_them) - count(without) == 2 * each
    x, context = rand(2, 9, 12), rand(2, 5, 12)
    whole, state, parts = without(x, context), None, []
    for chunk in x.split((1, 5, 3), 1):
        y, state = without.stream(chunk, state, context=context)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    whole.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any()
        for p in without.parameters()
    )
    assert not torch.allclose(whole, without(x, context + 1))
