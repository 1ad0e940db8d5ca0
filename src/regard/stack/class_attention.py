"""Class attention (CaiT, XCiT): patches are processed first, then a class token attends to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.ffn import MLP
from regard.mixer import State
from regard.mixers.xcit import ClassAttention
from regard.norm import LayerNorm
from regard.residual import NormFactory
from regard.stack.sequential import combine_capabilities, run_layers

CLASS_TOKEN_JOINS = "a class token joins after the last layer and reads all tokens"


class ClassAttentionLayer(nn.Module):
    """Layer of XCiT for tokens with the class token first, (b, 1 + n, d) -> (b, 1 + n, d)
    (El-Nouby et al. 2021, arXiv 2106.09681):

        y = norm(x)
        x ← norm(x + γ₁ [attention of y₀ over y; y₁ ..])
        x ← x + [γ₂ mlp(x₀); x₁ ..]

    Only the class token attends and feeds forward; the others are normalised and added, as in the
    authors' code.

    Args:
        norm_all_tokens: Apply the second norm to all tokens. False: to the class token only.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: int,
        norm: NormFactory = LayerNorm,
        norm_all_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm_all_tokens = norm(dim), norm(dim), norm_all_tokens
        self.attention, self.ffn = ClassAttention(dim, heads), MLP(dim, hidden)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        y = self.norm1(x)
        attended = self.attention(y[:, :1], y[:, 1:])
        x = x + self.gamma1 * torch.cat((attended, y[:, 1:]), 1)
        if self.norm_all_tokens:
            x = self.norm2(x)
        else:
            x = torch.cat((self.norm2(x[:, :1]), x[:, 1:]), 1)
        return x + torch.cat((self.gamma2 * self.ffn(x[:, :1]), x[:, 1:]), 1)


class ClassAttentionStack(Layer):
    """Layers in sequence, then layers in which a learned class token attends to all tokens:
    (b, n, d) -> (b, 1 + n, d), class token first (Touvron et al. 2021, arXiv 2103.17239).

    It takes no masks: it is for images, which have no padding.
    """

    def __init__(
        self, layers: Sequence[Layer], class_layers: Sequence[ClassAttentionLayer]
    ) -> None:
        can, causal, length = combine_capabilities(layers)
        can = can.without(
            causal=CLASS_TOKEN_JOINS,
            stream=CLASS_TOKEN_JOINS,
            mask="the mask would not cover the class token",
        )
        super().__init__(layers[0].dim, can=can, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.class_layers: Sequence[ClassAttentionLayer] = nn.ModuleList(class_layers)  # type: ignore[assignment]
        self.class_token = nn.Parameter(torch.randn(self.dim) * 0.02)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`; the output has one token more."""
        x, _ = run_layers(self.layers, x, inputs, None)
        x = torch.cat((self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x), 1)
        for layer in self.class_layers:
            x = layer(x)
        return x, None
