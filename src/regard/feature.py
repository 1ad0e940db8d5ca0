"""Feature maps for linear attention: phi(q)·phi(k) replaces exp(q·k)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from struct import Struct
from typing import Any

import torch
from torch import Tensor, nn

from regard import native
from regard.autograd import apply_function
from regard.device import widest_dtype
from regard.errors import check_int, check_stream_length
from regard.mixer import Can
from regard.numerics import unit_vectors
from regard.position.frequencies import token_positions

EPSILON = 1e-18  # vanishes when added to 1, but its square is not zero in float32
MIN_EXPONENT = -80.0  # its exp is just above the smallest float32
MIN_KERNEL_ELEMENTS = 1 << 14  # for fewer, calling the C++ kernel costs more than it saves

_ELEMENTS = Struct("6q" + 3 * "P3q")  # arguments of the C++ kernel, field by field

Features = tuple[Tensor, Tensor | None]


class FeatureMap(nn.Module, ABC):
    """Base class for phi: (b h n e) -> (b h n r), of queries and keys.

    Attributes:
        can: Capabilities.
        length: Maximum sequence length, or None for any length.
        heads: Number of heads it was built for, or None for any number.
        min_denominator: None if phi(q)·phi(k) is never negative. Otherwise the smallest absolute
            value of the denominator.
    """

    can: Can = Can("rotary", "gqa")
    length: int | None = None
    heads: int | None = None
    min_denominator: float | None = None

    @abstractmethod
    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """Compute features.

        Args:
            x: Queries or keys (b h n e), float32 at least.
            start: Position of the first token; (b) if it differs between examples.
            is_query: Whether x are queries.

        Returns:
            The features (b h n r) and, if phi could overflow, the logarithm of a factor (b h n)
            that was divided out: phi(x) = features · exp(log_scale). The factor of a query cancels
            in the quotient, so it may be ignored.
        """

    def advance(self) -> None:
        """Called once before each training call, for features that are redrawn."""


class EluFeatures(FeatureMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n e). A query below zero everywhere is shifted up, or phi would
        vanish."""
        return apply_function(_EluPlusOne, x, is_query), None


class _EluPlusOne(torch.autograd.Function):
    """exp(x) below zero, which keeps the digits that elu(x) + 1 loses, and 1 + x above; never zero.

    The backward pass is written out, because those of `where` and `clamp` take as long as the rest
    of linear attention.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_query: bool) -> Tensor:
        if _use_kernel(x):
            return _run_kernel("elu_forward", x, x, is_query)
        if is_query:
            x = x - x.amax(-1, keepdim=True).clamp_(max=0)
        return x.clamp(MIN_EXPONENT, 0.0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (phi,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and _use_kernel(grad, phi):
            return _run_kernel("elu_backward", grad, phi), None
        return grad * phi.clamp(max=1), None


def _use_kernel(*tensors: Tensor) -> bool:
    """Whether the C++ kernel supports the tensors and is faster than PyTorch."""
    large = all(x.dim() == 4 and x.numel() >= MIN_KERNEL_ELEMENTS for x in tensors)
    return large and native.supports(*tensors)


def _run_kernel(name: str, x: Tensor, y: Tensor, is_query: bool = False) -> Tensor:
    x, y = (native.pad_width(t, t.shape[3]) for t in (x, y))
    out = native.empty_like(y)
    pointers = native.pointers_and_strides(x, y, out)
    arguments = _ELEMENTS.pack(*x.shape, torch.get_num_threads(), is_query, *pointers)
    native.run(name, x.dtype, arguments)
    return out


class CosineFeatures(FeatureMap):
    """phi(x_i) = relu(x_i) (cos(π i / 2M), sin(π i / 2M))
    (cosFormer: Qin et al. 2022, arXiv 2202.08791).

    So phi(q_i)·phi(k_j) = relu(q_i)·relu(k_j) cos(π (i−j) / 2M). M = length is the maximum sequence
    length: beyond it the cosine would be negative.
    """

    length: int

    def __init__(self, length: int) -> None:
        super().__init__()
        check_int(1, length=length)
        self.length = length
        self.can = Can(
            "rotary",
            "gqa",
            cross="it compares positions, and those of two sequences are unrelated",
            length=f"its cosine was built for {length} positions",
        )

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n 2e)."""
        check_stream_length(self.length, start + x.shape[2])
        positions = token_positions(start, x.shape[2], x.device).to(widest_dtype(x.device))
        angle = positions * (math.pi / 2 / self.length)
        angle = angle[:, None, :, None] if isinstance(start, Tensor) else angle[:, None]
        x = x.relu()
        return torch.cat((x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)), -1), None


