"""Executors of `regard compare`: local processes, SLURM jobs (submitit) or Ray tasks.

Every executor calls `regard.compare.worker` in a process for each run. The run writes its log,
progress and result to its folder, and only these files are read: nothing is unpickled.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regard.compare.fork_server import ForkServer
from regard.environment import cores
from regard.errors import check_int, check_positive, did_you_mean
from regard.models import ModuleSpec

LOG_FILE = "log.txt"  # stdout and stderr of the run
STOP_FILE = "stop"  # asks the run to save a checkpoint and exit
JOBS_DIR = "jobs"  # of submitit, in the folder of the comparison
PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
DEFAULT_MINUTES = 60  # time limit of a SLURM job without a budget


class RunHandle(ABC):
    """A run that was started."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether it has ended, successfully or not."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def failure_reason(self) -> str:
        """Why the run was ended from outside; "" if it was not."""
        return ""


class Executor(ABC):
    """Starts runs.

    Attributes:
        threads: Threads of each run.
        has_queue: Whether a run may wait before it starts, and on another machine.
    """

    threads: int
    has_queue = True

    @abstractmethod
    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        """Start the run whose spec is in the folder; `seconds` limits a job in a queue."""

    def close(self) -> None:  # noqa: B027  most executors hold no resources
        """Release resources after the last run."""


# Opens the log and takes the start time before torch is imported: importing it counts too.
LAUNCHER = """
import os, sys, time
folder, log, threads = sys.argv[1:]
start_time = time.time()
os.environ["OMP_NUM_THREADS"] = threads
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
file = os.open(os.path.join(folder, log), FLAGS, 0o666)
os.dup2(file, 1)
os.dup2(file, 2)
from pathlib import Path
from regard.compare.worker import run_worker
sys.exit(run_worker(Path(folder), start_time))
"""


def worker_command(folder: Path, threads: int) -> list[str]:
    """Return the command of a run."""
    return [sys.executable, "-c", LAUNCHER, str(folder.absolute()), LOG_FILE, str(threads)]


