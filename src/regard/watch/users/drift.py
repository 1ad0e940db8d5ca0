"""Drift: ADWIN on the surprise of the events of each endpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import log2
from typing import Any

from regard.watch.detector import ScoredEvent
from regard.watch.follow.store import Drift

DELTA = 1e-4  # chance of a false alarm at one event, as ADWIN bounds it
MAX_ENDPOINTS = 1000  # watched at a time; the one that was quiet longest is forgotten
MIN_CHANGE = 0.5  # bits: smaller changes are real, but nobody needs to know
MAX_BITS = 16.0  # of one event, so that a single attack is no drift


class DriftMonitor:
    """Finds endpoints whose events have become more or less surprising.

    The surprise of an event is -log2 of its p-value: 1.44 bits on average while events are like
    those that the detector was calibrated on. ADWIN (Bifet and Gavaldà 2007) keeps a window of
    them, and drops its older part when the newer part differs; the means of the two are reported.

    After a restart, windows are filled anew.
    """

    def __init__(self, delta: float = DELTA) -> None:
        try:
            from river.drift import ADWIN
        except ImportError:
            raise ImportError(
                "Drift needs the package river: pip install 'regard[watch]'"
            ) from None
        adwin: Any = ADWIN
        self._new: Callable[[], Any] = lambda: adwin(delta=delta)
        self.windows: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def add(self, scored: Iterable[ScoredEvent]) -> list[Drift]:
        """Add events; returns the drifts that were found."""
        drifts = []
        for each in scored:
            event = each.event
            key = event.tenant, event.endpoint
            window = self.windows.get(key)
            if window is None:
                window = self.windows[key] = self._new()
                if len(self.windows) > MAX_ENDPOINTS:
                    self.windows.popitem(last=False)
            else:
                self.windows.move_to_end(key)
            mean, width = window.estimation, window.width
            bits = min(MAX_BITS, -log2(max(each.p, 1e-300)))
            window.update(bits)
            dropped = width + 1 - window.width
            if not window.drift_detected or dropped < 1:
                continue
            total = mean * width + bits
            before = (total - window.estimation * window.width) / dropped
            if abs(window.estimation - before) >= MIN_CHANGE:
                drifts.append(
                    Drift(
                        time=event.time,
                        tenant=event.tenant,
                        endpoint=event.endpoint,
                        before=before,
                        after=window.estimation,
                        events=int(dropped),
                    )
                )
        return drifts
