"""What this machine can do at most, at a number of threads, and whether it is quiet enough to be measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from regard.bench.stats import relative_spread, time_interleaved
from regard.environment import cores

CUBES = (256, 512, 1024)
ROWS = (
    1 << 12,
    1 << 16,
    1 << 20,
)  # numbers: one core's first cache, and enough for several threads
MOST_OTHERS = 0.10  # of all cores, that other processes may take
MOST_SPREAD = 0.30  # of the times of one product, again and again
MOST_LOAD = 0.5  # of the cores, over the last minute: worth a word, since it may be over already


@dataclass(frozen=True)
class PeakThroughput:
    """At so many threads: FLOP/s of a matrix product, and exponentials a second."""

    threads: int
    gemm: float
    exp: float

    def seconds(self, flops: float, exps: float) -> float:
        """What a call with so many FLOPs and exponentials takes at least: 4 n² d / G + n² / E for dense attention."""
        return flops / self.gemm + exps / self.exp


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch uses so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_peaks(
    *, seconds: float = 0.15, clock: Callable[[], float] = time.perf_counter
) -> PeakThroughput:
    """Measured, at the number of threads that torch has now."""
    flops, exps = [], []
    for size in CUBES:
        x = torch.randn(size, size)
        flops.append(
            2
            * size**3
            / min(time_interleaved({"": partial(torch.mm, x, x)}, seconds, clock=clock)[""])
        )
    for size in ROWS:
        x, out = -torch.rand(size), torch.empty(size)
        exps.append(
            size
            / min(
                time_interleaved({"": partial(torch.exp, x, out=out)}, seconds / 3, clock=clock)[""]
            )
        )
    return PeakThroughput(torch.get_num_threads(), max(flops), max(exps))


# ---------------------------------------------------------------------------------------------- is it quiet?
@dataclass(frozen=True)
class MachineLoad:
    """How busy the machine is.

    average   processes that wanted to run in the last minute, None where that is not told
    others    the share of all cores that other processes took while a product was repeated, None where that is not told
    spread    of the times of that product
    """

    cores: int
    average: float | None
    others: float | None
    spread: float

    def against(self) -> list[str]:
        """Reasons not to measure."""
        found = []
        if self.others is not None and self.others > MOST_OTHERS:
            found.append(
                f"other processes take {self.others:.0%} of the cores, and at most {MOST_OTHERS:.0%} are borne"
            )
        if self.spread > MOST_SPREAD:
            found.append(
                f"the same product takes times that differ by {self.spread:.0%}, and {MOST_SPREAD:.0%} are borne"
            )
        return found

    def flags(self) -> list[str]:
        """What a reader should know: the reasons, and a load average that may be a thing of the past."""
        busy = self.average is not None and self.average > MOST_LOAD * self.cores
        return self.against() + (
            [f"the load average of the last minute is {self.average:.1f}"] if busy else []
        )


def measure_load(*, seconds: float = 0.5) -> MachineLoad:
    """Look at the machine for so long."""
    x = torch.randn(256, 256)
    before, start = _busy(), time.perf_counter()
    times = time_interleaved({"": partial(torch.mm, x, x)}, seconds, most=10**6)[""]
    after, wall = _busy(), time.perf_counter() - start
    others = None
    if before is not None and after is not None:
        others = max(
            0.0, (after[0] - before[0] - (after[1] - before[1])) / (wall * (os.cpu_count() or 1))
        )
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return MachineLoad(cores(), average, others, relative_spread(times))


def _busy() -> tuple[float, float] | None:
    """Seconds that all cores were at work, for anybody, and those of this process; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, *rest = map(int, fields)
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(rest[:3])) / ticks, time.process_time()


def available_memory() -> int:
    """Memory that can be had without pushing others out; all there is, where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
