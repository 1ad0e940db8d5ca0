"""What the tests of stacks share."""

import copy

import torch

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.registry import get_recipe


def block(name="vanilla", *, causal=False, cross=False, seed=0, **more):
    """A small block around any mixer."""
    torch.manual_seed(seed)
    ask = {"cross": regard.create("vanilla", dim=8, heads=2)} if cross else {}
    return Block(get_recipe(name).example(8, causal=causal), MLP(8), **ask, **more)


def chunks(stack, x, sizes, **more):
    """The stream of a stack, put together."""
    state, parts = None, []
    for chunk in x.split(sizes, 1):
        y, state = stack.stream(chunk, state, **more)
        parts.append(y)
    return torch.cat(parts, 1)


def inside(module):
    """Parameters by name."""
    return dict(module.named_parameters())


def same_gradients(found, wanted, tensors, *, atol=1e-10):
    """Two scalars have the same gradients for all tensors; where one has none, the other has
    none or zero."""
    got = torch.autograd.grad(found, tensors, allow_unused=True, retain_graph=True)
    want = torch.autograd.grad(wanted, tensors, allow_unused=True, retain_graph=True)
    assert any(w is not None and w.abs().max() > 0 for w in want)
    for g, w, t in zip(got, want, tensors, strict=True):
        none = torch.zeros_like(t)
        torch.testing.assert_close(
            none if g is None else g, none if w is None else w, atol=atol, rtol=1e-9
        )


def twin(module):
    """A copy with the same parameters."""
    return copy.deepcopy(module)
