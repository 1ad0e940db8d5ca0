"""One run, or one measurement of costs, in its own process.

The folder has a spec.json, or a request.json for a measurement. The process measures its own peak
memory, and a crash affects no other run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from regard.compare.costs import REQUEST_FILE, measure_costs, read_request
from regard.compare.executors import STOP_FILE
from regard.compare.ledger import INTERRUPTED
from regard.compare.plan import cached_task
from regard.plugins import load_plugins
from regard.tasks import TASKS, Task
from regard.train.run import read_spec, run_training
from regard.train.trainer import Diverged, Interrupted, TrainProgress


def run_worker(folder: Path, start_time: float, task: Task | None = None) -> int:
    """Train the run of the folder, or measure; the exit code is 1 if it fails.

    Args:
        start_time: `time.time()` when the process was started.
        task: The task of the run, if it has been created.
    """
    parent = os.getppid()

    def is_stopped() -> bool:
        # a parent that was killed waits for no result
        return os.getppid() != parent or (folder / STOP_FILE).exists()

    def stop_if_asked(progress: TrainProgress) -> None:
        if is_stopped():
            signal.raise_signal(signal.SIGTERM)

    def end_if_asked() -> None:
        if is_stopped():
            raise Interrupted("measurement of costs")

    try:
        if (folder / REQUEST_FILE).exists():
            measure_costs(folder, start_time, end_if_asked, task=task)
            return 0
        spec = read_spec(folder)
        load_plugins(plugin.path for plugin in spec.plugins)
        run_training(spec, folder, stop_if_asked, start_time=start_time, task=task)
    except Interrupted as stop:
        print(f"{INTERRUPTED}: {stop}", file=sys.stderr)
        return 1
    except (Diverged, ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def prepare_task(folder: Path) -> Task | None:
    """The task of the run in a folder, to share it between forks.

    None if it comes from a plugin or another package, which may not expect to be forked, or if it
    cannot be created: then the run itself says why.
    """
    try:
        if (folder / REQUEST_FILE).exists():
            spec = next(iter(read_request(folder).specs.values()))
        else:
            spec = read_spec(folder)
        kind = TASKS.get(spec.task.name)
        if spec.plugins or kind is None or not kind.__module__.startswith("regard."):
            return None
        return cached_task(spec.task)
    except Exception:
        return None
