"""Fewer layers than depth: some are used again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.errors import check_choice, check_int
from regard.mixer import State
from regard.stack.sequential import combine_capabilities, run_layers


def _back_at_last(depth: int, count: int) -> list[int]:
    """In cycles, the last of which runs backwards."""
    turned = count * (-(-depth // count) - 1)  # where the last cycle begins
    return [i % count if i < turned else count - 1 - i % count for i in range(depth)]


ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "sequence": lambda depth, count: [i * count // depth for i in range(depth)],
    "cycle": lambda depth, count: [i % count for i in range(depth)],
    "cycle_reversed": _back_at_last,
}


class SharedStack(Layer):
    """x -> layers[o_1] -> ... -> layers[o_depth]: `depth` applications of fewer layers, whose parameters count once.

    One layer is ALBERT (Lan et al. 2020, arXiv 1909.11942).  Of several, `order` says which comes when (Takase and Kiyono
    2021, arXiv 2104.06022); for 3 layers and a depth of 6

        "sequence"        1 1 2 2 3 3     ALBERT's groups
        "cycle"           1 2 3 1 2 3
        "cycle_reversed"  1 2 3 3 2 1     the last cycle backwards

    A stream keeps a state for each application, not for each layer: sharing saves parameters, neither time nor cache.
    """

    def __init__(self, layers: Sequence[Layer], depth: int, *, order: str = "sequence") -> None:
        can, causal, length = combine_capabilities(layers)
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        check_int(len(layers), depth=depth)
        check_choice("order", order, ORDERS)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.order = tuple(ORDERS[order](depth, len(layers)))

    def initial_state(self) -> State:
        """The states of all applications before the first chunk."""
        return tuple(self.layers[i].initial_state() for i in self.order)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return run_layers([self.layers[i] for i in self.order], x, given, state)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"order={self.order}"
