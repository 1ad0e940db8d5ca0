"""Run all cells: each in its own process, some at a time, within a budget, and once only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from regard.compare.ledger import DONE, STOPPED, Ledger
from regard.compare.plan import Cell
from regard.train.checkpoint import Broken, read_json, write_json
from regard.train.log import NAME as METRICS
from regard.train.log import last
from regard.train.run import RESULT, SPEC
from regard.train.stopping import listening

LOG = "log.txt"  # what a process said
STARTUP = 4.0  # seconds before and after training, until the first run has shown them
LEAST = 1.0  # seconds to train, at least
PATIENCE = 30.0  # seconds beyond its time after which a run is stopped
POLL = 0.1


class Running(NamedTuple):
    """A run at work."""

    cell: Cell
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float
    seconds: float | None  # to train for


class Schedule:
    """Runs cells that are not done yet.

    root      the folder of the comparison: ledger.sqlite, and runs/ with a folder for each
    jobs      processes at a time; the cores are shared out among them
    budget    seconds for all that is not done; None: each as long as its settings say
    watch     called with (cell, fraction) while a run is at work, and with (cell, None) once it has ended
    """

    def __init__(
        self, root: Path, *, jobs: int = 1, budget: float | None = None,
        watch: Callable[[Cell, float | None], None] = lambda cell, fraction: None,
    ) -> None:  # fmt: skip
        self.root, self.jobs, self.budget, self.watch = root, jobs, budget, watch
        self.ledger = Ledger(root / "ledger.sqlite")
        self.startup = STARTUP
        self.threads = max(1, (os.cpu_count() or 1) // jobs)

    def run(self, cells: list[Cell]) -> None:
        """Do what is not done; Ctrl-C and SIGTERM have the runs at work save themselves, and end in KeyboardInterrupt."""
        for cell in cells:
            words = {"mixer": cell.mixer.model_dump(), "task": cell.task.model_dump(), "length": cell.length, "seed": cell.seed}
            self.ledger.add(cell.key, cell.name, words, refusal=cell.refusal)
        done = {entry.key for entry in self.ledger.entries() if entry.status == DONE}
        waiting = [cell for cell in cells if cell.spec is not None and cell.key not in done]
        self.end = None if self.budget is None else time.monotonic() + self.budget
        working: list[Running] = []
        with stopped_at_the_end(working), listening() as asked:
            while waiting or working:
                if asked.to_stop:
                    raise KeyboardInterrupt
                while waiting and len(working) < self.jobs:
                    working.append(self._start(waiting.pop(0), 1 + len(waiting) + len(working)))
                time.sleep(POLL)
                for each in [w for w in working if not self._at_work(w)]:
                    working.remove(each)
                    self._ended(each)

    def _start(self, cell: Cell, left: int) -> Running:
        """A process for one cell, with its share of the time that is left."""
        assert cell.spec is not None
        spec = cell.spec.model_copy(update={"threads": self.threads})
        if self.end is not None:
            share = max(LEAST, (self.end - time.monotonic()) * min(self.jobs, left) / left - self.startup)
            spec = spec.model_copy(update={"settings": spec.settings.model_copy(update={"seconds": share})})
        folder = self.root / "runs" / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        if not resumable(folder):
            write_json(folder / SPEC, spec.model_dump(mode="json"))
        log = (folder / LOG).open("wb")
        command = [sys.executable, "-m", "regard.compare.worker", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return Running(cell, folder, process, log, time.monotonic(), spec.settings.seconds)

    def _at_work(self, run: Running) -> bool:
        if run.process.poll() is not None:
            return False
        spent = time.monotonic() - run.began
        if run.seconds is not None and spent > 1.5 * run.seconds + self.startup + PATIENCE:
            run.process.kill()
        row = last(run.folder / METRICS)
        steps = run.cell.spec.settings.steps if run.cell.spec else 1
        by_steps = row.get("step", 0) / steps
        self.watch(run.cell, max(by_steps, row.get("seconds", 0) / run.seconds) if run.seconds else by_steps)
        return True

    def _ended(self, run: Running) -> None:
        """Take down what came of it."""
        run.log.close()
        code = run.process.returncode
        try:
            if code:
                raise Broken(said(run.folder / LOG) or f"the process ended with code {code}")
            result = read_json(run.folder / RESULT)
            self.startup = max(0.5, 0.5 * self.startup + 0.5 * (time.monotonic() - run.began - result["seconds"]))
            self.ledger.finish(run.cell.key, result)
        except Broken as error:
            self.ledger.fail(run.cell.key, str(error) if code != STOPPED else "interrupted")
        self.watch(run.cell, None)


@contextmanager
def stopped_at_the_end(working: list[Running]) -> Iterator[None]:
    """Whatever happens inside, no process is left: each is asked to save itself, and then made to stop."""
    try:
        yield
    finally:
        for run in working:
            run.process.send_signal(signal.SIGINT)
        for run in working:
            try:
                run.process.wait(10)
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()
            run.log.close()


def resumable(folder: Path) -> bool:
    """Whether a run was begun here: then it goes on with the words that it began with."""
    return (folder / SPEC).exists() and any((folder / "checkpoints").glob("step-*"))


def said(path: Path) -> str:
    """The last line that a process wrote."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
