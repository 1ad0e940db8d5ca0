"""One call in its own process with a memory limit: its peak memory and approximate time.

A crash or too little memory there is the reason in a row, not the end of the benchmark.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from regard.bench.cell import BenchCell, Contender, prepare_call
from regard.device import peak_memory, reset_peak_memory

if TYPE_CHECKING:  # Windows has no ForkServerContext
    from multiprocessing.context import ForkServerContext, SpawnContext

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

WARMUP_LENGTH = 256  # tokens of a first call that loads libraries
START_SECONDS = 30.0  # time for a process to start
COMPILE_SECONDS = 180.0  # and for one that compiles its code first
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
CALL_ERRORS = (
    ValueError,
    TypeError,
    ImportError,
    RuntimeError,
    AssertionError,
    MemoryError,
    LookupError,
    OSError,
)


class ProbeResult(NamedTuple):
    """Peak memory in bytes, None where it is unknown, and seconds of the call."""

    bytes: int | None
    seconds: float


class ProbeRefused(Exception):
    """The call cannot be measured, and why."""


class ProbeTimeout(ProbeRefused):
    """The call takes too long."""


def probe(
    contender: Contender, cell: BenchCell, *, threads: int, limit: int, seconds: float
) -> ProbeResult:
    """Run a call once with at most `limit` bytes and `seconds`; `ProbeRefused` if it fails."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = _context().Process(
        target=_run_call, args=(sender, contender, cell, threads, limit), daemon=True
    )
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds + (COMPILE_SECONDS if contender.compiles else START_SECONDS)):
            raise ProbeTimeout(f"a call takes more than {seconds:.0f} s")
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise ProbeRefused(f"its process ended with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(answer, str):
        raise ProbeRefused(answer)
    return ProbeResult(*answer)


def preload(modules: Sequence[str] = ()) -> None:
    """Import modules here and in the fork server, so that no probe waits for them."""
    for name in modules:
        with contextlib.suppress(ImportError):  # the row of the peer will say so
            import_module(name)
    if FORKS:
        multiprocessing.set_forkserver_preload(["__main__", __name__, *modules])
    child = _context().Process(target=_do_nothing, daemon=True)
    child.start()
    child.join()


def _do_nothing() -> None:
    """A named function: the other process looks it up."""


def _context() -> ForkServerContext | SpawnContext:
    """Return a context whose processes have none of the threads of this one."""
    if FORKS:
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


def _run_call(
    to: Connection, contender: Contender, cell: BenchCell, threads: int, limit: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    torch.set_num_threads(threads)
    try:
        with contextlib.suppress(*CALL_ERRORS):  # it may not support so few tokens
            small = replace(cell, length=min(WARMUP_LENGTH, cell.length))
            prepare_call(contender, small)()
        memory = MemoryProbe(torch.device(cell.device), limit)
        call = prepare_call(contender, cell)
        if contender.compiles:
            call()
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        # the memory of a compiler would hide that of the compiled code
        to.send((None if contender.compiles else memory.peak_bytes(), seconds))
    except CALL_ERRORS as error:
        to.send(_error_text(error, limit))
    finally:
        to.close()


class MemoryProbe:
    """Limits and measures the memory of this process, or its memory on an accelerator.

    Args:
        limit: Bytes to allow from now on; MPS has no limit.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        if device.type == "cpu":
            _limit_memory(limit)
            _reset_peak()
            self.before = process_memory("VmRSS")
            return
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        reset_peak_memory(device)
        self.before = peak_memory(device)

    def peak_bytes(self) -> int | None:
        """Return the peak since the start, None where it is unknown."""
        on_cpu = self.device.type == "cpu"
        peak = process_memory("VmHWM") if on_cpu else peak_memory(self.device)
        return None if peak is None or self.before is None else max(0, peak - self.before)


def _reset_peak() -> None:
    """Return freed memory to the system and reset the peak, so that the call cannot reuse it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Linux only
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _error_text(error: BaseException, limit: int) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in text
        or "not enough memory" in text
    ):
        return f"it needs more than the memory limit of {limit / 1e9:,.1f} GB"
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        return text
    return f"{type(error).__name__}: {text}"


def _limit_memory(extra: int) -> None:
    """Limit this process to `extra` bytes more than it has, where the system supports it."""
    size = process_memory("VmSize")
    if size is None or resource is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, hard))


def process_memory(field: str) -> int | None:
    """Return bytes of this process: VmRSS now, VmHWM peak, VmSize virtual; None without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
