"""Which executor runs a call: by what the call needs, and by what each would cost on this machine.

The costs are seconds for a call and seconds for a score of each executor, measured once (about a third of a second) and kept
in a small JSON file for the next process.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from regard import native
from regard.backends import cpp, flex, reference, sdpa, sparse, tiled_flash
from regard.backends.call import AttentionCall, make_call
from regard.disk_cache import cache_dir
from regard.errors import check_int
from regard.layout import Layout, build_layout
from regard.layout.tiles import QUERY_OVERHEAD, TILE, build_tiles
from regard.pattern import Band, Full, Pattern

BACKENDS = {"reference": reference, "sdpa": sdpa, "sparse": sparse, "cpp": cpp, "flex": flex}
LEAST = {
    "sparse": (192, 192),
    "cpp": (48, 64),
}  # queries or keys from which on each pays, without and with gradients
MARGIN = {"sparse": 0.8, "cpp": 1.0}  # what each must promise of the dense time
MASKED = 1.08  # the dense time with a mask, beside that without
KEYS = 512  # that PyTorch's kernel takes at once: of later ones, whole lots of them are left out
MOST_TILES = 1 << 20  # of a dense pattern: a list of more is not worth its memory
BACKWARD = 2.5  # scores of a backward pass, beside one of the forward pass
CALLS = 8  # what surrounds a forward and a backward pass, beside a call without gradients
WIDTH = 64  # of a head, when measuring
DENSE_SAME, SAME = (
    32,
    16,
)  # of the width that a score costs as much as, whatever the width: exponentials, above all
WIDE = 1.25  # a score of the kernel for heads wider than 64
FILLED, FILL = (
    2.2,
    40,
)  # heads that must be filled up to a whole width: its call, and scores that each token costs more
MIDDLE, LONG = 192, 768  # queries from which on PyTorch's kernel takes more of them at once
LEAST_CALL, MOST_CALL = 5e-6, 3e-4  # seconds: what seems outside was measured on a busy machine
MOST_RATIO = 2.5  # and so was a sparse score that seems to cost more than this many dense ones


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, for one head of width 64."""

    dense_call: float
    dense_short: float  # a score, where there are fewer than `MIDDLE` queries
    dense_middle: float  # fewer than `LONG`
    dense_score: float
    sparse_call: float
    sparse_score: float
    cpp_call: float | None = None  # where there is no compiled kernel
    cpp_score: float | None = None


@dataclass(frozen=True)
class BackendChoice:
    """What would run, and why; seconds as estimated, None where an executor cannot do it or was not considered.

    `sparse` is for computing the tiles that hold a seen pair only, by the compiled kernel where there is one.
    """

    backend: str
    reason: str
    dense: float | None = None
    sparse: float | None = None


DENSE = BackendChoice("sdpa", "the pattern is dense: nothing to leave out")
FEW_TOKENS = BackendChoice("sdpa", "few queries or keys: one fused dense call is the fastest")


def choose_backend(call: AttentionCall) -> BackendChoice:
    """The executor for a call with backend="auto"."""
    if call.q.device.type != "cpu":
        return _on_accelerator(call)
    if native.inside_transform() or type(call.q) not in native.TENSOR_TYPES:
        return BackendChoice(
            "sdpa", "these are stand-ins or inside a transform: only dense calls go through"
        )
    n, m, grad = call.q.shape[2], call.k.shape[2], call.grad()
    causal = sdpa.plainly_causal(call)
    way = "sparse" if _is_whole(call.pattern, causal, n, m) or cpp.refuses(call) else "cpp"
    if min(n, m) < LEAST[way][grad]:
        return FEW_TOKENS
    if way == "sparse" and (causal or call.pattern == Full()):
        return DENSE
    refusal = sparse.refuses(call) if way == "sparse" else None
    if refusal is not None:
        return BackendChoice("sdpa", f"sparse cannot: {refusal}")
    plain, heads, e = (
        call.pattern.resolve_global_mask(False, False),
        call.q.shape[0] * call.q.shape[1],
        call.q.shape[3],
    )
    return _by_cost(
        way,
        plain,
        n,
        m,
        call.q_start,
        sparse._start(call),
        heads,
        e,
        grad,
        causal,
        torch.get_num_threads(),
    )


