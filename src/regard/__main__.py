"""The command `regard`, also as `python -m regard`. Ctrl-C during the imports is one line too."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # it is ignored under nohup
        signal.signal(signal.SIGINT, exit_at_once)
    from regard.cli import main as run_command

    run_command(lambda: signal.signal(signal.SIGINT, previous))


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process while modules are imported, which cannot be interrupted by an exception:
    libraries catch it, or print it from a callback. Nothing has been written yet."""
    os.write(2, b"\nerror: interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
