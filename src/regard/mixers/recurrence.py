"""Recurrences: each token reads what the tokens before it wrote into a state of fixed size."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attentions.linear import append_ones, safe_divide
from regard.errors import Unsupported, check_int
from regard.mixer import Can, Mixer, State, check_batch, check_heads, merge_heads, split_heads
from regard.numerics import at_least_float32, disable_autocast, stable_argsort
from regard.update import Update


class RecurrenceInputs(NamedTuple):
    """What the heads need of the tokens: q and k (b h n r), v (b h n f), the gate of the update, and with which weight a
    token enters the state, (b h n); None: 1.  `mass` (b h n) is what such weights have come to: the floor is relative to it."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    weight: Tensor | None = None
    mass: Tensor | None = None


class RecurrenceState(NamedTuple):
    """From chunk to chunk: what `read` needs of the past, and the state of the heads (b h r f); None: nothing yet."""

    past: State
    heads: Tensor | None


class Recurrence(Mixer):
    """out = write(update(read(x))): a state for each head that every token changes and then reads.

    A subclass writes `read` and `write`.  A token that is left out is as if it were not there at all: the state stays as it
    is, positions count the others only, and so padding on either side and holes are as if cut out.

    update   how the state changes, see `regard.update`
    floor    None: heads give what they read.  Else they divide it by the weight of all they read, held so far from zero
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
        super().__init__(
            dim, can=Can(cross="its state is written and read along one sequence"), causal=causal
        )
        if not causal:
            raise Unsupported(
                "it is a recurrence, in which a token reads what was before it: build it with causal=True"
            )
        check_heads(dim, heads)
        check_int(1, chunk=chunk)
        self.heads, self.update, self.chunk, self.min_denominator = (
            heads,
            update,
            chunk,
            min_denominator,
        )

    @abstractmethod
    def project_inputs(self, x: Tensor, past: State) -> tuple[RecurrenceInputs, State]:
        """(b n d) -> what the heads need, and what the next chunk needs of this one."""

    @abstractmethod
    def project_output(self, y: Tensor, x: Tensor) -> Tensor:
        """What the heads found (b h n f), and the tokens (b n d) -> (b n d)."""

    def initial_state(self) -> RecurrenceState:
        """Nothing was read."""
        return RecurrenceState(None, None)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        if (
            mask is not None
        ):  # those left out come last, where nobody reads what they write; a stream has no mask
            order = _order(mask)
            return _take(self.mix(_take(x, order), None, None, None)[0], order.argsort(1)), None
        past, heads = RecurrenceState(None, None) if state is None else state
        if heads is not None:
            check_batch(heads, at_least_float32(x))
        found, past = self.project_inputs(x, past)
        y, heads = self._run(found, found.v, heads)
        return self.project_output(y.to(x.dtype), x), None if state is None else RecurrenceState(
            past, heads
        )

    def _run(
        self, found: RecurrenceInputs, v: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with disable_autocast(v):
            q, k, gate = (at_least_float32(t) for t in (found.q, found.k, found.gate))
            v = at_least_float32(v) if self.min_denominator is None else append_ones(v)
            v = v if found.weight is None else v * at_least_float32(found.weight)[..., None]
            y, state = self.update(q, k, v, gate, state, self.chunk)
            if self.min_denominator is None:
                return y, state
            min_denominator = (
                self.min_denominator
                if found.mass is None
                else self.min_denominator * found.mass[..., None]
            )
            return safe_divide(y[..., :-1], y[..., -1:], min_denominator), state

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """What the heads do to the identity: how much of each value each token reads, before `write`."""
        if not x.shape[1]:
            return x.new_zeros(x.shape[0], self.heads, 0, 0)
        order = (
            torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            if mask is None
            else _order(mask)
        )
        found, _ = self.project_inputs(_take(x, order), None)
        one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[
            order
        ]  # each value is the place that it came from
        y, _ = self._run(found, one[:, None].expand(-1, self.heads, -1, -1), None)
        return split_heads(_take(merge_heads(y), order.argsort(1)), self.heads).to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def _order(mask: Tensor) -> Tensor:
    """Where to take tokens from so that those left out come last: (b n)."""
    return stable_argsort((~mask).int())


def _take(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
