"""The cost model of the backends: estimated seconds for a call on this machine.

On the CPU, every backend has a fixed cost per kernel call and a cost per score (one query-key dot
product with its share of softmax and value product). Both are measured once, in about a third of a
second, and stored in the cache directory as JSON. On other devices nothing is measured: scores are
counted and compared at a nominal speed.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import native
from regard.backends.call import AttentionCall
from regard.backends.cpp_kernel import attend_tiles
from regard.backends.tiled_flash import attend_layout
from regard.disk_cache import cache_dir, read_verified, write_verified
from regard.layout import build_layout
from regard.layout.tiles import QUERY_OVERHEAD, build_tiles
from regard.pattern import Band, Full, Pattern

HEAD_DIM = 64  # head width at which costs are measured

# A score costs as much as `head_dim + x` multiply-adds: x stands for the exponential and other work
# that does not depend on the head width.
SDPA_FIXED_WIDTH = 32
TILE_FIXED_WIDTH = 16

# PyTorch's CPU kernel (scaled_dot_product_attention)
SDPA_MEDIUM = 192  # queries from which it processes 64 at a time instead of 32
SDPA_LONG = 768  # queries from which it processes 256 at a time
# keys it processes at a time; with is_causal=True it skips blocks that lie entirely in the future
SDPA_KEY_BLOCK = 512
SDPA_MASK_FACTOR = 1.08  # time with an attention mask relative to the time without

# The C++ kernel
WIDE_HEAD_FACTOR = 1.25  # cost of a score for heads wider than 64, beyond what the width explains
PADDED_CALL_FACTOR = 2.2  # cost of a call whose heads are padded to a multiple of 16
PADDED_TOKEN_SCORES = 40  # cost of padding one token (of q, k or v), in scores

# Training
BACKWARD_FACTOR = 2.5  # cost of a score in the backward pass, relative to the forward pass
TRAINING_CALL_FACTOR = 8  # fixed cost of forward and backward, relative to a call without gradients

# Accelerators, where nothing is measured: only the ratio of two estimates matters
NOMINAL_SCORES_PER_SECOND = 1e12
FLEX_FACTOR = 1.25  # time of a visible score in FlexAttention, relative to the fused dense kernel

SAMPLE_TOKENS = 2048  # the density of a pattern is computed for at most this many queries and keys

# Measurements outside of these bounds were disturbed by other processes.
MIN_CALL_SECONDS, MAX_CALL_SECONDS = 5e-6, 3e-4
MAX_SCORE_RATIO = 2.5  # of any score to a score of a long dense call
# So were long calls that had a processor for less than this share of their time: on a quiet machine
# they have 0.92 to 1.0, with one other busy process for each two threads 0.55 to 0.7.
MIN_CPU_SHARE = 0.85
MEASUREMENTS = 3  # attempts to measure without a disturbance

Timed = tuple[Callable[[Tensor], Tensor], int]  # a call and its number of tokens


@dataclass(frozen=True)
class BackendCosts:
    """Seconds per kernel call ("call") or per score, on this machine, for one head of width 64."""

    dense_call: float
    dense_short: float  # fewer than SDPA_MEDIUM queries
    dense_middle: float  # fewer than SDPA_LONG queries
    dense_score: float
    sparse_call: float
    sparse_score: float
    cpp_call: float | None = None  # None if the C++ kernel is not available
    cpp_score: float | None = None


class Workload(NamedTuple):
    """The properties of a call that determine its cost."""

    pattern: Pattern
    n: int
    m: int
    q_start: int
    k_start: int
    heads: int  # batch size times number of heads
    head_dim: int
    grad: bool  # whether a backward pass follows
    causal: bool  # whether `is_causal` of PyTorch's kernel expresses the pattern
    group: int = 1  # query heads that share a head of keys and values

    def head_patterns(self) -> tuple[Pattern, ...]:
        """The patterns of the heads; one if they are all alike."""
        return self.pattern.parts if self.pattern.heads else (self.pattern,)

    def sample_sizes(self) -> tuple[int, int]:
        """The number of queries and keys for which the density is computed."""
        return min(self.n, SAMPLE_TOKENS), min(self.m, SAMPLE_TOKENS)


def describe_workload(call: AttentionCall) -> Workload:
    """What the cost of a call depends on. Pairs that global tokens add are not counted."""
    b, h, n, e = call.q.shape
    return Workload(
        call.pattern.resolve_global_mask(False, False),
        n,
        call.k.shape[2],
        call.q_start,
        call.k_positions if isinstance(call.k_positions, int) else 0,
        b * h,
        e,
        call.needs_grad(),
        call.is_plain_causal(),
        call.group_size(),
    )


@lru_cache(1024)
def sample_density(work: Workload) -> float:
    """The fraction of visible pairs among the first `SAMPLE_TOKENS` queries and keys."""
    n, m, patterns = *work.sample_sizes(), work.head_patterns()
    densities = {pattern: pattern.density(n, m) for pattern in set(patterns)}
    return sum(densities[pattern] for pattern in patterns) / len(patterns)


def accelerator_seconds(work: Workload, *, sparse: bool) -> float:
    """Time at a nominal speed of all scores, or of the visible ones in FlexAttention, with as many
    keys per query as in the sample.
    """
    keys = float(work.m)
    if sparse:
        keys = sample_density(work) * work.sample_sizes()[1] * FLEX_FACTOR
    return work.heads * work.n * keys / NOMINAL_SCORES_PER_SECOND


@lru_cache(4096)
def dense_seconds(costs: BackendCosts, work: Workload) -> float:
    """Estimated time of PyTorch's dense kernel."""
    if work.causal:
        fraction = min(1, (1 + SDPA_KEY_BLOCK / work.m) / 2)
    else:
        fraction = 1 if work.pattern == Full() else SDPA_MASK_FACTOR
    score = costs.dense_score
    if work.n < SDPA_LONG:
        score = costs.dense_short if work.n < SDPA_MEDIUM else costs.dense_middle
    width = (work.head_dim + SDPA_FIXED_WIDTH) / (HEAD_DIM + SDPA_FIXED_WIDTH)
    seconds = score * work.heads * width * work.n * (work.m + QUERY_OVERHEAD) * fraction
    return _with_backward(costs.dense_call, seconds, work.grad)


