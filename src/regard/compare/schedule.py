"""Execute the runs of a comparison in their own processes, within a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from regard import native
from regard.compare.executors import LOG_FILE, STOP_FILE, Executor, LocalExecutor, RunHandle
from regard.compare.ledger import DONE, INTERRUPTED, Ledger
from regard.compare.plan import PlannedRun
from regard.compare.record import LEDGER_FILE, RUNS_DIR
from regard.json_files import CorruptFile, read_json, write_json
from regard.train.interrupts import catch_interrupts
from regard.train.metrics_log import METRICS_FILE, last_row
from regard.train.run import RESULT_FILE, SPEC_FILE

MIN_RUN_SECONDS = 5.0  # a run needs at least this long on an idle machine
GRACE_SECONDS = 3.0  # a run is killed this long, and a twentieth of its time, after its limit
SHUTDOWN_SECONDS = 10.0  # time to save a checkpoint when the comparison is stopped
POLL_SECONDS = 0.1


class ActiveRun(NamedTuple):
    """A run in progress; `seconds` is its time limit, process start included."""

    run: PlannedRun
    folder: Path
    handle: RunHandle
    started: float
    seconds: float | None


class Schedule:
    """Executes the runs that are not done yet.

    Args:
        root: Folder of the comparison.
        executor: Where to run; None: processes on this machine.
        jobs: Number of runs at a time.
        budget: Seconds for all runs, including those done before: every run gets the same share,
            whenever it is executed. None: no limit but the training settings.
        min_seconds: A budget that gives a run less than this is refused: its process has to start
            and to train.
        on_progress: Called with (run, fraction) during a run and (run, None) when it has ended.
    """

    def __init__(
        self,
        root: Path,
        *,
        executor: Executor | None = None,
        jobs: int = 1,
        budget: float | None = None,
        min_seconds: float = MIN_RUN_SECONDS,
        on_progress: Callable[[PlannedRun, float | None], None] = lambda run, fraction: None,
    ) -> None:
        self.root, self.jobs, self.budget, self.min_seconds = root, jobs, budget, min_seconds
        self.on_progress = on_progress
        self.executor = executor or LocalExecutor(root, jobs)
        self.ledger = Ledger(root / LEDGER_FILE)

    def run(self, runs: list[PlannedRun]) -> None:
        """Execute all runs that are not done.

        Ctrl-C and SIGTERM make the active runs save checkpoints; then KeyboardInterrupt is raised.
        """
        share = self.time_share(runs)
        for run in runs:
            self.ledger.add(run.key, run.name, run.settings(), refusal=run.refusal)
        pending = self.pending(runs)
        if pending:
            native.library()  # compile before the first run, which would seem slow otherwise
        deadline = time.monotonic() + (share or 0) * self._rounds(pending)
        active: list[ActiveRun] = []
        with stop_on_exit(active), catch_interrupts() as stop:
            while pending or active:
                if stop.requested:
                    raise KeyboardInterrupt
                while pending and len(active) < self.jobs:
                    seconds = share
                    if share is not None and not self.executor.has_queue:
                        # less than the share if earlier runs took longer than theirs
                        left = (deadline - time.monotonic()) / self._rounds(pending)
                        seconds = min(share, max(1.0, left))
                    active.append(self._start(pending[0], seconds))
                    pending.pop(0)
                time.sleep(POLL_SECONDS)
                for each in [each for each in active if self._check(each)]:
                    active.remove(each)
                    self._finish(each)

    def pending(self, runs: list[PlannedRun]) -> list[PlannedRun]:
        """Return the runs that are neither refused nor done."""
        done = {entry.key for entry in self.ledger.entries() if entry.status == DONE}
        return [run for run in runs if run.spec is not None and run.key not in done]

    def time_share(self, runs: list[PlannedRun]) -> float | None:
        """Return the seconds of each run; ValueError if the budget is too small."""
        trainable = [run for run in runs if run.spec is not None]
        if self.budget is None or not trainable:
            return None
        rounds = self._rounds(trainable)
        if self.budget < self.min_seconds * rounds and self.pending(runs):
            raise ValueError(
                f"The budget leaves {max(self.budget, 0):.0f} s for {len(trainable)} runs, "
                f"{self.jobs} at a time, but on this machine each needs at least "
                f"{self.min_seconds:.0f} s to start and train. Use a larger --budget, or fewer "
                "mixers, tasks or seeds."
            )
        return self.budget / rounds

    def _rounds(self, runs: list[PlannedRun]) -> int:
        return math.ceil(len(runs) / self.jobs)

    def _start(self, run: PlannedRun, seconds: float | None) -> ActiveRun:
        assert run.spec is not None
        spec = run.spec.model_copy(update={"threads": self.executor.threads})
        if seconds is not None:
            settings = spec.settings.model_copy(update={"max_seconds": seconds})
            spec = spec.model_copy(update={"settings": settings})
        folder = self.root / RUNS_DIR / run.key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP_FILE).unlink(missing_ok=True)
        write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
        handle = self.executor.start(folder, seconds)
        return ActiveRun(run, folder, handle, time.monotonic(), seconds)

    def _check(self, active: ActiveRun) -> bool:
        """Report the progress of a run and kill it if it is late; whether it has ended."""
        if active.handle.is_done():
            return True
        if active.seconds is not None and not self.executor.has_queue:
            limit = 1.05 * active.seconds + GRACE_SECONDS
            if time.monotonic() - active.started > limit:
                active.handle.kill()
                with (active.folder / LOG_FILE).open("a") as log:
                    log.write(
                        f"\nThe run exceeded its {active.seconds:.0f} s. Use a larger --budget or "
                        "a smaller model.\n"
                    )
        assert active.run.spec is not None
        row = last_row(active.folder / METRICS_FILE)
        fraction = row.get("step", 0) / active.run.spec.settings.steps
        if active.seconds:
            fraction = max(fraction, min(1.0, row.get("seconds", 0) / active.seconds))
        self.on_progress(active.run, fraction)
        return False

    def _finish(self, active: ActiveRun) -> None:
        """Store the result of a run, or the reason why it has none, in the ledger."""
        key, path = active.run.key, active.folder / RESULT_FILE
        try:
            if not path.exists():
                log = last_log_line(active.folder / LOG_FILE)
                reason = active.handle.failure_reason() or log or "it ended without a message"
                raise CorruptFile(reason)
            self.ledger.finish(key, read_json(path))
        except CorruptFile as error:
            reason = str(error)
            self.ledger.fail(key, INTERRUPTED if reason.startswith(INTERRUPTED) else reason)
        self.on_progress(active.run, None)

    def close(self) -> None:
        """Close the ledger and the executor."""
        self.ledger.close()
        self.executor.close()


@contextmanager
def stop_on_exit(active: list[ActiveRun]) -> Iterator[None]:
    """On exit, ask every active run to save a checkpoint and stop; kill those that do not."""
    try:
        yield
    finally:
        for each in active:
            (each.folder / STOP_FILE).touch()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while any(not each.handle.is_done() for each in active) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for each in active:
            if not each.handle.is_done():
                each.handle.kill()


def last_log_line(path: Path) -> str:
    """Return the last line of a log, "" if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text.strip().rpartition("\n")[2]
