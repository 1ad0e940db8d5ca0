"""How time, allocations and their bytes grow with the length: fitted, in wide bands, and never an
absolute time.
"""

import math
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import regard
from regard import native
from regard.bench.cell import BenchCell
from regard.bench.contenders import RecipeContender
from regard.bench.probe import probe, process_memory
from regard.cli.parsing import parse_spec
from regard.pattern import Band, Chunks, Global, RandomBlocks

HEADS, WIDTH = 2, 32
LENGTHS = (1024, 2048, 4096, 8192)
BIG = Chunks(64, 1, 1) | Global(64) | RandomBlocks(64, 2, 128)

needs_kernel = pytest.mark.skipif(native.library() is None, reason=native.missing_reason())


def inputs(n):
    return [torch.randn(1, HEADS, n, WIDTH, requires_grad=True) for _ in range(3)]


def exponent(sizes, values):
    """The slope of the best line through the logarithms."""
    x, y = ([math.log(v) for v in series] for series in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def train(call, q, k, v):
    return torch.autograd.grad(call(q, k, v).sum(), (q, k, v))


def seconds(call, n):
    """Of the processor, the shortest of five."""
    given = inputs(n)
    train(call, *given)
    times = []
    for _ in range(5):
        start = time.process_time()
        train(call, *given)
        times.append(time.process_time() - start)
    return min(times)


def allocated(call, n):
    """How many blocks a forward and backward pass asks for, and their bytes."""
    given = inputs(n)
    train(call, *given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train(call, *given)
    sizes = [e.self_cpu_memory_usage for e in seen.events() if e.self_cpu_memory_usage > 0]
    return len(sizes), sum(sizes)


CALLS = {
    "window": lambda q, k, v: regard.attend(q, k, v, pattern=Band(64, 64)),
    "bigbird": lambda q, k, v: regard.attend(q, k, v, pattern=BIG),
    "linear": lambda q, k, v: regard.LinearAttention()(q, k, v)[0],
    "linear, causal": lambda q, k, v: regard.LinearAttention()(q, k, v, causal=True)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_time_grows_with_the_length(name):
    """Fails if what promises to be linear is nearer to the square."""
    assert 0.5 < exponent(LENGTHS, [seconds(CALLS[name], n) for n in LENGTHS]) < 1.5


def test_the_fit_would_see_a_square():
    """Fails if the band above lets dense attention through."""
    dense = torch.nn.functional.scaled_dot_product_attention
    assert exponent(LENGTHS, [seconds(dense, n) for n in LENGTHS]) > 1.6


@needs_kernel
@pytest.mark.parametrize("name", CALLS)
def test_allocations_are_few_and_grow_with_the_length(name):
    """Fails if longer inputs ask for more blocks, or for bytes out of proportion."""
    found = [allocated(CALLS[name], n) for n in LENGTHS]
    assert max(count for count, _ in found) <= min(count for count, _ in found) + 2
    assert 0.8 < exponent(LENGTHS, [size for _, size in found]) < 1.1


@pytest.mark.skipif(
    process_memory("VmHWM") is None, reason="the system does not tell how much a process has taken"
)
@pytest.mark.parametrize("name", ["local:window=64", "bigbird", "linear", "linear causal"])
def test_memory_of_a_process_grows_with_the_length(name):
    """Fails if a kernel, whose memory no profiler sees, takes memory that grows as n²."""
    causal, sizes = name.endswith(" causal"), (4096, 16384)
    ours = RecipeContender(parse_spec(name.split()[0]))
    held = []
    for n in sizes:
        cell = BenchCell("kernel", "training", n, heads=HEADS, head_dim=WIDTH, causal=causal)
        held.append(probe(ours, cell, threads=1, limit=4 << 30, seconds=120).bytes)
    assert (
        held[0] >= 7 * 4 * HEADS * sizes[0] * WIDTH
    )  # three inputs, the result and three gradients, at least
    assert exponent(sizes, held) < 1.3


@needs_kernel
def test_what_a_window_asks_for():
    """Fails if the kernel's call allocates more than its results: out and one number a query, then
    three gradients.
    """
    n = 2048
    given, each = inputs(n), 4 * HEADS * 2048 * WIDTH
    call = CALLS["window"]
    call(*given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = call(*given)
    sizes = [e.self_cpu_memory_usage for e in seen.events() if e.self_cpu_memory_usage > 0]
    assert sum(sizes) == each + each // WIDTH
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        torch.autograd.grad(out, given, torch.ones_like(out))
    sizes = [e.self_cpu_memory_usage for e in seen.events() if e.self_cpu_memory_usage >= each]
    assert (
        len(sizes) <= 5 and sum(sizes) <= 5 * each
    )  # three gradients, the ones, and a copy of them at most