@lru_cache(4096)
def cpp_seconds(costs: BackendCosts, work: Workload) -> float:
    """Estimated time of the C++ kernel."""
    assert costs.cpp_call is not None
    assert costs.cpp_score is not None
    patterns = work.head_patterns()
    padded = native.padded_width(work.head_dim)
    call, extra = costs.cpp_call, 0
    if work.head_dim < padded:
        call *= PADDED_CALL_FACTOR
        extra = PADDED_TOKEN_SCORES * (work.n + 2 * work.m)
    score = (
        costs.cpp_score
        * work.heads
        / len(patterns)
        * (padded + TILE_FIXED_WIDTH)
        / (HEAD_DIM + TILE_FIXED_WIDTH)
    )
    score *= WIDE_HEAD_FACTOR if work.head_dim > HEAD_DIM else 1
    total = 0.0
    for pattern in patterns:
        tiles = build_tiles(pattern, work.n, work.m, q_start=work.q_start, k_start=work.k_start)
        total += _with_backward(
            call, score * (sum(part.scores() for part in tiles) + extra), work.grad
        )
    return total


@lru_cache(4096)
def sparse_seconds(costs: BackendCosts, work: Workload) -> float:
    """Estimated time of the `sparse` backend."""
    patterns = work.head_patterns()
    width = (work.head_dim + TILE_FIXED_WIDTH) / (HEAD_DIM + TILE_FIXED_WIDTH)
    score = costs.sparse_score * work.heads / len(patterns) * width
    total = 0.0
    for pattern in patterns:
        for backward in (False, True) if work.grad else (False,):
            layout = build_layout(
                pattern,
                work.n,
                work.m,
                q_start=work.q_start,
                k_start=work.k_start,
                backward=backward,
            )
            calls = layout.calls() * work.group
            total += score * layout.work(backward) + costs.sparse_call * calls
    return total


def _with_backward(call: float, scores: float, grad: bool) -> float:
    if grad:
        return call * TRAINING_CALL_FACTOR + scores * (1 + BACKWARD_FACTOR)
    return call + scores


# ---------------------------------------------------------------------- measuring
def machine_costs() -> BackendCosts:
    """The costs on this machine with the current number of threads, from the cache directory or
    newly measured.
    """
    return _machine_costs(torch.get_num_threads(), native.library() is not None)


