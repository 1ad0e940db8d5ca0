"""Machines: what they can do at most, as their makers say, or as measured here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from regard.errors import did_you_mean
from regard.models.config import StrictModel

GB, TERA = 10**9, 10**12
HERE = "this machine"


@dataclass(frozen=True)
class Accelerator:
    """A device.

    flops       FLOP/s of dense matrix products, by the type of number
    bandwidth   bytes/s of its memory, of which there are `memory` bytes
    link        bytes/s to its neighbours, both directions together
    source      where the numbers come from
    efficiency  the share of the peak that a training step reaches: for data-centre devices what large runs report, here
                what models of docs/cost.md reached
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    link: float
    source: str
    efficiency: float = 0.4


TABLE = {
    device.name: device
    for device in (
        Accelerator(
            "A100-80",
            {"bfloat16": 312 * TERA, "tf32": 156 * TERA, "float32": 19.5 * TERA},
            2039 * GB,
            80 * GB,
            600 * GB,
            "NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM",
        ),
        Accelerator(
            "H100",
            {"bfloat16": 989 * TERA, "tf32": 494 * TERA, "float32": 67 * TERA},
            3350 * GB,
            80 * GB,
            900 * GB,
            "NVIDIA H100 Tensor Core GPU data sheet, SXM, without sparsity",
        ),
        Accelerator(
            "H200",
            {"bfloat16": 989 * TERA, "tf32": 494 * TERA, "float32": 67 * TERA},
            4800 * GB,
            141 * GB,
            900 * GB,
            "NVIDIA H200 Tensor Core GPU data sheet, SXM, without sparsity",
        ),
        Accelerator(
            "L4",
            {"bfloat16": 121 * TERA, "tf32": 60 * TERA, "float32": 30.3 * TERA},
            300 * GB,
            24 * GB,
            64 * GB,
            "NVIDIA L4 Tensor Core GPU data sheet, without sparsity; its link is PCIe 4 x16",
        ),
        Accelerator(
            "TPU-v5e",
            {"bfloat16": 197 * TERA},
            819 * GB,
            16 * GB,
            400 * GB,
            "Google Cloud documentation, TPU v5e: 1,600 Gbit/s between chips each way, 400 GB/s both ways",
        ),
    )
}


def accelerator(name: str, table: Mapping[str, Accelerator] = TABLE) -> Accelerator:
    """By name, whatever its case; "this machine" is measured."""
    known = {each.lower(): each for each in (*table, HERE)}
    found = known.get(name.lower())
    if found is None:
        raise ValueError(f"no accelerator {name!r}: {did_you_mean(name, known.values())}")
    return this_machine() if found == HERE else table[found]


# ---------------------------------------------------------------------------------------------- tables of one's own
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AcceleratorEntry(StrictModel):
    """An accelerator in a file: see `Accelerator`, in the same units, FLOP/s, bytes/s and bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    flops: Annotated[dict[Literal["float32", "tf32", "bfloat16"], Amount], Field(min_length=1)]
    bandwidth: Amount
    memory: Annotated[int, Field(ge=1)]
    link: Amount
    source: str = "given"
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.4


def read_table(path: Path) -> dict[str, Accelerator]:
    """Accelerators of a JSON file, {name: {"flops": {"bfloat16": 1e15}, "bandwidth": .., "memory": .., "link": ..}}."""
    try:
        given = TypeAdapter(dict[str, AcceleratorEntry]).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{path} is no table of accelerators: {where}: {first['msg']}") from None
    if not given:
        raise ValueError(f"{path} names no accelerator")
    return {name: Accelerator(name, **entry.model_dump()) for name, entry in given.items()}


def peak(device: Accelerator, dtype: str) -> float:
    """FLOP/s for a type of number."""
    if dtype not in device.flops:
        raise ValueError(
            f"{device.name} has no peak for {dtype}: {did_you_mean(dtype, device.flops)}"
        )
    return device.flops[dtype]


# ---------------------------------------------------------------------------------------------- this machine
@lru_cache(1)
def this_machine() -> Accelerator:
    """Products and copies, timed: a second or so."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = copy_rate()
    flops = {"float32": product_rate(torch.float32), "bfloat16": product_rate(torch.bfloat16)}
    threads = torch.get_num_threads()
    return Accelerator(
        HERE, flops, bandwidth, memory, bandwidth, f"measured, with {threads} threads", 0.65
    )


def product_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """FLOP/s of a product (size size) (size size)."""
    x = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: x @ x)


def copy_rate(size: int = 1 << 25) -> float:
    """bytes/s, read and written, of a sum of two large tensors."""
    x, y, out = (torch.ones(size) for _ in range(3))
    return 3 * 4 * size / _best(lambda: torch.add(x, y, out=out))


def _best(run: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the fastest run."""
    return min(processor_seconds(run) for _ in range(rounds))


def processor_seconds(run: Callable[[], object]) -> float:
    """Seconds of the processor for each thread, so that what else a busy machine does is left out."""
    start = time.process_time()
    run()
    return (time.process_time() - start) / torch.get_num_threads()
