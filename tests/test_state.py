"""Stream states: selecting examples, detaching, memory, and errors for invalid states."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

import regard
from regard import Can, Mixer
from regard.block import Block
from regard.ffn import MLP
from regard.registry import get_recipe
from regard.stack import SequentialStack
from regard.state import detach, state_batch_size, state_bytes, take
from regard.testing import check_mixer, reorder

STREAMING = regard.list_recipes(can=["causal", "stream"])


class Pair(NamedTuple):
    a: object
    b: object


def test_take_nested_containers():
    """Fails if a kind of container is not entered, changes its type, or what all examples share is
    cut."""
    t, at = torch.arange(6).view(3, 2), np.arange(3)
    got = take(Pair({"x": [t, None, 2.5]}, (at, 3, ())), [2, 2, 0, 1])
    assert type(got) is Pair and type(got.a["x"]) is list
    assert got.a["x"][0].tolist() == [[4, 5], [4, 5], [0, 1], [2, 3]] and got.a["x"][1:] == [
        None,
        2.5,
    ]
    assert got.b[0] is at and got.b[1:] == (3, ())
    assert take(None, [0]) is None and len(take(t, [])) == 0
    assert take(t, torch.tensor([1], dtype=torch.int32)).tolist() == [[2, 3]]


def test_take_errors():
    """Fails if a wrong index or a wrong state gives a raw error, or none."""
    t = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="has 3 examples, but index ranges from 0 to 3"):
        take((t,), [0, 3])
    with pytest.raises(ValueError, match="index ranges from -1"):
        take((t,), [-1])
    for index in ([0.5], [[0]], [True, False, True]):
        with pytest.raises(ValueError, match="a list or 1-D tensor of integers"):
            take((t,), index)
    for state in ((t, torch.zeros(2)), (torch.tensor(1.0),)):
        with pytest.raises(ValueError, match="the batch as its first dimension"):
            take(state, [0])
    with pytest.raises(TypeError, match=r"consists of tuples, lists and dicts .* not str"):
        take((t, "three"), [0])


def test_state_bytes():
    """Fails if shared memory counts twice, or a view is taken for less than what it holds."""
    whole = torch.zeros(10, 100, dtype=torch.float64)
    assert state_bytes((whole, whole, None, 3)) == 8000
    assert state_bytes(whole[:, -1:]) == 8000 and state_bytes(take(whole[:, -1:], range(10))) == 80
    assert state_bytes([np.zeros(4), torch.zeros(2)]) == 40
    assert state_batch_size((None, 1)) is None and state_batch_size({"a": whole}) == 10


def test_a_window_holds_less_than_everything():
    """Fails if the memory that is told does not follow what the mechanism keeps."""
    held = {}
    for name in ("local", "vanilla", "linear"):
        more = {"window": 8} if name == "local" else {}
        state, mixer = None, regard.create(name, dim=8, heads=2, causal=True, **more)
        with torch.no_grad():
            for _ in range(40):
                _, state = mixer.stream(torch.zeros(1, 10, 8), state)
        held[name] = state_bytes(state)
    assert held["linear"] < held["local"] < held["vanilla"] / 2
    assert held["vanilla"] >= 400 * 8 * 2 * 4


def test_detach_cuts_the_graph(rand):
    """Fails if a gradient still reaches the chunk before."""
    mixer = get_recipe("local").example(causal=True).double()
    x = rand(1, 8, 8).requires_grad_()
    _, state = mixer.stream(x)
    mixer.stream(rand(1, 2, 8), detach(state))[0].sum().backward()
    assert x.grad is None and mixer.q.weight.grad is not None


@pytest.mark.parametrize("name", STREAMING)
def test_reorder_every_state(name):
    """Fails if a recipe goes on otherwise after its examples were reordered, repeated or
    dropped."""
    torch.manual_seed(0)
    with torch.no_grad():
        assert reorder(get_recipe(name).example(causal=True).double().eval(), 23) == "supported"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("axial_passes", {"width": 5}),
        ("aft", {"length": None}),
        ("aft", {"length": None, "kernel": 3}),
    ],
)
def test_reorder_optional_states(name, options):
    """Fails if a form that the small example does not show keeps another kind of state."""
    torch.manual_seed(0)
    with torch.no_grad():
        assert (
            reorder(regard.create(name, dim=8, heads=1, causal=True, **options).double(), 23)
            == "supported"
        )


def test_reorder_state_of_stack(rand):
    """Fails if the states of a stack are not those of its layers."""
    torch.manual_seed(0)
    names = ("vanilla", "linear", "retnet", "local")
    layers = (
        SequentialStack([Block(get_recipe(name).example(8, causal=True), MLP(8)) for name in names])
        .double()
        .eval()
    )
    x, order = rand(3, 12, 8), [2, 0, 0]
    _, state = layers.stream(x[:, :7])
    y, _ = layers.stream(x[order, 7:], take(state, order))
    torch.testing.assert_close(y, layers(x[order])[:, 7:])


class Counting(Mixer):
    """out_t = x_t + the sum of x before; keeps it in the way that is asked for."""

    def __init__(self, keep):
        toy = dict.fromkeys(("cross", "mask", "attn_mask", "maps"), "a toy")
        super().__init__(4, can=Can(**toy), causal=True)
        self.keep, self.scale = keep, torch.nn.Parameter(torch.ones(()))

    def initial_state(self):
        return (None,)

    def mix(self, x, context, mask, state):
        y = x.cumsum(1)
        if state is not None and state[0] is not None:
            y = y + torch.as_tensor(state[0], dtype=x.dtype).view(-1, 1, x.shape[2])[: len(x)]
        return self.scale * y, (self.keep(y[:, -1]),)


def build(keep):
    def built(causal):
        if not causal:
            raise regard.Unsupported("a toy")
        return Counting(keep)

    return built


def test_the_check_can_fail():
    """Fails if a state that breaks the rule passes."""
    assert check_mixer(build(lambda y: y))["reorder"] == "supported"
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_mixer(
            build(lambda y: y.detach().tolist() + [[0.0] * 4] * 5)
        )  # not a tensor, and yet not shared
    with pytest.raises(ValueError, match="the state has 8 examples, but the input has 2"):
        check_mixer(build(lambda y: y.reshape(-1, 1)))  # examples and channels folded into one


FOREIGN = ["text", 3, torch.zeros(2, 3), {}, [1], (1, "2")]


@pytest.mark.parametrize("name", STREAMING)
def test_invalid_states(name):
    """Fails if something that is no state of the mixer ends in a raw error, or is taken."""
    mixer = get_recipe(name).example(causal=True)
    for state in FOREIGN:
        with pytest.raises(
            TypeError,
            match=r"not a state of this mixer: expected|consists of tuples, lists and dicts",
        ):
            mixer.stream(torch.zeros(2, 3, mixer.dim), state)


def test_states_of_other_mixers():
    """Fails if the state of another mechanism, another stack or another batch is taken, or its
    refusal says nothing."""
    x, local, linear = (
        torch.zeros(2, 3, 8),
        get_recipe("local").example(causal=True),
        get_recipe("linear").example(causal=True),
    )
    with pytest.raises(TypeError, match=r"expected LinearAttentionState\(.*got KVCache\(a tensor"):
        linear.stream(x, local.stream(x)[1])
    two, three = (SequentialStack([Block(local)] * n) for n in (2, 3))
    with pytest.raises(TypeError, match="not a state of this mixer"):
        three.stream(x, two.stream(x)[1])
    for streams in (local, two):
        with pytest.raises(ValueError, match=r"has 2 examples.* input has 3"):
            streams.stream(torch.zeros(3, 1, 8), streams.stream(x)[1])
