"""One run in a process of its own: `python -m regard.compare.worker FOLDER`, where FOLDER has a spec.json.

So its peak memory is its own, and if it crashes the others go on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from regard.train.loop import Diverged, Interrupted
from regard.train.run import execute, read_spec

STOPPED = 75  # the exit code of a run that can go on


def main() -> int:
    """The entry point."""
    folder = Path(sys.argv[1])
    try:
        execute(read_spec(folder), folder)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return STOPPED
    except (Diverged, ValueError, TypeError, MemoryError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
