"""Layers that are applied more than once."""

import pytest
import torch

import naive
import regard
from regard.stack import SequentialStack, SharedStack
from stacks import block, chunks, inside, same_gradients, twin


def shared(count=1, depth=3, *, name="vanilla", order="sequence", **more):
    return (
        SharedStack([block(name, seed=i, **more) for i in range(count)], depth, order=order)
        .double()
        .eval()
    )


@pytest.mark.parametrize(
    ("order", "count", "depth", "expected"),
    [
        ("sequence", 1, 4, [0, 0, 0, 0]),
        ("sequence", 3, 6, [0, 0, 1, 1, 2, 2]),
        ("sequence", 2, 5, [0, 0, 0, 1, 1]),
        ("cycle", 3, 6, [0, 1, 2, 0, 1, 2]),
        ("cycle", 3, 4, [0, 1, 2, 0]),
        ("cycle_reversed", 3, 6, [0, 1, 2, 2, 1, 0]),
        ("cycle_reversed", 2, 6, [0, 1, 0, 1, 1, 0]),
        ("cycle_reversed", 1, 3, [0, 0, 0]),
    ],
)
def test_orders(order, count, depth, expected):
    """Layers are applied in the order of the papers."""
    assert list(shared(count, depth, order=order).order) == expected


APPLIED = {"sequence": (0, 0, 1, 1), "cycle": (0, 1, 0, 1), "cycle_reversed": (0, 1, 1, 0)}


@pytest.mark.parametrize("order", APPLIED)
@pytest.mark.parametrize("causal", [False, True])
def test_matches_manual_application(order, causal, rand):
    """Outputs and gradients equal layers applied one by one, with padding."""
    stack, x, weight = (
        shared(2, 4, order=order, causal=causal),
        rand(2, 5, 8).requires_grad_(),
        rand(2, 5, 8),
    )
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    p, found, expected = inside(stack), stack(x, mask=mask), []
    for one, real in zip(x, mask, strict=True):
        for i in APPLIED[order]:
            one = naive.block(naive.under(p, f"layers.{i}"), one, 2, causal=causal, mask=real)
        expected.append(one)
    expected = torch.stack(expected)
    torch.testing.assert_close(found[mask], expected[mask])
    weight = weight * mask[..., None]
    same_gradients((found * weight).sum(), (expected * weight).sum(), [x, *p.values()])


def test_parameters_do_not_grow_with_depth():
    """The number of parameters does not depend on the depth."""
    one, once, thrice = (
        sum(p.numel() for p in m.parameters()) for m in (block(), shared(1, 12), shared(3, 12))
    )
    assert (once, thrice) == (one, 3 * one)


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_state_per_application(name, rand):
    """Two applications of a layer have separate caches."""
    stack, x = shared(2, 5, name=name, order="cycle", causal=True), rand(2, 13, 8)
    torch.testing.assert_close(chunks(stack, x, (1, 7, 1, 4)), stack(x))


def test_equals_stack_of_copies(rand):
    """The output equals that of copied layers, also for a decoder."""
    stack, x, context = shared(1, 3, causal=True, cross=True), rand(2, 6, 8), rand(2, 4, 8)
    plain = SequentialStack([twin(stack.layers[0]) for _ in range(3)])
    torch.testing.assert_close(stack(x, context), plain(x, context))
    torch.testing.assert_close(chunks(stack, x, (1, 5), context=context), stack(x, context))


def test_invalid_arguments():
    """An invalid depth or order raises an error."""
    with pytest.raises(ValueError, match="depth must be an integer >= 2"):
        shared(2, 1)
    with pytest.raises(ValueError, match="'sequence', 'cycle', 'cycle_reversed'"):
        shared(2, 4, order="reverse")
    with pytest.raises(ValueError, match="at least one layer"):
        SharedStack([], 3)
