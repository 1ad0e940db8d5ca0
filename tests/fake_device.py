"""A fake accelerator: tensors on device "fakegpu" have shapes, dtypes and a device, but no data.

Tensors on the CPU stay real. So code runs as on a machine with a GPU: what the host computes is
computed, an operation that mixes CPU and GPU tensors raises, and what the host reads from the GPU
is counted. (Under a plain `FakeTensorMode` the CPU tensors would be fake as well, and every mask or
layout that the host computes would stop the run.)

    with fake_device() as gpu:
        mixer = regard.create("local", dim=32, heads=4).to(gpu.device)
        y = mixer(torch.randn(2, 100, 32, device=gpu.device))
    assert gpu.reads == 0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from regard import device

NAME = "fakegpu"
SWAP_TENSORS = torch.utils.swap_tensors


class UnsupportedDtype(TypeError):
    """A tensor has a dtype that the device does not have."""


class Module(_DummyBackendModule):
    """`torch.fakegpu`, with what autocast and checkpointing ask for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield


@lru_cache(1)
def register() -> None:
    """Register the device with PyTorch, once for a process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())


def is_on_device(value: object) -> bool:
    """Whether a value is a tensor on the fake device, or names that device."""
    if isinstance(value, torch.Tensor):
        return value.device.type == NAME
    return isinstance(value, torch.device) and value.type == NAME


class FakeDeviceMode(TorchDispatchMode):
    """Runs operations on the fake device without data, and all others as they are.

    Args:
        scalar: What the host reads from the device.
        float64: Whether the device has float64; MPS has not.

    Attributes:
        device: The fake device.
        reads: How often the host has read a number from the device.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, scalar: float, float64: bool) -> None:
        super().__init__()
        self.scalar, self.float64 = scalar, float64
        self.device, self.reads, self.fake = torch.device(NAME), 0, FakeTensorMode()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        leaves = tree_leaves((args, kwargs))
        if not any(is_on_device(leaf) or isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
            return self.scalar if args[0].is_floating_point() else int(self.scalar)
        if any(isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) for x in leaves):
            args, kwargs = tree_map_only(torch.Tensor, self.to_fake, (args, kwargs))
        with self.fake:
            out = func(*args, **kwargs)
        for leaf in () if self.float64 else tree_leaves(out):
            wide = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64
            if wide and is_on_device(leaf):
                raise UnsupportedDtype(f"{func} gives float64, which this device does not have")
        return out

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real CPU tensor as a fake one on the CPU; it still does not mix with device tensors."""
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)


class MoveNewTensors(TorchFunctionMode):
    """`torch.tensor(..., device="fakegpu")` copies in C++, past all modes: here in two steps."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            device = kwargs.pop("device", None)
            if device is None and func is torch.Tensor.new_tensor:
                device = args[0].device
            if func is torch.Tensor.new_tensor:
                kwargs.setdefault("dtype", args[0].dtype)
                func, args = torch.tensor, args[1:]
            if device is None or torch.device(device).type != NAME:
                return func(*args, device=device, **kwargs)
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def swap_unless_equal(old: torch.Tensor, new: torch.Tensor) -> None:
    """`Module.to` swaps fake parameters, also those of a shared module that it has moved before."""
    if (old.device, old.dtype) != (new.device, new.dtype):
        SWAP_TENSORS(old, new)


@contextmanager
def fake_device(scalar: float = 1.0, *, float64: bool = True) -> Iterator[FakeDeviceMode]:
    """Run the block as if this machine had an accelerator; modules move there with `.to(device)`.

    An operation whose result has a size that depends on data, such as `nonzero`, raises
    `DynamicOutputShapeException`.

    Args:
        scalar: What the host reads from the device, wherever it reads a number.
        float64: Whether the device has float64; otherwise such a tensor raises `UnsupportedDtype`.
    """
    register()
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # real -> fake is another type
    mode = FakeDeviceMode(scalar, float64)
    without_float64 = (*device.WITHOUT_FLOAT64, *([] if float64 else [NAME]))
    try:
        with (
            mock.patch.object(torch.utils, "swap_tensors", swap_unless_equal),
            mock.patch.object(device, "WITHOUT_FLOAT64", without_float64),
            mock.patch.object(torch.accelerator, "synchronize", return_value=None),
            mode,
            MoveNewTensors(),
            torch.autograd.set_multithreading_enabled(False),  # modes belong to this thread
        ):
            yield mode
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
