"""The machine and library versions that a measurement depends on.

What only some systems can tell (peak and available memory, load) is asked here and nowhere else.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def environment() -> dict[str, Any]:
    """Versions, processor and number of threads, as JSON."""
    import torch

    import regard

    return {
        "regard": regard.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": cpu_model() or platform.machine(),
        "cores": cores(),
        "system": platform.platform(),
    }


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str | None:
    """Name of the processor, or None where Linux's /proc/cpuinfo does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
    )


def load_average() -> float | None:
    """Load average of the last minute, or None where the system has none (Windows)."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def peak_bytes() -> int | None:
    """Peak resident memory of this process so far, or None where neither the system nor psutil
    tells it.
    """
    if resource is not None:
        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    try:
        import psutil
    except ImportError:
        return None
    return getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows


def total_memory() -> int:
    """Bytes of memory of this machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        import psutil
    except ImportError:
        raise ImportError(
            "this system tells the size of its memory only through psutil: pip install psutil"
        ) from None
    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Bytes of memory that are available; where that is unknown (no /proc, no psutil), all
    memory.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        pass
    try:
        import psutil
    except ImportError:
        return total_memory()
    return int(psutil.virtual_memory().available)
