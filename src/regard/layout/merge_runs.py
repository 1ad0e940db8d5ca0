"""Neighbouring calls in one, where a taller call is the cheaper one although it computes more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from regard.layout.calls import CALL, TileRun

TALL = 256  # queries: no call is made taller than that


def taller(runs: tuple[TileRun, ...], backward: bool) -> tuple[TileRun, ...]:
    """The same pairs, each still in exactly one call, in calls as tall as pays."""
    for run in runs:
        if run.count > 1 and run.step == run.s <= TALL // 2:
            rest = tuple(other for other in runs if other is not run)
            runs = min(_choices(run, rest, backward), key=lambda choice: _cost(choice, backward))
    return tuple(sorted(runs, key=lambda run: not run.fresh))  # what merges comes after what begins


def _cost(runs: tuple[TileRun, ...], backward: bool) -> float:
    return sum(CALL + run.work(backward) for run in runs)


def _choices(
    run: TileRun, rest: tuple[TileRun, ...], backward: bool
) -> Iterator[tuple[TileRun, ...]]:
    """So many calls of the run in one, from the first or a later one on; what is left over may join its neighbours."""
    for many in range(1, min(TALL // run.s, run.count) + 1):
        for front in range(many):
            whole, back = divmod(run.count - front, many)
            if whole:
                tall = _tall(run, front, many, whole)
                ends = [
                    _tall(run, at, calls, 1)
                    for at, calls in ((0, front), (run.count - back, back))
                    if calls
                ]
                yield tall, *_joined([*rest, *ends], backward)


def _tall(run: TileRun, first: int, many: int, count: int) -> TileRun:
    """`count` calls of `many` each, beginning with that of this number: the masks stand on a diagonal."""
    run = replace(run, q0=run.q0 + first * run.step, k0=run.k0 + first * run.step)
    calls = [replace(run, q0=run.q0 + i * run.step, k0=run.k0 + i * run.step) for i in range(many)]
    return replace(_one(calls), count=count, step=run.step * many)


def _joined(runs: list[TileRun], backward: bool) -> list[TileRun]:
    """Single calls, one below the other, share one where that costs less."""
    single = sorted((run for run in runs if run.count == 1), key=lambda run: run.q0)
    for above, below in pairwise(single):
        if (
            above.q0 + above.s == below.q0
            and above.s + below.s <= TALL
            and above.fresh == below.fresh
        ):
            both = _one([above, below])
            if _cost((both,), backward) < _cost((above, below), backward):
                return _joined(
                    [both, *(run for run in runs if run is not above and run is not below)],
                    backward,
                )
    return runs


def _one(calls: list[TileRun]) -> TileRun:
    """One call for all, which stand one below the other; what lies beside them is left out."""
    if len(calls) == 1:
        return calls[0]
    q0, k0 = calls[0].q0, min(call.k0 for call in calls)
    s, t = sum(call.s for call in calls), max(call.k0 + call.t for call in calls) - k0
    mask = torch.full((s, t), -torch.inf)
    for call in calls:
        mask[call.q0 - q0 :, call.k0 - k0 :][: call.s, : call.t] = (
            0 if call.mask is None else call.mask
        )
    return replace(
        calls[0],
        q0=q0,
        s=s,
        k0=k0,
        t=t,
        mask=mask if (mask < 0).any() else None,
        blind=any(c.blind for c in calls),
    )
