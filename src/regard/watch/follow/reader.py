"""Reading ahead of the detector: a thread that owns the source, and a queue of limited length."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from regard.watch.sources import Record, Source, SourceError

FIRST_DELAY, LAST_DELAY = 0.5, 30.0  # seconds until the source is tried again; they double
LAG_SECONDS = 5.0  # between two questions how much waits
IDLE_SECONDS = 0.2  # longest wait for records, so that acknowledgements do not wait longer


class ReadAhead:
    """Reads records in a thread, and acknowledges them there: a source belongs to one thread.

    While the queue is full nothing is read, so records wait in the broker and not in memory. When
    the source fails, it is tried again after 0.5, 1, 2, ... up to 30 seconds; one line says so.

    Args:
        open_source: Opens the source, in the thread. Its first error is raised here: a wrong
            address is not tried again.
        size: Records that are read ahead.
        report: Called with a line when the source fails, and when it answers again.
    """

    def __init__(
        self, open_source: Callable[[], Source], size: int, report: Callable[[str], object]
    ) -> None:
        self.open_source, self.size, self.report = open_source, size, report
        self.source: Source | None = None
        self.opened = threading.Event()
        self.records: queue.Queue[tuple[float, list[Record]]] = queue.Queue()
        self.waiting = 0
        self.waited = 0.0
        self.rest: list[Record] = []
        self.rest_read = 0.0
        self.done: queue.Queue[list[str]] = queue.Queue()
        self.space = threading.Condition()
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.error = ""
        self.finished = False
        self.lag: int | None = None
        self.thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self.thread.start()
        self.opened.wait()
        if self.source is None and self.failure is not None:
            raise self.failure

    @property
    def name(self) -> str:
        """Name of the source."""
        return "" if self.source is None else self.source.name

    def _run(self) -> None:
        """Open the source, read and acknowledge until `close`, and close it."""
        try:
            self.source = self.open_source()
            self.opened.set()
            try:
                self._read_and_acknowledge(self.source)
            finally:
                self.source.close()
        except BaseException as error:  # passed on to the thread that takes records
            self.failure = error
            self.opened.set()

    def _read_and_acknowledge(self, source: Source) -> None:
        delay, next_lag = FIRST_DELAY, 0.0
        unconfirmed: list[str] = []
        while True:
            try:
                unconfirmed += self._take_done()
                if unconfirmed:
                    source.acknowledge(unconfirmed)
                    unconfirmed = []
                if self.stopping.is_set():
                    if self.done.empty():
                        return
                    continue
                self._read(source)
                if time.monotonic() >= next_lag:
                    next_lag = time.monotonic() + LAG_SECONDS
                    self.lag = source.lag()
                if source.problem:
                    raise SourceError(source.problem)
            except (SourceError, OSError) as error:
                if self.stopping.is_set():
                    return  # what was not acknowledged comes again
                if not self.error:
                    self.report(f"{error} Trying again.")
                self.error = str(error)
                self.stopping.wait(delay)
                delay = min(2 * delay, LAST_DELAY)
            else:
                if self.error:
                    self.report(f"{source.name} answers again.")
                self.error, delay = "", FIRST_DELAY

    def _take_done(self) -> list[str]:
        """The ids that are to be acknowledged now."""
        ids: list[str] = []
        while not self.done.empty():
            ids += self.done.get_nowait()
        return ids

    def _read(self, source: Source) -> None:
        """Read what there is, if a quarter of the queue is free; otherwise wait a moment."""
        space = self.size - self.waiting
        if space < self.size / 4 or self.finished:
            with self.space:
                self.space.wait(IDLE_SECONDS / 4)
            return
        records = source.read(space, timeout=IDLE_SECONDS)
        if records:
            with self.space:
                self.waiting += len(records)
            self.records.put((time.monotonic(), records))
        self.finished = source.exhausted

    def take(self, most: int, timeout: float) -> list[Record]:
        """The next records, at most so many; [] if none came in `timeout` seconds. `waited` is how
        long ago the first of them was read."""
        deadline = time.monotonic() + timeout
        while not self.rest:
            if self.failure is not None:
                raise self.failure
            left = min(IDLE_SECONDS, deadline - time.monotonic())
            try:
                self.rest_read, self.rest = self.records.get(timeout=max(1e-3, left))
            except queue.Empty:
                if time.monotonic() >= deadline or self.exhausted:
                    return []
        self.waited = time.monotonic() - self.rest_read
        taken: list[Record] = []
        while len(taken) < most:
            room = most - len(taken)
            taken += self.rest[:room]
            self.rest = self.rest[room:]
            if self.rest or self.records.empty():
                break
            self.rest_read, self.rest = self.records.get_nowait()
        with self.space:
            self.waiting -= len(taken)
            self.space.notify()
        return taken

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Acknowledge records soon, in the thread of the source."""
        self.done.put(list(ids))
        with self.space:
            self.space.notify()

    @property
    def exhausted(self) -> bool:
        """Whether all records were taken and no more can come."""
        return self.finished and self.records.empty() and not self.rest

    def close(self, timeout: float = 10.0) -> None:
        """Acknowledge what is done, and close the source."""
        self.stopping.set()
        self.thread.join(timeout)
