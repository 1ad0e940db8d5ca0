"""The plan of a benchmark and its result, as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from regard.bench.cell import MODES, SCOPES, BenchCell, Contender
from regard.bench.machine import MachineLoad, PeakThroughput
from regard.bench.stats import MIN_ROUNDS, Ratio, crossover
from regard.device import DTYPES, describe_device, resolve_device, resolve_dtype
from regard.environment import cores, environment
from regard.errors import check_choice, check_int, check_positive

LENGTHS = tuple(1 << power for power in range(7, 17))  # 128 ... 65,536
MAX_LENGTH = 1 << 24
SCHEMA = 2  # of the JSON; raised when a key changes its meaning
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
DONE, SPENT, INTERRUPTED = "done", "budget exhausted", "interrupted"


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        groups: Contenders that are timed together, and with dense SDPA. In a group with peers the
            first is ours.
        lengths, scopes, modes, threads: What to measure each group with. Without threads: one and
            all cores, or all cores if the device is an accelerator.
        batch, heads, head_dim, causal: Sizes of the calls.
        budget: Seconds in total.
        memory_limit: Bytes of one call; None: a fraction of the available memory.
        rounds: Least number of pairs. 0: call each once in its own process, for its memory.
        clock: "wall", or "cpu" for CPU seconds of a single thread on a machine that is never idle.
        device: "cpu", "cuda", "cuda:1" or "mps"; "auto" is the first available accelerator.
        dtype: dtype of inputs and weights: "float32", "bfloat16", "float16" or "float64".
    """

    groups: Sequence[Sequence[Contender]]
    lengths: Sequence[int] = LENGTHS
    scopes: Sequence[str] = tuple(SCOPES)
    modes: Sequence[str] = ("forward", "training")
    threads: Sequence[int] = ()
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    budget: float = 120.0
    memory_limit: int | None = None
    rounds: int = MIN_ROUNDS
    clock: str = "wall"
    device: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        device = resolve_device(self.device)
        resolve_dtype(self.dtype, device, DTYPES)
        object.__setattr__(self, "device", str(device))
        if not self.threads:  # threads of the CPU do not matter on an accelerator
            own = sorted({1, cores()}) if device.type == "cpu" else [cores()]
            object.__setattr__(self, "threads", tuple(own))
        if self.clock == "cpu" and device.type != "cpu":
            raise ValueError(f"clock 'cpu' does not measure device {self.device!r}: use 'wall'")
        check_int(1, batch=self.batch, heads=self.heads, head_dim=self.head_dim)
        check_positive("budget", self.budget)
        check_int(0, rounds=self.rounds)
        if self.memory_limit is not None:
            check_positive("memory_limit", self.memory_limit)
        for length in self.lengths:
            check_int(1, length=length)
            if length > MAX_LENGTH:
                raise ValueError(f"lengths must be at most {MAX_LENGTH:,}, not {length:,}")
        for scope in self.scopes:
            check_choice("scope", scope, SCOPES)
        for mode in self.modes:
            check_choice("mode", mode, MODES)
        for count in self.threads:
            check_int(1, threads=count)
            if count > cores():
                raise ValueError(f"threads must be at most {cores()}, the number of cores: {count}")
        check_choice("clock", self.clock, CLOCKS)
        if self.clock == "cpu" and tuple(self.threads) != (1,):
            raise ValueError("clock 'cpu' measures a single thread: threads must be 1")
        for name in ("groups", "lengths", "scopes", "modes"):
            if not getattr(self, name):
                raise ValueError(f"there is nothing to measure: {name} is empty")

    def cells(self) -> list[BenchCell]:
        """Return all cells, shortest first: when time runs out, the short ones are complete."""
        sizes = (self.batch, self.heads, self.head_dim, self.causal, self.device, self.dtype)
        return [
            BenchCell(scope, mode, length, *sizes)
            for length in sorted(set(self.lengths))
            for mode in self.modes
            for scope in self.scopes
        ]


@dataclass(frozen=True)
class BenchRow:
    """One contender in one cell.

    Attributes:
        reference: For a peer: label of the recipe it is compared with.
        seconds: Median time; the time of the single call if there were no rounds.
        best_seconds: Least time.
        speedup: Ratio t(dense SDPA) / t(this) in the same rounds.
        lead: For a peer: ratio t(this) / t(reference), how many times faster ours is.
        density: Fraction of query-key pairs that are visible.
        bound_seconds: Least time in theory, from the peaks of this machine.
        peak_bytes: Peak memory of a call in its own process; `estimated_bytes` in theory.
        reason: Why it was not measured.
    """

    name: str
    reference: str
    cell: BenchCell
    threads: int
    seconds: float | None = None
    best_seconds: float | None = None
    speedup: Ratio | None = None
    lead: Ratio | None = None
    density: float | None = None
    bound_seconds: float | None = None
    peak_bytes: int | None = None
    estimated_bytes: float | None = None
    reason: str | None = None

    @property
    def utilization(self) -> float | None:
        """Fraction of the theoretical speed."""
        if self.bound_seconds is None or not self.seconds:
            return None
        return self.bound_seconds / self.seconds

    @property
    def efficiency(self) -> float | None:
        """Density × speedup: 1 means that a visible pair costs as much as in the dense kernel."""
        if self.density is None or self.speedup is None:
            return None
        return self.density * self.speedup.median

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(replace(self, speedup=None, lead=None))
        values |= {"utilization": self.utilization, "efficiency": self.efficiency}
        for name, ratio in (("speedup", self.speedup), ("lead", self.lead)):
            values[name] = None if ratio is None else ratio._asdict()
        return values.pop("cell") | values


@dataclass
class BenchResult:
    """What has been measured so far; `ended` is DONE, SPENT or INTERRUPTED."""

    plan: BenchPlan
    peaks: list[PeakThroughput]
    loads: list[MachineLoad]
    rows: list[BenchRow] = field(default_factory=list)
    ended: str = INTERRUPTED

    def crossovers(self) -> list[dict[str, Any]]:
        """Return the length from which on each contender is never slower than dense SDPA."""

        def series(row: BenchRow) -> tuple[str, str, str, int]:
            return row.name, row.cell.scope, row.cell.mode, row.threads

        measured = sorted((row for row in self.rows if row.speedup is not None), key=series)
        found = []
        for (name, scope, mode, threads), rows in groupby(measured, series):
            points = [(row.cell.length, row.speedup.median) for row in rows if row.speedup]
            found.append(
                {
                    "name": name,
                    "scope": scope,
                    "mode": mode,
                    "threads": threads,
                    "faster_from": crossover(points),
                    "max_length": max(n for n, _ in points),
                    "several": len(points) > 1,
                }
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        labels = [[contender.label for contender in group] for group in self.plan.groups]
        return {
            "schema": SCHEMA,
            "environment": environment()
            | {"device": describe_device(torch.device(self.plan.device))},
            "ended": self.ended,
            "plan": vars(self.plan) | {"groups": labels},
            "peaks": [asdict(peak) for peak in self.peaks],
            "load": [asdict(load) | {"flags": load.flags()} for load in self.loads],
            "rows": [row.as_json() for row in self.rows],
            "crossovers": self.crossovers(),
        }
