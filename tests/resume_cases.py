"""Training in processes that are killed, for `test_survive.py`.

As a program it reads lines from its input: a folder, and the number of a change to it before which
the process has to die (-1: none).  For each it forks a process that trains into the folder, says
its number, and then how it ended: so that torch is imported once.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from regard.models import ModuleSpec
from regard.train import TrainSettings
from regard.train.run import RunSpec, run_training

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "open")


def spec(**given):
    plan = {
        "steps": 12,
        "batch_size": 4,
        "eval_every": 3,
        "eval_examples": 8,
        "save_every": 2,
        "ema_decay": 0.9,
        "warmup_steps": 2,
    }
    return RunSpec(
        task=ModuleSpec(name="copy", arguments={"length": 9, "symbols": 4}),
        dim=8,
        heads=2,
        layers=1,
        dropout=0.2,
        threads=1,
        settings=TrainSettings(**plan | given),
    )


def die_before(number, folder):
    """Have the process end as SIGKILL ends it, before a change of the folder; count them in a file
    beside it."""
    seen = 0

    def hear(event, arguments):
        nonlocal seen
        if (
            event in EVENTS
            and arguments
            and isinstance(arguments[0], str | os.PathLike)
            and inside(arguments[0], folder)
        ):
            seen += 1
            if seen - 1 == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    return lambda: seen


def inside(path, folder):
    return os.fspath(path).startswith(os.fspath(folder) + os.sep)


def child(folder, number, **given):
    seen = die_before(number, folder)
    run_training(spec(**given), folder)
    folder.with_suffix(".count").write_text(str(seen()))


def main():
    given = {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    with tempfile.TemporaryDirectory() as folder:  # what is imported on the way is imported once
        run_training(spec(steps=1), Path(folder))
    print("ready", flush=True)
    for line in sys.stdin:
        folder, number = line.split()
        pid = os.fork()
        if pid == 0:
            child(Path(folder), int(number), **given)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
