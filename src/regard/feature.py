"""Feature maps for linear attention: phi(x) of queries and keys, with phi(q)·phi(k) in place of exp(q·k)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from struct import Struct
from typing import Any

import torch
from torch import Tensor, nn

from regard import native
from regard.autograd import apply_function
from regard.errors import check_int
from regard.mixer import Can

TINY = 1e-18  # beside 1 it is nothing, and its square is no zero
LOWEST = -80.0  # exp of it is just above the least that float32 has
FEW = 1 << 14  # numbers: for fewer, a call of the kernel takes longer than it saves

_ELEMENTS = Struct("6q" + 3 * "P3q")  # the structure of the kernel, field by field


class FeatureMap(nn.Module, ABC):
    """phi: (b h n e) -> (b h n r), of queries and keys.

    floor   None: phi(q)·phi(k) is never negative.  Else it may be, and the sum that one divides by is held so far from zero
    """

    can: Can = Can()
    length: int | None = None
    heads: int | None = None
    min_denominator: float | None = None

    @abstractmethod
    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """x (b h n e), of float32 at least, the first of them at position `at` -> (b h n r) and, where phi could overflow,
        the logarithm of a factor (b h n) that was left out: phi(x) = features · exp(level).  A factor of a query cancels,
        so it may be left out untold."""

    def advance(self) -> None:
        """Called once before each training call, for what is drawn anew in time."""


class EluFeatures(FeatureMap):
    """phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """Elementwise: (b h n e) -> (b h n e).  A query below zero everywhere is raised to it, lest it vanish."""
        return apply_function(_EluPlusOne, x, query), None


class _EluPlusOne(torch.autograd.Function):
    """exp(x) below zero, which keeps the digits that elu(x) + 1 loses, and 1 + x above; never nothing.

    By hand, since the backward passes of `where` and `clamp` take as long as all the rest of linear attention.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, query: bool) -> Tensor:
        if _by_kernel(x):
            return _elements("elu_forward", x, x, raise_=query)
        if query:
            x = x - x.amax(-1, keepdim=True).clamp_(max=0)
        return x.clamp(LOWEST, 0.0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (phi,) = ctx.saved_tensors
        if not torch.is_grad_enabled() and _by_kernel(grad, phi):
            return _elements("elu_backward", grad, phi), None
        return grad * phi.clamp(max=1), None


def _by_kernel(*tensors: Tensor) -> bool:
    """Whether one pass of our own is to be had, and shorter than several of PyTorch."""
    return all(x.dim() == 4 and x.numel() >= FEW for x in tensors) and native.supports(*tensors)


def _elements(name: str, x: Tensor, y: Tensor, *, raise_: bool = False) -> Tensor:
    x, y = (native.pad_width(t, t.shape[3]) for t in (x, y))
    out = native.empty_like(y)
    native.run(
        name,
        x.dtype,
        _ELEMENTS.pack(
            *x.shape, torch.get_num_threads(), raise_, *native.pointers_and_strides(x, y, out)
        ),
    )
    return out


class CosineFeatures(FeatureMap):
    """phi(x_i) = relu(x_i) (cos(π i / 2M), sin(π i / 2M)), so that phi(q_i)·phi(k_j) = relu(q_i)·relu(k_j) cos(π (i−j) / 2M)
    (Qin et al. 2022, arXiv 2202.08791).  M = length is the longest sequence: beyond it the cosine would be negative.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        check_int(1, length=length)
        self.length = length
        self.can = Can(
            cross="it compares positions, and those of two sequences are not comparable",
            length=f"its cosine was made for {length} positions",
        )

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """(b h n e) -> (b h n 2e)."""
        x = x.relu()
        n, most = x.shape[2], self.length or 0
        if at + n > most:
            raise ValueError(
                f"the stream has come to {at + n} tokens, and this was built for at most {most}"
            )
        angle = torch.arange(at, at + n, dtype=torch.float64, device=x.device) * (
            math.pi / 2 / most
        )
        cos, sin = (t.to(x.dtype)[:, None] for t in (angle.cos(), angle.sin()))
        return torch.cat((x * cos, x * sin), -1), None


