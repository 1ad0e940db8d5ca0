"""gMLP: a linear layer over positions gates the channels (Liu et al. 2021, arXiv 2105.08050)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.can import NO_HEADS
from regard.errors import check_int, check_stream_length
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import slice_dim, token_matmul

OWN = "its gate has weights for each position of one sequence"
INITIAL_SCALE = 1e-3  # of the gate's weights, times the length


class GatedMLPState(NamedTuple):
    """The normalised gate inputs so far, (b m hidden/2), and the state of the small attention."""

    values: Tensor | None
    attention: State


class TinyAttention(nn.Module):
    """Single-head softmax attention of any width: (b n d) -> (b n out)."""

    def __init__(self, dim: int, width: int, out: int) -> None:
        super().__init__()
        check_int(1, width=width)
        self.q, self.k, self.v = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.out, self.inner = nn.Linear(width, out), SoftmaxAttention()

    def forward(
        self, x: Tensor, mask: Tensor | None, state: State, *, causal: bool
    ) -> tuple[Tensor, State]:
        """Output and next state."""
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        y, state = self.inner(q, k, v, causal=causal, mask=mask, state=state)
        return self.out(y[:, 0]), state


class GatedMLP(Mixer):
    """out = V (z₁ ⊙ (W norm(z₂) + b + attention(x))), [z₁ z₂] = gelu(U x), with W (length length)
    over positions.

    W is initialised near zero and b to one, so that the gate starts open. If causal, W is lower
    triangular. Shorter sequences use the first rows and columns of W.

    Args:
        dim: Model width.
        length: Maximum length.
        hidden: Width of U x, even.
        attention: Width of a small attention that is added to the gate (aMLP); 0 for none (gMLP).
        causal: Mix with earlier tokens only.
    """

    def __init__(
        self, dim: int, length: int, hidden: int, *, attention: int = 0, causal: bool = False
    ) -> None:
        can = Can(
            cross=OWN,
            attn_mask="its gate has fixed weights, not a softmax over visible keys",
            length=f"its gate was built for {length} positions",
            maps="it is not linear in its tokens",
            heads=NO_HEADS,
        )
        check_int(1, length=length)
        check_int(2, hidden=hidden)
        check_int(0, attention=attention)
        if hidden % 2:
            raise ValueError(f"hidden must be even, because it is split in half, not {hidden}")
        super().__init__(dim, can=can, causal=causal, length=length)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden // 2, dim)
        self.norm = nn.LayerNorm(hidden // 2)
        bound = INITIAL_SCALE / length
        self.weight = nn.Parameter(torch.empty(length, length).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.ones(length))
        self.attend = TinyAttention(dim, attention, hidden // 2) if attention else None

    def initial_state(self) -> GatedMLPState:
        """State before the first token."""
        attention = None if self.attend is None else self.attend.inner.initial_state()
        return GatedMLPState(None, attention)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        z, gate = F.gelu(self.up(x)).chunk(2, -1)
        gate = self.norm(gate)
        if mask is not None:
            gate = gate.masked_fill(~mask[..., None], 0)
        if state is not None and state.values is not None:
            check_batch(state.values, gate)
            check_stream_length(self.length, state.values.shape[1] + gate.shape[1])
            gate = torch.cat((state.values, gate), 1)
        # W gate + b for the last n of m positions
        n, m = x.shape[1], gate.shape[1]
        weight = slice_dim(slice_dim(self.weight, 0, m - n, m), 1, 0, m)
        weight = weight.tril(m - n) if self.causal else weight
        spatial = token_matmul(weight, gate, slice_dim(self.bias, 0, m - n, m))
        attention_state = None if state is None else state.attention
        if self.attend is not None:
            attended, attention_state = self.attend(x, mask, attention_state, causal=self.causal)
            spatial = spatial + attended
        next_state = None if state is None else GatedMLPState(gate, attention_state)
        return self.down(z * spatial), next_state
