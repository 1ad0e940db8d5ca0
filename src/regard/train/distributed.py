"""The processes of a training run, as started by `torchrun`, and their collective operations.

RANK, WORLD_SIZE and LOCAL_RANK are read from the environment. The backend is gloo on CPUs and nccl
on GPUs, where process i of a machine uses its GPU i.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from regard.device import cuda_count, parse_device, resolve_device

T = TypeVar("T")
TIMEOUT = 600.0  # seconds to wait for another process
CONNECTION_ERRORS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")


def is_main_process() -> bool:
    """Whether this process prints and writes files; also valid before `init_distributed`."""
    return os.environ.get("RANK", "0") == "0"


class ProcessLost(RuntimeError):
    """Another process of the run ended or does not respond."""


class WorkerGroup:
    """All processes of the run; a single one without `torchrun`.

    Args:
        device: Device by name, as in `resolve_device`.

    Attributes:
        rank: Rank of this process.
        world_size: Number of processes.
        device: Device of this process.
    """

    def __init__(self, device: str | torch.device = "auto") -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if started else 0
        self.world_size = dist.get_world_size() if started else 1
        if self.world_size == 1:
            self.device = resolve_device(device)
            return
        on_gpu = dist.get_backend() == "nccl"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        asked = parse_device(device)
        if asked is not None and asked.type != self.device.type:
            raise ValueError(
                f"The processes communicate by {dist.get_backend()}, which needs "
                f"{self.device.type} tensors, but the device is {str(asked)!r}: give the same "
                "device to `init_distributed`."
            )

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The values summed over all processes, in float64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process; all processes return its result or its error."""
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all processes by rank, of any type."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes by rank; they must have the same shape."""
        if self.world_size == 1:
            return [tensor]
        own = tensor.to(self.device).contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own)
        return [each.to(tensor.device) for each in gathered]


def local_device(device: str | torch.device = "auto") -> torch.device:
    """The device of this process among the processes that `torchrun` started on this machine.

    Args:
        device: "auto" (a GPU for each process if there are GPUs, else the CPU), "cpu" or "cuda".
    """
    asked = parse_device(device)
    if asked is None:
        asked = torch.device("cuda" if cuda_count() else "cpu")
    if asked.type == "mps":
        raise ValueError("Several processes cannot share device 'mps': use 'cpu' or one process.")
    if asked.type == "cuda" and asked.index is not None:
        raise ValueError(
            f"torchrun gives every process a GPU of its own: use device 'cuda', not {str(asked)!r}."
        )
    resolve_device(asked)
    if asked.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= cuda_count():
            raise ValueError(
                f"Process {index} of this machine has no GPU, since there are {cuda_count()}: "
                "start fewer processes, or use device 'cpu'."
            )
        return torch.device("cuda", index)
    return asked


@contextmanager
def init_distributed(
    timeout: float = TIMEOUT, *, device: str | torch.device = "auto"
) -> Iterator[None]:
    """Initialize `torch.distributed` for the processes that `torchrun` started.

    Does nothing for a single process, or if `torch.distributed` is already initialized.

    Args:
        timeout: Seconds to wait for another process before raising `ProcessLost`.
        device: "auto", "cpu" (gloo) or "cuda" (nccl).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    own = local_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        with detect_lost_process():
            yield
        dist.barrier()  # a process that leaves early may crash the others
    finally:
        gc.collect()  # a sharded model holds the process group and must be freed first
        dist.destroy_process_group()


@contextmanager
def detect_lost_process() -> Iterator[None]:
    """Raise `ProcessLost` with a readable message for errors that a lost process causes."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if isinstance(error, dist.DistError) or any(
            sign in text.lower() for sign in CONNECTION_ERRORS
        ):
            raise ProcessLost(
                "Another process of this run ended or does not respond; see its own error message. "
                f"The same command resumes from the last checkpoint. ({text[:200]})"
            ) from error
        raise
