"""A thread that sends stored alerts to the outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from regard.watch.follow.store import WatchStore
from regard.watch.outputs import Deliveries, Output

WAIT_SECONDS = 1.0  # between two looks at the queue, if nobody calls `wake`


class AlertSender:
    """Sends what `WatchStore.add_alerts` has queued. A slow receiver does not hold up scoring.

    Args:
        folder: The state folder; the thread opens the store by itself.
        outputs: Where alerts go.
        show_values: Whether sensitive values are sent too.
        report: Called with a line about each new trouble.
    """

    def __init__(
        self,
        folder: Path,
        outputs: Sequence[Output],
        *,
        show_values: bool,
        report: Callable[[str], object],
    ) -> None:
        self.folder, self.outputs, self.report = folder, outputs, report
        self.show_values = show_values
        self.changed, self.stopping = threading.Event(), threading.Event()
        self.idle = threading.Event()
        self.error = ""
        self.thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        store = WatchStore(self.folder)
        deliveries = Deliveries(
            store, self.outputs, show_values=self.show_values, report=self.report
        )
        try:
            while True:
                self.changed.clear()
                try:
                    deliveries.send_pending()
                    errors = [state.error for state in deliveries.states.values()]
                except (OSError, ValueError) as error:  # of the store: full or damaged
                    errors = [str(error)]
                self.error = next((error for error in errors if error), "")
                if not self.changed.is_set():
                    self.idle.set()
                    if self.stopping.is_set():
                        return
                self.changed.wait(WAIT_SECONDS)
        finally:
            store.close()

    def wake(self) -> None:
        """Look at the queue now."""
        self.idle.clear()
        self.changed.set()

    def close(self, timeout: float) -> None:
        """Send what can be sent at once; the rest is sent after the next start."""
        deadline = time.monotonic() + timeout
        self.wake()
        self.stopping.set()
        self.idle.wait(timeout)
        self.changed.set()
        self.thread.join(max(0.0, deadline - time.monotonic()))
        for output in self.outputs:
            output.close()
