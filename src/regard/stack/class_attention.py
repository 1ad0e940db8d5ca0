"""A class token that joins late: patches attend among themselves first, and a learned token then asks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.block import Layer, LayerInputs
from regard.ffn import MLP
from regard.mixer import Can, State
from regard.mixers.xcit import ClassAttention
from regard.norm import LayerNorm
from regard.residual import NormFactory
from regard.stack.sequential import combine_capabilities, run_layers

JOINS = "a class token joins behind the last layer, and would have to read all tokens"


class ClassAttentionLayer(nn.Module):
    """Tokens with the class token first, (b 1+n d) -> (b 1+n d), as in XCiT (El-Nouby et al. 2021, arXiv 2106.09681):

    y = norm(x);  x ← x + γ₁ [attention of y₀ over y; y₁ ..];  x ← norm(x);  x ← x + [γ₂ mlp(x₀); x₁ ..]

    Only the class token attends and feeds forward; the others are normalised and added, as in the authors' code.

    every   the second norm is over all tokens; False: over the class token alone
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: int,
        norm: NormFactory = LayerNorm,
        every: bool = True,
    ) -> None:
        super().__init__()
        self.first, self.second, self.every = norm(dim), norm(dim), every
        self.ask, self.feed = ClassAttention(dim, heads), MLP(dim, hidden)
        self.attended, self.fed = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        y = self.first(x)
        x = x + self.attended * torch.cat((self.ask(y[:, :1], y[:, 1:]), y[:, 1:]), 1)
        x = self.second(x) if self.every else torch.cat((self.second(x[:, :1]), x[:, 1:]), 1)
        return x + torch.cat((self.fed * self.feed(x[:, :1]), x[:, 1:]), 1)


class ClassAttentionStack(Layer):
    """A plain stack, and behind it layers in which a learned class token asks all others: (b n d) -> (b 1+n d), class first
    (Touvron et al. 2021, arXiv 2103.17239).  No masks: it is for images, which have no padding."""

    def __init__(self, layers: Sequence[Layer], last: Sequence[ClassAttentionLayer]) -> None:
        can, causal, length = combine_capabilities(layers)
        unsupported = Can(
            supports_global_mask=True,
            causal=JOINS,
            stream=JOINS,
            mask="the mask would have to grow by the class token",
        )
        super().__init__(layers[0].dim, can=can & unsupported, causal=causal, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.last: Sequence[ClassAttentionLayer] = nn.ModuleList(last)  # type: ignore[assignment]
        self.token = nn.Parameter(torch.randn(self.dim) * 0.02)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`; one token more comes out."""
        x, _ = run_layers(self.layers, x, given, None)
        x = torch.cat((self.token.to(x.dtype).expand(x.shape[0], 1, -1), x), 1)
        for layer in self.last:
            x = layer(x)
        return x, None