def _is_whole(pattern: Pattern, causal: bool, n: int, m: int) -> bool:
    """Whether it would have too many tiles: a dense pattern, and very many tokens."""
    return (causal or pattern == Full()) and n * m > MOST_TILES * TILE * TILE


def _on_accelerator(call: AttentionCall) -> BackendChoice:
    refusal = flex.refuses(call)
    if call.pattern == Full() or sdpa.plainly_causal(call) or refusal is not None:
        return BackendChoice("sdpa", refusal or "the pattern is dense: nothing to leave out")
    return BackendChoice("flex", f"a block mask on {call.q.device.type}")


@lru_cache(4096)
def _by_cost(
    way: str,
    pattern: Pattern,
    n: int,
    m: int,
    q_start: int,
    k_positions: int,
    heads: int,
    e: int,
    grad: bool,
    causal: bool,
    threads: int,
) -> BackendChoice:
    costs = calibration()
    patterns = pattern.parts if pattern.heads else (pattern,)
    share = min(1, (1 + KEYS / m) / 2) if causal else 1 if pattern == Full() else MASKED
    dense = _dense(costs, n, m, heads, e, grad, share)
    seen = sum(p.density(min(n, 2048), min(m, 2048)) for p in set(patterns)) / len(set(patterns))
    if way == "sparse" and seen >= MARGIN[way] and n <= 2048:
        return BackendChoice("sdpa", f"{seen:.0%} of all pairs are seen", dense)
    estimate = _compiled if way == "cpp" else _sparse
    total = sum(
        estimate(costs, p, n, m, q_start, k_positions, heads / len(patterns), e, grad)
        for p in patterns
    )
    name = way if total < MARGIN[way] * dense else "sdpa"
    return BackendChoice(
        name, f"about {total * 1e3:.3g} ms {way}, {dense * 1e3:.3g} ms dense", dense, total
    )


def _dense(costs: Costs, n: int, m: int, heads: float, e: int, grad: bool, share: float) -> float:
    score = (
        costs.dense_short if n < MIDDLE else costs.dense_middle if n < LONG else costs.dense_score
    )
    work = (
        score * heads * (e + DENSE_SAME) / (WIDTH + DENSE_SAME) * n * (m + QUERY_OVERHEAD) * share
    )
    return costs.dense_call * (CALLS if grad else 1) + work * (1 + BACKWARD if grad else 1)


def _compiled(
    costs: Costs,
    p: Pattern,
    n: int,
    m: int,
    q_start: int,
    k_positions: int,
    heads: float,
    e: int,
    grad: bool,
) -> float:
    assert costs.cpp_call is not None
    assert costs.cpp_score is not None
    scores = sum(
        part.scores() for part in build_tiles(p, n, m, q_start=q_start, k_start=k_positions)
    )
    width = native.padded_width(e)
    scores += FILL * (n + 2 * m) if e < width else 0
    work = (
        costs.cpp_score
        * heads
        * scores
        * (width + SAME)
        / (WIDTH + SAME)
        * (WIDE if e > WIDTH else 1)
    )
    call = costs.cpp_call * (FILLED if e < width else 1)
    return call * (CALLS if grad else 1) + work * (1 + BACKWARD if grad else 1)


def _sparse(
    costs: Costs,
    p: Pattern,
    n: int,
    m: int,
    q_start: int,
    k_positions: int,
    heads: float,
    e: int,
    grad: bool,
) -> float:
    total, each = 0.0, heads * (e + SAME) / (WIDTH + SAME)
    for backward in (False, True) if grad else (False,):
        work = build_layout(p, n, m, q_start=q_start, k_start=k_positions, backward=backward)
        total += costs.sparse_score * each * work.work(backward) + costs.sparse_call * work.calls()
    return total


def explain(
    pattern: Pattern, n: int, *, heads: int = 8, width: int = 64, grad: bool = False
) -> BackendChoice:
    """What `auto` would do for n tokens, without running it."""
    check_int(1, n=n, heads=heads, width=width)
    x = torch.empty(1, heads, n, width, device="meta", requires_grad=grad)
    call = make_call(
        x,
        x,
        x,
        pattern=pattern,
        prior=None,
        mask=None,
        global_attention_mask=None,
        scale=None,
        q_start=0,
        k_positions=0,
    )
    causal = sdpa.plainly_causal(call)
    way = "cpp" if native.library() and not _is_whole(pattern, causal, n, n) else "sparse"
    if n < LEAST[way][grad]:
        return FEW_TOKENS
    if way == "sparse" and (causal or pattern == Full()):
        return DENSE
    return _by_cost(
        way,
        pattern.resolve_global_mask(False, False),
        n,
        n,
        0,
        0,
        heads,
        width,
        grad,
        causal,
        torch.get_num_threads(),
    )