@lru_cache(8)
def _machine_costs(threads: int, has_kernel: bool) -> BackendCosts:
    path = costs_path()
    try:
        costs = BackendCosts(**json.loads(read_verified(path) or ""))
        values = [x for x in asdict(costs).values() if x is not None]
        if len(values) == (8 if has_kernel else 6) and all(
            isinstance(x, float) and 0 < x < 1 for x in values
        ):
            return costs
    except (ValueError, TypeError):  # missing, not a file that we wrote, or of another version
        pass
    for _ in range(MEASUREMENTS):
        costs, cpu_share = measure_costs()
        if cpu_share >= MIN_CPU_SHARE:
            break
    else:
        return costs  # the machine is busy: use the costs in this process, but do not store them
    write_verified(path, json.dumps(asdict(costs), indent=1))
    return costs


def costs_path() -> Path:
    """The file in which the costs of this machine and number of threads are stored."""
    kernel = "cpp" if native.library() else "plain"
    machine = f"{platform.machine()}-{os.cpu_count()}-torch{torch.__version__}"
    # increase the number when what is measured changes
    return cache_dir() / f"costs7-{kernel}-{machine}-{torch.get_num_threads()}threads.json"


def measure_costs() -> tuple[BackendCosts, float]:
    """Time small and large calls of each backend; solve for the costs of a call and a score.

    Returns:
        The costs, and the smallest share of its time during which a large dense call had the
        processors: less than 1 if other processes used them.
    """
    heads, few, large = 4, 32, 1024
    small_layout, large_layout = (build_layout(Band(32, 32), n, n, size=32) for n in (few, large))

    def dense(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def sparse(x: Tensor) -> Tensor:
        layout = small_layout if x.shape[2] == few else large_layout
        return attend_layout(x[0], x[0], x[0], layout, layout, scale=0.125)

    def by_kernel(x: Tensor) -> Tensor:
        return attend_tiles(x, x, x, build_tiles(Full(), x.shape[2], x.shape[2]), 0.125)

    calls: list[Timed] = [(dense, n) for n in (1, 128, 512, large)]
    calls += [(sparse, few), (sparse, large)]
    if native.library():
        calls += [(by_kernel, 1), (by_kernel, large)]
    seconds, cpu_shares = _time_calls(calls, heads)
    cpu_share = min(
        share for (call, n), share in cpu_shares.items() if n == large and call != sparse
    )

    call = _clamp_call(seconds[dense, 1])
    short, middle, score = (
        (seconds[dense, n] - call) / n / (n + QUERY_OVERHEAD) / heads for n in (128, 512, large)
    )
    sparse_call = _clamp_call(seconds[sparse, few] - score * heads * few * (few + QUERY_OVERHEAD))
    sparse_score = (
        (seconds[sparse, large] - sparse_call * large_layout.calls())
        / large_layout.work(False)
        / heads
    )
    short, middle, sparse_score = (
        min(max(x, score), MAX_SCORE_RATIO * score) for x in (short, middle, sparse_score)
    )
    costs = BackendCosts(call, short, middle, score, sparse_call, sparse_score)
    if not native.library():
        return costs, cpu_share
    cpp_call = _clamp_call(seconds[by_kernel, 1])
    scores = sum(part.scores() for part in build_tiles(Full(), large, large))
    cpp_score = (seconds[by_kernel, large] - cpp_call) / heads / scores
    cpp_score = min(max(cpp_score, score / 2), MAX_SCORE_RATIO * score)
    return replace(costs, cpp_call=cpp_call, cpp_score=cpp_score), cpu_share


def _clamp_call(seconds: float) -> float:
    return min(max(seconds, MIN_CALL_SECONDS), MAX_CALL_SECONDS)


def _time_calls(
    calls: list[Timed], heads: int, rounds: int = 6, repeats: int = 3
) -> tuple[dict[Timed, float], dict[Timed, float]]:
    """Time calls f(x), x (1 heads n 64), which are interleaved.

    Returns:
        The shortest time of each call, and its processor time as a fraction of what its threads
        could have used. The load average would not do: it lags behind by a minute.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, n, HEAD_DIM, generator=generator) for _, n in calls]
    best = dict.fromkeys(calls, float("inf"))
    wall, cpu = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0.0)
    with torch.no_grad():
        for _ in range(rounds):
            for timed, x in zip(calls, inputs, strict=True):
                timed[0](x)  # warms up
                for _ in range(repeats - 1):
                    cpu_start, start = time.process_time(), time.perf_counter()
                    timed[0](x)
                    seconds = time.perf_counter() - start
                    cpu[timed] += time.process_time() - cpu_start
                    wall[timed] += seconds
                    best[timed] = min(best[timed], seconds)
    threads = torch.get_num_threads()
    return best, {timed: cpu[timed] / (wall[timed] * threads) for timed in calls}
