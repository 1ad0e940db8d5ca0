"""Retention: a recurrence with a fixed decay rate per head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import widest_dtype
from regard.errors import check_int
from regard.mixer import State, merge_heads, split_heads
from regard.mixers.recurrence import Recurrence, RecurrenceInputs
from regard.position.rotary import Rope
from regard.state import per_example
from regard.update import decay


@per_example("position")
class RetentionPosition(NamedTuple):
    """What is carried between chunks: the position of the next token, an int or (b)."""

    position: int | Tensor


class Retention(Recurrence):
    """Multi-scale retention (Sun et al. 2023, arXiv 2307.08621), equations 6 to 8.

    S_i = γ S_{i−1} + k_i v_iᵀ and head_i = S_iᵀ q_i / √e, with rotary embeddings on q and k, and
    γ = 1 − 2^(−5−h) in head h; out = W⁰ (swish(W^G x) ∘ GroupNorm(heads)).

    Args:
        dim: Model width.
        heads: Number of heads.
        expand: Width of the values, in multiples of the width of the keys.
        causal: Must be True.
        chunk: Tokens processed at once.
    """

    def __init__(
        self, dim: int, heads: int, *, expand: int = 2, causal: bool = True, chunk: int = 64
    ) -> None:
        super().__init__(dim, heads, decay, causal=causal, chunk=chunk)
        check_int(1, expand=expand)
        if dim // heads % 2:
            raise ValueError(
                "rotary embeddings rotate pairs of channels: "
                f"the width of a head must be even, not {dim // heads}"
            )
        self.q, self.k = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(dim, expand * dim, bias=False) for _ in range(2))
        self.rotary = Rope(layout="pairs")
        self.norm = nn.GroupNorm(heads, expand * dim)
        self.out = nn.Linear(expand * dim, dim, bias=False)

    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """Rotated queries and keys, values, and log γ."""
        at, n = 0 if past is None else past.position, x.shape[1]
        q, k, v = (split_heads(f(x), self.heads) for f in (self.q, self.k, self.v))
        q, k = self.rotary(q, k, at, at)
        head = torch.arange(self.heads, dtype=widest_dtype(x.device), device=x.device)
        log_decay = torch.log1p(-torch.exp2(-5 - head))
        log_decay = log_decay.to(torch.promote_types(x.dtype, torch.float32))
        gate = log_decay[None, :, None].expand(x.shape[0], -1, n)
        return RecurrenceInputs(q / math.sqrt(q.shape[-1]), k, v, gate), RetentionPosition(at + n)

    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Normalise each head, gate and project."""
        y = self.norm(merge_heads(y).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.out(F.silu(self.gate(x)) * y)
