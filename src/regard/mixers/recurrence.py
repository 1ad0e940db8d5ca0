"""Recurrences: every token updates and reads a state of fixed size."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions.linear import append_ones, safe_divide
from regard.errors import Unsupported, check_int
from regard.mixer import Can, Mixer, State, check_batch, check_heads, merge_heads, split_heads
from regard.numerics import at_least_float32, disable_autocast, stable_argsort
from regard.state import per_example
from regard.update import Update

ONE_SEQUENCE = "its state is updated and read along one sequence"
ONE_STATE = "all earlier tokens are summed up in one state, which every later token reads"


class RecurrenceInputs(NamedTuple):
    """Inputs of the heads: q and k (b h n r), v (b h n f), and the gate of the update.

    `weight` (b h n) scales what a token adds to the state (None: 1). `mass` (b h n) is the total of
    these weights; the minimum of the denominator is relative to it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    weight: Tensor | None = None
    mass: Tensor | None = None


@per_example()
class RecurrenceState(NamedTuple):
    """What `project_inputs` carries between chunks; the state of the heads (b h r f), or None."""

    past: State
    heads: Tensor | None


class RecurrentHeads(nn.Module):
    """The heads of a recurrence: linear in the values, as an `Attention` is.

    Args:
        update: How the state changes, see `regard.update`.
        chunk: Tokens processed at once.
        min_denominator: See `Recurrence`.
    """

    def __init__(self, update: Update, chunk: int, min_denominator: float | None) -> None:
        super().__init__()
        self.update, self.chunk, self.min_denominator = update, chunk, min_denominator

    def forward(
        self, found: RecurrenceInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the heads read if the values are v (b h n f): (b h n f), and the next state."""
        with disable_autocast(v):
            q, k, gate = (at_least_float32(t) for t in (found.q, found.k, found.gate))
            v = at_least_float32(v) if self.min_denominator is None else append_ones(v)
            v = v if found.weight is None else v * at_least_float32(found.weight)[..., None]
            y, state = self.update(q, k, v, gate, state, self.chunk)
            if self.min_denominator is None:
                return y, state
            smallest: float | Tensor = self.min_denominator
            if found.mass is not None:
                smallest = smallest * found.mass[..., None]
            return safe_divide(y[..., :-1], y[..., -1:], smallest), state


class Recurrence(Mixer):
    """Base class: project to heads, update a state per head, project back.

    Subclasses implement `project_inputs` and `project_output`. A masked token is skipped: it leaves
    the state unchanged and has no position, so padding on either side is as if removed.

    Args:
        dim: Model width.
        heads: Number of heads.
        update: How the state changes, see `regard.update`.
        causal: Must be True.
        chunk: Tokens processed at once.
        min_denominator: Divide what a head reads by the sum of its weights, with at least this
            absolute value. Default: no division.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        update: Update,
        *,
        causal: bool,
        chunk: int = 64,
        min_denominator: float | None = None,
    ) -> None:
        super().__init__(dim, can=Can(cross=ONE_SEQUENCE, attn_mask=ONE_STATE), causal=causal)
        if not causal:
            raise Unsupported("a recurrence only sees earlier tokens: use causal=True")
        check_heads(dim, heads)
        check_int(1, chunk=chunk)
        self.heads, self.inner = heads, RecurrentHeads(update, chunk, min_denominator)

    @abstractmethod
    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """Tokens (b n d) and the carried state -> inputs of the heads, and the state to carry to
        the next chunk.
        """

    @abstractmethod
    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Outputs of the heads (b h n f) and tokens (b n d) -> (b n d)."""

    def initial_state(self) -> RecurrenceState:
        """State before the first token."""
        return RecurrenceState(None, None)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        if mask is not None:  # move masked tokens to the end, where no token reads them
            order = _order(mask)
            return _take(self.mix(_take(x, order), None, None, None)[0], order.argsort(1)), None
        past, heads = RecurrenceState(None, None) if state is None else state
        if heads is not None:
            check_batch(heads, at_least_float32(x))
        inputs, past = self.project_inputs(x, past)
        y, heads = self.inner(inputs, inputs.v, heads)
        if x.dtype == torch.float16:  # its range is small, and the norms that follow ignore scale
            largest = torch.finfo(x.dtype).max
            y = y * (largest / y.abs().amax(-1, keepdim=True).clamp(min=largest))
        y = self.project_output(y.to(x.dtype), x)
        return y, None if state is None else RecurrenceState(past, heads)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """Weight of each value in what each token reads, before `project_output`."""
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], self.heads, 0, 0)
        n = x.shape[1]
        if mask is None:
            order = torch.arange(n, device=x.device).expand(x.shape[:2])
        else:
            order = _order(mask)
        inputs, _ = self.project_inputs(_take(x, order), None)
        one_hot = torch.eye(n, dtype=x.dtype, device=x.device)[order]  # position of each value
        y, _ = self.inner(inputs, one_hot[:, None].expand(-1, self.heads, -1, -1), None)
        return split_heads(_take(merge_heads(y), order.argsort(1)), self.heads).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _order(mask: Tensor) -> Tensor:
    """Permutation (b n) that moves masked tokens to the end."""
    return stable_argsort((~mask).int())


def _take(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
