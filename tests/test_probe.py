"""Probes of training difficulty, on stacks whose answer is known."""

import math

import pytest
import torch
from torch import nn

import regard
from regard.block import Block
from regard.deep_init import admin_init
from regard.ffn import MLP, FeedForward
from regard.measure.probe import (
    SublayerGradient,
    adam_first_step,
    amplification,
    gradient_norms,
    random_perturbation,
)
from regard.mixer import Can, Mixer
from regard.norm import LayerNorm
from regard.residual import RESIDUALS, Residual, get_residual
from regard.stack import SequentialStack


class Times(Mixer):
    """x times a number."""

    def __init__(self, dim, number):
        super().__init__(dim, can=Can())
        self.number = nn.Parameter(torch.tensor(number))

    def mix(self, x, memory, mask, state):
        return x * self.number, state


class FeedTimes(FeedForward):
    def __init__(self, dim, number):
        super().__init__(dim)
        self.number = nn.Parameter(torch.tensor(number))

    def forward(self, x, mask=None):
        return x * self.number


class Nothing(Residual):
    """f(x) alone."""

    def add(self, x, y, mask=None):
        return y


def product(*numbers):
    """x times all of them, two in a block."""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return SequentialStack(
        [Block(Times(1, a), FeedTimes(1, b), residual=lambda dim: Nothing()) for a, b in pairs]
    )


def test_gradients_of_a_product():
    """Fails if ∂(x Π w) / ∂ w_i is not x Π w / w_i in its place, or the gradients that were there
    are changed.
    """
    numbers, x = (2.0, 3.0, -0.5, 4.0), torch.tensor([[[1.0], [4.0]]])
    layers = product(*numbers)
    layers.layers[0].mixer.number.grad = torch.tensor(7.0)
    found = gradient_norms(layers, layers(x).sum())
    whole = abs(math.prod(numbers)) * 5
    assert [(g.layer, g.part) for g in found] == [
        (0, "mixer"),
        (0, "ffn"),
        (1, "mixer"),
        (1, "ffn"),
    ]
    assert [g.norm for g in found] == pytest.approx([whole / abs(n) for n in numbers])
    assert layers.layers[0].mixer.number.grad == 7.0 and layers.layers[0].ffn.number.grad is None


def test_gradients_of_all_weights_of_a_sub_layer(rand):
    """Fails if a norm is not over all weights of its sub-layer, as `backward` leaves them; what is
    unused has none.
    """
    torch.manual_seed(0)
    attention = [regard.create("vanilla", dim=8, heads=2) for _ in range(2)]
    block = Block(attention[0], MLP(8), cross=attention[1])
    block.mixer.spare = nn.Parameter(torch.ones(3))
    block.double()
    loss = block(rand(2, 5, 8), rand(2, 3, 8)).square().sum()
    found = gradient_norms(block, loss)
    loss.backward()
    for gradient, part in zip(found, (block.mixer, block.cross, block.ffn), strict=True):
        squares = [
            value.item() ** 2
            for p in part.parameters()
            if p.grad is not None
            for value in p.grad.flatten()
        ]
        assert gradient.norm == pytest.approx(math.sqrt(sum(squares)))
    assert isinstance(found[0], SublayerGradient) and found[1].part == "cross"


def test_a_known_move_of_a_linear_layer(rand):
    """Fails if the change is not the mean of (δ x)², or the weights are not what they were, to the
    bit.
    """
    model, x, move = nn.Linear(4, 3).double(), rand(2, 5, 4), rand(3, 4)
    before = model.weight.clone()
    assert amplification(model, {"weight": move}, x) == pytest.approx(
        (x @ move.T).square().mean().item()
    )
    assert torch.equal(model.weight, before)
    assert amplification(model, {"bias": torch.full((3,), 2.0).double()}, x) == pytest.approx(4.0)


@pytest.mark.parametrize("layers", [1, 4, 16])
def test_the_change_of_a_linear_stack_grows_with_its_depth(layers, rand):
    """Fails if N linear layers of the identity, moved by δ of deviation s, do not change by N s²
    |x|², to first order.
    """
    model, x, size = (
        nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers))).double(),
        rand(2, 8, 16),
        1e-3,
    )
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(16))
    found = [
        amplification(model, random_perturbation(model, size, seed=seed), x) for seed in range(20)
    ]
    want = layers * size**2 * x.square().sum(-1).mean().item()
    assert sum(found) / 20 == pytest.approx(want, rel=0.1)


