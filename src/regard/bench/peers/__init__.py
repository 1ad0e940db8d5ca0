"""Other people's code for the same mechanisms, to be measured beside ours: the same shapes and, where it can be had, the
same work.

Adapters stand in the package, and not in benchmarks/, so that `regard bench --peers` runs wherever Regard is installed.
Every peer is imported only when it is measured; one that is missing is a row that says how to get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from regard.bench.cell import Cell, Contender, Needs, Run, of_layer
from regard.bench.contenders import Ours
from regard.bench.peers import others, sparse
from regard.bench.peers.registry import FLEX, PEERS, Peer
from regard.errors import Unsupported, nearest
from regard.ffn import ProductKeys
from regard.models import Part

__all__ = ["PEERS", "Matched", "OurProductKeys", "Peer", "Theirs", "groups", "others", "sparse"]


@dataclass(frozen=True)
class Theirs(Contender):
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

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        found = PEERS[self.label]
        if find_spec(found.module.split(".")[0]) is None:
            raise ImportError(f"it is not installed: pip install {found.package}")
        refusal = found.refusal(cell)
        if refusal is not None:
            raise Unsupported(refusal)
        return found.build(cell)


@dataclass(frozen=True)
class Matched(Contender):
    """Our recipe, with the sizes that make its work that of a peer."""

    label: str
    like: str

    def ours(self, cell: Cell) -> Contender:
        """At the length of the cell."""
        return Ours(Part(name=self.label, arguments=dict(PEERS[self.like].ours(cell.length))))

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        return self.ours(cell).build(cell)

    def needs(self, cell: Cell) -> Needs | None:
        """See `Contender`."""
        return self.ours(cell).needs(cell)


class OurProductKeys(Contender):
    """The one that is no mixer: a feed-forward layer that reads a memory."""

    label = "product_keys"

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        if cell.way == "decode":
            raise Unsupported("it works token by token, and has no state")
        return of_layer(ProductKeys(cell.dim, 128, heads=4, top=32, width=256), cell)


def groups(names: Sequence[str] = ()) -> list[list[Contender]]:
    """Ours and its peers, for each of these recipes and each level; for all unless named."""
    known = list(dict.fromkeys(each.recipe for each in PEERS.values()))
    for name in names:
        if name not in known:
            raise ValueError(f"there is no peer for {name!r}: {nearest(name, known)}")
    found: dict[tuple[str, str], list[Contender]] = {}
    for each in PEERS.values():
        if not names or each.recipe in names:
            mine = OurProductKeys() if each.recipe == "product_keys" else Matched(each.recipe, each.name)
            found.setdefault((each.recipe, each.level), [mine]).append(Theirs(each.name))
    return list(found.values())
