"""Counters for a run: FLOPs, bytes saved by autograd, and peak memory.

`torch.utils.flop_counter` misses the fused attention of the CPU, Fourier transforms, and
elementwise products that are summed. A multiply-add counts as 2 FLOPs. A transform of N numbers
counts as 5 N log₂ N, or half of that for real numbers where half of the result is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2, prod
from typing import Any, ClassVar, Self
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * q[..., 0].numel() * k.shape[2] * (q.shape[3] + v.shape[3])


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> float:
    """The scores again, and two products for each of the forward pass."""
    return 2.0 * q[..., 0].numel() * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])


def _fft(x: Tensor, dims: list[int], *args: Any, **kwargs: Any) -> float:
    size = prod(x.shape[dim] for dim in dims)
    return 5 * x.numel() * log2(size) if size > 1 else 0.0


def _real_fft(x: Tensor, dims: list[int], norm: int, onesided: bool, **kwargs: Any) -> float:
    return _fft(x, dims) / (2 if onesided else 1)


def _solve_triangular(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> float:
    return float(a.shape[-1] * b.numel())


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> float:
    """For x and for the weight, if they need gradients. The formula of torch ignores groups."""
    needs_gradient = args[-1][:2]
    return 2.0 * grad.numel() * weight[0].numel() * sum(map(bool, needs_gradient))


def _matrix_vector(a: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * a.numel()


def _baddbmm(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> float:
    return 2.0 * a.numel() * b.shape[2]


def _embedding_bag(table: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> float:
    return 2.0 * indices.numel() * table.shape[1]


def _embedding_bag_backward(grad: Tensor, *args: Any, **kwargs: Any) -> float:
    """For the table or for the weights. The indices are the first integer tensor."""
    indices = next(x for x in args if isinstance(x, Tensor) and not x.is_floating_point())
    return 2.0 * indices.numel() * grad.shape[1]


FLOPS: dict[Any, Callable[..., float]] = {
    aten._embedding_bag: _embedding_bag,
    aten._embedding_bag_dense_backward: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward: _embedding_bag_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._fft_c2c: _fft,
    aten._fft_r2c: _real_fft,
    aten._fft_c2r: _fft,
    aten.convolution_backward: _convolution_backward,
    aten.linalg_solve_triangular: _solve_triangular,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.baddbmm_: _baddbmm,
}


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs while it is entered.

    An elementwise product counts once it is summed or added to another tensor: two for each number.

    Attributes:
        total: FLOPs.
        recomputed: The share of `total` that repeats earlier work, as far as it was reported.
        by_operation: FLOPs of each operation.
    """

    _active: ClassVar[list[FlopCounter]] = []

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.recomputed, self.by_operation = 0.0, 0.0, Counter[str]()
        self._products = WeakIdKeyDictionary()  # results of elementwise products

    @classmethod
    def report(cls, flops: float, recomputed: float = 0.0) -> None:
        """Add FLOPs to all active counters, for an operation that computes nothing itself."""
        for counter in cls._active:
            counter.total += flops
            counter.recomputed += recomputed

    @classmethod
    @contextmanager
    def pause(cls) -> Iterator[None]:
        """Inside, the counters that are active now do not count."""
        active, cls._active = cls._active, []
        try:
            with _disable_current_modes():
                yield
        finally:
            cls._active = active

    def __enter__(self) -> Self:
        self._active.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._active.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func._overloadpacket
        out = func(*args, **kwargs)
        flops = 0.0
        if op in FLOPS:
            flops = FLOPS[op](*args, **kwargs)
        elif op in flop_registry:
            flops = flop_registry[op](*args, **kwargs, out_val=out)
        elif op in (aten.sum, aten.add):
            products = [x for x in args[:2] if isinstance(x, Tensor) and x in self._products]
            flops = 2.0 * max((x.numel() for x in products), default=0)
        elif op is aten.mul and isinstance(args[1], Tensor) and args[1].numel() > 1:
            self._products[out] = True
        if flops:
            self.total += flops
            self.by_operation[str(op)] += round(flops)
        return out


@dataclass
class SavedActivations:
    """Bytes of the storages that autograd saves and does not free during the pass, by address."""

    ignored: set[int] = field(default_factory=set)
    storages: dict[int, int] = field(default_factory=dict)
    is_recording: bool = True

    @property
    def bytes(self) -> int:
        """Total size."""
        return sum(self.storages.values())

    def add(self, x: Tensor) -> Tensor:
        """Record the storage of a tensor until it is freed."""
        storage = x.untyped_storage()
        if storage._cdata not in self.ignored and storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.nbytes()
            finalize(storage, self._free, storage._cdata)
        return x

    def _free(self, address: int) -> None:
        if self.is_recording:
            self.storages.pop(address, None)


@contextmanager
def record_saved_activations(module: nn.Module) -> Iterator[SavedActivations]:
    """Record what autograd saves inside, without the parameters and buffers of the module."""
    tensors = (*module.parameters(), *module.buffers())
    saved = SavedActivations({t.untyped_storage()._cdata for t in tensors})
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
        yield saved
    saved.is_recording = False


class PeakCounter(TorchDispatchMode):
    """Counts the bytes of tensors that operations create while it is entered; not the workspace of
    kernels.

    Attributes:
        live_bytes: Bytes that are alive.
        peak_bytes: The most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.watch(x)
        return out

    def watch(self, x: Tensor) -> None:
        """Count the storage of x until it is freed."""
        storage = x.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.live_bytes -= size


@dataclass(frozen=True)
class CountedRun:
    """FLOPs of a forward and a backward pass, and bytes saved between them."""

    forward_flops: float
    backward_flops: float
    activation_bytes: int


def count(module: nn.Module, x: Tensor, **kwargs: Any) -> CountedRun:
    """Run a module forward and backward, and count."""
    x = x.requires_grad_() if x.is_floating_point() else x
    with record_saved_activations(module) as saved, FlopCounter() as forward:
        y = module(x, **kwargs)
    with FlopCounter() as backward:
        y.sum().backward()
    return CountedRun(forward.total, backward.total, saved.bytes)