def test_only_real_tokens_count(rand):
    """Fails if a left-out token adds to the change."""
    torch.manual_seed(0)
    model = Block(regard.create("vanilla", dim=8, heads=2), MLP(8)).double()
    x, mask = rand(2, 5, 8), torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    moves = random_perturbation(model, 0.01)
    found = [
        amplification(model, moves, x.masked_fill(~mask[..., None], fill), mask=mask)
        for fill in (0.0, 50.0)
    ]
    assert found[0] == pytest.approx(found[1]) and found[0] > 0


def test_the_first_step_is_adams(rand):
    """Fails if the move differs from what torch's Adam does first."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), rand(6, 4)
    loss = model(x).square().mean()
    moves, before = (
        adam_first_step(model, loss, 0.01),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    loss.backward()
    torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-12).step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] + moves[name], p.detach(), rtol=0, atol=1e-9)


def test_random_moves_take_a_seed():
    """Fails if the same seed moves otherwise, another one alike, or the spread is wrong."""
    model = nn.Linear(100, 100)
    a, b, c = (random_perturbation(model, 0.1, seed=seed)["weight"] for seed in (0, 0, 1))
    assert (
        torch.equal(a, b)
        and not torch.equal(a, c)
        and a.std().item() == pytest.approx(0.1, rel=0.05)
    )


class Turn(Mixer):
    """W x, token by token: attention makes tokens alike in deep stacks, which would hide what is
    looked for.
    """

    def __init__(self, dim):
        super().__init__(dim, can=Can())
        self.out = nn.Linear(dim, dim, bias=False)

    def mix(self, x, memory, mask, state):
        return self.out(x), state


def change(name, layers, seed, x):
    torch.manual_seed(seed)
    make = get_residual(name, layers)
    stack = SequentialStack([Block(Turn(32), MLP(32), residual=make) for _ in range(layers)])
    model = nn.Sequential(stack, LayerNorm(32)) if RESIDUALS[name].needs_final_norm else stack
    if name == "admin":
        admin_init(model, x)
    return sum(
        amplification(model, random_perturbation(model, 1e-3, seed=draw), x) for draw in range(2)
    )


@pytest.mark.parametrize("seed", range(3))
def test_post_norm_amplifies_with_depth_and_admin_and_pre_norm_do_less(seed, rand):
    """Fails if from 3 to 24 layers post-norm does not grow about as they do, and pre-norm and Admin
    by half: the claim.
    """
    x = rand(4, 16, 32, dtype=torch.float32)
    growth = {
        name: change(name, 24, seed, x) / change(name, 3, seed, x)
        for name in ("post", "pre", "admin")
    }
    assert growth["post"] > 7 and growth["pre"] < 5 and growth["admin"] < 5


def test_frozen_weights_do_not_count(rand):
    """Fails if a frozen weight is an error, is moved, or shifts the gradients of the others."""
    torch.manual_seed(0)
    model, x = (
        SequentialStack(
            [Block(regard.create("vanilla", dim=8, heads=2), MLP(8)) for _ in range(2)]
        ).double(),
        rand(2, 5, 8),
    )
    whole = gradient_norms(model, model(x).square().sum())
    model.layers[0].mixer.requires_grad_(False)
    loss = model(x).square().sum()
    found = gradient_norms(model, loss)
    assert found[0] == SublayerGradient(0, "mixer", 0.0)
    assert [part.norm for part in found[1:]] == pytest.approx([part.norm for part in whole[1:]])
    assert not any(name.startswith("layers.0.mixer.") for name in adam_first_step(model, loss, 0.1))


def test_what_does_not_fit_is_said():
    """Fails if a model without sub-layers, a parameter it does not have, or a move of no size is
    accepted.
    """
    model = nn.Linear(3, 3)
    with pytest.raises(regard.Unsupported, match="no Block with weights"):
        gradient_norms(model, model(torch.ones(3)).sum())
    with pytest.raises(ValueError, match=r"has no parameters \['wight'\]"):
        amplification(model, {"wight": torch.ones(3)}, torch.ones(3))
    with pytest.raises(ValueError, match="std must be a finite number above 0"):
        random_perturbation(model, 0.0)
    with pytest.raises(ValueError, match="lr must be a finite number above 0"):
        adam_first_step(model, model(torch.ones(3)).sum(), -1.0)
