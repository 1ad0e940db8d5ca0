"""Transparent attention: each decoder layer attends to its own mixture of all encoder layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.block import NO_CROSS_ATTENTION, Layer, LayerInputs, run_layer
from regard.errors import Unsupported, check_int
from regard.mixer import State
from regard.numerics import zero_padding_tokens
from regard.stack.sequential import combine_capabilities


class TransparentAttention(nn.Module):
    """z_j = Σ_i softmax_i(W_ij) h_i: a mixture of encoder layers for each decoder layer
    (Bapna et al. 2018, arXiv 1808.07561).

    Args:
        encoder: Number of encoder layers, without the embedding: W has one row more.
        decoder: Number of decoder layers.
        dropout: Dropout of W before the softmax, as in lingvo. W starts at zero.
    """

    def __init__(self, encoder: int, decoder: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_int(1, encoder=encoder, decoder=decoder)
        self.logits = nn.Parameter(torch.zeros(encoder + 1, decoder))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix `SequentialStack.hidden_states`, (layers + 1, b, m, d), with mask (b, m), to
        (decoder layers, b, m, d)."""
        if hidden_states.dim() != 4 or len(hidden_states) != len(self.logits):
            raise ValueError(
                f"hidden_states must be ({len(self.logits)}, b, m, d), "
                f"not {tuple(hidden_states.shape)}"
            )
        weights = self.dropout(self.logits).softmax(0)
        return torch.einsum("ij,ibmd->jbmd", weights, zero_padding_tokens(hidden_states, mask))


class PerLayerContextStack(Layer):
    """Layers in sequence with one context each: `context` is (layers, b, m, d), as
    `TransparentAttention` returns it. Layers without cross-attention ignore theirs."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        can, causal, length = combine_capabilities(layers)
        if not can.cross:
            raise Unsupported(f"PerLayerContextStack needs cross-attention: {NO_CROSS_ATTENTION}")
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """States of all layers before the first chunk."""
        return tuple(layer.initial_state() for layer in self.layers)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        contexts = inputs.context
        if contexts is None or contexts.dim() != 4 or len(contexts) != len(self.layers):
            shape = None if contexts is None else tuple(contexts.shape)
            raise ValueError(
                f"context must be ({len(self.layers)}, b, m, d), one per layer, not {shape}"
            )
        states = []
        for i, layer in enumerate(self.layers):
            layer_inputs = inputs._replace(context=contexts[i])
            layer_state = None if state is None else state[i]
            x, layer_state = run_layer(layer, x, layer_inputs, layer_state)
            states.append(layer_state)
        return x, None if state is None else tuple(states)
