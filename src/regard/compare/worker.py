"""One run in a process of its own: `python -m regard.compare.worker FOLDER`, where FOLDER has a spec.json.

So its peak memory is its own, and if it crashes the others go on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from regard.compare.ledger import STOPPED
from regard.train.loop import Diverged, Interrupted, Progress
from regard.train.run import execute, read_spec


def main() -> int:
    """The entry point."""
    folder, parent = Path(sys.argv[1]), os.getppid()

    def watch(progress: Progress) -> None:
        if os.getppid() != parent:  # it was killed, and nobody waits for the result: save, and stop
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        execute(read_spec(folder), folder, watch)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return STOPPED
    except (Diverged, ValueError, TypeError, MemoryError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
