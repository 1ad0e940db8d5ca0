"""Residual connections: y = f(prepare(x)), then x = add(x, y). `RESIDUALS` lists all by name."""

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


class Residual(nn.Module, ABC):
    """Residual connection around a sub-layer f, in two steps, so that f may have a state.

    Here x and y are (b, n, d), and mask is (b, n), True = keep.
    """

    needs_final_norm: bool = False  # its output is an unnormalised sum

    def prepare(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Input of the sub-layer: x, unless the residual normalises it first."""
        return x

    @abstractmethod
    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the output y of the sub-layer to x."""


# ----------------------------------------------------------------------------------- norm placement
class PostNorm(Residual):
    """norm(x + f(x)) (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return self.norm(x + y, mask)


class PreNorm(Residual):
    """x + f(norm(x)) (Xiong et al. 2020, arXiv 2002.04745)."""

    needs_final_norm = True

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.norm = norm(dim)

    def prepare(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return self.norm(x, mask)

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return x + y


class Sandwich(Residual):
    """x + norm₂(f(norm₁(x))) (Ding et al. 2021, CogView, arXiv 2105.13290)."""

    needs_final_norm = True

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__()
        self.pre_norm, self.post_norm = norm(dim), norm(dim)

    def prepare(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return self.pre_norm(x, mask)

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return x + self.post_norm(y, mask)


# --------------------------------------------------------------------------------- scaled residuals
class ReZero(Residual):
    """x + α f(x), with a learned scalar α, initially 0, and no norm (Bachlechner et al. 2020,
    arXiv 2003.04887).

    A stack starts as the identity. Each sub-layer has its own α; the authors' code shares one per
    layer.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_int(1, dim=dim)
        self.scale = nn.Parameter(torch.zeros(()))

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return x + self.scale * y


class LayerScale(PreNorm):
    """x + λ f(norm(x)), with a learned λ (d), initially small (Touvron et al. 2021, CaiT,
    arXiv 2103.17239).

    Args:
        init_value: Initial value of λ. `layer_scale_init_value` gives the paper's: 0.1 for up to 18
            layers, 1e-5 for up to 24, 1e-6 for more.
    """

    def __init__(self, dim: int, *, init_value: float, norm: NormFactory = LayerNorm) -> None:
        super().__init__(dim, norm=norm)
        check_positive("init_value", init_value)
        self.scale = nn.Parameter(torch.full((dim,), float(init_value)))

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return x + self.scale * y


class Admin(PostNorm):
    """norm(ω x + f(x)), with a learned ω (d) per sub-layer (Liu et al. 2020, arXiv 2004.08249).

    ω is 1 until `regard.deep_init.admin_init` initialises it from data; until then this is
    `PostNorm`.
    """

    def __init__(self, dim: int, *, norm: NormFactory = LayerNorm) -> None:
        super().__init__(dim, norm=norm)
        self.omega = nn.Parameter(torch.ones(dim))
        # Called before each addition while `admin_init` runs.
        self.profiler: Callable[[Admin, Tensor, Tensor, Tensor | None], None] | None = None

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        if self.profiler is not None:
            self.profiler(self, x, y, mask)
        return self.norm(self.omega * x + y, mask)


class DeepNorm(PostNorm):
    """norm(α x + f(x)), with a fixed α (Wang et al. 2022, DeepNet, arXiv 2203.00555).

    The method also scales the initial weights by β: see `regard.deep_init.deepnorm_init`.

    Args:
        alpha: Depends on the depth: `deepnorm_scales` and `deepnorm_seq2seq_scales`.
    """

    def __init__(self, dim: int, *, alpha: float, norm: NormFactory = LayerNorm) -> None:
        super().__init__(dim, norm=norm)
        check_positive("alpha", alpha)
        self.alpha = alpha

    def add(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Residual`."""
        return self.norm(self.alpha * x + y, mask)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"alpha={self.alpha:.3f}"


# --------------------------------------------------------------------------- depth-dependent scales
class DeepNormScales(NamedTuple):
    """Scales of DeepNorm: α of the residual, β of the initial weights."""

    alpha: float
    beta: float


def deepnorm_scales(layers: int) -> DeepNormScales:
    """Scales of an encoder or decoder of N layers: α = (2N)^¼, β = (8N)^−¼."""
    check_int(1, layers=layers)
    return DeepNormScales((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def deepnorm_seq2seq_scales(encoder: int, decoder: int) -> tuple[DeepNormScales, DeepNormScales]:
    """Scales of an encoder of N layers and a decoder of M layers with cross-attention.

    Encoder: α = 0.81 (N⁴ M)^(1/16), β = 0.87 (N⁴ M)^(−1/16); decoder: α = (3M)^¼, β = (12M)^−¼.
    """
    check_int(1, encoder=encoder, decoder=decoder)
    depth = (encoder**4 * decoder) ** (1 / 16)
    return (
        DeepNormScales(0.81 * depth, 0.87 / depth),
        DeepNormScales((3 * decoder) ** 0.25, (12 * decoder) ** -0.25),
    )


def layer_scale_init_value(layers: int) -> float:
    """Initial λ of `LayerScale` for a stack of that depth."""
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


def get_residual(
    name: str, layers: int, *, norm: NormFactory | None = None
) -> Callable[[int], Residual]:
    """Factory (width -> residual) for a stack of `layers` layers without cross-attention.

    Args:
        norm: Default layer norm. `rezero` has no norm.
    """
    if name not in RESIDUALS:
        raise ValueError(f"no residual {name!r}: {did_you_mean(str(name), RESIDUALS)}")
    check_int(1, layers=layers)
    kwargs: dict[str, object] = {} if norm is None else {"norm": norm}
    if name == "rezero" and norm is not None:
        raise Unsupported("rezero has no norm: leave norm out")
    if name == "layerscale":
        kwargs["init_value"] = layer_scale_init_value(layers)
    if name == "deepnorm":
        kwargs["alpha"] = deepnorm_scales(layers).alpha
    return partial(RESIDUALS[name], **kwargs)
