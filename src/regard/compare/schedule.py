"""Execute the runs of a comparison, and the measurement of costs, in their own processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from regard import native
from regard.compare.costs import (
    COSTS_DIR,
    COSTS_FILE,
    REQUEST_FILE,
    CostRequest,
    MeasuredCosts,
    read_costs,
)
from regard.compare.executors import LOG_FILE, STOP_FILE, Executor, LocalExecutor, RunHandle
from regard.compare.ledger import DONE, INTERRUPTED, Ledger
from regard.compare.plan import RUNS_DIR, PlannedRun
from regard.compare.record import LEDGER_FILE, check_comparison_folder
from regard.folder_lock import lock_folder
from regard.json_files import CorruptFile, write_json
from regard.train.interrupts import catch_interrupts
from regard.train.metrics_log import METRICS_FILE, last_row
from regard.train.run import RESULT_FILE, SPEC_FILE, RunSpec, read_result

LIMIT_FACTOR = 3.0  # times the estimated time of a run: the time limit of a job in a queue
SHUTDOWN_SECONDS = 10.0  # time to save a checkpoint when the comparison is stopped
POLL_SECONDS = 0.1


class ActiveRun(NamedTuple):
    """A run in progress; None: a measurement of costs."""

    run: PlannedRun | None
    folder: Path
    handle: RunHandle


class Schedule:
    """Executes the runs that are not done yet.

    Args:
        root: Folder of the comparison.
        executor: Where to run; None: processes on this machine.
        jobs: Number of runs at a time.
        on_progress: Called with (run, fraction) during a run and (run, None) when it has ended.
    """

    def __init__(
        self,
        root: Path,
        *,
        executor: Executor | None = None,
        jobs: int = 1,
        on_progress: Callable[[PlannedRun, float | None], None] = lambda run, fraction: None,
    ) -> None:
        self.root, self.jobs = root, jobs
        self.on_progress = on_progress
        check_comparison_folder(root)
        self.executor = executor or LocalExecutor(root, jobs)
        self.ledger = Ledger(root / LEDGER_FILE)
        self.locks = ExitStack()

    def run(self, runs: list[PlannedRun]) -> None:
        """Execute all runs that are not done.

        Ctrl-C and SIGTERM make the active runs save checkpoints; then KeyboardInterrupt is raised.
        """
        for run in runs:
            self.ledger.add(run.key, run.name, run.settings(), refusal=run.refusal)
        pending = self.pending(runs)
        if pending:
            native.library()  # compile before the first run, which would seem slow otherwise
        active: list[ActiveRun] = []
        with stop_on_exit(active), catch_interrupts() as stop:
            while pending or active:
                if stop.requested:
                    raise KeyboardInterrupt
                while pending and len(active) < self.jobs:
                    active.append(self._start(pending.pop(0)))
                time.sleep(POLL_SECONDS)
                for each in [each for each in active if self._check(each)]:
                    active.remove(each)
                    self._finish(each)

    def measure_costs(self, specs: Mapping[str, RunSpec], seconds: float) -> Path:
        """Measure the costs of candidates by label, once; returns the folder with the costs.

        Raises:
            ValueError: The process of the measurement failed.
        """
        specs = {
            label: spec.model_copy(update={"threads": self.executor.threads})
            for label, spec in specs.items()
        }
        request = CostRequest(specs=specs, seconds=seconds)
        identity = request.model_dump_json(exclude={"seconds"})
        folder = self.costs_folder(hashlib.sha256(identity.encode()).hexdigest()[:16])
        if read_costs(folder) is None:
            native.library()
            self._measure([folder], request)
        return folder

    def measure_side_by_side(
        self, specs: Mapping[str, RunSpec], seconds: float
    ) -> list[MeasuredCosts]:
        """Measure the costs of training in as many processes at a time as there are jobs, which
        share cores, caches and memory."""
        specs = {
            label: spec.model_copy(update={"threads": self.executor.threads})
            for label, spec in specs.items()
        }
        request = CostRequest(specs=specs, seconds=seconds, latency=False)
        folders = [self.costs_folder(f"side-by-side-{number}") for number in range(self.jobs)]
        for folder in folders:
            (folder / COSTS_FILE).unlink(missing_ok=True)
        self._measure(folders, request)
        return [costs for folder in folders if (costs := read_costs(folder)) is not None]

    def _measure(self, folders: list[Path], request: CostRequest) -> None:
        """Measure in all folders at the same time."""
        active: list[ActiveRun] = []
        with stop_on_exit(active), catch_interrupts() as stop:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / STOP_FILE).unlink(missing_ok=True)
                write_json(folder / REQUEST_FILE, request.model_dump(mode="json"))
                active.append(ActiveRun(None, folder, self.executor.start(folder, None)))
            while not all(each.handle.is_done() for each in active):
                if stop.requested:
                    raise KeyboardInterrupt
                time.sleep(POLL_SECONDS)
        for each in active:
            if read_costs(each.folder) is None:
                log = last_log_line(each.folder / LOG_FILE)
                reason = each.handle.failure_reason() or log or "it ended without a message"
                raise ValueError(f"The costs of the candidates could not be measured: {reason}")

    def costs_folder(self, name: str) -> Path:
        """Return a folder of measured costs by its name."""
        return self.root / COSTS_DIR / name

    def pending(self, runs: list[PlannedRun]) -> list[PlannedRun]:
        """Return the runs that are neither refused nor done."""
        done = {entry.key for entry in self.ledger.entries() if entry.status == DONE}
        return [run for run in runs if run.spec is not None and run.key not in done]

    def _start(self, run: PlannedRun) -> ActiveRun:
        assert run.spec is not None
        spec = run.spec.model_copy(update={"threads": self.executor.threads})
        folder = self.root / RUNS_DIR / run.key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP_FILE).unlink(missing_ok=True)
        write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
        limit = LIMIT_FACTOR * run.seconds if run.seconds else None
        return ActiveRun(run, folder, self.executor.start(folder, limit))

    def _check(self, active: ActiveRun) -> bool:
        """Report the progress of a run; whether it has ended."""
        if active.handle.is_done():
            return True
        assert active.run is not None
        assert active.run.spec is not None
        row = last_row(active.folder / METRICS_FILE)
        self.on_progress(active.run, row.get("step", 0) / active.run.spec.settings.steps)
        return False

    def _finish(self, active: ActiveRun) -> None:
        """Store the result of a run, or the reason why it has none, in the ledger."""
        assert active.run is not None
        key, path = active.run.key, active.folder / RESULT_FILE
        try:
            if not path.exists():
                log = last_log_line(active.folder / LOG_FILE)
                reason = active.handle.failure_reason() or log or "it ended without a message"
                raise CorruptFile(reason)
            self.ledger.finish(key, read_result(active.folder))
        except CorruptFile as error:
            reason = str(error)
            self.ledger.fail(key, INTERRUPTED if reason.startswith(INTERRUPTED) else reason)
        self.on_progress(active.run, None)

    def lock(self) -> None:
        """Keep other comparisons out of the folder until `close`; ValueError if there is one."""
        self.locks.enter_context(lock_folder(self.root))

    def close(self) -> None:
        """Close the ledger and the executor, and release the folder."""
        self.locks.close()
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
