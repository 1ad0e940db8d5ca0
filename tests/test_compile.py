"""torch.compile changes nothing: one recipe a family, outputs and gradients."""

import pytest
import torch

import regard

CASES = {
    "vanilla": {"heads": 2},
    "local": {"heads": 2, "window": 5},
    "reformer": {"heads": 2, "buckets": 4, "chunk": 5},
    "linear": {"heads": 2},
    "linformer": {"heads": 2, "length": 40, "rank": 7},
    "fnet": {},
    "synthesizer_mixture": {"heads": 2, "length": 40},
    "gmlp": {"length": 40},
    "xcit": {"heads": 2, "width": 6},
    "dynamic_conv": {"heads": 2},
    "aft": {"length": 40, "rank": 3},
    "average_pool": {},
    "bahdanau": {},
    "graves_window": {},
    "draw_read": {"width": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name, rand):
    """Fails if the compiled mixer computes something else, or its gradient is another."""
    torch.manual_seed(0)
    mixer = regard.create(name, dim=8, **CASES[name])
    compiled = torch.compile(mixer, backend="aot_eager")
    x = rand(2, 33, 8).float()
    results = []
    for f in (mixer, compiled):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *mixer.parameters()])
        results.append((y, *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


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
