"""How long the process took to start: importing torch counts to a time budget."""

from __future__ import annotations

import os
import time
from pathlib import Path

_seconds = 0.0


def record_startup() -> None:
    """Store the age of the process; `main` calls it once the command is about to run."""
    global _seconds
    _seconds = process_age()


def startup_seconds() -> float:
    """Return the seconds from process start to the command; 0 if it was called from Python."""
    return _seconds


def process_age() -> float:
    """Return the seconds since this process started, or 0 where there is no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
