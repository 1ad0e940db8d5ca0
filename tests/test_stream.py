"""Chunk by chunk: the whole again, with a cache that forgets what no later query can see."""

import pytest
import torch

import regard
from regard import SoftmaxAttention
from regard.attentions import LSHAttention
from regard.mixer import MultiHead
from regard.pattern import Band, Chunks, Keys, PerHead
from regard.registry import get_recipe
from regard.route.lsh import AngularHash
from regard.state import leaves
from test_join import STACKS, STREAMING

N = 400
BOUNDED = {  # recipe, arguments, and how many keys can matter to a later query
    "local": ({"window": 16}, 16),
    "dilated": ({"window": 4, "dilation": 5}, 20),
    "block_local": ({"block": 20}, 20),
    "longformer": ({"window": 12, "dilation": (1, 2)}, 24),
    "sparse_fixed": ({"stride": 20, "cells": 2, "split": "merged"}, 20 + N // 10),
    "global_tokens": ({"tokens": 5}, 5),
}


def streamed(mixer, x, size):
    """The output in chunks, and the most keys that were ever in the cache."""
    state, parts, most = None, [], 0
    for chunk in x.split(size, 1):
        y, state = mixer.stream(chunk, state)
        parts.append(y)
        most = max(most, len(state.positions))
    return torch.cat(parts, 1), most


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("name", BOUNDED)
def test_the_cache_is_bounded_and_loses_nothing(name, size, rand):
    """Fails if a key is dropped too early, or never."""
    arguments, needed = BOUNDED[name]
    torch.manual_seed(0)
    mixer = regard.create(name, dim=8, heads=2, causal=True, **arguments).double()
    x = rand(2, N, 8)
    with torch.no_grad():
        y, most = streamed(mixer, x, size)
        torch.testing.assert_close(y, mixer(x), rtol=0, atol=1e-12)
    assert most <= max(2 * needed, needed + 64) + size


def test_sinks_stay_while_the_window_moves(rand):
    """Fails if keys that do not stand in a row are taken for a row."""
    torch.manual_seed(0)
    mixer = MultiHead(8, 2, SoftmaxAttention(Band(10, 0) | Keys(0, 4)), causal=True).double()
    x = rand(1, N, 8)
    with torch.no_grad():
        y, most = streamed(mixer, x, 3)
        torch.testing.assert_close(y, mixer(x), rtol=0, atol=1e-12)
    assert most <= 14 + 64 + 3


def test_a_key_stays_as_long_as_one_head_needs_it(rand):
    """Fails if eviction follows one head and starves another."""
    torch.manual_seed(0)
    mixer = MultiHead(
        8, 2, SoftmaxAttention(PerHead((Band(3, 0), Chunks(90)))), causal=True
    ).double()
    x = rand(1, N, 8)
    with torch.no_grad():
        y, _ = streamed(mixer, x, 11)
        torch.testing.assert_close(y, mixer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vanilla", "local", "linear"])
def test_two_streams_do_not_mix(name, rand):
    """Fails if a mixer keeps state of its own beside the one that it hands out."""
    mixer = regard.create(name, dim=8, heads=2, causal=True).double()
    a, b = rand(1, 30, 8), rand(1, 30, 8) * 2 + 1
    with torch.no_grad():
        states, parts = [None, None], [[], []]
        for start in range(0, 30, 5):
            for i, x in enumerate((a, b)):
                y, states[i] = mixer.stream(x[:, start : start + 5], states[i])
                parts[i].append(y)
        for x, got in zip((a, b), parts, strict=True):
            torch.testing.assert_close(torch.cat(got, 1), mixer(x))


def test_a_state_can_be_used_twice(rand):
    """Fails if streaming changes the state that it was given: beams would disturb each other."""
    mixer = regard.create("local", dim=8, heads=2, window=4, causal=True).double()
    x = rand(1, 20, 8)
    with torch.no_grad():
        _, state = mixer.stream(x[:, :10])
        first, _ = mixer.stream(x[:, 10:], state)
        second, _ = mixer.stream(x[:, 10:], state)
    assert torch.equal(first, second)


UNPROJECTED = {
    "MultiHead without projections": lambda: MultiHead(
        8, 2, SoftmaxAttention(), causal=True, project=False
    ),
    "LSH without projections": lambda: MultiHead(
        8, 2, LSHAttention(AngularHash(2, 4, buckets=4, rounds=2)), causal=True, project=False
    ),
    "average_pool on a grid": lambda: regard.create("average_pool", dim=8, width=5, causal=True),
}
EXAMPLES = {name: lambda name=name: get_recipe(name).example(causal=True) for name in STREAMING}


@pytest.mark.parametrize("name", [*STREAMING, *UNPROJECTED, *STACKS])
def test_a_buffer_can_be_reused(name, rand):
    """Fails if a state is a view of the tokens that it was given, or of the output: it would
    change with them."""
    torch.manual_seed(0)
    streams = {**EXAMPLES, **UNPROJECTED, **STACKS}[name]().double().eval()
    x, buffer = rand(2, 18, 8), torch.empty(2, 5, 8, dtype=torch.float64)
    state = None
    with torch.no_grad():
        whole = streams(x)
        for start, end in ((0, 4), (4, 8), (8, 9), (9, 13), (13, 18)):
            tokens = buffer[:, : end - start].copy_(x[:, start:end])
            y, state = streams.stream(tokens, state)
            torch.testing.assert_close(y, whole[:, start:end], rtol=0, atol=1e-10)
            shared = {tensor.untyped_storage().data_ptr() for tensor in (buffer, y)}
            held = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
            assert not any(leaf.untyped_storage().data_ptr() in shared for leaf in held)
            buffer.fill_(torch.nan)
            y.fill_(torch.nan)


def test_an_empty_chunk_changes_nothing(rand):
    """Fails if no tokens are taken for the end, or for an error."""
    mixer = regard.create("local", dim=8, heads=2, window=4, causal=True).double()
    x = rand(1, 12, 8)
    with torch.no_grad():
        _, state = mixer.stream(x[:, :6])
        empty, state = mixer.stream(x[:, :0], state)
        rest, _ = mixer.stream(x[:, 6:], state)
        torch.testing.assert_close(rest, mixer(x)[:, 6:])
    assert empty.shape == (1, 0, 8)


def test_gradients_flow_through_a_stream(rand):
    """Fails if the state is cut from the graph."""
    mixer = regard.create("vanilla", dim=8, heads=2, causal=True).double()
    x = rand(1, 12, 8).requires_grad_()
    y, state = mixer.stream(x[:, :5])
    z, _ = mixer.stream(x[:, 5:], state)
    (got,) = torch.autograd.grad(torch.cat((y, z), 1).square().sum(), x)
    (want,) = torch.autograd.grad(mixer(x).square().sum(), x)
    torch.testing.assert_close(got, want)


def test_a_mixer_that_looks_ahead_refuses():
    """Fails if the first chunk is answered before the last is known."""
    with pytest.raises(regard.Unsupported, match="causal"):
        regard.create("local", dim=8, heads=2).stream(torch.zeros(1, 3, 8))
