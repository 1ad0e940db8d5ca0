"""Linear attention: the sum over keys is taken first, so that cost grows with n, and a state of fixed size streams."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.autograd import apply_function
from regard.backends.linear_scan import causal_linear_scan, linear_attention_sums
from regard.errors import check_int
from regard.feature import EluFeatures, FeatureMap
from regard.mixer import Attention, Can, check_batch
from regard.numerics import at_least_float32, cumulative_max, disable_autocast
from regard.update import decay


class LinearAttentionState(NamedTuple):
    """What all keys so far amount to: Σ phi(k) (v 1)ᵀ (b h r f+1), the highest level among them (b h), and how many."""

    kv: Tensor | None
    level: Tensor | None
    next: int


class LinearAttention(Attention):
    """out_i = phi(q_i)ᵀ Σ_j phi(k_j) v_jᵀ / phi(q_i)ᵀ Σ_j phi(k_j) (Katharopoulos et al. 2020, arXiv 2006.16236).

    Causal sums run over j <= i.  A 1 beside each value makes the sum below one more column of the sum above.

    chunk   the causal form works through the sequence in chunks of so many tokens
    """

    def __init__(self, feature: FeatureMap | None = None, *, chunk: int = 64) -> None:
        super().__init__()
        check_int(1, chunk=chunk)
        self.feature = EluFeatures() if feature is None else feature
        self.chunk = chunk
        self.can, self.length, self.heads = (
            self.feature.can,
            self.feature.length,
            self.feature.heads,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: LinearAttentionState | None = None,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        """See `Attention.forward`."""
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3]), state
        if self.training and state is None:
            self.feature.advance()
        with disable_autocast(q):
            top, bottom, new = self._sums(
                at_least_float32(q), at_least_float32(k), at_least_float32(v), causal, mask, state
            )
            return safe_divide(top, bottom, self.feature.min_denominator).to(v.dtype), new

    def _sums(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        mask: Tensor | None,
        state: LinearAttentionState | None,
    ) -> tuple[Tensor, Tensor, LinearAttentionState | None]:
        """What is above and below the fraction, (b h n f) and (b h n 1), and the next state."""
        at = 0 if state is None else state.next
        (q, _), (k, level) = self.feature(q, at, True), self.feature(k, at, False)
        if mask is not None:
            k, v, level = _kept(k, v, level, mask)
        if not causal:
            return *_of_all(q, k, v, level), None
        top, bottom, new = self._past(
            q, k, v, level, self.initial_state() if state is None else state
        )
        return top, bottom, None if state is None else new

    def _past(
        self, q: Tensor, k: Tensor, v: Tensor, level: Tensor | None, state: LinearAttentionState
    ) -> tuple[Tensor, Tensor, LinearAttentionState]:
        if state.kv is not None:
            check_batch(state.kv, q)
        end = state.next + q.shape[2]
        if level is None:
            add = _add_one if q.shape[2] == 1 else partial(causal_linear_scan, chunk=self.chunk)
            top, bottom, kv = add(q, k, v, state.kv)
            return top, bottom, LinearAttentionState(kv, None, end)
        highest = _highest(
            level.detach(), state.level
        )  # so far, and never of what comes: it shows in the last digit
        before = highest[..., :1] if state.level is None else state.level[..., None]
        gate = (torch.cat((before, highest[..., :-1]), -1) - highest).clamp(
            max=0
        )  # above, where there was no key yet
        out, kv = decay(
            q, k, append_ones(v) * (level - highest).exp()[..., None], gate, state.kv, self.chunk
        )
        return out[..., :-1], out[..., -1:], LinearAttentionState(kv, highest[..., -1], end)

    def initial_state(self) -> LinearAttentionState:
        """No key yet."""
        return LinearAttentionState(None, None, 0)


class EfficientAttention(Attention):
    """softmax over features (q) · (softmax over positions (k)ᵀ v) (Shen et al. 2021, arXiv 1812.01243): e summaries of all
    values, of which each query takes a mean."""

    can = Can(
        causal="the softmax over positions is of all keys, later ones too",
        stream="the softmax over positions is of all keys",
    )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: None = None,
    ) -> tuple[Tensor, None]:
        """See `Attention.forward`."""
        wide_k = at_least_float32(k)
        if mask is not None:  # where all are left out the softmax is of equals, and then nothing
            out = ~mask[:, None, :, None]
            weights = (
                wide_k.masked_fill(out, torch.finfo(wide_k.dtype).min)
                .softmax(2)
                .masked_fill(out, 0)
            )
        else:
            weights = wide_k.softmax(2)
        return (
            at_least_float32(q).softmax(-1) @ (weights.transpose(-1, -2) @ at_least_float32(v))
        ).to(v.dtype), None


def append_ones(v: Tensor) -> Tensor:
    """(v 1): (b h m f) -> (b h m f+1)."""
    return F.pad(at_least_float32(v), (0, 1), value=1.0)


def safe_divide(top: Tensor, bottom: Tensor, min_denominator: float | Tensor | None) -> Tensor:
    """(... f) by (... 1); where no key has any weight both are zero, and so is the result.

    floor   where weights may be negative: the sum is held so far from zero, on its side of it
    """
    if min_denominator is None:
        bottom = bottom.masked_fill(bottom <= 0, 1)
    else:
        least = torch.as_tensor(min_denominator, dtype=top.dtype, device=top.device).expand_as(
            bottom
        )
        bottom = torch.where(bottom.abs() < least, torch.where(bottom < 0, -least, least), bottom)
    return apply_function(_Quotient, top, bottom)


class _Quotient(torch.autograd.Function):
    """top / bottom, (... f) by (... 1).  By hand, to go through what is as long as all values twice and not five times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(top: Tensor, bottom: Tensor) -> Tensor:
        return top / bottom

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        bottom, out = ctx.saved_tensors
        grad = grad / bottom
        return grad, -(grad * out).sum(-1, keepdim=True)


def _kept(
    k: Tensor, v: Tensor, level: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features, values and levels of the keys, with those left out in no sum."""
    out = ~mask[:, None, :, None]
    v = v.masked_fill(out, 0)
    return (
        (k.masked_fill(out, 0), v, None)
        if level is None
        else (k, v, level.masked_fill(out[..., 0], -torch.inf))
    )


def _of_all(q: Tensor, k: Tensor, v: Tensor, level: Tensor | None) -> tuple[Tensor, Tensor]:
    """Over all keys, phi(q)ᵀ Σ phi(k) vᵀ (b h n f) and phi(q)ᵀ Σ phi(k) (b h n 1)."""
    if level is None:
        return linear_attention_sums(q, k, v)
    most = level.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(level.dtype).min)
    weight = (level - most).exp()[
        ..., None
    ]  # the factors of the keys, but for the greatest, which cancels
    return q @ (k.mT @ (v * weight)), q @ (k.mT @ weight)


def _add_one(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `causal_linear_scan` gives, for one token: a stream waits for it, and there is no chunk to be made."""
    kv = k.mT * append_ones(v)
    kv = kv if state is None else kv + state
    out = q @ kv
    return out[..., :-1], out[..., -1:], kv


def _highest(level: Tensor, before: Tensor | None) -> Tensor:
    """The highest level up to each token; 0 where there was none, for there the sums are zero."""
    first = level if before is None else torch.cat((before[..., None], level), -1)
    highest = cumulative_max(first)[..., first.shape[-1] - level.shape[-1] :]
    return highest.masked_fill(highest == -torch.inf, 0)
