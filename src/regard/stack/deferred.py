"""Deferred tokens: a layer reads them only when a later token needs that layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.block import Layer, LayerInputs, run_layer
from regard.mixer import State, check_batch


class DeferredState(NamedTuple):
    """Streaming state of a layer, and the tokens (b, w, d) it has not read yet.

    If depth depends on the token, a chunk may not need a layer that a later chunk needs. The layer
    must then see the earlier tokens too. They wait here and are read with the first chunk that
    reaches the layer.
    """

    state: State
    pending: Tensor | None = None

    def run_layer(
        self, layer: Layer, x: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, DeferredState]:
        """Run the layer on the pending tokens and the chunk x (b, n, d); return the chunk only."""
        y, state = run_layer(layer, self._with_pending(x), inputs, self.state)
        return y[:, y.shape[1] - x.shape[1] :], DeferredState(state)

    def defer(self, x: Tensor) -> DeferredState:
        """Add the chunk x (b, n, d) to the pending tokens."""
        return DeferredState(self.state, self._with_pending(x))

    def _with_pending(self, x: Tensor) -> Tensor:
        if self.pending is None:
            return x
        check_batch(self.pending, x)
        return torch.cat((self.pending, x), 1)
