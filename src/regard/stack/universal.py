"""Universal Transformers: one layer again and again, as often as each token asks for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.block import Layer, LayerInputs
from regard.errors import check_int, check_positive
from regard.mixer import State
from regard.numerics import at_least_float32
from regard.position.frequencies import sinusoidal_encoding
from regard.stack.deferred import DeferredState


class Halting(nn.Module):
    """How a token decides that it has been thought about enough (Graves 2016, arXiv 1603.08983).

        p_t = σ(w · s_t + bias)             from the state s_t with which step t begins
        N   = min {t : p_1 + ... + p_t ≥ 1 − ε},  at most the steps that there are
        R   = 1 − (p_1 + ... + p_{N−1})     what is left for the last step

    epsilon  a single step is allowed where p_1 ≥ 1 − ε
    weight   of the cost, `weight` · mean of N + R over real tokens, told as "ponder"
    bias     where b starts: at 1, as in tensor2tensor, p starts near 0.73, and two steps do
    """

    def __init__(
        self, dim: int, *, epsilon: float = 0.01, weight: float = 0.01, bias: float = 1.0
    ) -> None:
        super().__init__()
        check_int(1, dim=dim)
        check_positive("weight", weight)
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
            raise ValueError(f"epsilon must be a number between 0 and 1, not {epsilon!r}")
        self.dim, self.epsilon, self.weight = dim, float(epsilon), float(weight)
        self.ask = nn.Linear(dim, 1)
        nn.init.constant_(self.ask.bias, bias)

    def forward(self, s: Tensor) -> Tensor:
        """s (b n d) -> p (b n)."""
        return at_least_float32(self.ask(s)[..., 0]).sigmoid()


class _Pondered(NamedTuple):
    """How far each token is, all (b n): whether it goes on, p so far, the remainder, its steps, and whether it was cut off."""

    runs: Tensor
    total: Tensor
    remainder: Tensor
    steps: Tensor
    cut: Tensor

    def step(self, p: Tensor, threshold: float, last: bool) -> tuple[Tensor, _Pondered]:
        """The weights (b n) of this step's states, and how far the tokens are after it."""
        enough = self.total + p >= threshold
        halts = self.runs if last else self.runs & enough
        goes_on = self.runs & ~halts
        left = 1 - self.total
        weight = torch.where(halts, left, p * goes_on)
        return weight, _Pondered(
            runs=goes_on,
            total=self.total + p * goes_on,
            remainder=torch.where(halts, left, self.remainder),
            steps=self.steps + self.runs,
            cut=self.cut | (halts & ~enough),
        )


class _Stream(NamedTuple):
    """The position of the next token, and the state of each step."""

    next: int
    steps: tuple[DeferredState, ...]


class UniversalStack(Layer):
    """h_t = layer(h_{t−1} + P_t), with the same layer at every step (Dehghani et al. 2018, arXiv 1807.03819).

    steps    how many there are, or with `halting` how many there are at most
    halting  None: all tokens take all steps, and the last h is the result.  Else a token takes N steps, and the result is
             Σ_t w_t h_t with w_t = p_t before the last step and R at it, which sum up to one
    signal   add P_t, the sinusoids of the position and of the step

    A token that has halted keeps its state, and the others go on seeing it.  A step is computed for all tokens as long as
    one goes on.  Left-out tokens never ponder, and come out as zero where there is halting.

    Gradients: N is a count and has none.  R has: it lowers with every p before the last step, so the cost pushes those up.
    The last p decides when to halt and is in no weight, so no gradient reaches it.

    In a stream every step has its state, and a later token sees at step t what an earlier one was at step t, which for
    one that had halted is the state it kept: so chunks give what the whole gives.
    """

    def __init__(
        self, layer: Layer, steps: int, *, halting: Halting | None = None, signal: bool = True
    ) -> None:
        super().__init__(layer.dim, can=layer.can, causal=layer.causal, length=layer.length)
        check_int(1, steps=steps)
        if halting is not None and halting.dim != layer.dim:
            raise ValueError(f"halting is {halting.dim} wide, and the layer {layer.dim}")
        self.layer, self.steps, self.halting, self.signal = layer, steps, halting, signal

    def initial_state(self) -> State:
        """A state for each step."""
        return _Stream(
            0, tuple(DeferredState(self.layer.initial_state()) for _ in range(self.steps))
        )

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        late = [DeferredState(None)] * self.steps if state is None else list(state.steps)
        first = 0 if state is None else state.next
        if self.halting is None:
            y = self._all_steps(x, given, late, first)
        else:
            y = self._as_asked(self.halting, x, given, late, first)
        return y, None if state is None else _Stream(first + x.shape[1], tuple(late))

    def _all_steps(
        self, h: Tensor, given: LayerInputs, late: list[DeferredState], first: int
    ) -> Tensor:
        for t in range(self.steps):
            h, late[t] = late[t].read(self.layer, self._placed(h, t, first), given)
        return h

    def _as_asked(
        self, halting: Halting, x: Tensor, given: LayerInputs, late: list[DeferredState], first: int
    ) -> Tensor:
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if given.mask is None else given.mask
        h = x.masked_fill(~real[..., None], 0)  # NaN in padding would survive a weight of zero
        zero = at_least_float32(h.new_zeros(h.shape[:2]))
        far, y = _Pondered(real, zero, zero, zero, torch.zeros_like(real)), torch.zeros_like(h)
        for t in range(self.steps):
            s = self._placed(h, t, first)
            if not far.runs.any():
                late[t] = late[t].wait(s)
                continue
            runs, (weight, far) = (
                far.runs,
                far.step(halting(s), 1 - halting.epsilon, t == self.steps - 1),
            )
            new, late[t] = late[t].read(self.layer, s, given)
            h = torch.where(runs[..., None], new, h)
            y = y + weight[..., None].to(y.dtype) * h
        _say(far, real, halting.weight)
        return y

    def _placed(self, h: Tensor, t: int, first: int) -> Tensor:
        """h with the signal of step t, counted from 0, for tokens from position `first` on."""
        return h + coordinates(h, t + 1, first) if self.signal else h

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"steps={self.steps}, signal={self.signal}"


def coordinates(like: Tensor, step: int, first: int = 0) -> Tensor:
    """P_t (n d) for tokens (b n d) from position `first` on: sin(i / 10000^(2j/d)) + sin(t / 10000^(2j/d)) in channel 2j,
    the cosines in channel 2j + 1."""
    n, d = like.shape[1:]
    places = torch.arange(first, first + n, device=like.device)
    return (
        sinusoidal_encoding(places, d)
        + sinusoidal_encoding(torch.tensor(step, device=like.device), d)
    ).to(like)


def _say(far: _Pondered, real: Tensor, weight: float) -> None:
    """The cost, the steps of each token, and the share that the last step cut off."""
    tokens = real.sum().clamp(min=1)
    record_aux("ponder", lambda: weight * (far.steps + far.remainder).sum() / tokens, is_loss=True)
    record_aux("steps", lambda: far.steps)
    record_aux("unhalted", lambda: far.cut.sum() / tokens)
