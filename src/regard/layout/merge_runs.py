"""Merging neighbouring calls into taller ones, where that is cheaper although it computes more
scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from regard.layout.calls import CALL_COST, TileRun

MAX_QUERIES = 256  # in one call
# An irregular pattern, such as one of packed sequences, has more runs than this. They are left as
# they are: trying all ways to merge them would take longer than the calls.
MAX_RUNS = 16


def merge_runs(runs: tuple[TileRun, ...], backward: bool) -> tuple[TileRun, ...]:
    """The same pairs, each still in exactly one call, in calls as tall as pays off."""
    for run in runs if len(runs) <= MAX_RUNS else ():
        if run.count > 1 and run.step == run.s <= MAX_QUERIES // 2:
            rest = tuple(other for other in runs if other is not run)
            runs = min(_candidates(run, rest, backward), key=lambda found: _cost(found, backward))
    return tuple(sorted(runs, key=lambda run: not run.is_first))  # runs that merge come last


def _cost(runs: tuple[TileRun, ...], backward: bool) -> float:
    return sum(CALL_COST + run.work(backward) for run in runs)


def _candidates(
    run: TileRun, rest: tuple[TileRun, ...], backward: bool
) -> Iterator[tuple[TileRun, ...]]:
    """Merge `many` calls of the run at a time, beginning with the first or a later call; the
    remainder may join others.
    """
    for many in range(1, min(MAX_QUERIES // run.s, run.count) + 1):
        for front in range(many):
            whole, back = divmod(run.count - front, many)
            if whole:
                tall = _merge_calls(run, front, many, whole)
                remainder = ((0, front), (run.count - back, back))
                ends = [_merge_calls(run, first, calls, 1) for first, calls in remainder if calls]
                yield tall, *_join_single_calls([*rest, *ends], backward)


def _merge_calls(run: TileRun, first: int, many: int, count: int) -> TileRun:
    """`count` calls, each of `many` calls of the run, beginning with call `first`."""
    calls = [
        replace(run, q0=run.q0 + i * run.step, k0=run.k0 + i * run.step)
        for i in range(first, first + many)
    ]
    return replace(_bounding_call(calls), count=count, step=run.step * many)


def _join_single_calls(runs: list[TileRun], backward: bool) -> list[TileRun]:
    """Join single calls with adjacent queries where that costs less."""
    single = sorted((run for run in runs if run.count == 1), key=lambda run: run.q0)
    for above, below in pairwise(single):
        adjacent = above.q0 + above.s == below.q0 and above.s + below.s <= MAX_QUERIES
        if adjacent and above.is_first == below.is_first:
            both = _bounding_call([above, below])
            if _cost((both,), backward) < _cost((above, below), backward):
                others = [run for run in runs if run is not above and run is not below]
                return _join_single_calls([both, *others], backward)
    return runs


def _bounding_call(calls: list[TileRun]) -> TileRun:
    """One call for several with adjacent queries; pairs that are in none of them are masked."""
    if len(calls) == 1:
        return calls[0]
    q0, k0 = calls[0].q0, min(call.k0 for call in calls)
    s, t = sum(call.s for call in calls), max(call.k0 + call.t for call in calls) - k0
    mask = torch.full((s, t), -torch.inf)
    for call in calls:
        inside = mask[call.q0 - q0 :, call.k0 - k0 :][: call.s, : call.t]
        inside[:] = 0 if call.mask is None else call.mask
    return replace(
        calls[0],
        q0=q0,
        s=s,
        k0=k0,
        t=t,
        mask=mask if (mask < 0).any() else None,
        has_empty_rows=any(call.has_empty_rows for call in calls),
    )
