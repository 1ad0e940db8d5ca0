"""The machine and library versions that a measurement depends on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Versions, processor and number of threads, as JSON."""
    import torch

    return {
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


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
