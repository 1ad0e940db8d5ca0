"""Being asked to stop: the step at hand is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Asked:
    """Whether somebody asked."""

    def __init__(self) -> None:
        self.to_stop = False


@contextmanager
def listening() -> Iterator[Asked]:
    """Inside, the first Ctrl-C or SIGTERM is only noted; the second interrupts as usual.  In a thread nothing changes, since
    signals reach the main one."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked.to_stop:
            raise KeyboardInterrupt
        asked.to_stop = True

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
