"""The processes of a run, as `torchrun` starts them, and what they say to each other.

RANK, WORLD_SIZE and LOCAL_RANK are read from the environment.  They talk through gloo on CPUs and through nccl on GPUs.
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

T = TypeVar("T")
PATIENCE = 600.0  # seconds to wait for another process
SIGNS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "timed out",
)  # of an error that a lost process causes


def is_main_process() -> bool:
    """Whether this process is the one that shows and writes; also before `init_distributed`."""
    return os.environ.get("RANK", "0") == "0"


class ProcessLost(RuntimeError):
    """Another process of the run ended or does not answer."""


class WorkerGroup:
    """All processes of the run; one, where nobody started more.

    rank    the number of this one
    world   how many there are
    device  what this one computes on
    """

    def __init__(self) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if started else 0
        self.world = dist.get_world_size() if started else 1
        on_gpu = started and dist.get_backend() == "nccl"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and shows."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Numbers added up over all processes, in float64."""
        if self.world == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        return found.tolist()

    def first(self, do: Callable[[], T]) -> T:
        """Do it in the first process alone; all get what it returned, or raise what it raised, once it is done."""
        if self.world == 1:
            return do()
        told: list[Any] = [None, None]
        if self.leads:
            try:
                told[0] = do()
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, device=self.device)
        if told[1] is not None:
            raise told[1]
        return told[0]

    def every(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one shape, by rank."""
        if self.world == 1:
            return [tensor]
        sent = tensor.to(self.device).contiguous()
        found = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(found, sent)
        return [each.to(tensor.device) for each in found]


@contextmanager
def init_distributed(patience: float = PATIENCE) -> Iterator[None]:
    """Inside, the processes that `torchrun` started know of each other.  Where it started none, or where they do already,
    nothing changes."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=patience))
    try:
        with detect_lost_process():
            yield
        dist.barrier()  # who leaves while others are still at it may bring them down
    finally:
        gc.collect()  # what still holds the group, such as a model that is split, must be gone before it
        dist.destroy_process_group()


@contextmanager
def detect_lost_process() -> Iterator[None]:
    """Inside, what goes wrong because another process is gone is said in words."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in SIGNS):
            text = " ".join(str(error).split())[:200]
            raise ProcessLost(
                "another process of this run ended or does not answer; its own message says why, and the same command goes on "
                f"from the last checkpoint ({text})"
            ) from error
        raise
