"""How a sub-layer f joins the stream of tokens: y = f(before(x)), then x = after(x, y)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from regard.norm import LayerNorm, Norm

MakeNorm = Callable[[int], Norm]


class Residual(nn.Module, ABC):
    """What stands around one sub-layer, as two functions, so that a sub-layer may keep a state between them."""

    unfinished: bool = False  # what it leaves is a bare sum, and wants a norm after the last layer

    @abstractmethod
    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the sub-layer reads: x (b n d), mask (b n), True = a real token -> (b n d)."""

    @abstractmethod
    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The stream x and what the sub-layer made of it, y -> the stream behind it, (b n d)."""


class PostNorm(Residual):
    """norm(x + f(x)) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, norm: MakeNorm = LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum, normalised."""
        return self.norm(x + y, mask)


class PreNorm(Residual):
    """x + f(norm(x)) (Xiong et al. 2020, arXiv 2002.04745)."""

    unfinished = True

    def __init__(self, dim: int, *, norm: MakeNorm = LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, normalised."""
        return self.norm(x, mask)

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum."""
        return x + y
