"""Run all cells: each in its own process, some at a time, within a budget, and once only."""

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
from regard.json_files import CorruptFile, read_json, write_json
from regard.train.interrupts import catch_interrupts
from regard.train.metrics_log import METRICS_FILE as METRICS, last_row
from regard.train.run import RESULT_FILE, SPEC_FILE

LEAST = 5.0  # seconds of a run, at least, on a machine that has nothing else to do
GRACE = 3.0  # seconds, and a twentieth of its time, after which a run that goes on is ended
PATIENCE = 10.0  # seconds that a run has to save itself when all is stopped
POLL = 0.1


class ActiveRun(NamedTuple):
    """A run at work."""

    cell: PlannedRun
    folder: Path
    job: RunHandle
    began: float
    seconds: float | None  # for all of it


class Schedule:
    """Runs cells that are not done yet.

    root      the folder of the comparison: ledger.sqlite, and runs/ with a folder for each
    place     where runs are run; None: processes of this machine
    jobs      runs at a time
    budget    seconds for all cells, those that are done too: each has the same share, whenever it is run.  None: each as long
              as its settings say
    least     seconds that a run needs, or the budget is refused: its process must start, and train for a while
    watch     called with (cell, fraction) while a run is at work, and with (cell, None) once it has ended
    """

    def __init__(
        self,
        root: Path,
        *,
        place: Executor | None = None,
        jobs: int = 1,
        budget: float | None = None,
        least: float = LEAST,
        watch: Callable[[PlannedRun, float | None], None] = lambda cell, fraction: None,
    ) -> None:
        self.root, self.jobs, self.budget, self.least, self.watch = root, jobs, budget, least, watch
        self.place = place or LocalExecutor(root, jobs)
        self.ledger = Ledger(root / "ledger.sqlite")

    def run(self, cells: list[PlannedRun]) -> None:
        """Do what is not done; Ctrl-C and SIGTERM have the runs at work save themselves, and end in KeyboardInterrupt."""
        share = self.share(cells)
        for cell in cells:
            words = {
                "mixer": cell.mixer.model_dump(),
                "task": cell.task.model_dump(),
                "length": cell.length,
                "seed": cell.seed,
            }
            self.ledger.add(cell.key, cell.name, words, refusal=cell.refusal)
        waiting = self.waiting(cells)
        if waiting:
            native.library()  # built now, once: else the first runs would wait for a compiler, and seem slow
        end = time.monotonic() + (share or 0) * self._rounds(waiting)
        working: list[ActiveRun] = []
        with stopped_at_the_end(working), catch_interrupts() as asked:
            while waiting or working:
                if asked.requested:
                    raise KeyboardInterrupt
                while waiting and len(working) < self.jobs:
                    working.append(
                        self._start(waiting[0], self._now(share, end, self._rounds(waiting)))
                    )
                    waiting.pop(0)
                time.sleep(POLL)
                for each in [w for w in working if not self._at_work(w)]:
                    working.remove(each)
                    self._ended(each)

    def waiting(self, cells: list[PlannedRun]) -> list[PlannedRun]:
        """Those that are neither refused nor done."""
        done = {entry.key for entry in self.ledger.entries() if entry.status == DONE}
        return [cell for cell in cells if cell.spec is not None and cell.key not in done]

    def share(self, cells: list[PlannedRun]) -> float | None:
        """The seconds of each run, the same for all; too few of them are refused."""
        todo = [cell for cell in cells if cell.spec is not None]
        if self.budget is None or not todo:
            return None
        rounds = self._rounds(todo)
        if self.budget < self.least * rounds and self.waiting(cells):
            raise ValueError(
                f"the budget leaves {max(self.budget, 0):.0f} s for {len(todo)} runs, {self.jobs} at a time, and here each "
                f"needs {self.least:.0f} s at least, to start and to train: give more time, or fewer mixers, tasks or seeds"
            )
        return self.budget / rounds

    def _rounds(self, cells: list[PlannedRun]) -> int:
        """How many runs follow one another, when so many are still to begin."""
        return math.ceil(len(cells) / self.jobs)

    def _now(self, share: float | None, end: float, rounds: int) -> float | None:
        """The seconds of a run that begins now: its share, or less where those before it took longer."""
        if share is None or self.place.has_queue:
            return share
        return min(share, max(1.0, (end - time.monotonic()) / rounds))

    def _start(self, cell: PlannedRun, seconds: float | None) -> ActiveRun:
        """A process for one cell."""
        assert cell.spec is not None
        spec = cell.spec.model_copy(update={"threads": self.place.threads})
        if seconds is not None:
            spec = spec.model_copy(
                update={"settings": spec.settings.model_copy(update={"seconds": seconds})}
            )
        folder = self.root / "runs" / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STOP_FILE).unlink(missing_ok=True)
        write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
        return ActiveRun(cell, folder, self.place.start(folder, seconds), time.monotonic(), seconds)

    def _at_work(self, run: ActiveRun) -> bool:
        if run.job.over():
            return False
        if (
            run.seconds is not None
            and not self.place.has_queue
            and time.monotonic() - run.began > 1.05 * run.seconds + GRACE
        ):
            run.job.kill()
            with (run.folder / LOG_FILE).open("a") as log:
                log.write(
                    f"\nit took longer than its {run.seconds:.0f} s: give more time, or make it smaller\n"
                )
        row = last_row(run.folder / METRICS)
        steps = run.cell.spec.settings.steps if run.cell.spec else 1
        by_steps = row.get("step", 0) / steps
        self.watch(
            run.cell,
            max(by_steps, min(1.0, row.get("seconds", 0) / run.seconds))
            if run.seconds
            else by_steps,
        )
        return True

    def _ended(self, run: ActiveRun) -> None:
        """Take down what came of it."""
        try:
            if not (run.folder / RESULT_FILE).exists():
                raise CorruptFile(
                    run.job.why()
                    or last_log_line(run.folder / LOG_FILE)
                    or "it ended without a word"
                )
            self.ledger.finish(run.cell.key, read_json(run.folder / RESULT_FILE))
        except CorruptFile as error:
            self.ledger.fail(
                run.cell.key, INTERRUPTED if str(error).startswith(INTERRUPTED) else str(error)
            )
        self.watch(run.cell, None)

    def close(self) -> None:
        """Let everything go."""
        self.ledger.close()
        self.place.close()


@contextmanager
def stopped_at_the_end(working: list[ActiveRun]) -> Iterator[None]:
    """Whatever happens inside, no run is left: each is asked to save itself, and then made to stop."""
    try:
        yield
    finally:
        for run in working:
            (run.folder / STOP_FILE).touch()
        end = time.monotonic() + PATIENCE
        while any(not run.job.over() for run in working) and time.monotonic() < end:
            time.sleep(POLL)
        for run in working:
            if not run.job.over():
                run.job.kill()


def last_log_line(path: Path) -> str:
    """The last line that a process wrote."""
    lines = (
        path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if path.exists()
        else []
    )
    return lines[-1] if lines else ""
