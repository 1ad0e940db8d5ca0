"""Peak throughput of this machine, and whether it is idle enough for measurements."""

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
from regard.device import DTYPES, synchronize
from regard.environment import available_memory, cores, load_average

GEMM_SIZES = (256, 512, 1024)
DEVICE_SIZES = (1024, 4096, 8192)  # of matrix products on an accelerator
EXP_SIZES = (1 << 12, 1 << 16, 1 << 20)  # from the first-level cache to enough for several threads
MAX_OTHERS = 0.10  # fraction of all cores that other processes may use
MAX_SPREAD = 0.30  # relative spread of the times of one matrix product
MAX_LOAD = 0.5  # load average per core that is worth a flag; the load may be over already


@dataclass(frozen=True)
class PeakThroughput:
    """FLOP/s of a matrix product and exponentials per second, at a number of threads."""

    threads: int
    gemm: float
    exp: float

    def seconds(self, flops: float, exps: float) -> float:
        """Return the least time of a call: 4 n² d / G + n² / E for dense attention."""
        return flops / self.gemm + exps / self.exp


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_peaks(
    *,
    seconds: float = 0.15,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "cpu",
    dtype: str = "float32",
) -> PeakThroughput:
    """Measure the peaks of a device, on the CPU at torch's current number of threads."""
    on, precision = torch.device(device), DTYPES[dtype]

    def best(call: Callable[[], object], seconds: float) -> float:
        def call_and_wait() -> None:
            call()
            synchronize(on)

        return min(time_interleaved({"": call_and_wait}, seconds, clock=clock)[""])

    gemm = exp = 0.0
    for size in GEMM_SIZES if device == "cpu" else DEVICE_SIZES:
        x = torch.randn(size, size, device=on, dtype=precision)
        gemm = max(gemm, 2 * size**3 / best(partial(torch.mm, x, x), seconds))
    for size in EXP_SIZES:
        x = -torch.rand(size, device=on, dtype=precision)
        out = torch.empty_like(x)
        exp = max(exp, size / best(partial(torch.exp, x, out=out), seconds / 3))
    return PeakThroughput(torch.get_num_threads(), gemm, exp)


@dataclass(frozen=True)
class MachineLoad:
    """How busy the machine is.

    Attributes:
        cores: Cores of this process.
        average: Load average of the last minute; None where it is unknown.
        others: Fraction of all cores used by other processes; None where it is unknown.
        spread: Relative spread of the times of one matrix product.
    """

    cores: int
    average: float | None
    others: float | None
    spread: float

    def problems(self) -> list[str]:
        """Return the reasons not to measure."""
        problems = []
        if self.others is not None and self.others > MAX_OTHERS:
            problems.append(
                f"other processes use {self.others:.0%} of the cores (limit {MAX_OTHERS:.0%})"
            )
        if self.spread > MAX_SPREAD:
            problems.append(
                f"times of the same product vary by {self.spread:.0%} (limit {MAX_SPREAD:.0%})"
            )
        return problems

    def flags(self) -> list[str]:
        """Return the problems, and a high load average, which may be over already."""
        if self.average is None or self.average <= MAX_LOAD * self.cores:
            return self.problems()
        return [*self.problems(), f"the load average of the last minute is {self.average:.1f}"]


def measure_load(*, seconds: float = 0.5) -> MachineLoad:
    """Observe the machine for some time."""
    x = torch.randn(256, 256)
    before, start = busy_seconds(), time.perf_counter()
    times = time_interleaved({"": partial(torch.mm, x, x)}, seconds, max_rounds=10**6)[""]
    after, wall = busy_seconds(), time.perf_counter() - start
    others = None
    if before is not None and after is not None:
        everyone, ours = after[0] - before[0], after[1] - before[1]
        others = max(0.0, (everyone - ours) / (wall * (os.cpu_count() or 1)))
    return MachineLoad(cores(), load_average(), others, relative_spread(times))


def busy_seconds() -> tuple[float, float] | None:
    """Return the CPU seconds of all processes and of this one; None without /proc."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, *rest = map(int, fields)
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(rest[:3])) / ticks, time.process_time()


def device_memory(device: str = "cpu") -> int:
    """Return the bytes of memory that are available on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if torch.device(device).type == "mps":
        return torch.mps.recommended_max_memory()
    return available_memory()
