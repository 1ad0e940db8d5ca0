"""A band over keys that stand apart, as those of a shortened memory do."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.pattern.algebra import MAX_POSITION, Block, Leaf


@dataclass(frozen=True, repr=False)
class StridedKeyBand(Leaf):
    """Key k stands at `first + step * k`, for `first` >= -1; it is seen from `left` behind to `right` ahead of the query.

    None = unlimited.
    """

    step: int
    first: int = 0
    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        self._check(
            step=1,
            first=-1,
            **{side: 0 for side in ("left", "right") if getattr(self, side) is not None},
        )

    def _reach(self) -> tuple[int, int]:
        left, right = (MAX_POSITION if side is None else side for side in (self.left, self.right))
        return left, right

    def _allowed(self, q: Tensor, k: Tensor) -> Tensor:
        left, right = self._reach()
        gap = q - (self.first + self.step * k)
        return (gap <= left) & (gap >= -right)

    def _block(self, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> Block:
        left, right = self._reach()
        low, high = q0 - (self.first + self.step * k1), q1 - (self.first + self.step * k0)
        return (low <= left) & (high >= -right), (high <= left) & (low >= -right)
