"""Selects the backend of a call, by what each supports and by its estimated cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from regard import native
from regard.backends import calibration, cpp, flex, reference, sdpa, sparse
from regard.backends.calibration import Workload
from regard.backends.call import AttentionCall, make_call
from regard.errors import check_int
from regard.layout.tiles import TILE
from regard.pattern import Full, Pattern

BACKENDS = {"reference": reference, "sdpa": sdpa, "sparse": sparse, "cpp": cpp, "flex": flex}

# Queries and keys from which a backend is considered, for inference and for training.
MIN_TOKENS = {"sparse": (192, 192), "cpp": (48, 64)}
# A backend is used if its estimated time is below this fraction of that of dense attention.
MAX_COST_RATIO = {"sparse": 0.8, "cpp": 1.0}
# of a dense pattern on the C++ kernel: a longer list takes too much memory
MAX_DENSE_TILES = 1 << 20
SAMPLE_TOKENS = 2048  # the density of a pattern is computed for at most this many tokens


@dataclass(frozen=True)
class BackendChoice:
    """The selected backend, the reason, and estimated times in seconds, None if they were not
    needed.

    `sparse_seconds` is the time of computing visible tiles only, on the C++ kernel if it is
    available.
    """

    backend: str
    reason: str
    dense_seconds: float | None = None
    sparse_seconds: float | None = None


DENSE = BackendChoice("sdpa", "the pattern is dense: nothing to leave out")
FEW_TOKENS = BackendChoice("sdpa", "few queries or keys: one fused dense call is the fastest")


def choose_backend(call: AttentionCall) -> BackendChoice:
    """The backend for a call with backend="auto"."""
    causal = sdpa.is_plain_causal(call)
    is_dense = causal or call.pattern == Full()
    if call.q.device.type != "cpu":
        refusal = flex.refuses(call)
        if is_dense or refusal is not None:
            return BackendChoice("sdpa", refusal or DENSE.reason)
        return BackendChoice("flex", f"block mask on {call.q.device.type}")
    if native.inside_transform() or type(call.q) not in native.TENSOR_TYPES:
        return BackendChoice("sdpa", "only dense calls support tensor subclasses and transforms")

    n, m, grad = call.q.shape[2], call.k.shape[2], call.needs_grad()
    too_many_tiles = is_dense and n * m > MAX_DENSE_TILES * TILE * TILE
    backend = "sparse" if too_many_tiles or cpp.refuses(call) else "cpp"
    if min(n, m) < MIN_TOKENS[backend][grad]:
        return FEW_TOKENS
    if backend == "sparse":
        if is_dense:
            return DENSE
        refusal = sparse.refuses(call)
        if refusal is not None:
            return BackendChoice("sdpa", f"not supported by sparse: {refusal}")
    work = Workload(
        call.pattern.resolve_global_mask(False, False),
        n,
        m,
        call.q_start,
        call.k_start(),
        call.q.shape[0] * call.q.shape[1],
        call.q.shape[3],
        grad,
        causal,
    )
    return _choose_by_cost(backend, work, torch.get_num_threads())


@lru_cache(4096)
def _choose_by_cost(backend: str, work: Workload, threads: int) -> BackendChoice:
    """Dense attention or the given backend, whichever is estimated to be faster."""
    costs = calibration.machine_costs()
    dense = calibration.dense_seconds(costs, work)
    if backend == "cpp":
        seconds = calibration.cpp_seconds(costs, work)
    else:
        patterns = set(work.head_patterns())
        sample = min(work.n, SAMPLE_TOKENS), min(work.m, SAMPLE_TOKENS)
        density = sum(pattern.density(*sample) for pattern in patterns) / len(patterns)
        if density >= MAX_COST_RATIO[backend] and work.n <= SAMPLE_TOKENS:
            return BackendChoice("sdpa", f"{density:.0%} of all pairs are visible", dense)
        seconds = calibration.sparse_seconds(costs, work)
    reason = f"estimated {seconds * 1e3:.3g} ms {backend}, {dense * 1e3:.3g} ms dense"
    faster = backend if seconds < MAX_COST_RATIO[backend] * dense else "sdpa"
    return BackendChoice(faster, reason, dense, seconds)


def explain(
    pattern: Pattern, n: int, *, heads: int = 8, width: int = 64, grad: bool = False
) -> BackendChoice:
    """The backend that `auto` selects for self-attention on the CPU, without running it.

    Args:
        pattern: The pattern.
        n: Number of tokens.
        heads: Number of heads, times the batch size.
        width: Width of a head.
        grad: Whether a backward pass follows.
    """
    check_int(1, n=n, heads=heads, width=width)
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        x = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=grad)
        x = x.expand(1, heads, n, width)  # has the shape, but takes no memory
        return choose_backend(make_call(x, x, x, pattern=pattern))
