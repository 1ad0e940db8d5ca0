"""Other people's code for the same mechanisms, to be measured beside ours: the same shapes and, where it can be had, the
same work.

Adapters stand in the package, and not in benchmarks/, so that `regard bench --peers` runs wherever Regard is installed.
Every peer is imported only when it is measured; one that is missing is a row that says how to get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from regard.bench.cell import BenchCall, BenchCell, CallEstimate, Contender, layer_call
from regard.bench.contenders import RecipeContender
from regard.bench.peers import others, sparse
from regard.bench.peers.registry import FLEX, PEERS, Peer
from regard.errors import Unsupported, did_you_mean
from regard.ffn import ProductKeyMemory
from regard.models import ModuleSpec

__all__ = [
    "PEERS",
    "MatchedContender",
    "ProductKeysContender",
    "Peer",
    "PeerContender",
    "peer_groups",
    "others",
    "sparse",
]


@dataclass(frozen=True)
class PeerContender(Contender):
    """A peer, by its name."""

    label: str
    foreign: bool = True

    @property
    def levels(self) -> tuple[str, ...]:  # type: ignore[override]
        """The one that its adapter is for."""
        return (PEERS[self.label].level,)

    @property
    def module(self) -> str:  # type: ignore[override]
        """What its adapter imports."""
        return PEERS[self.label].module

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether its first call makes code."""
        return self.module == FLEX

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        found = PEERS[self.label]
        if find_spec(found.module.split(".")[0]) is None:
            raise ImportError(f"it is not installed: pip install {found.package}")
        refusal = found.refusal(cell)
        if refusal is not None:
            raise Unsupported(refusal)
        return found.build(cell)


@dataclass(frozen=True)
class MatchedContender(Contender):
    """Our recipe, with the sizes that make its work that of a peer."""

    label: str
    like: str

    def ours(self, cell: BenchCell) -> Contender:
        """At the length of the cell."""
        return RecipeContender(
            ModuleSpec(name=self.label, arguments=dict(PEERS[self.like].ours(cell.length)))
        )

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        return self.ours(cell).build(cell)

    def needs(self, cell: BenchCell) -> CallEstimate | None:
        """See `Contender`."""
        return self.ours(cell).needs(cell)


class ProductKeysContender(Contender):
    """The one that is no mixer: a feed-forward layer that reads a memory."""

    label = "product_keys"

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        if cell.way == "decode":
            raise Unsupported("it works token by token, and has no state")
        return layer_call(ProductKeyMemory(cell.dim, 128, heads=4, top=32, width=256), cell)


def peer_groups(names: Sequence[str] = ()) -> list[list[Contender]]:
    """Ours and its peers, for each of these recipes and each level; for all unless named."""
    known = list(dict.fromkeys(each.recipe for each in PEERS.values()))
    for name in names:
        if name not in known:
            raise ValueError(f"there is no peer for {name!r}: {did_you_mean(name, known)}")
    found: dict[tuple[str, str], list[Contender]] = {}
    for each in PEERS.values():
        if not names or each.recipe in names:
            mine = (
                ProductKeysContender()
                if each.recipe == "product_keys"
                else MatchedContender(each.recipe, each.name)
            )
            found.setdefault((each.recipe, each.level), [mine]).append(PeerContender(each.name))
    return list(found.values())
