"""One run in a process of its own: `python -m regard.compare.worker FOLDER BEGAN`, where FOLDER has a spec.json and BEGAN is
when the process was called for, in seconds since 1970.

So its peak memory is its own, and if it crashes the others go on.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.compare.executors import LOCK_FILE, STOP_FILE
from regard.compare.ledger import INTERRUPTED
from regard.train.run import read_spec, run_training
from regard.train.trainer import Diverged, Interrupted, TrainProgress


def main() -> int:
    """The entry point."""
    folder, parent = Path(sys.argv[1]), os.getppid()

    def watch(progress: TrainProgress) -> None:
        # killed, the parent waits for no result: save, and stop
        if os.getppid() != parent or (folder / STOP_FILE).exists():
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with alone(folder):
            run_training(read_spec(folder), folder, watch, since=float(sys.argv[2]))
    except Interrupted as stop:
        print(f"{INTERRUPTED}: {stop}", file=sys.stderr)
        return 1
    except (Diverged, ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process works in the folder; one that does is left alone."""
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is at work in {folder}: wait for it, and run the same again"
            ) from None
        yield


if __name__ == "__main__":
    sys.exit(main())
