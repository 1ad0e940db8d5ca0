"""Graves' window: a mixture of Gaussians moves forward over the context (arXiv 1308.0850)."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.can import NO_HEADS
from regard.cells.graves import WindowParameters, WindowShape, window_weights
from regard.mixer import Can, Mixer, State, check_batch
from regard.numerics import at_least_float32, attention_mask, saturate

MOVED = "each query moves the window forward for the queries after it"
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
        can = Can(independent_queries=MOVED, attn_mask=NO_SOFTMAX, heads=NO_HEADS)
        super().__init__(dim, can=can, causal=causal)
        self.shape = WindowShape(dim, mixtures)

    def initial_state(self) -> State:
        """State before the first token."""
        return (None, None)

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) and (b m d) -> (b n d). The state holds κ and all tokens."""
        source = x if context is None else context
        kappa = None
        if state is not None and state[1] is not None:
            check_batch(state[1], x)
            kappa, source = state[0], torch.cat((state[1], x), 1)
        query_mask = mask if context is None else query_mask
        phi, kappa = self._phi(x, source, kappa, mask, query_mask)
        y = saturate(phi @ at_least_float32(source), x.dtype)
        if state is None:
            return y, None
        # a state must not be a view of the caller's tokens
        return y, (kappa[:, -1:], source.clone() if source is x else source)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """φ, (b 1 n m), whose rows need not sum to one."""
        if context is None:
            context, query_mask = x, mask
        phi, _ = self._phi(x, context, None, mask, query_mask)
        return saturate(phi, x.dtype)[:, None]

    def _phi(
        self,
        x: Tensor,
        source: Tensor,
        before: Tensor | None,
        mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """φ (b n m) and κ (b n K), in float32 at least. Masked queries do not move the window."""
        shape: WindowParameters = self.shape(x)
        step = shape.step if query_mask is None else shape.step * query_mask[..., None]
        kappa = step.cumsum(1) if before is None else before + step.cumsum(1)
        positions = torch.arange(1, source.shape[1] + 1, device=x.device, dtype=kappa.dtype)
        phi = window_weights(shape.alpha, shape.beta, kappa, positions)
        keep = attention_mask(
            x.shape[1], source.shape[1], causal=self.causal, mask=mask, device=x.device
        )
        if keep is not None:
            phi = phi * (keep[:, 0] if keep.dim() == 4 else keep)
        return phi, kappa
