"""Stop at the next safe point on Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a stop was requested."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def catch_interrupts() -> Iterator[StopRequest]:
    """Record the first Ctrl-C or SIGTERM instead of raising; the second raises KeyboardInterrupt.

    Does nothing outside the main thread, which never receives signals.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
