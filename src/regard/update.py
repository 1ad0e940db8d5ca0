"""Recurrent state updates of linear attention, computed chunk by chunk for whole sequences.

All functions have the same signature. q and k are (b h n r), v is (b h n f), and the state S is
(b h r f), or None at the start:

    out, S = update(q, k, v, gate, S, chunk)      out_i = S_iᵀ q_i,  with S_i after token i

They differ in the next state:

    add              S + k vᵀ
    decay            g S + k vᵀ            gate = log g <= 0, (b h n)
    diagonal_decay   diag(g) S + k vᵀ      gate = log g <= 0, (b h n r)
    delta            S + β k (v − Sᵀk)ᵀ    gate = β, (b h n): replaces what S stores for k by v

Inside a chunk, tokens interact through masked matrix products; everything before comes from the
state. So the work is n (chunk + r), and n / chunk states are stored for the backward pass. No
factor above 1 is ever computed, so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from regard.backends.linear_scan import causal_linear_scan, join_chunks, split_chunks
from regard.numerics import chunk_length

Update = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", int], tuple[Tensor, Tensor]
]

MIN_LOG_GATE = -60.0  # exp of it vanishes next to 1, and sums of such numbers stay precise


def add(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """S + k vᵀ: linear attention without its denominator."""
    b, h, _, r = q.shape
    state = q.new_zeros(b, h, r, v.shape[3]) if state is None else state
    out, _, state = causal_linear_scan(q, k, v, F.pad(state, (0, 1)), chunk)
    return out, state[..., :-1]


def decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """g S + k vᵀ with one g per token and head: retention, and gated random feature attention."""
    assert gate is not None
    n = q.shape[2]
    gate = gate.clamp(min=MIN_LOG_GATE)[..., None]
    q, k, v, gate = split_chunks((q, k, v, gate), chunk_length(chunk, n))
    total = gate.cumsum(3)  # (b h chunks c 1)
    last = total[..., -1:, :]
    before, state = _scan_chunks(k.mT @ (v * (last - total).exp()), last.exp(), state)
    within = (total - total.mT).tril_().exp()  # tril_ before exp: it could overflow above
    out = (q @ k.mT * within).tril_() @ v + total.exp() * (q @ before)
    return join_chunks(out, n), state


def diagonal_decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """diag(g) S + k vᵀ: gated linear attention."""
    assert gate is not None
    gate = gate.clamp(min=MIN_LOG_GATE)
    if torch.compiler.is_exporting():
        return _diagonal_decay_dense(q, k, v, gate, state)
    return _diagonal_decay_by_chunk(q, k, v, gate, state, chunk)


@_disable_dynamo  # halving a length that is a symbol takes minutes to compile
def _diagonal_decay_by_chunk(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """`diagonal_decay` with the work n (chunk + r)."""
    n = q.shape[2]
    size = 1 << (min(chunk, n) - 1).bit_length()  # a power of two, to be halved
    q, k, v, gate = split_chunks((q, k, v, gate), size)
    total = gate.cumsum(3)
    last = total[..., -1:, :]
    before, state = _scan_chunks((k * (last - total).exp()).mT @ v, last.exp().mT, state)
    out = (q * total.exp()) @ before + _diagonal_decay_within(q, k, v, total)
    return join_chunks(out, n), state


def _diagonal_decay_dense(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`diagonal_decay` for a graph of unknown length: computes all n × n × r factors."""
    assert state is None, "exported graphs take whole sequences"
    total = gate.cumsum(2)
    factors = (total[:, :, :, None] - total[:, :, None]).clamp(max=0.0).exp()
    scores = torch.einsum("bhir,bhjr,bhijr->bhij", q, k, factors).tril()
    return scores @ v, (k * (total[:, :, -1:] - total).exp()).mT @ v


def _diagonal_decay_within(q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """Σ_{j <= i} (Σ_r q_ir k_jr exp(total_ir − total_jr)) v_j inside each chunk (b h chunks c r).

    exp(total_i − total_j) cannot be split into a factor of q_i and one of k_j for all pairs, since
    exp(−total_j) overflows. Between the later and the earlier half of a range it can: split at the
    border, both factors are at most 1. The halves are halved again, down to single tokens.
    """
    out = (q * k).sum(-1, keepdim=True) * v
    size = q.shape[3] // 2
    while size:
        q_late = q.unflatten(3, (-1, 2, size))[:, :, :, :, 1]
        k_early, v_early = (x.unflatten(3, (-1, 2, size))[:, :, :, :, 0] for x in (k, v))
        early, late = total.unflatten(3, (-1, 2, size)).unbind(4)
        border = early[..., -1:, :]
        scores = (q_late * (late - border).exp()) @ (k_early * (border - early).exp()).mT
        late_out = F.pad(scores @ v_early, (0, 0, size, 0))  # nothing for the earlier half
        out, size = out + late_out.reshape(out.shape), size // 2
    return out


def delta(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """S + β k (v − Sᵀk)ᵀ, by the WY form of Yang et al. 2024 (arXiv 2406.06484).

    In a chunk, S = P S_before + Kᵀ U. Token i writes u_i − w_iᵀ S_before, where
    (I + tril(β K Kᵀ, −1)) (U W) = β (V K).
    """
    assert gate is not None
    n, f = q.shape[2], v.shape[-1]
    q, k, v, gate = split_chunks((q, k, v, gate[..., None]), chunk_length(chunk, n))
    lower = (k * gate @ k.mT).tril_(-1)
    right = torch.cat((v, k), -1) * gate
    written = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = written[..., :f], written[..., f:]
    inside = (q @ k.mT).tril_()
    one = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    before, state = _scan_chunks(k.mT @ u, one - k.mT @ w, state, matrix=True)
    return join_chunks(inside @ u + (q - inside @ w) @ before, n), state


def _scan_chunks(
    new: Tensor, keep: Tensor, state: Tensor | None, *, matrix: bool = False
) -> tuple[Tensor, Tensor]:
    """S ← keep S + new over the chunks (dimension 2).

    Args:
        new: What each chunk adds (b h chunks r f).
        keep: Factor of S, or of its rows; with `matrix` a matrix (r r).
        state: S before the first chunk, or None.
        matrix: Whether keep is a matrix.

    Returns:
        S before each chunk (b h chunks r f), and S after the last.
    """
    now = torch.zeros_like(new[:, :, 0]) if state is None else state
    states = []
    for factor, addend in zip(keep.unbind(2), new.unbind(2), strict=True):
        states.append(now)
        now = addend + (factor @ now if matrix else factor * now)
    return torch.stack(states, 2), now
