"""Theoretical cost of a call: FLOPs, exponentials, bytes, and the fraction of visible pairs."""

from __future__ import annotations

from regard.bench.cell import BenchCell, CallEstimate
from regard.device import DTYPES
from regard.measure.cost import Cost, cost
from regard.measure.pairs import count_pairs
from regard.mixer import Mixer
from regard.show.build import pattern_of

LAST_TOKENS = 64  # tokens over which the cost of decoding one is averaged: chunks count as a whole


def estimate_call(mixer: Mixer, cell: BenchCell, heads: int) -> CallEstimate:
    """Estimate a call of a mixer with that many heads in the scope and mode of a cell."""
    n, pattern, float_bytes = cell.length, pattern_of(mixer), DTYPES[cell.dtype].itemsize

    def scope_cost(length: int) -> Cost:
        whole = cost(mixer, length, batch=cell.batch)
        if cell.scope == "layer":
            return whole
        return next((part for part in whole.parts if part.name == "attend"), whole)

    def visible_pairs(length: int) -> float:
        if pattern is None or not length:
            return 0.0
        return float(cell.batch * count_pairs(pattern, length, length, heads))

    if cell.mode == "decode":
        before = max(0, n + 1 - LAST_TOKENS)
        tokens, after = n + 1 - before, scope_cost(n + 1)
        flops = (after.forward_flops - (scope_cost(before).forward_flops if before else 0)) / tokens
        exps = (visible_pairs(n + 1) - visible_pairs(before)) / tokens
        return CallEstimate(flops, exps, after.state_bytes + float_bytes * after.parameters, None)

    total, pairs = scope_cost(n), visible_pairs(n)
    density = None if pattern is None else pairs / (cell.batch * heads * n * n)
    x_bytes = float_bytes * cell.batch * n * cell.dim
    parameter_bytes = float_bytes * total.parameters
    if cell.mode == "forward":
        memory = max(total.activation_bytes, 2 * x_bytes) + parameter_bytes
        return CallEstimate(total.forward_flops, pairs, memory, density)
    inputs = 3 if cell.scope == "kernel" else 1  # q, k and v, or x
    memory = total.activation_bytes + 2 * parameter_bytes + (inputs + 1) * x_bytes
    # fused attention computes its scores twice
    return CallEstimate(total.forward_flops + total.backward_flops, 2 * pairs, memory, density)
