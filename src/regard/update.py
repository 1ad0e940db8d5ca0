"""How a state takes in the next key and value, for whole sequences at once: in chunks, never with a state for each token.

All have one form.  q and k are (b h n r), v is (b h n f), the state S is (b h r f), None: nothing yet.

    out, S = update(q, k, v, gate, S, chunk)      out_i = S_iᵀ q_i,  with S_i after token i

and differ in how S_i follows from S_{i-1}:

    add          S + k vᵀ
    decay        g S + k vᵀ            g a number for each token and head;  gate = log g, (b h n), at most 0
    diagonal_decay   diag(g) S + k vᵀ      g a number for each row of S;        gate = log g, (b h n r), at most 0
    delta        S + β k (v − Sᵀk)ᵀ    what S says of k is replaced by v;   gate = β, (b h n)

Inside a chunk tokens meet by masked products; what was before it they get from the state.  So the work is n (chunk + r) and
what is kept for the backward pass n / chunk states.  No factor above 1 is ever formed, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends.linear_scan import causal_linear_scan, join_chunks, split_chunks
from regard.numerics import chunk_length

Update = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", int], tuple[Tensor, Tensor]
]

LEAST = (
    -60.0
)  # of log g: beside 1, exp of it is nothing, and sums of such numbers keep their digits


def add(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """S + k vᵀ: linear attention without its denominator."""
    none = q.new_zeros(*q.shape[:2], q.shape[3], 1)
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if state is None else state
    out, _, state = causal_linear_scan(q, k, v, torch.cat((state, none), -1), chunk)
    return out, state[..., :-1]


def decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """g S + k vᵀ, with one g for a token and head: retention, and the gate of random feature attention."""
    assert gate is not None
    n, (q, k, v, gate) = (
        q.shape[2],
        split_chunks((q, k, v, gate.clamp(min=LEAST)[..., None]), chunk_length(chunk, q.shape[2])),
    )
    past = gate.cumsum(3)  # (b h chunks c 1): how much has gone by the end of each token
    last = past[..., -1:, :]
    within = (
        (past - past.transpose(-1, -2)).tril_().exp()
    )  # above the diagonal it could overflow, and is cut off below
    before, state = _carried(k.transpose(-1, -2) @ (v * (last - past).exp()), last.exp(), state)
    out = (q @ k.transpose(-1, -2) * within).tril_() @ v + past.exp() * (q @ before)
    return join_chunks(out, n), state


def diagonal_decay(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """diag(g) S + k vᵀ: gated linear attention."""
    assert gate is not None
    if torch.compiler.is_exporting():
        return _each_at_once(q, k, v, gate, state)
    size = 1 << (min(chunk, q.shape[2]) - 1).bit_length()  # halves are halved again
    n, (q, k, v, gate) = q.shape[2], split_chunks((q, k, v, gate.clamp(min=LEAST)), size)
    past = gate.cumsum(3)
    last = past[..., -1:, :]
    before, state = _carried(
        (k * (last - past).exp()).transpose(-1, -2) @ v, last.exp().transpose(-1, -2), state
    )
    out = (q * past.exp()) @ before + _halves(q, k, v, past)
    return join_chunks(out, n), state


def _each_at_once(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`diagonal_decay` for a length that is not known: without halves, so that all n × n × r factors are formed."""
    assert state is None, "a graph for any length takes a whole sequence"
    past = gate.clamp(min=LEAST).cumsum(2)
    factors = (past[:, :, :, None] - past[:, :, None]).clamp(max=0.0).exp()
    scores = torch.einsum("bhir,bhjr,bhijr->bhij", q, k, factors).tril()
    return scores @ v, (k * (past[:, :, -1:] - past).exp()).mT @ v


def _halves(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
    """Σ_{j <= i} (Σ_r q_ir k_jr exp(past_ir − past_jr)) v_j inside each chunk (b h chunks c r).

    The factors of q and k cannot be parted at one place for all pairs, or exp(−past) overflows.  But between the later
    half of a stretch and the earlier one they can, at the border: both factors are then at most 1.  So are they for the
    halves of the halves, down to a token and itself.
    """
    out = (q * k).sum(-1, keepdim=True) * v
    size = q.shape[3] // 2
    while size:
        (_, late_q), (early_k, _), (early_v, _), (early, late) = (
            _pairs(x, size) for x in (q, k, v, past)
        )
        border = early[..., -1:, :]
        scores = (late_q * (late - border).exp()) @ (early_k * (border - early).exp()).transpose(
            -1, -2
        )
        found = F.pad(scores @ early_v, (0, 0, size, 0))  # nothing for the earlier half
        out, size = out + found.reshape(out.shape), size // 2
    return out


def _pairs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Stretches of 2 size tokens: their earlier and later halves, (b h chunks stretches size r) each."""
    early, late = x.unflatten(3, (-1, 2, size)).unbind(4)
    return early, late


def delta(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """S + β k (v − Sᵀk)ᵀ, by the WY form of Yang et al. 2024 (arXiv 2406.06484): in a chunk, S = P S_before + Kᵀ U.

    The rows that token i writes are u_i − w_iᵀ S_before, where (I + tril(β K Kᵀ, −1)) (U W) = β (V K).
    """
    assert gate is not None
    n, (q, k, v, gate) = (
        q.shape[2],
        split_chunks((q, k, v, gate[..., None]), chunk_length(chunk, q.shape[2])),
    )
    keys, width = k.transpose(-1, -2), v.shape[-1]
    mixed = (k * gate @ keys).tril_(-1)
    written = torch.linalg.solve_triangular(
        mixed, torch.cat((v, k), -1) * gate, upper=False, unitriangular=True
    )
    u, w = written[..., :width], written[..., width:]
    inside = (q @ keys).tril_()
    before, state = _carried(
        keys @ u,
        torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - keys @ w,
        state,
        product=True,
    )
    return join_chunks(inside @ u + (q - inside @ w) @ before, n), state


def _carried(
    each: Tensor, keep: Tensor, state: Tensor | None, *, product: bool = False
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, (b h chunks r f), and after the last: S = keep S + each, one chunk after the other.

    keep is a factor for S or for its rows; with `product` it is a matrix.
    """
    now = torch.zeros_like(each[:, :, 0]) if state is None else state
    states = []
    for factor, new in zip(keep.unbind(2), each.unbind(2), strict=True):
        states.append(now)
        now = new + (factor @ now if product else factor * now)
    return torch.stack(states, 2), now