class LocalExecutor(Executor):
    """Runs processes on this machine, which share its cores.

    Threads that wait do not spin: they would take the cores from the run beside them. On Linux the
    processes are forks of one that has imported PyTorch and read the data (`ForkServer`); not on
    machines with an accelerator, whose driver may be in use by then.
    """

    has_queue = False

    def __init__(self, root: Path, jobs: int) -> None:
        self.threads = max(1, cores() // jobs)
        self.forks = (
            sys.platform == "linux" and hasattr(os, "fork") and not torch.accelerator.is_available()
        )
        self.server: ForkServer | None = None

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        environment = {**os.environ, **PASSIVE_WAITING, "OMP_NUM_THREADS": str(self.threads)}
        if self.forks:
            if self.server is None or not self.server.is_alive():
                self.server = ForkServer(environment)
            self.server.start(folder)
            return ForkHandle(self.server, folder)
        process = subprocess.Popen(
            worker_command(folder, self.threads),
            # Ctrl-C is for the parent alone, which asks its runs to stop
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
            env=environment,
        )
        return ProcessHandle(process)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


class LocalHandle(RunHandle):
    """A process on this machine."""

    killed_by_us = False

    @abstractmethod
    def exit_code(self) -> int | None:
        """Its exit code, -n for signal n, or None while it runs."""

    def is_done(self) -> bool:
        return self.exit_code() is not None

    def failure_reason(self) -> str:
        code = self.exit_code()
        if self.killed_by_us or code is None or code >= 0:
            return ""
        name = signal.Signals(-code).name
        hint = " (possibly out of memory)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"


class ProcessHandle(LocalHandle):
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def exit_code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.killed_by_us = True
        self.process.kill()
        self.process.wait()


class ForkHandle(LocalHandle):
    """A process that a `ForkServer` has started."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.name = server, str(folder.absolute())

    def exit_code(self) -> int | None:
        alive = self.server.is_alive()
        self.server.update()
        code = self.server.exit_codes.get(self.name)
        return 1 if code is None and not alive else code

    def kill(self) -> None:
        self.killed_by_us = True
        self.server.update()
        if self.name not in self.server.pids:
            self.server.process.kill()  # it still reads the data for this run
            self.server.process.wait()
        elif self.name not in self.server.exit_codes:
            os.kill(self.server.pids[self.name], signal.SIGKILL)

    def failure_reason(self) -> str:
        ended = self.name not in self.server.exit_codes and not self.server.is_alive()
        return self.server.failure_reason() if ended else super().failure_reason()


class SlurmExecutor(Executor):
    """Submits SLURM jobs with submitit. All machines must see the folder of the comparison.

    Args:
        root: Folder of the comparison.
        jobs: Runs at a time; the queue needs no limit.
        partition: SLURM partition.
        cores: CPU cores per run.
        memory: Memory per run in GB.
        minutes: Time limit per job. Default: three times the estimated time of the run, or 60.
        cluster: "slurm", or "local" to try submitit without a cluster.
    """

    def __init__(
        self,
        root: Path,
        jobs: int,
        *,
        partition: str | None = None,
        cores: int = 1,
        memory: float | None = None,
        minutes: float | None = None,
        cluster: str = "slurm",
    ) -> None:
        check_int(1, cores=cores)
        for name, value in (("memory", memory), ("minutes", minutes)):
            if value is not None:
                check_positive(name, value)
        submitit = import_optional("submitit", "--executor slurm")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            self.submitit = submitit.AutoExecutor(folder=root / JOBS_DIR, cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"--executor slurm: {error}. Use --executor local to run on this machine."
            ) from None
        self.threads, self.minutes = cores, minutes
        parameters = {
            "cpus_per_task": cores,
            "mem_gb": memory,
            "slurm_partition": partition,
            "name": "regard",
        }
        self.submitit.update_parameters(
            **{name: value for name, value in parameters.items() if value is not None}
        )

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        default = DEFAULT_MINUTES if seconds is None else 1.1 * seconds / 60 + 2
        self.submitit.update_parameters(timeout_min=math.ceil(self.minutes or default))
        return SubmititHandle(
            self.submitit.submit(subprocess.call, worker_command(folder, self.threads))
        )


class SubmititHandle(RunHandle):
    """A submitit job. Its pickled result is never read."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def is_done(self) -> bool:
        return bool(self.job.done())

    def kill(self) -> None:
        self.job.cancel()

    def failure_reason(self) -> str:
        state = self.job.state
        if state in ("COMPLETED", "FINISHED"):
            return ""
        return f"job {self.job.job_id} ended with state {state}"


class RayExecutor(Executor):
    """Runs Ray tasks, on an existing cluster or on one that is started here.

    Args:
        root: Folder of the comparison; all machines must see it.
        jobs: Runs at a time.
        cores: CPU cores per run.
        address: Address of a cluster; "auto" finds a running one.
    """

    def __init__(
        self, root: Path, jobs: int, *, cores: int = 1, address: str | None = None
    ) -> None:
        check_int(1, cores=cores)
        # silences a warning of Ray about a coming change, as the warning recommends
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self.ray, self.threads = import_optional("ray", "--executor ray"), cores
        local: dict[str, Any] = {}
        if not address:
            local = {"num_cpus": max(os.cpu_count() or 1, cores), "include_dashboard": False}
        try:
            self.ray.init(
                address=address, logging_level=logging.ERROR, log_to_driver=False, **local
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"--executor ray: {error}. Without an address a cluster is started here."
            ) from None
        self.remote = self.ray.remote(num_cpus=cores, max_retries=0)(run_command)

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        return RayHandle(self.ray, self.remote.remote(worker_command(folder, self.threads)))

    def close(self) -> None:
        self.ray.shutdown()


def run_command(command: list[str]) -> None:
    """Run a command. Ray needs a function with a plain signature, which subprocess.call is not."""
    subprocess.call(command)


class RayHandle(RunHandle):
    """A Ray task. Its result is never fetched."""

    def __init__(self, ray: Any, task: Any) -> None:
        self.ray, self.task = ray, task

    def is_done(self) -> bool:
        return bool(self.ray.wait([self.task], timeout=0)[0])

    def kill(self) -> None:
        """End the task; the process of the run exits when it sees that its parent is gone."""
        self.ray.cancel(self.task, force=True)


EXECUTORS: dict[str, Callable[..., Executor]] = {
    "local": LocalExecutor,
    "slurm": SlurmExecutor,
    "ray": RayExecutor,
}


def create_executor(spec: ModuleSpec, root: Path, jobs: int) -> Executor:
    """Create an executor by name, such as `module_spec("slurm", partition="cpu")`."""
    if spec.name not in EXECUTORS:
        raise ValueError(f"Unknown executor {spec.name!r}: {did_you_mean(spec.name, EXECUTORS)}")
    known = set(inspect.signature(EXECUTORS[spec.name]).parameters) - {"root", "jobs"}
    for name in spec.arguments:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it has no options"
            raise ValueError(f"--executor {spec.name} has no option {name!r}: {hint}")
    return EXECUTORS[spec.name](root, jobs, **spec.arguments)


def import_optional(name: str, needed_by: str) -> Any:
    """Import an optional package; ImportError names the extra that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f"{needed_by} needs the package {name}: pip install 'regard[sweep]'"
        ) from None
