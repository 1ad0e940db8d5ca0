"""Sending of stored alerts: the queue is in the store, so no alert is lost in a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from regard.watch.outputs.masking import mask_alert
from regard.watch.outputs.output import Output, OutputError

FIRST_DELAY, LAST_DELAY = 1.0, 300.0  # seconds from a failure to the next attempt; they double


class StoredAlert(Protocol):
    """An alert of the store."""

    content: dict[str, Any]


class DeliveryQueue(Protocol):
    """The part of `WatchStore` that deliveries need."""

    def next_deliveries(self, output: str, limit: int) -> Sequence[StoredAlert]:
        """The oldest alerts that an output has not received."""

    def finish_deliveries(self, output: str, ids: Sequence[str]) -> None:
        """Mark alerts as received."""


@dataclass
class OutputState:
    """How an output is doing.

    Attributes:
        sent: Alerts that it received.
        refused: Alerts that it refused for good.
        failures: Failed attempts in a row.
        next_attempt: When it is tried again, by `time.monotonic`.
        error: The last error; "" if the last attempt went well.
    """

    sent: int = 0
    refused: int = 0
    failures: int = 0
    next_attempt: float = 0.0
    error: str = ""


@dataclass
class Deliveries:
    """Sends stored alerts to their outputs: each in its own order, each at its own pace.

    An output that fails is tried again after 1, 2, 4, ... up to 300 seconds, and holds up no other.
    An alert that it refuses for good is reported and dropped.

    Args:
        queue: The store.
        outputs: The outputs, with different names.
        show_values: Whether sensitive values are sent too.
        report: Called with a line about each new trouble.
    """

    queue: DeliveryQueue
    outputs: Sequence[Output]
    show_values: bool = False
    report: Callable[[str], object] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    states: dict[str, OutputState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [output.name for output in self.outputs]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"Output {min(repeated)} is given twice.")
        self.states = {name: OutputState() for name in names}

    def send_pending(self) -> int:
        """Send what waits, to the outputs that are not waiting after a failure; returns how many
        alerts were received. Call it again and again."""
        sent = 0
        for output in self.outputs:
            state = self.states[output.name]
            while self.clock() >= state.next_attempt:
                waiting = self.queue.next_deliveries(output.name, output.batch)
                if not waiting:
                    break
                sent += self._send_batch(output, state, [each.content for each in waiting])
        return sent

    def _send_batch(
        self, output: Output, state: OutputState, alerts: Sequence[Mapping[str, Any]]
    ) -> int:
        """Send alerts together; returns how many were received."""
        ids = [alert["id"] for alert in alerts]
        try:
            output.send([alert if self.show_values else mask_alert(alert) for alert in alerts])
        except OutputError as error:
            if not error.permanent:
                self._wait(state, error)
                return 0
            state.refused += len(ids)
            state.failures = 0
            self.report(f"{error}; not sent again: {', '.join(ids)}.")
            self.queue.finish_deliveries(output.name, ids)
            return 0
        self.queue.finish_deliveries(output.name, ids)
        state.sent += len(ids)
        state.failures, state.error = 0, ""
        return len(ids)

    def _wait(self, state: OutputState, error: OutputError) -> None:
        """Put off the next attempt; the first failure in a row is reported."""
        delay = min(LAST_DELAY, FIRST_DELAY * 2.0**state.failures)
        state.failures += 1
        state.next_attempt = self.clock() + delay
        state.error = str(error)
        if state.failures == 1:
            self.report(f"{error}; trying again in {delay:.0f} s.")
