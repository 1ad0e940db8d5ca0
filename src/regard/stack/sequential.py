"""Layers in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs, run_layer
from regard.mixer import Can, State


class SequentialStack(Layer):
    """x -> layer_1 -> ... -> layer_L. The layers may differ, for example in their mixers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        can, causal, length = combine_capabilities(layers)
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """States of all layers before the first chunk."""
        return tuple(layer.initial_state() for layer in self.layers)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        return run_layers(self.layers, x, inputs, state)

    def hidden_states(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """x and all layer outputs, (layers + 1, b, n, d). Takes the arguments of `forward`."""
        inputs = LayerInputs(mask, context, context_mask, global_attention_mask)
        states = [self.validate_inputs(x, inputs)]
        for layer in self.layers:
            states.append(layer.run(states[-1], inputs, None)[0])
        return torch.stack(states)


def run_layers(
    layers: Sequence[Layer], x: Tensor, inputs: LayerInputs, states: State
) -> tuple[Tensor, State]:
    """Run layers in sequence, on a whole sequence or with `states` on the next chunk."""
    next_states = []
    for layer, state in zip(
        layers, [None] * len(layers) if states is None else states, strict=True
    ):
        x, state = run_layer(layer, x, inputs, state)
        next_states.append(state)
    return x, None if states is None else tuple(next_states)


def combine_capabilities(layers: Sequence[Layer]) -> tuple[Can, bool, int | None]:
    """Capabilities of layers in sequence, whether they are causal, and their maximum length.

    A stack has cross-attention if one of its layers has.
    """
    if not layers:
        raise ValueError("a stack needs at least one layer")
    widths = {layer.dim for layer in layers}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack must have the same dim, not {sorted(widths)}")
    unsupported = dict(reduce(and_, (layer.can for layer in layers)).unsupported)
    if any(layer.can.cross for layer in layers):
        unsupported.pop("cross", None)
    lengths = [layer.length for layer in layers if layer.length is not None]
    can = Can("global_attention_mask", **unsupported)
    return can, all(layer.causal for layer in layers), min(lengths, default=None)
