"""What is measured: a call of given sizes, and the contenders that provide it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.device import DTYPES, synchronize

SCOPES = {
    "kernel": "the attention alone, on given queries, keys and values",
    "layer": "the whole mixer with its projections",
}
MODES = {
    "forward": "without gradients",
    "training": "forward and backward",
    "decode": "one token after `length` others, from their cached state",
}
DENSE = "dense SDPA"


@dataclass(frozen=True)
class BenchCell:
    """The sizes of a call, its device and its dtype.

    In mode "decode" one token follows `length` others.
    """

    scope: str
    mode: str
    length: int
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def dim(self) -> int:
        """Model width."""
        return self.heads * self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of queries, keys and values: (b, h, n, e)."""
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def is_causal(self) -> bool:
        """Whether tokens see no later ones. When decoding there are none."""
        return self.causal or self.mode == "decode"


class BenchCall(NamedTuple):
    """A call and the tensors that receive gradients from it."""

    call: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()


class CallEstimate(NamedTuple):
    """Theoretical cost of a call.

    Attributes:
        flops: FLOPs of matrix products.
        exps: Number of exponentials.
        bytes: Parameters, tensors saved by autograd and, in training, gradients. Without gradients
            less may be enough.
        density: Fraction of query-key pairs that are visible; None without a pattern.
    """

    flops: float
    exps: float
    bytes: float
    density: float | None


class Contender(ABC):
    """Something that can be measured in a cell. It is a value: another process can build the same.

    Attributes:
        label: Its name in tables.
        is_peer: Whether it is code of another package.
        scopes: Scopes in which it can be measured.
        module: Module that it imports besides Regard.
        compiles: Whether its first call compiles code and is not representative.
        reference: For a peer: label of the recipe it is compared with [the first of its group].
    """

    label: str
    is_peer: bool = False
    scopes: Sequence[str] = tuple(SCOPES)
    module: str | None = None
    compiles: bool = False
    reference: str = ""

    @abstractmethod
    def build(self, cell: BenchCell) -> BenchCall:
        """Return the call; ValueError or Unsupported if there is none, with the reason."""

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        """Return the theoretical cost, or None if it is unknown."""
        return None


def prepare_call(contender: Contender, cell: BenchCell) -> Callable[[], object]:
    """Return the call to be timed, always on the same inputs; it ends when the device is done."""
    device = torch.device(cell.device)
    with torch.random.fork_rng(devices=[]), tensor_defaults(cell.device, cell.dtype):
        torch.manual_seed(0)
        run = contender.build(cell)
    call: Callable[[], object] = torch.no_grad()(run.call)
    if cell.mode == "training":
        with torch.no_grad():
            gradient = torch.ones_like(run.call())

        def step() -> None:
            for leaf in run.leaves:
                leaf.grad = None
            run.call().backward(gradient)

        call = step
    if device.type == "cpu":
        return call

    def call_and_wait() -> None:
        call()
        synchronize(device)

    synchronize(device)
    return call_and_wait


@contextmanager
def tensor_defaults(device: str, dtype: str) -> Iterator[None]:
    """New tensors and modules are on a device and have a dtype, unless they are given others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def random_tokens(cell: BenchCell, count: int | None = None) -> Tensor:
    """Return normal x (b, n, d) with n = count or the cell's length."""
    n = cell.length if count is None else count
    return torch.randn(cell.batch, n, cell.dim, requires_grad=cell.mode == "training")


def layer_call(
    module: nn.Module, cell: BenchCell, call: Callable[[Tensor], Tensor] | None = None
) -> BenchCall:
    """Return the call of a layer on tokens; `call` unwraps outputs that are not a tensor."""
    module.train(cell.mode == "training")
    x, apply = random_tokens(cell), module if call is None else call
    return BenchCall(lambda: apply(x), [x, *module.parameters()])


def heads_call(
    call: Callable[..., Tensor],
    cell: BenchCell,
    *shapes: Sequence[int],
    parameters: Sequence[Tensor] = (),
) -> BenchCall:
    """Return the call of an attention on normal inputs of these shapes."""
    inputs = [torch.randn(*shape, requires_grad=cell.mode == "training") for shape in shapes]
    return BenchCall(lambda: call(*inputs), [*inputs, *parameters])
