"""The table of peers, and what their adapters share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from regard.bench.cell import BenchCall, BenchCell

Build = Callable[[BenchCell], BenchCall]
FLEX = "torch.nn.attention.flex_attention"
HUGGING_FACE = "transformers.models.{0}.modeling_{0}"
STREAMS = "it has no state from which a stream could go on"
LEAKS = "padded tokens are not left out in full"
FILLED = "unless causal, what fills up the last window is attended to"
NO_MASK = "it takes no padding mask"
NOT_CAUSAL = "it has no causal form"


@dataclass(frozen=True)
class Peer:
    """One of them.

    build    its run in a cell
    module   what is imported, of the package `import_optional` on PyPI
    recipe   ours for the same mechanism, with arguments that make the work the same at a length
    cannot   {"causal": why, "training": why, "mask": why}: what it cannot do; "note" says what it does otherwise
    """

    name: str
    build: Build
    module: str
    package: str
    level: str
    recipe: str
    ours: Callable[[int], Mapping[str, Any]]
    cannot: Mapping[str, str]

    def refusal(self, cell: BenchCell) -> str | None:
        """Why it has no place in a cell; None: it has one."""
        if cell.level != self.level:
            return f"it is measured at the level {self.level}"
        if cell.way == "decode":
            return STREAMS
        wanted = [
            word
            for word, is_so in (("causal", cell.causal), ("training", cell.way == "training"))
            if is_so
        ]
        return next((self.cannot[word] for word in wanted if word in self.cannot), None)


PEERS: dict[str, Peer] = {}


def peer(
    name: str,
    module: str,
    recipe: str,
    *,
    level: str = "layer",
    ours: Callable[[int], Mapping[str, Any]] = lambda n: {},
    **cannot: str,
) -> Callable[[Build], Build]:
    """Register the decorated function; see `Peer`."""

    def register(build: Build) -> Build:
        PEERS[name] = Peer(name, build, module, name.split()[0], level, recipe, ours, cannot)
        return build

    return register


def part_of(name: str, attribute: str) -> Any:
    """Imported only now."""
    return getattr(import_module(name), attribute)


class OutputProjection(nn.Module):
    """A layer that ends before its last projection, and that projection: ours has it too."""

    def __init__(
        self, inner: nn.Module, dim: int, call: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.inner, self.out, self.call = inner, nn.Linear(dim, dim, bias=False), call

    def forward(self, x: Tensor) -> Tensor:
        """x (b n d) -> (b n d)."""
        return self.out(self.call(self.inner, x))
