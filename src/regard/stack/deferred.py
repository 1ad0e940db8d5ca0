"""Tokens that wait: a layer reads them when a later token needs it, and not before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.block import Layer, LayerInputs
from regard.mixer import State, check_batch


class DeferredState(NamedTuple):
    """The state of a layer in a stream, and the tokens (b w d) that it has yet to read; None: no token was read or waits.

    Where depth depends on the token, a chunk may not need a layer that a later chunk does need.  Then that layer must see
    the earlier tokens too, as they stood.  They wait here, and are read together with the first chunk that goes on.
    """

    state: State
    waiting: Tensor | None = None

    def read(self, layer: Layer, x: Tensor, given: LayerInputs) -> tuple[Tensor, DeferredState]:
        """What the layer makes of the chunk x (b n d), once it has read what waits."""
        y, state = layer.run(self._with(x), given, self.state)
        return y[:, y.shape[1] - x.shape[1] :], DeferredState(state)

    def wait(self, x: Tensor) -> DeferredState:
        """The chunk x (b n d) is not read yet."""
        return DeferredState(self.state, self._with(x))

    def _with(self, x: Tensor) -> Tensor:
        if self.waiting is None:
            return x
        check_batch(self.waiting, x)
        return torch.cat((self.waiting, x), 1)
