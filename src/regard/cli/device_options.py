"""The options --device and --dtype, which several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.output import USAGE, fail

if TYPE_CHECKING:
    import torch

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="cpu, cuda, cuda:N or mps; auto: cuda if available, else mps, else cpu."
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32; bfloat16 or float16 for mixed precision.")
]


def check_device(device: str, dtype: str, choices: Iterable[str] | None = None) -> torch.device:
    """The device of the options; a wrong option ends the command with exit code 2.

    Args:
        choices: Valid names of a dtype. None: those of mixed precision.
    """
    from regard.device import MIXED_PRECISION, resolve_device, resolve_dtype

    try:
        found = resolve_device(device)
        resolve_dtype(dtype, found, MIXED_PRECISION if choices is None else choices)
    except ValueError as error:
        fail(str(error), USAGE)
    return found


def check_device_names(device: str, dtype: str) -> None:
    """Like `check_device`, for another machine, which may have other devices than this one."""
    from regard.device import parse_device, resolve_dtype

    try:
        parse_device(device)
        resolve_dtype(dtype)
    except ValueError as error:
        fail(str(error), USAGE)
