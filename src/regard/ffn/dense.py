"""Dense feed-forward layers, with and without a gate."""

from __future__ import annotations

from torch import Tensor, nn

from regard.errors import check_int
from regard.ffn.activations import Activation, get_activation
from regard.ffn.base import FeedForward

EXPANSION = 4  # default hidden width of an MLP, in multiples of dim


class MLP(FeedForward):
    """W₂ σ(W₁ x + b₁) + b₂ (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        hidden: Hidden width, default 4 · dim.
        activation: σ, a name of `ACTIVATIONS` or a function.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        activation: str | Activation = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__(dim)
        hidden = EXPANSION * dim if hidden is None else hidden
        check_int(1, hidden=hidden)
        self.activation = get_activation(activation)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.activation(self.up(x)))


class GLU(FeedForward):
    """W₂ (σ(W x) ⊙ V x) (Dauphin et al. 2017, arXiv 1612.08083; Shazeer 2020, arXiv 2002.05202).

    Args:
        hidden: Hidden width, default ⌊8/3 · dim⌉, two thirds of the width of an `MLP`, so that the
            three matrices have as many parameters as its two, up to rounding and biases.
        activation: σ, a name of `ACTIVATIONS` or a function. GLU "sigmoid", ReGLU "relu", GEGLU
            "gelu", SwiGLU "silu", bilinear "identity".
        bias: Default False, as in Shazeer.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        activation: str | Activation = "sigmoid",
        bias: bool = False,
    ) -> None:
        super().__init__(dim)
        hidden = (2 * EXPANSION * dim + 1) // 3 if hidden is None else hidden
        check_int(1, hidden=hidden)
        self.activation = get_activation(activation)
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.activation(self.gate(x)) * self.up(x))
