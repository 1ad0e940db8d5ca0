"""The table of peers: implementations of other packages, and what their adapters share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from regard.bench.cell import BenchCall, BenchCell
from regard.bench.flex import FLEX_MODULE as FLEX_MODULE

BuildCall = Callable[[BenchCell], BenchCall]
HUGGING_FACE = "transformers.models.{0}.modeling_{0}"
NO_STREAM = "it has no state to continue a stream from"
LEAKS = "padded tokens are not fully masked"
PADDED_WINDOW = "unless causal, the padding of the last window is attended to"
NO_MASK = "it takes no padding mask"
NOT_CAUSAL = "it has no causal form"


@dataclass(frozen=True)
class Peer:
    """An implementation of another package.

    Attributes:
        build: Returns its call in a cell.
        module: Module to import, of the PyPI package `package`.
        scope: Scope in which it can be measured.
        recipe: Our recipe for the same mechanism.
        arguments: Returns the recipe's arguments that give the same work at a length.
        limitations: What it does not support, with the reason ("causal", "training", "mask");
            "note" describes other differences.
    """

    name: str
    build: BuildCall
    module: str
    package: str
    scope: str
    recipe: str
    arguments: Callable[[int], Mapping[str, Any]]
    limitations: Mapping[str, str]

    def refusal(self, cell: BenchCell) -> str | None:
        """Return why it cannot be measured in a cell, or None."""
        if cell.scope != self.scope:
            return f"it is measured with --scope {self.scope}"
        if cell.mode == "decode":
            return NO_STREAM
        if cell.causal and "causal" in self.limitations:
            return self.limitations["causal"]
        return self.limitations.get("training") if cell.mode == "training" else None


PEERS: dict[str, Peer] = {}


def peer(
    name: str,
    module: str,
    recipe: str,
    *,
    scope: str = "layer",
    arguments: Callable[[int], Mapping[str, Any]] = lambda n: {},
    **limitations: str,
) -> Callable[[BuildCall], BuildCall]:
    """Register the decorated function as a peer; see `Peer`."""

    def register(build: BuildCall) -> BuildCall:
        package = name.split()[0]
        PEERS[name] = Peer(name, build, module, package, scope, recipe, arguments, limitations)
        return build

    return register


def import_from(module: str, name: str) -> Any:
    """Import a name when it is needed."""
    return getattr(import_module(module), name)


class OutputProjection(nn.Module):
    """A peer's layer that lacks the output projection, with one: ours has it too."""

    def __init__(
        self, inner: nn.Module, dim: int, call: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.inner, self.out, self.call = inner, nn.Linear(dim, dim, bias=False), call

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, n, d) to (b, n, d)."""
        return self.out(self.call(self.inner, x))
