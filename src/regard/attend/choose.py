"""Which executor runs a call: by what the call needs, and by what each would cost on this machine.

The costs are two numbers each for the dense and for the sparse executor, seconds for a call and seconds for a score,
measured once (about a fifth of a second) and kept in a small JSON file for the next process.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from regard.attend import flex, reference, sdpa, sparse
from regard.attend import fused as kernel
from regard.attend.call import Call, make_call
from regard.cache import folder
from regard.layout import Layout, layout
from regard.pattern import Band, Full, Pattern

BACKENDS = {"reference": reference, "sdpa": sdpa, "sparse": sparse, "flex": flex}
SMALL = 192  # with fewer queries than this a layout does not pay
MARGIN = 0.85  # sparse must promise at least this much of the dense time
BACKWARD = 2.5  # scores of a backward pass, beside one of the forward pass
WIDTH = 64  # of a head, when measuring
LEAST_CALL, MOST_CALL = 5e-6, 3e-4  # seconds: what seems outside was measured on a busy machine
MOST_RATIO = 2.5  # and so was a sparse score that seems to cost more than this many dense ones


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, for one head of width 64."""

    dense_call: float
    dense_score: float
    sparse_call: float
    sparse_score: float


@dataclass(frozen=True)
class Choice:
    """What would run, and why; seconds as estimated, None where an executor cannot do it or was not considered."""

    backend: str
    reason: str
    dense: float | None = None
    sparse: float | None = None


DENSE = Choice("sdpa", "the pattern is dense: nothing to leave out")
FEW_TOKENS = Choice("sdpa", f"fewer than {SMALL} queries or keys: one fused dense call is the fastest")


def choose(call: Call) -> Choice:
    """The executor for a call with backend="auto"."""
    if call.q.device.type != "cpu":
        return _on_accelerator(call)
    n, m = call.q.shape[2], call.k.shape[2]
    if n < SMALL or m < SMALL:
        return FEW_TOKENS
    if sdpa.plainly_causal(call) or call.pattern == Full():
        return DENSE
    refusal = sparse.refuses(call)
    if refusal is not None:
        return Choice("sdpa", f"sparse cannot: {refusal}")
    heads, e = call.q.shape[0] * call.q.shape[1], call.q.shape[3]
    return _by_cost(
        call.pattern.given(False, False), n, m, call.q_at, sparse._start(call), heads, e, call.grad(), torch.get_num_threads()
    )


def _on_accelerator(call: Call) -> Choice:
    refusal = flex.refuses(call)
    if call.pattern == Full() or sdpa.plainly_causal(call) or refusal is not None:
        return Choice("sdpa", refusal or "the pattern is dense: nothing to leave out")
    return Choice("flex", f"a block mask on {call.q.device.type}")


@lru_cache(4096)
def _by_cost(
    pattern: Pattern, n: int, m: int, q_at: int, k_at: int, heads: int, e: int, grad: bool, threads: int
) -> Choice:  # fmt: skip
    costs = calibration()
    each = heads * (e + WIDTH / 4) / (1.25 * WIDTH)  # the products grow with the width, the exponentials do not
    passes = 1 + BACKWARD if grad else 1
    dense = costs.dense_call * passes + costs.dense_score * each * n * m * passes
    patterns = pattern.parts if pattern.heads else (pattern,)
    seen = sum(p.density(min(n, 2048), min(m, 2048)) for p in set(patterns)) / len(set(patterns))
    if seen > MARGIN and n <= 2048:
        return Choice("sdpa", f"{seen:.0%} of all pairs are seen", dense)
    total = 0.0
    for p in patterns:
        for backward in (False, True) if grad else (False,):
            work = layout(p, n, m, q_at=q_at, k_at=k_at, backward=backward)
            total += costs.sparse_score * each / len(patterns) * work.work(backward)
            total += costs.sparse_call * work.calls() / len(patterns) * len(set(patterns))
    name = "sparse" if total < MARGIN * dense else "sdpa"
    return Choice(name, f"about {total * 1e3:.3g} ms sparse, {dense * 1e3:.3g} ms dense", dense, total)


def explain(pattern: Pattern, n: int, *, heads: int = 8, width: int = 64, grad: bool = False) -> Choice:
    """What `auto` would do for n tokens, without running it."""
    x = torch.empty(1, heads, n, width, device="meta", requires_grad=grad)
    call = make_call(x, x, x, pattern=pattern, prior=None, mask=None, marks=None, scale=None, q_at=0, k_at=0)
    if pattern == Full() or sdpa.plainly_causal(call):
        return DENSE
    if n < SMALL:
        return FEW_TOKENS
    return _by_cost(pattern.given(False, False), n, n, 0, 0, heads, width, grad, torch.get_num_threads())


# ---------------------------------------------------------------------------------------------- calibration
def calibration() -> Costs:
    """The costs of this machine with as many threads as torch has now: read from the cache, or measured."""
    return _calibration(torch.get_num_threads())


@lru_cache(8)
def _calibration(threads: int) -> Costs:
    path = _cache_file()
    return _read(path) or _measure_and_keep(path)


def _cache_file() -> Path:
    machine = f"{platform.machine()}-{os.cpu_count()}-torch{torch.__version__}-{torch.get_num_threads()}threads"
    return folder() / f"costs2-{machine}.json"  # 2: what a unit of work is has changed once


def _read(path: Path) -> Costs | None:
    """What was measured before; None where it is missing or makes no sense."""
    try:
        costs = Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    values = asdict(costs).values()
    return costs if all(isinstance(x, float) and 0 < x < 1 for x in values) else None


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
    """Time a small and a large call of each executor, in turn, and take the best of each."""
    heads, small, large = 4, 32, 1024
    window = Band(32, 32)
    work, once = layout(window, large, large, size=32), layout(window, small, small, size=32)
    dense = torch.nn.functional.scaled_dot_product_attention
    calls: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {
        ("dense", small): lambda x: dense(x, x, x), ("dense", large): lambda x: dense(x, x, x),
        ("sparse", small): partial(_run, once), ("sparse", large): partial(_run, work),
    }  # fmt: skip
    best = _best(calls, heads)
    score = best["dense", large] / large**2 / heads
    dense_call, sparse_call = (
        min(max(best[name, small] - score * heads * small**2, LEAST_CALL), MOST_CALL) for name in ("dense", "sparse")
    )
    each = (best["sparse", large] - sparse_call * work.calls()) / work.work(False) / heads
    return Costs(dense_call, score, sparse_call, min(max(each, score), MOST_RATIO * score))


def _run(work: Layout, q: Tensor) -> Tensor:
    return kernel.attend(q[0], q[0], q[0], work, work, scale=0.125)


def _best(
    calls: dict[tuple[str, int], Callable[[Tensor], Tensor]], heads: int, rounds: int = 10
) -> dict[tuple[str, int], float]:
    """The shortest time of each call, by turns."""
    make = torch.Generator().manual_seed(0)
    inputs = {key: torch.randn(1, heads, key[1], WIDTH, generator=make) for key in calls}
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for key, call in calls.items():
                start = time.perf_counter()
                call(inputs[key])
                best[key] = min(best[key], time.perf_counter() - start)
    return best
