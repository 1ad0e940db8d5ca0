"""Weight sharing between layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.errors import check_choice, check_int
from regard.mixer import State
from regard.stack.sequential import combine_capabilities, run_layers


def cycle_reversed(depth: int, count: int) -> list[int]:
    """Cycles over `count` layers, the last of which runs backwards."""
    last_cycle = count * (-(-depth // count) - 1)
    return [i % count if i < last_cycle else count - 1 - i % count for i in range(depth)]


ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "sequence": lambda depth, count: [i * count // depth for i in range(depth)],
    "cycle": lambda depth, count: [i % count for i in range(depth)],
    "cycle_reversed": cycle_reversed,
}


class SharedStack(Layer):
    """Applies a few layers `depth` times in total, with shared weights.

    One layer gives ALBERT (Lan et al. 2020, arXiv 1909.11942). For several, `order` sets the
    sequence (Takase and Kiyono 2021, arXiv 2104.06022); for 3 layers and depth 6:

        "sequence"        1 1 2 2 3 3     ALBERT's groups
        "cycle"           1 2 3 1 2 3
        "cycle_reversed"  1 2 3 3 2 1     the last cycle backwards

    A stream keeps a state per application, not per layer: sharing saves parameters, not time or
    cache.
    """

    def __init__(self, layers: Sequence[Layer], depth: int, *, order: str = "sequence") -> None:
        can, causal, length = combine_capabilities(layers)
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        check_int(len(layers), depth=depth)
        check_choice("order", order, ORDERS)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.order = tuple(ORDERS[order](depth, len(layers)))

    def initial_state(self) -> State:
        """States of all applications before the first chunk."""
        return tuple(self.layers[i].initial_state() for i in self.order)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return run_layers([self.layers[i] for i in self.order], x, inputs, state)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"order={self.order}"
