"""Where runs are run: processes of this machine, jobs of a SLURM cluster, tasks of Ray.

Each run is the same process everywhere, `python -m regard.compare.worker FOLDER`.  What it does and says goes into its folder,
and is read from there: nothing that another machine sends back is unpacked.
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
from pathlib import Path
from typing import Any

from regard.errors import check_int, check_positive, did_you_mean
from regard.models import ModuleSpec

LOG_FILE = "log.txt"  # what a process said
STOP_FILE = "stop"  # a file that asks a run to save itself and end
LOCK_FILE = "lock"  # one that is held while a process is at work in the folder
MINUTES = 60  # of a job, where there is no budget


class RunHandle(ABC):
    """A run at work."""

    @abstractmethod
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def why(self) -> str:
        """What ended a run from outside, so that it could not say so itself; "": nothing did."""
        return ""


class Executor(ABC):
    """Starts runs.

    threads   of each run
    queues    a run may wait before it begins, for as long as others please: so its time is its own, and no common end
    """

    threads: int
    has_queue = True

    @abstractmethod
    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        """Begin the run whose words are in the folder; it is told to take so long at most."""

    def close(self) -> None:  # noqa: B027  most have nothing to let go of
        """No more runs come."""


def worker_command(folder: Path, threads: int) -> list[str]:
    """What to call for a run, wherever.  The shell says when that was: to load torch takes seconds, and they count."""
    script = f'OMP_NUM_THREADS="$2" exec "$0" -m regard.compare.worker "$1" "$(date +%s)" > "$1/{LOG_FILE}" 2>&1'
    return ["sh", "-c", script, sys.executable, str(folder.absolute()), str(threads)]


# ---------------------------------------------------------------------------------------------- this machine
class LocalExecutor(Executor):
    """Processes of this machine, which share its cores."""

    has_queue = False

    def __init__(self, root: Path, jobs: int) -> None:
        self.threads = max(1, (os.cpu_count() or 1) // jobs)

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        """See `Place`."""
        return ProcessHandle(
            subprocess.Popen(worker_command(folder, self.threads), start_new_session=True)
        )


class ProcessHandle(RunHandle):
    """A process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.ours = process, False

    def over(self) -> bool:
        """See `Job`."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """See `Job`."""
        self.ours = True
        self.process.kill()
        self.process.wait()

    def why(self) -> str:
        """See `Job`."""
        code = self.process.returncode
        if self.ours or code >= 0:
            return ""
        return f"ended by {signal.Signals(-code).name}{', as is done where memory runs out' if code == -signal.SIGKILL else ''}"


# ---------------------------------------------------------------------------------------------- SLURM
class SlurmExecutor(Executor):
    """Jobs of a SLURM cluster, by submitit; the folder of the comparison must be one that all machines see.

    partition   where to queue
    cores       of each run; `memory` in GB
    minutes     after which a job is ended; without it the time that the budget gives a run, and a little more, else an hour
    cluster     "slurm"; "local" does the same without one, to try it out
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
        submitit = import_optional("submitit", "--on slurm")
        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            self.executor = submitit.AutoExecutor(folder=root / "jobs", cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--on slurm: {error}; --on local runs on this machine") from None
        self.threads, self.minutes = cores, minutes
        given = {
            "cpus_per_task": cores,
            "mem_gb": memory,
            "slurm_partition": partition,
            "name": "regard",
        }
        self.executor.update_parameters(
            **{name: value for name, value in given.items() if value is not None}
        )

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        """See `Place`."""
        usual = MINUTES if seconds is None else 1.1 * seconds / 60 + 2
        self.executor.update_parameters(timeout_min=math.ceil(self.minutes or usual))
        return SubmititHandle(
            self.executor.submit(subprocess.call, worker_command(folder, self.threads))
        )


class SubmititHandle(RunHandle):
    """A job of submitit, whose pickled result is left where it is."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def over(self) -> bool:
        """See `Job`."""
        return bool(self.job.done())

    def kill(self) -> None:
        """See `Job`."""
        self.job.cancel()

    def why(self) -> str:
        """See `Job`."""
        state = self.job.state
        return (
            "" if state in ("COMPLETED", "FINISHED") else f"job {self.job.job_id} ended as {state}"
        )


# ---------------------------------------------------------------------------------------------- Ray
def call(words: list[str]) -> None:
    """What Ray does: it wants a function with a signature of its own."""
    subprocess.call(words)


class RayExecutor(Executor):
    """Tasks of Ray: of the cluster at `address`, or of one that is started here.

    cores     of each run
    address   "auto" finds a cluster that runs; the folder of the comparison must be one that all its machines see
    """

    def __init__(
        self, root: Path, jobs: int, *, cores: int = 1, address: str | None = None
    ) -> None:
        check_int(1, cores=cores)
        os.environ.setdefault(
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
        )  # it warns of what will change, and asks for this
        self.ray, self.threads = import_optional("ray", "--on ray"), cores
        own = (
            {}
            if address
            else {"num_cpus": max(os.cpu_count() or 1, cores), "include_dashboard": False}
        )
        try:
            self.ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"--on ray: {error}; without an address a cluster is started here"
            ) from None
        self.remote = self.ray.remote(num_cpus=cores, max_retries=0)(call)

    def start(self, folder: Path, seconds: float | None) -> RunHandle:
        """See `Place`."""
        return RayHandle(self.ray, self.remote.remote(worker_command(folder, self.threads)))

    def close(self) -> None:
        """See `Place`."""
        self.ray.shutdown()


class RayHandle(RunHandle):
    """A task of Ray, whose result is never asked for."""

    def __init__(self, ray: Any, task: Any) -> None:
        self.ray, self.task = ray, task

    def over(self) -> bool:
        """See `Job`."""
        return bool(self.ray.wait([self.task], timeout=0)[0])

    def kill(self) -> None:
        """See `Job`: the process of the run ends when it sees that its parent is gone."""
        self.ray.cancel(self.task, force=True)


# ---------------------------------------------------------------------------------------------- by name
EXECUTORS: dict[str, Callable[..., Executor]] = {
    "local": LocalExecutor,
    "slurm": SlurmExecutor,
    "ray": RayExecutor,
}


def create_executor(part: ModuleSpec, root: Path, jobs: int) -> Executor:
    """A place by name: `Part(name="slurm", arguments={"partition": "cpu"})`; what is wrong is named with the nearest."""
    if part.name not in EXECUTORS:
        raise ValueError(f"no place {part.name!r} to run: {did_you_mean(part.name, EXECUTORS)}")
    known = [
        name
        for name in inspect.signature(EXECUTORS[part.name]).parameters
        if name not in ("root", "jobs")
    ]
    for name in part.arguments:
        if name not in known:
            raise ValueError(
                f"--on {part.name} takes no {name!r}: {did_you_mean(name, known) if known else 'it takes none'}"
            )
    return EXECUTORS[part.name](root, jobs, **part.arguments)


def import_optional(name: str, what: str) -> Any:
    """An optional package; a missing one is named with its extra."""
    try:
        return __import__(name)
    except ImportError:
        raise ImportError(f"{what} needs the package {name}: pip install 'regard[sweep]'") from None
