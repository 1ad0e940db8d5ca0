"""One call in a process of its own, under a limit: the memory that it takes at most, and about how long it takes.

What goes wrong there, be it too little memory or a crash, is a reason in a row and not the end of the measurement.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import signal
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import NamedTuple

import torch

from regard.bench.cell import BenchCell, Contender, prepare_call

SMALL = 256  # tokens of the call that loads what is loaded only once
STARTS = 30.0  # seconds that a process may take before it begins
COMPILES = 180.0  # and one that compiles its code first
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
EXCUSES = (
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
    """Bytes that were taken at most, None where the system does not tell, and seconds of the first call."""

    bytes: int | None
    seconds: float


class ProbeRefused(Exception):
    """It does not run, and why."""


def probe(
    contender: Contender, cell: BenchCell, *, threads: int, limit: int, seconds: float
) -> ProbeResult:
    """Run it once, with at most `limit` bytes and for so many seconds; `ProbeRefused` where that is not enough, or it fails."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = _context().Process(
        target=_child, args=(theirs, contender, cell, threads, limit), daemon=True
    )
    child.start()
    theirs.close()
    try:
        if not mine.poll(seconds + (COMPILES if contender.compiles else STARTS)):
            raise ProbeRefused(f"a call takes more than {seconds:.0f} s")
        found = mine.recv()
    except EOFError:
        child.join()
        raise ProbeRefused(f"its process ended with {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
        mine.close()
    if isinstance(found, str):
        raise ProbeRefused(found)
    return ProbeResult(*found)


def warm(modules: Sequence[str] = ()) -> None:
    """Import these modules, here and in the server that forks processes: it takes some seconds, once."""
    for name in modules:
        with contextlib.suppress(ImportError):  # then a row will say so
            import_module(name)
    if FORKS:
        multiprocessing.set_forkserver_preload(["__main__", __name__, *modules])
    child = _context().Process(target=_nothing, daemon=True)
    child.start()
    child.join()


def _nothing() -> None:
    """Not a lambda: another process looks it up by its name."""


def _context() -> ForkServerContext | SpawnContext:
    """Processes that begin with everything imported, and without the threads of this one."""
    return (
        multiprocessing.get_context("forkserver") if FORKS else multiprocessing.get_context("spawn")
    )


def _child(to: Connection, contender: Contender, cell: BenchCell, threads: int, limit: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    torch.set_num_threads(threads)
    try:
        with contextlib.suppress(
            *EXCUSES
        ):  # it may not know so few tokens; then what it loads counts too
            prepare_call(contender, _smaller(cell))()
        _limit(limit)
        _settle()
        before = process_memory("VmRSS")
        call = prepare_call(contender, cell)
        if contender.compiles:
            call()
        begin = time.perf_counter()
        call()
        took, peak = time.perf_counter() - begin, process_memory("VmHWM")
        told = (
            None if peak is None or before is None or contender.compiles else max(0, peak - before)
        )
        to.send((told, took))  # the compiler's own memory would drown that of what it made
    except EXCUSES as error:
        to.send(_reason(error, limit))
    finally:
        to.close()


def _settle() -> None:
    """Give freed memory back, and forget the peak so far: else the call would take from what a smaller one has left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # other systems have neither
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _smaller(cell: BenchCell) -> BenchCell:
    return BenchCell(
        cell.level,
        cell.way,
        min(SMALL, cell.length),
        cell.batch,
        cell.heads,
        cell.width,
        cell.causal,
    )


def _reason(error: BaseException, limit: int) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if (
        isinstance(error, MemoryError)
        or "can't allocate memory" in text
        or "not enough memory" in text
    ):
        return f"it needs more than the {limit / 1e9:,.1f} GB that may be taken"
    return (
        text
        if isinstance(error, ValueError | TypeError | NotImplementedError)
        else f"{type(error).__name__}: {text}"
    )


def _limit(more: int) -> None:
    """This process may take so many bytes more, where the system can hold it to that."""
    size = process_memory("VmSize")
    if size is None:
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def process_memory(what: str) -> int | None:
    """Bytes of this process: VmRSS now, VmHWM at most so far, VmSize in addresses; None where the system does not tell."""
    try:
        lines: Sequence[str] = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), None)
