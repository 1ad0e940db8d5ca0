"""Two linear maps with a bend between them, and three with a gate."""

from __future__ import annotations

from torch import Tensor, nn

from regard.errors import check_int
from regard.ffn.activations import Activation, get_activation
from regard.ffn.base import FeedForward

WIDER = 4  # how much wider a plain layer is inside than outside


class MLP(FeedForward):
    """W₂ σ(W₁ x + b₁) + b₂ (Vaswani et al. 2017, arXiv 1706.03762), four times as wide inside unless `hidden` is given.

    activation   σ, a name of `ACTIVATIONS` or a function
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
        hidden = WIDER * dim if hidden is None else hidden
        check_int(1, hidden=hidden)
        self.activation = _function(activation)
        self.up, self.down = nn.Linear(dim, hidden, bias=bias), nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.activation(self.up(x)))


class GLU(FeedForward):
    """W₂ (σ(W x) ⊙ V x) (Dauphin et al. 2017, arXiv 1612.08083; Shazeer 2020, arXiv 2002.05202).

    hidden       ⌊8/3 · dim⌉ unless given, two thirds of the width of an `MLP`: so three matrices have the parameters of its
                 two, but for the rounding (at most 1.5 · dim of them) and the biases
    activation   σ, a name of `ACTIVATIONS` or a function.  GLU "sigmoid", ReGLU "relu", GEGLU "gelu", SwiGLU "silu",
                 bilinear "identity"
    bias         none, as in Shazeer's, unless asked
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
        hidden = gated_width(dim) if hidden is None else hidden
        check_int(1, hidden=hidden)
        self.activation = _function(activation)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


_function = get_activation  # the constructors have an argument of that name


def gated_width(dim: int) -> int:
    """Two thirds of 4 · dim, to the nearest whole number."""
    return (2 * WIDER * dim + 1) // 3
