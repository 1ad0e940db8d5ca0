"""A small comparison with a budget in one process; with a number, killed at that start of a run.

`python compare_cases.py FOLDER [NUMBER]`
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import regard.compare.comparison as comparing
import regard.compare.halving as halving
import regard.compare.schedule as scheduling
from regard.compare import Comparison, ComparisonPlan, Schedule
from regard.compare.costs import REQUEST_FILE, measure_costs
from regard.compare.executors import Executor, RunHandle
from regard.models import module_spec
from regard.train.run import read_spec, run_training
from regard.train.settings import TrainSettings


class EndedRun(RunHandle):
    """A run that has ended."""

    def is_done(self):
        return True

    def kill(self):
        pass


class InlineExecutor(Executor):
    """Trains in this process, and kills it when the run with a number starts."""

    threads = 1

    def __init__(self, kill_at=None):
        self.kill_at, self.started = kill_at, 0

    def start(self, folder, seconds):
        if (folder / REQUEST_FILE).exists():
            measure_costs(folder, time.time())
            return EndedRun()
        self.started += 1
        if self.started == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        run_training(read_spec(folder), folder)
        return EndedRun()


PLAN = ComparisonPlan(
    tasks=[module_spec("copy", length=9, symbols=4)],
    mixers=[module_spec(name) for name in ("linear", "retnet", "delta_rule", "fnet")],
    rates=(1e-3, 1e-2),
    seeds=2,
    budget=900,  # more than 40 steps need, so that a busy machine changes nothing
    dim=8,
    heads=2,
    layers=1,
    settings=TrainSettings(steps=40, batch_size=4),
)


def compare(folder, *, kill_at=None, plan=PLAN, plan_folder=None):
    """A comparison as the command executes it, without its page."""
    scheduling.POLL_SECONDS, comparing.COST_SECONDS = 0.001, 1.0
    halving.MAX_EXAMPLES = 128
    torch.set_num_threads(1)
    schedule = Schedule(Path(folder), executor=InlineExecutor(kill_at))
    comparison = Comparison(schedule, plan, "regard compare", plan_folder=plan_folder)
    try:
        comparison.prepare()
        comparison.run()
    finally:
        schedule.close()
    return comparison


if __name__ == "__main__":
    compare(sys.argv[1], kill_at=int(sys.argv[2]))