class RandomFeatures(FeatureMap):
    """Base class for features from random rows (features e).

    Args:
        width: Head width e.
        features: Number of rows.
        heads: None for the same rows for all heads, else rows (heads features e).
        orthogonal: Whether to draw rows of random rotations, scaled to the length of Gaussian rows.
            Otherwise they are Gaussian.
        seed: Seed of the rows.
        redraw: Draw new rows every `redraw` training calls, or never if None. Rows and counter are
            saved with the parameters. A call that is recomputed, as by activation checkpointing,
            counts twice.
    """

    rows: Tensor
    calls: Tensor

    def __init__(
        self,
        width: int,
        features: int,
        *,
        heads: int | None = None,
        orthogonal: bool = True,
        seed: int = 0,
        redraw: int | None = None,
    ) -> None:
        super().__init__()
        check_int(1, width=width, features=features)
        check_int(0, seed=seed)
        if redraw is not None:
            check_int(1, redraw=redraw)
        self.heads, self.seed, self.redraw, self.orthogonal = heads, seed, redraw, orthogonal
        shape = (features, width) if heads is None else (heads, features, width)
        self.register_buffer("rows", torch.empty(shape))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self._draw(0)

    def advance(self) -> None:
        """Count a training call, and redraw the rows when it is time."""
        if self.redraw is not None:
            self.calls += 1
            draws, rest = divmod(int(self.calls), self.redraw)
            if not rest:
                self._draw(draws)

    def _draw(self, number: int) -> None:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * number)
        draw = orthogonal_rows if self.orthogonal else normal_rows
        *heads, features, width = self.rows.shape
        rows = [draw(features, width, generator) for _ in range(math.prod(heads))]
        # a new tensor, since autograd may still need the old one
        self.rows = torch.stack(rows).view(self.rows.shape).to(self.rows)

    def project(self, x: Tensor) -> Tensor:
        """w·x for each row w: (b h n e) -> (b h n features)."""
        return x @ self.rows.to(x.dtype).mT

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"features={self.rows.shape[-2]}, seed={self.seed}, redraw={self.redraw}"


def normal_rows(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Gaussian rows (count width)."""
    return torch.randn(count, width, dtype=torch.float64, generator=generator)


def orthogonal_rows(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Rows (count width): blocks of `width` orthogonal rows, each distributed as a Gaussian row.

    Q of a QR decomposition is not uniform over rotations, because LAPACK fixes the signs of R.
    Multiplying by the signs of R's diagonal makes it uniform
    (Mezzadri 2007, arXiv math-ph/0609050).
    """
    blocks = -(-count // width)
    gaussian = torch.randn(blocks, width, width, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    rotations = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    norms = normal_rows(count, width, generator).norm(dim=1, keepdim=True)
    return rotations.flatten(0, 1)[:count] * norms


class PositiveFeatures(RandomFeatures):
    """phi(x)_r = exp(w_r·x − |x|²/2) / √m with x / e^¼ for x
    (FAVOR+: Choromanski et al. 2021, arXiv 2009.14794).

    Never negative, and E phi(q)·phi(k) = exp(q·k / √e).
    """

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n m), at most 1. The largest feature and |x| go into the log-scale."""
        x = x * x.shape[-1] ** -0.25
        features, peak = apply_function(_ExpOfProjection, x, self.rows.to(x.dtype))
        log_scale = peak - x.square().sum(-1) / 2 - math.log(features.shape[-1]) / 2
        return features, log_scale


class _ExpOfProjection(torch.autograd.Function):
    """exp(w·x − peak) for rows w (m e) or (h m e), never zero; and the peak.

    The peak is added back in the log-scale, so it needs no gradient. The backward pass is written
    out to store one tensor of this size and not five.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        projection = x @ rows.mT
        peak = projection.amax(-1)
        return projection.sub_(peak[..., None]).exp_().add_(EPSILON), peak

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(inputs[1], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        rows, features = ctx.saved_tensors
        return (grad * features) @ rows, None


class TrigonometricFeatures(RandomFeatures):
    """phi(x) = exp(|x|²/2) (sin(w_r·x), cos(w_r·x)) / √m with x / e^¼ for x.

    The other estimate of exp(q·k / √e) in Choromanski et al. 2021
    (arXiv 2009.14794). It has a larger variance where it matters, and is sometimes negative.
    """

    min_denominator = 1e-4

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n 2m), between −1 and 1."""
        x = x * x.shape[-1] ** -0.25
        return _sin_cos(self.project(x)), x.square().sum(-1) / 2


class ReluFeatures(RandomFeatures):
    """phi(x)_r = relu(w_r·x) + 0.001 with x / e^¼ for x: generalized attention, which is not an
    estimate of the softmax (Choromanski et al. 2021, arXiv 2009.14794)."""

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n m)."""
        return self.project(x * x.shape[-1] ** -0.25).relu() + 1e-3, None


class RandomFourierFeatures(RandomFeatures):
    """phi(x) = (sin(w_r·u), cos(w_r·u)) / √m with u = x / |x|
    (RFA: Peng et al. 2021, arXiv 2103.02143).

    w = σ ∘ Gaussian numbers, so E phi(q)·phi(k) = exp(−|σ ∘ (q/|q| − k/|k|)|² / 2), which for σ = 1
    is exp(cos(q, k)) / exp(1). σ is learned for each head and dimension. Each head has its own
    rows.
    """

    min_denominator = 1e-2

    def __init__(
        self, width: int, features: int, heads: int, *, seed: int = 0, redraw: int | None = None
    ) -> None:
        super().__init__(width, features, heads=heads, orthogonal=False, seed=seed, redraw=redraw)
        self.scale = nn.Parameter(torch.ones(heads, 1, width))

    def forward(self, x: Tensor, start: int | Tensor, is_query: bool) -> Features:
        """(b h n e) -> (b h n 2m), between −1 and 1."""
        x = unit_vectors(x)
        return _sin_cos(self.project(x * self.scale.to(x.dtype))), None


def _sin_cos(angle: Tensor) -> Tensor:
    """(b h n m) -> (b h n 2m), scaled so that phi(x)·phi(x) = 1."""
    return torch.cat((angle.sin(), angle.cos()), -1) * angle.shape[-1] ** -0.5
