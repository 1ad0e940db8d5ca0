"""Attention is a dense layer whose weights depend on the input: docs/dense-layer.md."""

import pytest
import torch

import regard
from regard import registry
from regard.mixers import with_position

DEPENDS = [
    "vanilla",
    "local",
    "multi_query",
    "linear",
    "linformer",
    "nystrom",
    "performer",
    "talking_heads",
    "reformer",
]
FIXED = ["hard_gaussian"]


def weights(mixer, x):
    """W(x), (n d n d) as a matrix: W[i a, j b] = Σ_h A_h[i, j] Σ_e W⁰[a, h e] W_v[h e, b], for
    one example x (1 n d)."""
    maps = mixer.attention_map(x)[0]
    heads, n, d = len(maps), x.shape[1], x.shape[2]
    values = mixer.v.weight.unflatten(0, (mixer.kv_heads, -1)).repeat_interleave(
        heads // mixer.kv_heads, 0
    )
    merged = mixer.out.weight.unflatten(1, (heads, -1))
    rows = torch.zeros(n * d, n * d, dtype=x.dtype)
    for i in range(n):
        for j in range(n):
            block = sum(maps[h, i, j] * merged[:, h] @ values[h] for h in range(heads))
            rows[i * d : (i + 1) * d, j * d : (j + 1) * d] = block
    return rows


def mixer_of(name, causal=False):
    torch.manual_seed(0)
    return registry.get_recipe(name).example(8, causal=causal).double().eval()


@pytest.mark.parametrize("name", DEPENDS + FIXED)
def test_the_output_is_a_matrix_times_the_input(name, rand):
    """Fails if, for the input at hand, attention is anything but x_flat times a matrix made of
    its map and projections."""
    mixer, x = mixer_of(name), rand(1, 7, 8)
    torch.testing.assert_close((weights(mixer, x) @ x.flatten()).view(1, 7, 8), mixer(x))


@pytest.mark.parametrize("name", DEPENDS)
def test_the_same_matrix_is_wrong_for_another_input(name, rand):
    """Fails if the weights did not depend on the input: then attention would be a dense layer,
    and no more."""
    mixer, x, other = mixer_of(name), rand(1, 7, 8), rand(1, 7, 8)
    frozen = weights(mixer, x)
    assert ((frozen @ other.flatten()).view(1, 7, 8) - mixer(other)).abs().max() > 1e-3
    jacobian = torch.autograd.functional.jacobian(mixer, x).view(56, 56)
    assert (jacobian - frozen).abs().max() > 1e-3, (
        "a derivative that is W would mean that W is constant"
    )


@pytest.mark.parametrize("name", FIXED)
def test_weights_that_no_token_chooses_are_a_plain_dense_layer(name, rand):
    """Fails if a mixer with a fixed map is not one and the same matrix for every input."""
    mixer, x, other = mixer_of(name), rand(1, 7, 8), rand(1, 7, 8)
    frozen = weights(mixer, x)
    torch.testing.assert_close((frozen @ other.flatten()).view(1, 7, 8), mixer(other))
    torch.testing.assert_close(torch.autograd.functional.jacobian(mixer, x).view(56, 56), frozen)


def test_causal_weights_are_triangular_by_blocks_and_local_ones_banded(rand):
    """Fails if a pattern is not zeros of the matrix."""
    x = rand(1, 7, 8)
    blocks = weights(mixer_of("vanilla", causal=True), x).view(7, 8, 7, 8).abs().amax((1, 3))
    assert (blocks.triu(1) == 0).all() and (blocks.tril() > 0).sum() == 28
    banded = (
        weights(regard.create("local", dim=8, heads=2, window=1).double(), x)
        .view(7, 8, 7, 8)
        .abs()
        .amax((1, 3))
    )
    assert torch.equal(banded > 0, (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 1)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "xl"])
def test_positions_change_the_matrix_and_not_the_rule(scheme, rand):
    """Fails if the map of a mixer with positions is not the one that its output comes from."""
    mixer, x = with_position(mixer_of("vanilla"), scheme), rand(1, 7, 8)
    torch.testing.assert_close((weights(mixer, x) @ x.flatten()).view(1, 7, 8), mixer(x))


def test_a_dense_layer_is_for_one_length_and_attention_for_any(rand):
    """Fails if attention had a parameter for each pair of positions."""
    count = sum(p.numel() for p in mixer_of("vanilla").parameters())
    assert count == 4 * 8 * 8
    assert [weights(mixer_of("vanilla"), rand(1, n, 8)).numel() for n in (1, 7)] == [64, 49 * 64]
