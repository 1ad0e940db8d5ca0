"""When a command was typed: to load torch takes seconds, which are part of a budget too."""

from __future__ import annotations

import os
import time
from pathlib import Path

_before = 0.0


def record_startup() -> None:
    """Called once, when the command line begins; from Python, commands begin when they are called."""
    global _before
    _before = process_age()


def startup_seconds() -> float:
    """The seconds that this process took to come to the command."""
    return _before


def process_age() -> float:
    """The seconds since this process began, where the system tells it as Linux does; else 0."""
    try:
        began = int(
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        ) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
