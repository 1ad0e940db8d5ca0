"""Numbers that overflow, underflow or tie, in every dtype that mixers take."""

from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.numerics import unit_vectors
from regard.query_prototypes import QueryClusters
from regard.registry import get_recipe

NORMALISING = ["reformer", "rfa", "rfa_gated", "delta_rule", "xcit"]


def example(name, causal=None, dtype=torch.float32):
    torch.manual_seed(0)
    return get_recipe(name).example(causal=causal).eval().to(dtype)


def test_unit_vectors(rand):
    """Fails if a zero vector has no direction but a gradient, or long vectors overflow."""
    x = rand(3, 4)
    torch.testing.assert_close(unit_vectors(x), torch.nn.functional.normalize(x, dim=-1))
    x[1] = 0
    x.requires_grad_()
    unit_vectors(x).sum().backward()
    assert (x.grad[1] == 0).all() and x.grad.isfinite().all() and (x.grad[0] != 0).any()
    long = torch.full((2, 4), 6e4, dtype=torch.float16)
    torch.testing.assert_close(unit_vectors(long), torch.full_like(long, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMALISING)
def test_zero_tokens(name, dtype):
    """Fails if a token that is zero, or masked, has NaN or a huge gradient."""
    mixer = example(name, dtype=dtype)
    x = torch.randn(2, 23, 8, generator=torch.Generator().manual_seed(1))
    x[:, 0] = x[:, 5:10] = 0
    x = x.to(dtype).requires_grad_()
    for mask in (None, torch.arange(23).expand(2, 23) % 3 != 1):
        y = mixer(x, mask=mask)
        gradients = torch.autograd.grad(y.sum(), [x, *mixer.parameters()])
        assert y.isfinite().all()
        assert all(grad.isfinite().all() and grad.abs().max() < 1e4 for grad in gradients)


def tokens(*shape, scale=1.0, seed=1):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_of_equal_tokens(dtype):
    """Fails if the length decides which of equally near tokens a cluster takes."""
    mixer = example("routing", dtype=dtype)
    for n, length in ((7, 23), (16, 40), (18, 23), (37, 64)):
        x = tokens(2, n, 8).to(dtype)
        for same in (torch.zeros(n, dtype=torch.long), torch.arange(n) // 2):
            cut = x[:, same]
            padded = torch.cat((cut, tokens(2, length - n, 8).to(dtype)), 1)
            mask = (torch.arange(length) < n).expand(2, -1)
            torch.testing.assert_close(
                mixer(padded, mask=mask)[:, :n], mixer(cut), rtol=1e-2, atol=1e-3
            )


def test_prob_sparse_of_equal_tokens():
    """Fails if the length decides which of equally uneven queries attend."""
    for seed, kinds, dtype in product(range(5), (1, 2, 3), (torch.float64, torch.float32)):
        torch.manual_seed(seed)
        mixer = regard.create("prob_sparse", dim=16, heads=2).to(dtype).eval()
        index = torch.arange(400)
        x = tokens(1, kinds, 16, seed=seed).to(dtype)[:, index % kinds]
        padded, cut = mixer(x, mask=(index < 300)[None])[:, :300], mixer(x[:, :300])
        torch.testing.assert_close(padded, cut, rtol=1e-4, atol=1e-4)


def test_clustered_improved_chooses_keys_by_score():
    """Fails if the choice is arbitrary where weights underflow."""
    torch.manual_seed(0)
    mixer = regard.create("clustered_improved", dim=32, heads=2, clusters=4, top=8).double()
    x = tokens(2, 64, 32, scale=20.0).double()
    want = mixer(x)
    torch.testing.assert_close(mixer.float()(x.float()).double(), want, rtol=1e-3, atol=1e-3)


def test_means_of_large_clusters():
    """Fails if 16 bits count the queries of a cluster, or float16 sums them."""
    clusters = QueryClusters(4, 2)
    for dtype in (torch.bfloat16, torch.float16):
        q = torch.full((1, 1, 3000, 4), 100.0, dtype=dtype)
        means = clusters.means(q, torch.zeros(1, 1, 3000, dtype=torch.long), None)
        assert (means[:, :, 0] == 100).all()


def test_sinkhorn_with_a_hard_permutation():
    """Fails if a share of the tokens that are there underflows."""
    mask = torch.rand(1, 512, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[:, 128:192] = False
    for seed in range(3):
        torch.manual_seed(seed)
        mixer = regard.create("sinkhorn", dim=64, heads=4, length=512, causal=True).eval()
        x = (tokens(1, 512, 64, seed=seed) + 1).requires_grad_()
        y = mixer(x, mask=mask)
        (grad,) = torch.autograd.grad(y[mask].sum(), x)
        assert y.isfinite().all() and grad.isfinite().all()
        want = mixer.double()(x.double(), mask=mask).float()
        torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinkhorn_streams_long_sums(dtype):
    """Fails if the sum of all tokens is kept in 16 bits."""
    torch.manual_seed(0)
    mixer = regard.create("sinkhorn", dim=8, heads=2, length=4096, block=64, causal=True)
    mixer = mixer.to(dtype).eval()
    x = (tokens(1, 4096, 8) + 20).to(dtype)
    state = None
    with torch.no_grad():
        for chunk in x.split(32, 1):
            y, state = mixer.stream(chunk, state)
        torch.testing.assert_close(state.total, x.float().sum(1, keepdim=True))
        assert y.isfinite().all()


@pytest.mark.parametrize("length", [16, 23])
def test_second_derivatives_of_causal_sinkhorn(length):
    """Fails if they are NaN, as those of logcumsumexp are where a gradient is zero."""
    mixer = example("sinkhorn", causal=True, dtype=torch.float64)
    x = tokens(1, length, 8).double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel refuses them
        assert torch.autograd.gradgradcheck(mixer, x, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("scale", [1, 20, 150])
@pytest.mark.parametrize("name", regard.list_recipes())
def test_float16_stays_finite(name, scale):
    """Fails if large inputs overflow where softmax attention does not."""
    found = get_recipe(name)
    for causal in found.causal_options():
        torch.manual_seed(0)
        mixer = found.example(64, causal=causal).eval().half()
        x = tokens(2, 23, 64, scale=scale).half()
        mask = torch.arange(23).expand(2, 23) % 3 != 1
        with torch.no_grad():
            assert mixer(x).isfinite().all()
            if mixer.can.mask:
                assert mixer(x, mask=mask).isfinite().all()


def test_delta_rule_gradients_of_large_inputs_in_float16():
    """Fails if the SiLU of a large negative number underflows before keys are normalised."""
    mixer = get_recipe("delta_rule").example(causal=True).half()
    for seed in range(10):
        x = 150 * torch.randn(2, 23, 8, generator=torch.Generator().manual_seed(seed))
        x = x.half().requires_grad_()
        (x_grad,) = torch.autograd.grad(mixer(x).float().sum(), x)
        assert x_grad.isfinite().all()
