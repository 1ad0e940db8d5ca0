"""torch.compile changes nothing, and compiles several lengths at a bounded cost."""

import pytest
import torch

import regard
from fuzzing import examples
from regard.registry import get_recipe
from regard.testing import check_compile

# One of each, and those that once took minutes or crashed. `make fuzz` compiles all.
SOME = ["local", "bp_transformer", "sinkhorn", "gated_linear"]
NAMES = regard.list_recipes() if examples(0, 1) else SOME


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name):
    """Fails if a compiled mixer has other outputs or gradients at one of three lengths, or takes
    minutes to compile."""
    recipe = get_recipe(name)
    torch.manual_seed(0)
    mixer = recipe.example(causal=recipe.causal_options()[-1]).double().eval()
    check_compile(mixer)


@pytest.mark.slow
def test_compiled_on_the_sparse_executor(forced, rand):
    """Fails if a graph break around the sparse executor loses a gradient."""
    torch.manual_seed(0)
    mixer = regard.create("bigbird", dim=8, heads=2, length=300, block=16)
    x = rand(1, 300, 8).float().requires_grad_()
    with forced("sparse") as picked:
        (want,) = torch.autograd.grad(mixer(x).square().sum(), x)
        (got,) = torch.autograd.grad(torch.compile(mixer, backend="aot_eager")(x).square().sum(), x)
    assert set(picked) == {"sparse"}
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
