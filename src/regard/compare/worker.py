"""One run, or one measurement of costs, in its own process:
`python -m regard.compare.worker FOLDER START`.

FOLDER has a spec.json, or a request.json for a measurement; START is the time of the command in
seconds since 1970. The process measures its own peak memory, and a crash affects no other run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from regard.compare.costs import REQUEST_FILE, measure_costs
from regard.compare.executors import STOP_FILE
from regard.compare.ledger import INTERRUPTED
from regard.plugins import load_plugins
from regard.train.run import read_spec, run_training
from regard.train.trainer import Diverged, Interrupted, TrainProgress


def main() -> int:
    """Train the run of the folder, or measure; the exit code is 1 if it fails."""
    folder, parent = Path(sys.argv[1]), os.getppid()

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
            measure_costs(folder, float(sys.argv[2]), end_if_asked)
            return 0
        spec = read_spec(folder)
        load_plugins(plugin.path for plugin in spec.plugins)
        run_training(spec, folder, stop_if_asked, start_time=float(sys.argv[2]))
    except Interrupted as stop:
        print(f"{INTERRUPTED}: {stop}", file=sys.stderr)
        return 1
    except (Diverged, ValueError, TypeError, MemoryError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
