"""Universal Transformer: one layer applied repeatedly, with adaptive computation time per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.block import Layer, LayerInputs
from regard.errors import check_int, check_positive
from regard.mixer import State
from regard.numerics import at_least_float32, zero_padding_tokens
from regard.position.frequencies import sinusoidal_encoding
from regard.stack.deferred import DeferredState


class Halting(nn.Module):
    """Halting unit of adaptive computation time (Graves 2016, arXiv 1603.08983).

        p_t = σ(w · s_t + bias)             from the state s_t at the start of step t
        N   = min {t : p_1 + ... + p_t ≥ 1 − ε},  at most the number of steps
        R   = 1 − (p_1 + ... + p_{N−1})     remainder, the weight of the last step

    Args:
        epsilon: A single step suffices if p_1 ≥ 1 − ε.
        loss_weight: Weight of the auxiliary loss "ponder_loss", the mean of N + R over real tokens.
        bias: Initial bias. With 1, as in tensor2tensor, p starts near 0.73, and two steps suffice.
    """

    def __init__(
        self, dim: int, *, epsilon: float = 0.01, loss_weight: float = 0.01, bias: float = 1.0
    ) -> None:
        super().__init__()
        check_int(1, dim=dim)
        check_positive("loss_weight", loss_weight)
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
            raise ValueError(f"epsilon must be a number between 0 and 1, not {epsilon!r}")
        self.dim, self.epsilon, self.loss_weight = dim, float(epsilon), float(loss_weight)
        self.proj = nn.Linear(dim, 1)
        nn.init.constant_(self.proj.bias, bias)

    def forward(self, s: Tensor) -> Tensor:
        """States s (b, n, d) -> halting probabilities p (b, n)."""
        return at_least_float32(self.proj(s)[..., 0]).sigmoid()


class _HaltingState(NamedTuple):
    """Progress of each token, all (b, n)."""

    active: Tensor
    total: Tensor  # sum of p so far
    remainder: Tensor
    steps: Tensor
    cut_off: Tensor  # stopped by the maximum number of steps

    def update(self, p: Tensor, threshold: float, last: bool) -> tuple[Tensor, _HaltingState]:
        """Weights (b, n) of the states of this step, and the progress after it."""
        reached = self.total + p >= threshold
        halts = self.active if last else self.active & reached
        active = self.active & ~halts
        remainder = 1 - self.total
        weight = torch.where(halts, remainder, p * active)
        return weight, _HaltingState(
            active=active,
            total=self.total + p * active,
            remainder=torch.where(halts, remainder, self.remainder),
            steps=self.steps + self.active,
            cut_off=self.cut_off | (halts & ~reached),
        )


class UniversalState(NamedTuple):
    """State of a `UniversalStack`: the position of the next token, and a state per step."""

    position: int
    steps: tuple[DeferredState, ...]


class UniversalStack(Layer):
    """h_t = layer(h_{t−1} + P_t), with the same layer at every step (Dehghani et al. 2018,
    arXiv 1807.03819).

    A halted token keeps its state, and other tokens continue to see it. A step is computed for all
    tokens while one is active. Padding takes no steps, and with halting its output is zero.

    Gradients: N is a count and has none. R decreases with every p before the last step, so the
    ponder loss increases those. The last p only decides when to halt and gets no gradient.

    A stream keeps a state per step, and a later token sees at step t the state that an earlier one
    had at step t or when it halted: chunks give the same result as the whole sequence.

    Args:
        steps: Number of steps, or with `halting` the maximum number.
        halting: None: all tokens take all steps, and the last h is the output. Else a token takes N
            steps, and the output is Σ_t w_t h_t, with w_t = p_t before the last step and R at it.
        timing_signal: Add P_t, sinusoidal encodings of the position and of the step.
    """

    def __init__(
        self,
        layer: Layer,
        steps: int,
        *,
        halting: Halting | None = None,
        timing_signal: bool = True,
    ) -> None:
        super().__init__(layer.dim, can=layer.can, causal=layer.causal, length=layer.length)
        check_int(1, steps=steps)
        if halting is not None and halting.dim != layer.dim:
            raise ValueError(f"halting has dim {halting.dim} but the layer has dim {layer.dim}")
        self.layer, self.steps = layer, steps
        self.halting, self.timing_signal = halting, timing_signal

    def initial_state(self) -> State:
        """A state per step."""
        return UniversalState(
            0, tuple(DeferredState(self.layer.initial_state()) for _ in range(self.steps))
        )

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        states = [DeferredState(None)] * self.steps if state is None else list(state.steps)
        start = 0 if state is None else state.position
        if self.halting is None:
            y = x
            for t in range(self.steps):
                y, states[t] = states[t].run_layer(
                    self.layer, self._add_signal(y, t, start), inputs
                )
        else:
            y = self._run_halting(self.halting, x, inputs, states, start)
        return y, None if state is None else UniversalState(start + x.shape[1], tuple(states))

    def _run_halting(
        self,
        halting: Halting,
        x: Tensor,
        inputs: LayerInputs,
        states: list[DeferredState],
        start: int,
    ) -> Tensor:
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if inputs.mask is None else inputs.mask
        h = zero_padding_tokens(x, real)  # NaN in padding would survive a weight of zero
        zero = at_least_float32(h.new_zeros(h.shape[:2]))
        progress = _HaltingState(real, zero, zero, zero, torch.zeros_like(real))
        y = torch.zeros_like(h)
        for t in range(self.steps):
            s = self._add_signal(h, t, start)
            if not progress.active.any():
                states[t] = states[t].defer(s)
                continue
            active, last = progress.active, t == self.steps - 1
            weight, progress = progress.update(halting(s), 1 - halting.epsilon, last)
            new, states[t] = states[t].run_layer(self.layer, s, inputs)
            h = torch.where(active[..., None], new, h)
            y = y + weight[..., None].to(y.dtype) * h

        tokens, steps = real.sum().clamp(min=1), progress.steps
        record_aux(
            "ponder_loss",
            lambda: halting.loss_weight * (steps + progress.remainder).sum() / tokens,
            is_loss=True,
        )
        record_aux("steps", lambda: steps)
        record_aux("unhalted", lambda: progress.cut_off.sum() / tokens)
        return y

    def _add_signal(self, h: Tensor, t: int, start: int) -> Tensor:
        return h + timing_signal(h, t + 1, start) if self.timing_signal else h

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"steps={self.steps}, timing_signal={self.timing_signal}"


def timing_signal(like: Tensor, step: int, start: int = 0) -> Tensor:
    """P_t (n, d) for tokens (b, n, d) from position `start` on: sin(i / 10000^(2j/d)) +
    sin(t / 10000^(2j/d)) in channel 2j, cosines in channel 2j + 1."""
    n, d = like.shape[1:]
    positions = torch.arange(start, start + n, device=like.device)
    of_step = sinusoidal_encoding(torch.tensor(step, device=like.device), d)
    return (sinusoidal_encoding(positions, d) + of_step).to(like)
