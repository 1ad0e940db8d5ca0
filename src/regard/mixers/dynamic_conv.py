"""Lightweight and dynamic convolution (Wu et al. 2019, arXiv 1901.10430)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.mixer import Can, Mixer, State, check_batch, check_heads

ONE_SEQUENCE = "the kernel slides over one sequence"
ONE_KERNEL = "its weights are a kernel over distances, not a softmax over visible keys"


class DynamicConv(Mixer):
    """out = W⁰ y with y_ic = Σ_j softmax_j(W z_i)_{h(c) j} z_{i+j−⌈(k+1)/2⌉, c} and z = GLU(W x),
    j = 1 .. k.

    The d / heads channels of a head share one kernel. If causal, the kernel ends at the token
    itself. As in the paper, the sequence is padded with zeros, whose weights are lost.

    Args:
        dim: Model width.
        heads: Number of heads.
        kernel: Kernel size.
        dynamic: Predict the kernel from each token. False: learn it, the paper's lightweight
            convolution.
        causal: Convolve with earlier tokens only.
    """

    def __init__(
        self, dim: int, heads: int, kernel: int, *, dynamic: bool = True, causal: bool = False
    ) -> None:
        check_heads(dim, heads)
        check_int(1, kernel=kernel)
        super().__init__(dim, can=Can(cross=ONE_SEQUENCE, attn_mask=ONE_KERNEL), causal=causal)
        self.heads, self.kernel = heads, kernel
        self.before = kernel - 1 if causal else kernel // 2  # taps before the token
        self.up, self.out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.taps = (
            nn.Linear(dim, heads * kernel, bias=False) if dynamic else StaticKernels(heads * kernel)
        )

    def initial_state(self) -> State:
        """State before the first token."""
        return (None,)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d). The state holds the last kernel − 1 tokens."""
        z = self._apply_glu(x, mask)
        past = None if state is None else state[0]
        if past is None:
            past = z.new_zeros(z.shape[0], self.before, self.dim)
        check_batch(past, z)
        future = z.new_zeros(z.shape[0], self.kernel - 1 - self.before, self.dim)
        window = torch.cat((past, z, future), 1)
        y = self._convolve(window.unflatten(-1, (self.heads, -1)), self._kernels(z))
        last = window[:, window.shape[1] - self.before :]
        return self.out(y.flatten(2)), None if state is None else (last,)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """The kernels as a band matrix, (b h n n)."""
        n = x.shape[1]
        kernels = self._kernels(self._apply_glu(x, mask)).transpose(1, 2)  # (b h n k)
        at = torch.arange(n, device=x.device)[:, None] + torch.arange(self.kernel, device=x.device)
        wide = kernels.new_zeros(*kernels.shape[:3], n + self.kernel - 1)
        wide = wide.scatter(3, at.expand_as(kernels), kernels)[..., self.before : self.before + n]
        return wide if mask is None else wide * mask[:, None, None]

    def _apply_glu(self, x: Tensor, mask: Tensor | None) -> Tensor:
        z = F.glu(self.up(x), -1)
        return z if mask is None else z.masked_fill(~mask[..., None], 0)

    def _kernels(self, z: Tensor) -> Tensor:
        """(b n d) -> (b n h k)."""
        return self.taps(z).unflatten(-1, (self.heads, -1)).softmax(-1)

    def _convolve(self, window: Tensor, kernels: Tensor) -> Tensor:
        """(b n+k−1 h e), (b n h k) -> (b n h e), tap by tap to avoid a tensor k times as large."""
        n = kernels.shape[1]
        out = torch.zeros_like(window[:, :n])
        for j in range(self.kernel):
            out = out + kernels[..., j, None] * window[:, j : j + n]
        return out


class StaticKernels(nn.Module):
    """Learned kernels, the same for all tokens: (b n d) -> (b n h*k)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count))

    def forward(self, z: Tensor) -> Tensor:
        return self.weight.expand(*z.shape[:2], -1)
