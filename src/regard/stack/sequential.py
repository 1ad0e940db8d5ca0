"""One layer after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.mixer import Can, State


class SequentialStack(Layer):
    """x -> layer_1 -> ... -> layer_L.  The layers may differ: a hybrid stack is a list of blocks with different mixers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        can, causal, length = combine_capabilities(layers)
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """The states of all layers before the first chunk."""
        return tuple(layer.initial_state() for layer in self.layers)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return run_layers(self.layers, x, given, state)

    def every(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(layers+1 b n d): x itself, then what each layer made of it.  The arguments are those of `forward`."""
        given = LayerInputs(mask, context, context_mask, global_attention_mask)
        found = [self.checked(x, given)]
        for layer in self.layers:
            found.append(layer.run(found[-1], given, None)[0])
        return torch.stack(found)


def run_layers(
    layers: Sequence[Layer], x: Tensor, given: LayerInputs, states: State
) -> tuple[Tensor, State]:
    """x through all layers: the whole sequence where `states` is None, else the next chunk, each layer with its state."""
    if states is None:
        for layer in layers:
            x, _ = layer.run(x, given, None)
        return x, None
    after = []
    for layer, mine in zip(layers, states, strict=True):
        x, mine = layer.run(x, given, mine)
        after.append(mine)
    return x, tuple(after)


def combine_capabilities(layers: Sequence[Layer]) -> tuple[Can, bool, int | None]:
    """What layers in a row can do together: their promises, whether they are causal, and the longest sequence.

    Whether a context is looked at is no common promise: one layer that does is enough.
    """
    if not layers:
        raise ValueError("a stack needs at least one layer")
    widths = {layer.dim for layer in layers}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack must have one width, not {sorted(widths)}")
    unsupported = dict(reduce(and_, (layer.can for layer in layers)).unsupported)
    if any(layer.can.cross for layer in layers):
        unsupported.pop("cross", None)
    limits = [layer.length for layer in layers if layer.length is not None]
    return (
        Can(supports_global_mask=True, **unsupported),
        all(layer.causal for layer in layers),
        min(limits, default=None),
    )