# ---------------------------------------------------------------------------------------------- calibration
def calibration() -> Costs:
    """The costs of this machine with as many threads as torch has now: read from the cache, or measured."""
    return _calibration(torch.get_num_threads(), native.library() is not None)


@lru_cache(8)
def _calibration(threads: int, kernel: bool) -> Costs:
    path = _cache_file()
    return _read(path) or _measure_and_keep(path)


def _cache_file() -> Path:
    machine = f"{platform.machine()}-{os.cpu_count()}-torch{torch.__version__}-{torch.get_num_threads()}threads"
    kernel = "cpp" if native.library() else "plain"
    return cache_dir() / f"costs6-{kernel}-{machine}.json"  # 6: what is measured has changed


def _read(path: Path) -> Costs | None:
    """What was measured before; None where it is missing or makes no sense."""
    try:
        costs = Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    values = [x for x in asdict(costs).values() if x is not None]
    complete = len(values) == (8 if native.library() else 6)
    return costs if complete and all(isinstance(x, float) and 0 < x < 1 for x in values) else None


def _measure_and_keep(path: Path) -> Costs:
    costs = measure()
    if os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1):  # good enough for now, but not to be kept
        return costs
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(costs), indent=1))
    except OSError:  # a read-only home is no reason to stop: it is measured again next time
        pass
    return costs


def measure() -> Costs:
    """Time small and large calls of each executor, in turn, and take the best of each."""
    heads, few, large = 4, 32, 1024
    work, once = (build_layout(Band(32, 32), n, n, size=32) for n in (large, few))
    calls: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {
        ("dense", n): lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
        for n in (1, 128, 512, large)
    }
    calls |= {("sparse", few): partial(_run, once), ("sparse", large): partial(_run, work)}
    if native.library():
        calls |= {("cpp", n): lambda x: cpp.run(_whole(x)) for n in (1, large)}
    best = _best(calls, heads)
    call = _clamped(best["dense", 1])
    short, middle, score = (
        (best["dense", n] - call) / n / (n + QUERY_OVERHEAD) / heads for n in (128, 512, large)
    )
    short, middle = (min(max(x, score), MOST_RATIO * score) for x in (short, middle))
    sparse_call = _clamped(best["sparse", few] - score * heads * few * (few + QUERY_OVERHEAD))
    sparse_score = (best["sparse", large] - sparse_call * work.calls()) / work.work(False) / heads
    costs = Costs(
        call, short, middle, score, sparse_call, min(max(sparse_score, score), MOST_RATIO * score)
    )
    if not native.library():
        return costs
    start = _clamped(best["cpp", 1])
    ours = (
        (best["cpp", large] - start)
        / heads
        / sum(part.scores() for part in build_tiles(Full(), large, large))
    )
    return replace(costs, cpp_call=start, cpp_score=min(max(ours, score / 2), MOST_RATIO * score))


def _clamped(seconds: float) -> float:
    return min(max(seconds, LEAST_CALL), MOST_CALL)


def _run(work: Layout, q: Tensor) -> Tensor:
    return tiled_flash.attend_layout(q[0], q[0], q[0], work, work, scale=0.125)


def _whole(x: Tensor) -> AttentionCall:
    return AttentionCall(x, x, x, Full(), None, None, None, 0.125, 0, 0)


def _best(
    calls: dict[tuple[str, int], Callable[[Tensor], Tensor]],
    heads: int,
    rounds: int = 6,
    at_once: int = 3,
) -> dict[tuple[str, int], float]:
    """The shortest time of each call, by turns of a few: the first of them finds caches cold and threads asleep."""
    make = torch.Generator().manual_seed(0)
    inputs = {key: torch.randn(1, heads, key[1], WIDTH, generator=make) for key in calls}
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for key, call in calls.items():
                for _ in range(at_once):
                    start = time.perf_counter()
                    call(inputs[key])
                    best[key] = min(best[key], time.perf_counter() - start)
    return best
