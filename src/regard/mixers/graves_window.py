"""Graves' window: a mixture of Gaussians moves forward over the context (arXiv 1308.0850)."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.can import NO_HEADS
from regard.cells.graves import WindowParameters, WindowShape, window_weights
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import attention_mask

NO_SOFTMAX = "its weights are a window that moves forward, not a softmax over visible keys"


class GaussianWindow(Mixer):
    """out_t = Σ_u φ(t, u) c_u, φ(t, u) = Σ_k α_k exp(−β_k (κ_k − u)²), κ_t = κ_{t−1} + step_t,
    u = 1 .. m.

    c is the context, or x. α, β and the step are exp(W x_t + b), so κ is a cumulative sum, and all
    tokens run in parallel.

    Args:
        dim: Model width.
        mixtures: Number of Gaussians K.
        causal: Attend to earlier tokens only.
    """

    def __init__(self, dim: int, mixtures: int, *, causal: bool = False) -> None:
        super().__init__(dim, can=Can(attn_mask=NO_SOFTMAX, heads=NO_HEADS), causal=causal)
        self.shape = WindowShape(dim, mixtures)

    def initial_state(self) -> State:
        """State before the first token."""
        return (None, None)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) and (b m d) -> (b n d). The state holds κ and all tokens."""
        source = x if context is None else context
        kappa = None
        if state is not None and state[1] is not None:
            check_batch(state[1], x)
            kappa, source = state[0], torch.cat((state[1], x), 1)
        phi, kappa = self._phi(x, source, kappa, mask, context is None)
        return phi @ source, None if state is None else (kappa[:, -1:], source)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """φ, (b 1 n m), whose rows need not sum to one."""
        return self._phi(x, x if context is None else context, None, mask, context is None)[0][
            :, None
        ]

    def _phi(
        self, x: Tensor, source: Tensor, before: Tensor | None, mask: Tensor | None, own: bool
    ) -> tuple[Tensor, Tensor]:
        """φ (b n m) and κ (b n K).

        With `own`, the mask is over x, and masked tokens do not move the window.
        """
        shape: WindowParameters = self.shape(x)
        step = shape.step if mask is None or not own else shape.step * mask[..., None]
        kappa = step.cumsum(1) if before is None else before + step.cumsum(1)
        positions = torch.arange(1, source.shape[1] + 1, device=x.device, dtype=kappa.dtype)
        phi = window_weights(shape.alpha, shape.beta, kappa, positions).to(x.dtype)
        keep = attention_mask(
            x.shape[1], source.shape[1], causal=self.causal, mask=mask, device=x.device
        )
        if keep is not None:
            phi = phi * (keep[:, 0] if keep.dim() == 4 else keep)
        return phi, kappa
