"""Devices and dtypes by name, and what differs between devices: clocks, memory, random numbers.

`resolve_device("auto")` is the only place that chooses a device: a CUDA GPU if there is one, then
Apple's MPS, then the CPU.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from regard.errors import SIMILARITY

DEVICES = ("auto", "cpu", "cuda", "cuda:N", "mps")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
MIXED_PRECISION = ("float32", "bfloat16", "float16")  # float32: no autocast
WITHOUT_FLOAT64 = ("mps",)
NICKNAMES = {  # for suggestions in errors
    "gpu": "cuda",
    "metal": "mps",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


# ------------------------------------------------------------------------------------------ devices
def available_devices() -> list[str]:
    """The devices of this machine: "cpu", then "cuda:0", "cuda:1", ..., "mps", or the name of
    another accelerator of PyTorch, such as "xpu"."""
    names = ["cpu", *(f"cuda:{i}" for i in range(cuda_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type not in ("cuda", "mps"):
        names.append(other.type)
    return names


def cuda_count() -> int:
    """Number of CUDA devices; 0 if CUDA is not available."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def parse_device(device: str | torch.device) -> torch.device | None:
    """A device by name, whether or not this machine has it; None for "auto".

    Raises:
        ValueError: If there is no such device, with the nearest name.
    """
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return None
    if isinstance(device, str):
        name = device.removesuffix(":0")
        if name in available_devices() or re.fullmatch(r"cpu|mps|cuda(:\d+)?", name, re.ASCII):
            return torch.device(name)
    raise ValueError(_unknown("device", device, DEVICES))


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The device for a name: "auto", "cpu", "cuda", "cuda:1" or "mps".

    Args:
        device: A name, or a `torch.device`. "auto" is "cuda" if available, else "mps" if available,
            else "cpu". Another accelerator that PyTorch finds, such as "xpu", is used if it is
            named.

    Raises:
        ValueError: If the name is unknown, or the device is not available on this machine.
    """
    parsed = parse_device(device)
    available = available_devices()
    if parsed is None:
        found = next((name for name in ("cuda:0", "mps") if name in available), "cpu")
        return torch.device(found.removesuffix(":0"))
    name = f"cuda:{parsed.index or 0}" if parsed.type == "cuda" else parsed.type
    if parsed.type in ("cuda", "mps") and name not in available:
        raise ValueError(
            f"Device {str(parsed)!r} is not available on this machine. "
            f"Available: {', '.join(available)}."
        )
    return parsed


def describe_device(device: torch.device) -> str:
    """Name of a device with its product name, such as "cuda (NVIDIA A100-SXM4-80GB)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


# ------------------------------------------------------------------------------------------- dtypes
def resolve_dtype(
    dtype: str | torch.dtype,
    device: torch.device | None = None,
    choices: Iterable[str] = MIXED_PRECISION,
) -> torch.dtype:
    """The dtype for a name, checked against what a device supports.

    Args:
        dtype: A name such as "bfloat16", or a `torch.dtype`.
        device: Device that has to support it. None: not checked.
        choices: Valid names.

    Raises:
        ValueError: If the name is unknown, or the device does not support the dtype.
    """
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    choices = tuple(choices)
    if name not in choices:
        raise ValueError(_unknown("dtype", name, choices))
    if device is not None:
        supported = supported_dtypes(device)
        if name not in supported:
            raise ValueError(
                f"Device {str(device)!r} does not support {name}. "
                f"Supported: {', '.join(each for each in supported if each in choices)}."
            )
    return DTYPES[name]


def supported_dtypes(device: torch.device) -> tuple[str, ...]:
    """Names of the floating-point dtypes that a device supports."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return tuple(name for name in DTYPES if name != "bfloat16")  # before Ampere
    if device.type == "mps":
        has_bfloat16 = torch.backends.mps.is_macos_or_newer(14, 0)
        return ("float32", *(["bfloat16"] if has_bfloat16 else []), "float16")
    return tuple(DTYPES)


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it; for positions, angles and counts."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """A context for mixed precision; float32 and float64 run as they are."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(device.type, dtype)
    return nullcontext()


# ------------------------------------------------------------------ clocks, memory, random numbers
def synchronize(device: torch.device) -> None:
    """Wait until a device has finished; call it before reading a clock. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement for `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "mps":
        torch.mps.empty_cache()


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on a CUDA device since `reset_peak_memory`.

    MPS counts no peak. There it is the memory that the driver has allocated, which does not shrink
    before `reset_peak_memory`.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    raise ValueError(f"The peak memory of device {str(device)!r} is unknown.")


def get_rng_state(device: torch.device) -> Tensor | None:
    """State of the random number generator of an accelerator, on the CPU; None for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Restore a state of `get_rng_state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


def _unknown(what: str, value: object, choices: Iterable[str]) -> str:
    choices = tuple(choices)
    message = f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}"
    word = str(value).strip().lower()
    if "," in word:
        return f"{message}: give one {what}"
    if NICKNAMES.get(word) in choices:
        return f"{message}; did you mean {NICKNAMES[word]!r}?"
    close = difflib.get_close_matches(word, choices, 1, SIMILARITY)
    return f"{message}; did you mean {close[0]!r}?" if close else message
