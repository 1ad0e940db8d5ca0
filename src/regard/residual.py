"""How a sub-layer f joins the stream of tokens: y = f(before(x)), then x = after(x, y).  `RESIDUALS` has all by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported, check_int, check_positive, did_you_mean
from regard.norm import LayerNorm, Norm

NormFactory = Callable[[int], Norm]
Watch = Callable[["Admin", Tensor, Tensor, Tensor | None], None]


class Residual(nn.Module, ABC):
    """What stands around one sub-layer, as two functions, so that a sub-layer may keep a state between them."""

    needs_final_norm: bool = (
        False  # what it leaves is a bare sum, and wants a norm after the last layer
    )

    @abstractmethod
    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the sub-layer reads: x (b n d), mask (b n), True = a real token -> (b n d)."""

    @abstractmethod
    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The stream x and what the sub-layer made of it, y -> the stream behind it, (b n d)."""


# ---------------------------------------------------------------------------------------------- where the norm stands
class PostNorm(Residual):
    """norm(x + f(x)) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
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

    needs_final_norm = True

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, normalised."""
        return self.norm(x, mask)

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum."""
        return x + y


class Sandwich(Residual):
    """x + norm(f(norm(x))), with two norms (Ding et al. 2021, CogView, arXiv 2105.13290)."""

    needs_final_norm = True

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.first, self.second = norm(dim), norm(dim)

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, normalised."""
        return self.first(x, mask)

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """x and y, normalised."""
        return x + self.second(y, mask)


# ---------------------------------------------------------------------------------------------- how much f adds
class ReZero(Residual):
    """x + α f(x), with one learned number α, 0 at first, and no norm at all (Bachlechner et al. 2020, arXiv 2003.04887).

    At first a stack is the identity.  Each sub-layer has its own α; the authors' code shares one within a layer.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.scale = nn.Parameter(torch.zeros(()))

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, and α of y."""
        return x + self.scale * y


class LayerScale(Residual):
    """x + λ f(norm(x)), with a learned λ (d), small at first (Touvron et al. 2021, CaiT, arXiv 2103.17239).

    start   of all λ; the paper's is 0.1 for up to 18 layers, 1e-5 for up to 24, and 1e-6 for more: `layer_scale_init_value`
    """

    needs_final_norm = True

    def __init__(self, dim: int, *, start: float, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        check_positive("start", start)
        self.norm, self.scale = norm(dim), nn.Parameter(torch.full((dim,), float(start)))

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, normalised."""
        return self.norm(x, mask)

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """x, and λ of y."""
        return x + self.scale * y


class Admin(Residual):
    """norm(ω x + f(x)), with a learned ω (d) of each sub-layer (Liu et al. 2020, arXiv 2004.08249).

    ω is one until `regard.deep_init.admin_init` has measured what it should begin with; before that, this is `PostNorm`.
    """

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.norm, self.omega = norm(dim), nn.Parameter(torch.ones(dim))
        self.watch: Watch | None = None  # is shown what is joined, while a profile is taken

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """ω of x and y, normalised."""
        if self.watch is not None:
            self.watch(self, x, y, mask)
        return self.norm(self.omega * x + y, mask)


class DeepNorm(Residual):
    """norm(α x + f(x)), with a fixed α (Wang et al. 2022, DeepNet, arXiv 2203.00555).

    The other half of it is the start: weights must be drawn smaller by β, with `regard.deep_init.deepnorm_init`.

    alpha   by the depth of the stack: `alone(layers).alpha`, or `deepnorm_seq2seq_scales(encoder, decoder)`
    """

    def __init__(self, dim: int, *, alpha: float, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        check_positive("alpha", alpha)
        self.norm, self.alpha = norm(dim), alpha

    def before(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x

    def after(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """α of x and y, normalised."""
        return self.norm(self.alpha * x + y, mask)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"alpha={self.alpha:.3f}"


# ---------------------------------------------------------------------------------------------- numbers by depth
class DeepNormScales(NamedTuple):
    """What DeepNorm needs: α for the stream, β for the weights at first."""

    alpha: float
    beta: float


def deepnorm_scales(layers: int) -> DeepNormScales:
    """For a stack by itself, encoder or decoder, of N layers: α = (2N)^¼, β = (8N)^−¼."""
    check_int(1, layers=layers)
    return DeepNormScales((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def deepnorm_seq2seq_scales(encoder: int, decoder: int) -> tuple[DeepNormScales, DeepNormScales]:
    """For an encoder of N layers and a decoder of M that looks at it.

    Encoder: α = 0.81 (N⁴ M)^(1/16), β = 0.87 (N⁴ M)^(−1/16); decoder: α = (3M)^¼, β = (12M)^−¼.
    """
    check_int(1, encoder=encoder, decoder=decoder)
    both = (encoder**4 * decoder) ** (1 / 16)
    return DeepNormScales(0.81 * both, 0.87 / both), DeepNormScales(
        (3 * decoder) ** 0.25, (12 * decoder) ** -0.25
    )


def layer_scale_init_value(layers: int) -> float:
    """What λ of `LayerScale` begins with."""
    check_int(1, layers=layers)
    return 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6


RESIDUALS: Mapping[str, type[Residual]] = {
    "post": PostNorm,
    "pre": PreNorm,
    "sandwich": Sandwich,
    "rezero": ReZero,
    "layerscale": LayerScale,
    "admin": Admin,
    "deepnorm": DeepNorm,
}
BY_DEPTH: Mapping[type[Residual], Callable[[int], dict[str, float]]] = {
    LayerScale: lambda layers: {"start": layer_scale_init_value(layers)},
    DeepNorm: lambda layers: {"alpha": deepnorm_scales(layers).alpha},
}


def get_residual(
    name: str, layers: int, *, norm: NormFactory | None = None
) -> Callable[[int], Residual]:
    """What makes residuals of this name from a width, for a stack of so many layers that stands by itself.

    norm   layer norm unless given; `rezero` has none
    """
    if name not in RESIDUALS:
        raise ValueError(f"no residual {name!r}: {did_you_mean(str(name), RESIDUALS)}")
    check_int(1, layers=layers)
    kind = RESIDUALS[name]
    if norm is not None and kind is ReZero:
        raise Unsupported("rezero has no norm: leave norm out")
    more = BY_DEPTH[kind](layers) if kind in BY_DEPTH else {}
    return partial(kind, **more) if norm is None else partial(kind, norm=norm, **more)
