"""What is measured: a call of given sizes, and what a contender has to say for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

SCOPES = {
    "kernel": "the attention alone, on given queries, keys and values",
    "layer": "the whole mixer, with its projections",
}
MODES = {
    "forward": "without gradients",
    "training": "forward and backward",
    "decode": "one token after `length` others, from the state that they left",
}
DENSE = "dense SDPA"


@dataclass(frozen=True)
class BenchCell:
    """The sizes of a call, float32.  A decoded token stands behind `length` others."""

    level: str
    way: str
    length: int
    batch: int = 1
    heads: int = 8
    width: int = 64
    causal: bool = False

    @property
    def dim(self) -> int:
        """The width of a token."""
        return self.heads * self.width

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of queries, keys and values: (b h n e)."""
        return self.batch, self.heads, self.length, self.width

    @property
    def past(self) -> bool:
        """Whether no token sees later ones; a stream has none."""
        return self.causal or self.way == "decode"


class BenchCall(NamedTuple):
    """A call, and the tensors that get gradients from it."""

    call: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()


class CallEstimate(NamedTuple):
    """What a call needs by formula: FLOPs of products, exponentials, bytes, and the share of pairs that are seen, if any are.

    Bytes are parameters and what autograd keeps, and for training the gradients too; without gradients less may do.
    """

    flops: float
    exps: float
    bytes: float
    density: float | None


class Contender(ABC):
    """Something that can run in a cell.  It is a value: another process builds the same from it."""

    label: str
    foreign: bool = False  # somebody else's code
    levels: Sequence[str] = tuple(SCOPES)  # that it has a place at
    module: str | None = None  # what it imports beside Regard
    compiles: bool = False  # its first call makes code, and says nothing of the others
    of: str = ""  # somebody else's code: the label of ours that it is held against, the first of the group unless said

    @abstractmethod
    def build(self, cell: BenchCell) -> BenchCall:
        """What to run.  ValueError or Unsupported: it cannot, and why."""

    def needs(self, cell: BenchCell) -> CallEstimate | None:
        """By formula; None: there is none."""
        return None


def prepare_call(contender: Contender, cell: BenchCell) -> Callable[[], object]:
    """The call to be timed, on inputs that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = contender.build(cell)
    if cell.way != "training":
        return torch.no_grad()(run.call)
    with torch.no_grad():
        back = torch.ones(run.call().shape)

    def step() -> None:
        for leaf in run.leaves:
            leaf.grad = None
        run.call().backward(back)

    return step


def tokens(cell: BenchCell, count: int | None = None) -> Tensor:
    """x (b n d), normal numbers."""
    n = cell.length if count is None else count
    return torch.randn(cell.batch, n, cell.dim, requires_grad=cell.way == "training")


def layer_call(
    module: nn.Module, cell: BenchCell, call: Callable[[Tensor], Tensor] | None = None
) -> BenchCall:
    """A whole layer, on tokens; `call` unwraps what it gives, where it is no tensor."""
    module.train(cell.way == "training")
    x, apply = tokens(cell), module if call is None else call
    return BenchCall(lambda: apply(x), [x, *module.parameters()])


def heads_call(
    call: Callable[..., Tensor],
    cell: BenchCell,
    *shapes: Sequence[int],
    more: Sequence[Tensor] = (),
) -> BenchCall:
    """An attention, on normal numbers of these shapes; `more` are parameters that get gradients too."""
    given = [torch.randn(*shape, requires_grad=cell.way == "training") for shape in shapes]
    return BenchCall(lambda: call(*given), [*given, *more])