class RandomFeatures(FeatureMap):
    """A feature made of random rows (features e), drawn by `seed`, and drawn anew every `redraw` training calls.

    orthogonal  rows of random rotations, as long as rows of normal numbers are; else normal numbers
    heads       None: the same rows for all heads; else (heads features e)
    redraw      None: never.  What was drawn and how many calls there were is saved with the parameters.  A call that is
                computed again, as by activation checkpointing, counts twice
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
        self.register_buffer(
            "rows", torch.empty(*(() if heads is None else (heads,)), features, width)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self._draw(0)

    def advance(self) -> None:
        """Count a training call, and draw where it is time to."""
        if self.redraw is not None:
            self.calls += 1
            done, rest = divmod(int(self.calls), self.redraw)
            if not rest:
                self._draw(done)

    def _draw(self, number: int) -> None:
        make = torch.Generator().manual_seed(self.seed + 1_000_003 * number)
        draw = orthogonal_rows if self.orthogonal else normal_rows
        *heads, features, width = self.rows.shape
        drawn = [draw(features, width, make) for _ in range(math.prod(heads))]
        self.rows = (
            torch.stack(drawn).view(self.rows.shape).to(self.rows)
        )  # a graph may still need the old ones

    def project(self, x: Tensor) -> Tensor:
        """w·x for each row w: (b h n e) -> (b h n features)."""
        return x @ self.rows.to(x.dtype).transpose(-1, -2)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"features={self.rows.shape[-2]}, seed={self.seed}, redraw={self.redraw}"


def normal_rows(count: int, width: int, make: torch.Generator) -> Tensor:
    """(count width) of normal numbers."""
    return torch.randn(count, width, dtype=torch.float64, generator=make)


def orthogonal_rows(count: int, width: int, make: torch.Generator) -> Tensor:
    """(count width): blocks of `width` rows at right angles, each row distributed as a row of normal numbers.

    Q of a QR decomposition alone is not uniform over rotations: LAPACK fixes the signs of R by its own rule, which gives Q
    a direction.  With the signs of R's diagonal it is (Mezzadri 2007, arXiv math-ph/0609050).
    """
    blocks = -(-count // width)
    q, r = torch.linalg.qr(torch.randn(blocks, width, width, dtype=torch.float64, generator=make))
    turned = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return turned.flatten(0, 1)[:count] * normal_rows(count, width, make).norm(dim=1, keepdim=True)


class PositiveFeatures(RandomFeatures):
    """phi(x)_r = exp(w_r·x − |x|²/2) / √m, with x / e^¼ for x: E phi(q)·phi(k) = exp(q·k / √e), and never negative
    (FAVOR+, Choromanski et al. 2021, arXiv 2009.14794).
    """

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """(b h n e) -> (b h n m), at most 1.  The largest is left out as a factor of each token, and |x| with it."""
        x = x * x.shape[-1] ** -0.25
        found, peak = apply_function(_Powers, x, self.rows.to(x.dtype))
        return found, peak - x.square().sum(-1) / 2 - math.log(found.shape[-1]) / 2


class _Powers(torch.autograd.Function):
    """exp(w·x − peak) for rows w (m e) or (h m e), and never nothing; and the peak, which comes back in the level and so needs
    no gradient.

    By hand, to make one tensor of this size and not five.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        power = x @ rows.mT
        peak = power.amax(-1)
        return power.sub_(peak[..., None]).exp_().add_(TINY), peak

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(inputs[1], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        rows, found = ctx.saved_tensors
        return (grad * found) @ rows, None


class TrigonometricFeatures(RandomFeatures):
    """phi(x) = exp(|x|²/2) (sin(w_r·x), cos(w_r·x)) / √m, with x / e^¼ for x: the other estimate of exp(q·k / √e) in
    Choromanski et al. 2021, arXiv 2009.14794; of greater variance where it matters, and negative at times.
    """

    min_denominator = 1e-4

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """(b h n e) -> (b h n 2m), between −1 and 1."""
        x = x * x.shape[-1] ** -0.25
        angle = self.project(x)
        level = x.square().sum(-1) / 2
        return torch.cat((angle.sin(), angle.cos()), -1) * angle.shape[-1] ** -0.5, level


class ReluFeatures(RandomFeatures):
    """phi(x)_r = relu(w_r·x) + 0.001, with x / e^¼ for x: the generalised attention of Choromanski et al. 2021,
    arXiv 2009.14794, which estimates a kernel of its own.
    """

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """(b h n e) -> (b h n m)."""
        return self.project(x * x.shape[-1] ** -0.25).relu() + 1e-3, None


class RandomFourierFeatures(RandomFeatures):
    """phi(x) = (sin(w_r·u), cos(w_r·u)) / √m, with u = x / |x| and w = σ ∘ normal numbers: E phi(q)·phi(k) =
    exp(−|σ ∘ (q/|q| − k/|k|)|² / 2), which for σ = 1 is exp(cos(q, k)) / exp(1) (Peng et al. 2021, arXiv 2103.02143).

    σ is learned, for each head and dimension.  Each head has rows of its own.
    """

    min_denominator = 1e-2

    def __init__(
        self, width: int, features: int, heads: int, *, seed: int = 0, redraw: int | None = None
    ) -> None:
        super().__init__(width, features, heads=heads, orthogonal=False, seed=seed, redraw=redraw)
        self.scale = nn.Parameter(torch.ones(heads, 1, width))

    def forward(self, x: Tensor, at: int, query: bool) -> tuple[Tensor, Tensor | None]:
        """(b h n e) -> (b h n 2m), between −1 and 1."""
        x = nn.functional.normalize(x, dim=-1)
        angle = self.project(x * self.scale.to(x.dtype))
        return torch.cat((angle.sin(), angle.cos()), -1) * angle.shape[-1] ** -0.5, None
