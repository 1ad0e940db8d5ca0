"""Being asked to stop: the step at hand is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def catch_interrupts() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C or SIGTERM is only noted; the second interrupts as usual.  In a thread nothing changes, since
    signals reach the main one."""
    asked = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked.requested:
            raise KeyboardInterrupt
        asked.requested = True

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
