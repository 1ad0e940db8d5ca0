"""Counting what a real run does: FLOPs of products and transforms, and numbers that autograd keeps.

torch's own counter knows neither the fused attention of the CPU nor the Fourier transform, nor products that are written
element by element and then summed.  A multiply-add is two FLOPs; a transform of N numbers is 5 N log₂ N, and half as much
where they are real and half the result is asked for.
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
Flops = Callable[..., float]


def _attention(q: Tensor, k: Tensor, v: Tensor, products: tuple[int, int]) -> float:
    """Products of the width of the keys, and of that of the values; heads (b h n e).  Every score is computed."""
    b, h, n, e = q.shape
    return 2 * b * h * n * k.shape[2] * (products[0] * e + products[1] * v.shape[3])


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> float:
    return _attention(q, k, v, (1, 1))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any
) -> float:
    """The scores once more, and two products for each of the two of the forward pass."""
    return _attention(q, k, v, (3, 2))


def _transform(x: Tensor, dims: list[int], *rest: Any, **more: Any) -> float:
    """5 N log₂ of the numbers that are transformed together."""
    size = prod(x.shape[d] for d in dims)
    return 5 * x.numel() * log2(size) if size > 1 else 0.0


def _real_transform(x: Tensor, dims: list[int], norm: int, half: bool, **more: Any) -> float:
    """Half of that where half the result is asked for: of real numbers it tells the other half."""
    return _transform(x, dims) / (2 if half else 1)


def _triangular(a: Tensor, b: Tensor, *rest: Any, **more: Any) -> float:
    """Half of a product (n n) (n m)."""
    return a.shape[-1] * b.numel()


def _convolved_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **more: Any) -> float:
    """Once for x and once for the weight, where they have gradients.  torch's own formula takes no groups into account."""
    wanted = rest[-1]
    return 2.0 * grad.numel() * weight[0].numel() * sum(map(bool, wanted[:2]))


def _matrix_vector(a: Tensor, b: Tensor, *rest: Any, **more: Any) -> float:
    return 2 * a.numel()


def _products_added(x: Tensor, a: Tensor, b: Tensor, **more: Any) -> float:
    """x + a b in place, (b n inner) (b inner m)."""
    return 2 * a.numel() * b.shape[2]


def _bag(table: Tensor, indices: Tensor, *rest: Any, **more: Any) -> float:
    """Rows of a table, weighed and summed."""
    return 2 * indices.numel() * table.shape[1]


def _bag_backward(grad: Tensor, *rest: Any, **more: Any) -> float:
    """For the table, or for the weights: each number of each row that was read, once.  The indices are the first whole ones."""
    indices = next(x for x in rest if isinstance(x, Tensor) and not x.is_floating_point())
    return 2 * indices.numel() * grad.shape[1]


KNOWN: dict[Any, Flops] = {
    aten._embedding_bag: _bag,
    aten._embedding_bag_dense_backward: _bag_backward,
    aten._embedding_bag_per_sample_weights_backward: _bag_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten._fft_c2c: _transform,
    aten._fft_r2c: _real_transform,
    aten._fft_c2r: _transform,
    aten.convolution_backward: _convolved_backward,
    aten.linalg_solve_triangular: _triangular,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.baddbmm_: _products_added,
}
PRODUCTS = (aten.mul,)
SUMS = (aten.sum, aten.add)


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
        self._products = WeakIdKeyDictionary()  # results of products, for as long as they live

    @classmethod
    def report(cls, flops: float, recomputed: float = 0.0) -> None:
        """Add FLOPs to all active counters, for an operation that computes nothing itself."""
        for counter in cls._active:
            counter.total += flops
            counter.recomputed += recomputed

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Inside, the counters that are active now do not count."""
        active, cls._active = cls._active, []
        try:
            with _disable_current_modes():
                yield
        finally:
            cls._active = active

    def __enter__(self) -> Self:
        self._active.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._active.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count it."""
        kwargs = kwargs or {}
        op = func._overloadpacket
        out = func(*args, **kwargs)
        flops = self._flops(op, args, kwargs, out)
        if (
            op in PRODUCTS
            and isinstance(out, Tensor)
            and isinstance(args[1], Tensor)
            and args[1].numel() > 1
        ):
            self._products[out] = True
        if flops:
            self.total += flops
            self.by_operation[str(op)] += round(flops)
        return out

    def _flops(self, op: Any, args: Any, kwargs: Any, out: Any) -> float:
        if op in KNOWN:
            return KNOWN[op](*args, **kwargs)
        if op in flop_registry:
            return float(flop_registry[op](*args, **kwargs, out_val=out))
        if op in SUMS:
            return 2.0 * max(
                (x.numel() for x in args[:2] if isinstance(x, Tensor) and x in self._products),
                default=0,
            )
        return 0.0


@dataclass
class SavedActivations:
    """Bytes that autograd keeps, each storage once; parameters are not counted."""

    known: set[int] = field(default_factory=set)
    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.storages.values())

    def take(self, x: Tensor) -> Tensor:
        """Called for every tensor that is kept."""
        at = x.untyped_storage()._cdata
        if at not in self.known:
            self.storages[at] = x.untyped_storage().nbytes()
        return x


@contextmanager
def record_saved_activations(module: nn.Module) -> Iterator[SavedActivations]:
    """Watch what autograd keeps of a forward pass."""
    seen = SavedActivations(
        {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    )
    with torch.autograd.graph.saved_tensors_hooks(seen.take, lambda x: x):
        yield seen


class PeakCounter(TorchDispatchMode):
    """The most bytes that were alive at once, of tensors that operations made while it is entered.

    What a kernel needs inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and note what it made."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.watch(x)
        return out

    def watch(self, x: Tensor) -> None:
        """Count the storage of x until it dies."""
        storage = x.untyped_storage()
        at, size = storage._cdata, storage.nbytes()
        if at in self._alive:
            return
        self._alive.add(at)
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._died, at, size)

    def _died(self, at: int, size: int) -> None:
        self._alive.discard(at)
        self.now -= size


@dataclass(frozen=True)
class CountedRun:
    """Of one run: FLOPs forward and backward, and bytes that were kept between."""

    forward: float
    backward: float
    saved: int


def count(module: nn.Module, x: Tensor, **given: Any) -> CountedRun:
    """Run it forward and backward, and count.  On meta tensors nothing is computed, where the module allows that."""
    x = x.requires_grad_() if x.is_floating_point() else x
    with record_saved_activations(module) as seen, FlopCounter() as ahead:
        y = module(x, **given)
    with FlopCounter() as back:
        y.sum().backward()
    return CountedRun(ahead.total, back.total, seen.bytes)
