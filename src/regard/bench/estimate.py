"""What a call of a mixer needs by formula: products, exponentials, bytes, and the share of pairs that are seen."""

from __future__ import annotations

from collections.abc import Sequence

from regard.bench.cell import BenchCell, CallEstimate
from regard.measure.cost import Cost, cost
from regard.measure.pairs import count_pairs
from regard.mixer import Mixer, MultiHead
from regard.pattern import Pattern
from regard.show.build import pattern_of

LAST = 64  # tokens over which the cost of one more is told
BYTES = 4  # of a number


def estimate_call(mixer: Mixer, cell: BenchCell) -> CallEstimate:
    """At the level and in the way of the cell."""
    n, pattern = cell.length, pattern_of(mixer)
    if cell.way == "decode":
        before = max(0, n + 1 - LAST)
        flops = _marginal(
            [
                _part(cost(mixer, m, batch=cell.batch), cell).forward_flops
                for m in (before or 1, n + 1)
            ],
            before,
            n,
        )
        exps = (
            0.0
            if pattern is None
            else _marginal([_seen(pattern, m, cell) for m in (before, n + 1)], before, n)
        )
        found = _part(cost(mixer, n + 1, batch=cell.batch), cell)
        return CallEstimate(flops, exps, found.state_bytes + BYTES * found.parameters, None)
    found = _part(cost(mixer, n, batch=cell.batch), cell)
    seen = 0 if pattern is None else _seen(pattern, n, cell)
    density = None if pattern is None else seen / (cell.batch * _heads(mixer, cell) * n * n)
    if cell.way == "forward":
        held = max(
            found.activation_bytes, 2 * BYTES * cell.batch * n * cell.dim
        )  # at least what goes in and what comes out
        return CallEstimate(found.forward_flops, seen, held + BYTES * found.parameters, density)
    leaves = 3 if cell.level == "kernel" else 1  # q, k and v, or x
    gradients = BYTES * (leaves + 1) * cell.batch * n * cell.dim  # and that of the result
    held = found.activation_bytes + 2 * BYTES * found.parameters + gradients
    return CallEstimate(
        found.forward_flops + found.backward_flops, 2 * seen, held, density
    )  # fused attention makes its scores twice


def _marginal(counts: Sequence[float], before: int, n: int) -> float:
    """Of the last token: the mean of the last few, for chunks are counted whole."""
    return (counts[1] - (counts[0] if before else 0)) / (n + 1 - before)


def _part(found: Cost, cell: BenchCell) -> Cost:
    """Of the whole mixer, or of the attention in it."""
    if cell.level == "layer":
        return found
    return next((part for part in found.parts if part.name == "attend"), found)


def _seen(pattern: Pattern, n: int, cell: BenchCell) -> float:
    return float(cell.batch * count_pairs(pattern, n, n, cell.heads)) if n else 0.0


def _heads(mixer: Mixer, cell: BenchCell) -> int:
    return mixer.heads if isinstance(mixer, MultiHead) else cell.heads
