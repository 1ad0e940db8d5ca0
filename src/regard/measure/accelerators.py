"""Peak performance of accelerators, from their data sheets, and of this machine, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from regard.device import synchronize
from regard.environment import total_memory
from regard.errors import did_you_mean, format_validation_error
from regard.models.config import StrictModel

GB, TERA = 10**9, 10**12
THIS_MACHINE = "this machine"

DType = Literal["float32", "tf32", "bfloat16"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Accelerator(StrictModel):
    """Peak performance of a device.

    Args:
        flops: FLOP/s of dense matrix products, by dtype.
        bandwidth: Memory bandwidth in bytes/s.
        memory: Memory in bytes.
        link: Bandwidth to neighbouring devices in bytes/s, both directions together.
        source: Where the numbers come from.
        efficiency: Share of the peak FLOP/s that a training step reaches.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    flops: Annotated[dict[DType, Positive], Field(min_length=1)]
    bandwidth: Positive
    memory: Annotated[int, Field(ge=1)]
    link: Positive
    source: str = "user"
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.4  # what large training runs report
    name: str = ""

    def peak(self, dtype: str) -> float:
        """FLOP/s for a dtype."""
        peaks = {str(known): flops for known, flops in self.flops.items()}
        if dtype not in peaks:
            raise ValueError(f"{self.name} has no peak for {dtype}: {did_you_mean(dtype, peaks)}")
        return peaks[dtype]


def _data_sheet(
    name: str, tflops: tuple[float, ...], bandwidth: int, memory: int, link: int, source: str
) -> Accelerator:
    """Peaks in TFLOP/s for bfloat16, tf32 and float32; GB/s and GB for the rest."""
    dtypes: tuple[DType, ...] = ("bfloat16", "tf32", "float32")
    flops = {dtype: peak * TERA for dtype, peak in zip(dtypes, tflops, strict=False)}
    return Accelerator(
        name=name,
        flops=flops,
        bandwidth=bandwidth * GB,
        memory=memory * GB,
        link=link * GB,
        source=source,
    )


_DEVICES = [
    _data_sheet("A100-80", (312, 156, 19.5), 2039, 80, 600, "NVIDIA A100 data sheet, 80GB SXM"),
    _data_sheet("H100", (989, 494, 67), 3350, 80, 900, "NVIDIA H100 data sheet, SXM, dense"),
    _data_sheet("H200", (989, 494, 67), 4800, 141, 900, "NVIDIA H200 data sheet, SXM, dense"),
    _data_sheet("L4", (121, 60, 30.3), 300, 24, 64, "NVIDIA L4 data sheet, dense; PCIe 4 x16"),
    _data_sheet("TPU-v5e", (197,), 819, 16, 400, "Google Cloud documentation, TPU v5e"),
]
ACCELERATORS = {device.name: device for device in _DEVICES}


def find_accelerator(name: str, table: Mapping[str, Accelerator] = ACCELERATORS) -> Accelerator:
    """An accelerator by name, in any case. "this machine" is measured."""
    known = {each.lower(): each for each in (*table, THIS_MACHINE)}
    if name.lower() not in known:
        raise ValueError(f"no accelerator {name!r}: {did_you_mean(name, known.values())}")
    exact = known[name.lower()]
    return measure_this_machine() if exact == THIS_MACHINE else table[exact]


def read_accelerators(path: Path) -> dict[str, Accelerator]:
    """Read a JSON file {name: {"flops": {"bfloat16": 1e15}, "bandwidth": .., "memory": .., "link":
    ..}}."""
    try:
        table = TypeAdapter(dict[str, Accelerator]).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        message = format_validation_error(error)
        raise ValueError(f"{path} is not a table of accelerators: {message}") from None
    if not table:
        raise ValueError(f"{path} has no accelerators")
    return {name: device.model_copy(update={"name": name}) for name, device in table.items()}


@lru_cache(1)
def measure_this_machine() -> Accelerator:
    """Time matrix products and copies on the CPU; takes about a second."""

    def fastest(run: Callable[[], object]) -> float:
        return min(processor_seconds(run) for _ in range(5))

    def product_flops(dtype: torch.dtype, size: int = 1024) -> float:
        x = torch.ones(size, size, dtype=dtype)
        return 2 * size**3 / fastest(lambda: x @ x)

    x, y, out = (torch.ones(1 << 25) for _ in range(3))
    bandwidth = 3 * x.nbytes / fastest(lambda: torch.add(x, y, out=out))
    return Accelerator(
        name=THIS_MACHINE,
        flops={
            "float32": product_flops(torch.float32),
            "bfloat16": product_flops(torch.bfloat16),
        },
        bandwidth=bandwidth,
        memory=total_memory(),
        link=bandwidth,
        source=f"measured with {torch.get_num_threads()} threads",
        efficiency=0.65,  # fitted to the models of docs/cost.md
    )


def call_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Processor time of a call on the CPU; elapsed time on an accelerator until it has finished."""
    if device.type == "cpu":
        return processor_seconds(run)
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def processor_seconds(run: Callable[[], object]) -> float:
    """Processor time of a call, divided by the number of threads. Other processes do not count."""
    start = time.process_time()
    run()
    return (time.process_time() - start) / torch.get_num_threads()
