"""One run in its own process: `python -m regard.compare.worker FOLDER START`.

FOLDER has a spec.json, START is the time of the command in seconds since 1970. The process measures
its own peak memory, and a crash affects no other run.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.compare.executors import LOCK_FILE, STOP_FILE
from regard.compare.ledger import INTERRUPTED
from regard.train.run import read_spec, run_training
from regard.train.trainer import Diverged, Interrupted, TrainProgress


def main() -> int:
    """Train the run of the folder; the exit code is 1 if it fails."""
    folder, parent = Path(sys.argv[1]), os.getppid()

    def stop_if_asked(progress: TrainProgress) -> None:
        # a parent that was killed waits for no result
        if os.getppid() != parent or (folder / STOP_FILE).exists():
            signal.raise_signal(signal.SIGTERM)

    try:
        with lock_folder(folder):
            run_training(read_spec(folder), folder, stop_if_asked, start_time=float(sys.argv[2]))
    except Interrupted as stop:
        print(f"{INTERRUPTED}: {stop}", file=sys.stderr)
        return 1
    except (Diverged, ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; ValueError if one already works in it.

    SQLite locks files on every system, and the lock of a process that was killed is gone with it.
    """
    lock = sqlite3.connect(folder / LOCK_FILE, timeout=0, isolation_level=None)
    try:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            raise ValueError(
                f"Another process is working in {folder}. Wait for it, then run the same command."
            ) from None
        yield
    finally:
        lock.close()


if __name__ == "__main__":
    sys.exit(main())
