"""Implementations of other packages, measured with the same shapes and the same work as ours.

The adapters are part of the package, so `regard bench --peers` runs wherever Regard is installed. A
peer is imported only when it is measured; the row of a missing one says how to install it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from regard.bench.cell import BenchCall, BenchCell, CallEstimate, Contender, layer_call
from regard.bench.contenders import RecipeContender
from regard.bench.peers import others, sparse
from regard.bench.peers.registry import FLEX_MODULE, PEERS, Peer
from regard.errors import Unsupported, did_you_mean
from regard.ffn import ProductKeyMemory
from regard.models import ModuleSpec

__all__ = [
    "PEERS",
    "MatchedContender",
    "Peer",
    "PeerContender",
    "ProductKeysContender",
    "others",
    "peer_groups",
    "sparse",
]


@dataclass(frozen=True)
class PeerContender(Contender):
    """A peer by its name."""

    label: str
    is_peer: bool = True

    @property
    def scopes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The scope of its adapter."""
        return (PEERS[self.label].scope,)

    @property
    def module(self) -> str:  # type: ignore[override]
        """The module of its package."""
        return PEERS[self.label].module

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether its first call compiles code."""
        return self.module == FLEX_MODULE

    def build(self, cell: BenchCell) -> BenchCall:
        found = PEERS[self.label]
        if find_spec(found.module.split(".")[0]) is None:
            raise ImportError(f"it is not installed: pip install {found.package}")
        if (refusal := found.refusal(cell)) is not None:
            raise Unsupported(refusal)
        return found.build(cell)


@dataclass(frozen=True)
class MatchedContender(Contender):
    """A recipe with the arguments that give it the same work as a peer."""

    label: str
    peer: str

    def recipe(self, cell: BenchCell) -> RecipeContender:
        """Return the recipe at the length of a cell."""
        arguments = dict(PEERS[self.peer].arguments(cell.length))
        return RecipeContender(ModuleSpec(name=self.label, arguments=arguments))

    def build(self, cell: BenchCell) -> BenchCall:
        return self.recipe(cell).build(cell)

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        return self.recipe(cell).estimate(cell)


class ProductKeysContender(Contender):
    """Product-key memory, which is a feed-forward layer and not a mixer."""

    label = "product_keys"

    def build(self, cell: BenchCell) -> BenchCall:
        if cell.mode == "decode":
            raise Unsupported("it processes every token separately and has no state")
        return layer_call(ProductKeyMemory(cell.dim, 128, heads=4, top_k=32, query_dim=256), cell)


def peer_groups(names: Sequence[str] = ()) -> list[list[Contender]]:
    """Return our recipe and its peers, for each recipe and scope; all recipes by default."""
    known = list(dict.fromkeys(each.recipe for each in PEERS.values()))
    for name in names:
        if name not in known:
            raise ValueError(f"There is no peer for {name!r}: {did_you_mean(name, known)}")
    groups: dict[tuple[str, str], list[Contender]] = {}
    for each in PEERS.values():
        if not names or each.recipe in names:
            ours: Contender = MatchedContender(each.recipe, each.name)
            if each.recipe == "product_keys":
                ours = ProductKeysContender()
            groups.setdefault((each.recipe, each.scope), [ours]).append(PeerContender(each.name))
    return list(groups.values())
