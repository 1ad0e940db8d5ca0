"""The delta rule: a token overwrites what the state says of its key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int
from regard.mixer import Can, State, merge_heads, split_heads
from regard.mixers.recurrence import Recurrence, RecurrenceInputs
from regard.numerics import at_least_float32, unit_vectors
from regard.update import delta


class DeltaRule(Recurrence):
    """DeltaNet (Yang et al. 2024, arXiv 2406.06484; the rule is of Schlag et al. 2021,
    arXiv 2102.11174).

    S_i = S_{i−1} + β_i k_i (v_i − S_{i−1}ᵀ k_i)ᵀ and head_i = S_iᵀ q_i, with β_i = σ(w·x_i) in each
    head; q, k and v pass a short convolution and swish, and q and k have length 1; out = W⁰
    RMSNorm(head).

    Args:
        dim: Model width.
        heads: Number of heads.
        convolution: Kernel size of the causal convolution; 0 for none.
        causal: Must be True.
        chunk: Tokens processed at once.
    """

    def __init__(
        self, dim: int, heads: int, *, convolution: int = 4, causal: bool = True, chunk: int = 64
    ) -> None:
        super().__init__(dim, heads, delta, causal=causal, chunk=chunk)
        self.can = self.can & Can(onnx="ONNX has no triangular solve, which its chunks need")
        check_int(0, convolution=convolution)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.rate = nn.Linear(dim, heads, bias=False)
        self.convolution = ShortConvolution(3 * dim, convolution) if convolution else None
        self.norm = nn.RMSNorm(dim // heads, eps=1e-5)

    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """Queries, keys, values and β. The carried state holds the inputs of the convolution."""
        qkv = torch.cat([f(x) for f in (self.q, self.k, self.v)], -1)
        if self.convolution is not None:
            qkv, past = self.convolution(qkv, past)
        # in float16 the SiLU of a large negative number is so small that its norm underflows
        activated = F.silu(at_least_float32(qkv))
        q, k, v = (split_heads(t, self.heads) for t in activated.chunk(3, -1))
        q, k, v = unit_vectors(q), unit_vectors(k), v.to(qkv.dtype)
        return RecurrenceInputs(q, k, v, self.rate(x).sigmoid().transpose(1, 2)), past

    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Normalise each head and project."""
        return self.out(merge_heads(self.norm(y)))


class ShortConvolution(nn.Module):
    """Causal depth-wise convolution, zero-padded: y_i = Σ_s w_s ∘ x_{i−s}, s = 0 .. size − 1."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (b n width) and the tokens before it (b size-1 width), or None for zeros -> (b n width)
        and the last tokens.
        """
        size, n = len(self.weight), x.shape[1]
        x = F.pad(x, (0, 0, size - 1, 0)) if past is None else torch.cat((past, x), 1)
        y = x[:, size - 1 :] * self.weight[0]
        for back in range(1, size):
            y = y + x[:, size - 1 - back : size - 1 - back + n] * self.weight[back]
        return y, x[:, n:]
