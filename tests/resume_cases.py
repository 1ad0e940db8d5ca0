"""Training and comparisons in processes that are killed, for `test_resume.py`.

As a program it reads lines from its input: a folder, and the number of a change to it before which
the process has to die (-1: none).  For each it forks a process that trains into the folder, says
its number, and then how it ended: so that torch is imported once.  With the argument "compare", the
process executes a comparison of two mixers instead.
"""

import os
import signal
import sqlite3
import sys
import tempfile
from pathlib import Path

from regard.compare import (
    ComparisonPlan,
    ComparisonRecord,
    Schedule,
    load_result,
    plan_runs,
    schedule as scheduling,
)
from regard.compare.executors import Executor, RunHandle
from regard.compare.record import write_record
from regard.models import ModuleSpec, module_spec
from regard.train import TrainSettings
from regard.train.run import RunSpec, read_spec, run_training

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
    """Have the process end as SIGKILL ends it, before a change of the folder or of its ledger;
    return a list of the changes so far."""
    seen = []

    def count(change):
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(change)

    def hear(event, arguments):
        if (
            event in EVENTS
            and arguments
            and isinstance(arguments[0], str | os.PathLike)
            and inside(arguments[0], folder)
        ):
            count(f"{event} {os.path.relpath(arguments[0], folder)}")

    class Connection(sqlite3.Connection):
        def execute(self, sql, *values):
            count(f"before {sql}")
            found = super().execute(sql, *values)
            count(f"after {sql}")
            return found

    usual = sqlite3.connect
    sqlite3.connect = lambda *a, **k: usual(*a, **k, factory=Connection)
    sys.addaudithook(hear)
    return seen


def inside(path, folder):
    return os.fspath(path).startswith(os.fspath(folder) + os.sep)


class EndedRun(RunHandle):
    """A run that has ended."""

    def is_done(self):
        return True

    def kill(self):
        pass


class InlineExecutor(Executor):
    """Trains in this process, which dies with the run."""

    threads = 1

    def start(self, folder, seconds):
        run_training(read_spec(folder), folder)
        return EndedRun()


def compare(folder, **given):
    """A comparison as the command executes it, without its page."""
    plan = ComparisonPlan(
        tasks=[module_spec("copy", length=9, symbols=4)],
        mixers=[module_spec("linear"), module_spec("fnet")],  # fnet is refused: it is not causal
        dim=8,
        heads=2,
        layers=1,
        settings=spec(**given).settings,
    )
    runs = plan_runs(plan)
    scheduling.POLL_SECONDS = 0.001
    schedule = Schedule(folder, executor=InlineExecutor())
    keys = [run.key for run in runs]
    write_record(folder, ComparisonRecord(plan=plan, command="regard compare", keys=keys))
    schedule.run(runs)
    schedule.close()
    return load_result(folder)


def main():
    words = [word for word in sys.argv[1:] if word != "compare"]
    given = {name: int(value) for name, value in (word.split("=") for word in words)}

    def work(folder, **given):
        if "compare" in sys.argv:
            compare(folder, **given)
        else:
            run_training(spec(**given), folder)

    with tempfile.TemporaryDirectory() as folder:  # what is imported on the way is imported once
        work(Path(folder), **given | {"steps": 1})
    print("ready", flush=True)
    for line in sys.stdin:
        folder, number = line.split()
        pid = os.fork()
        if pid == 0:
            seen = die_before(int(number), folder)
            work(Path(folder), **given)
            Path(folder).with_suffix(".changes").write_text(
                "\n".join(" ".join(change.split()) for change in seen)
            )
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
