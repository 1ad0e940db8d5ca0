"""Transparent attention: each layer of a decoder looks at its own mixture of all layers of the encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.block import NO_CONTEXT, Layer, LayerInputs
from regard.errors import Unsupported, check_int
from regard.mixer import State
from regard.numerics import zero_padding_tokens
from regard.stack.sequential import combine_capabilities


class TransparentAttention(nn.Module):
    """z_j = Σ_i softmax_i(W_ij) h_i: one mixture of the encoder's layers for each layer of the decoder (Bapna et al. 2018,
    arXiv 1808.07561).

    encoder  its layers, without the embedding: W has a row more
    decoder  its layers
    dropout  of W, before the softmax as in lingvo: a dropped weight counts as 0, which is where all of them start
    """

    def __init__(self, encoder: int, decoder: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_int(1, encoder=encoder, decoder=decoder)
        self.logits, self.dropout = (
            nn.Parameter(torch.zeros(encoder + 1, decoder)),
            nn.Dropout(dropout),
        )

    def forward(self, outputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `SequentialStack.every` gave, (layers+1 b m d), and its mask (b m) -> (decoder layers b m d)."""
        if outputs.dim() != 4 or len(outputs) != len(self.logits):
            raise ValueError(
                f"outputs must be ({len(self.logits)} b m d), not {tuple(outputs.shape)}"
            )
        return torch.einsum(
            "ij,ibmd->jbmd",
            self.dropout(self.logits).softmax(0),
            zero_padding_tokens(outputs, mask),
        )


class PerLayerContextStack(Layer):
    """A plain stack whose layers look at one context each: `context` is (layers b m d), as `TransparentAttention` gives it.

    A layer that looks at no context has one all the same, which it leaves alone.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        can, causal, length = combine_capabilities(layers)
        if not can.cross:
            raise Unsupported(f"there is nothing to give contexts to: {NO_CONTEXT}")
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """The states of all layers before the first chunk."""
        return tuple(layer.initial_state() for layer in self.layers)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        contexts = given.context
        if contexts is None or contexts.dim() != 4 or len(contexts) != len(self.layers):
            shape = None if contexts is None else tuple(contexts.shape)
            raise ValueError(
                f"context must be ({len(self.layers)} b m d), one for each layer, not {shape}"
            )
        after = []
        for i, layer in enumerate(self.layers):
            x, mine = layer.run(
                x, given._replace(context=contexts[i]), None if state is None else state[i]
            )
            after.append(mine)
        return x, None if state is None else tuple(after)
