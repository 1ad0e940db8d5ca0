"""Linear attention: sum over the keys first, so cost is linear in n and streams have a fixed-size
state."""

from __future__ import annotations

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
from regard.state import per_example
from regard.update import decay

SUMS_FIRST = "it sums over keys before it sees the queries"


@per_example("next_position")
class LinearAttentionState(NamedTuple):
    """Sums over all keys so far.

    Attributes:
        kv: Σ phi(k) (v 1)ᵀ, (b kv r f+1), or None before the first token.
        log_scale: Largest log-scale of the keys so far (b kv), if the feature map has one.
        next_position: Position of the next token; (b) if it differs between examples.
    """

    kv: Tensor | None
    log_scale: Tensor | None
    next_position: int | Tensor


class LinearAttention(Attention):
    """Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236).

        out_i = phi(q_i)ᵀ Σ_j phi(k_j) v_jᵀ / phi(q_i)ᵀ Σ_j phi(k_j)

    In the causal form the sums run over j <= i. Appending a 1 to each value makes the denominator
    one more column of the numerator.

    Args:
        feature: Feature map phi. Defaults to `EluFeatures()`.
        chunk: Tokens that the causal form processes at once. Does not change the result.
    """

    def __init__(self, feature: FeatureMap | None = None, *, chunk: int = 64) -> None:
        super().__init__()
        check_int(1, chunk=chunk)
        self.feature, self.chunk = EluFeatures() if feature is None else feature, chunk
        self.can = self.feature.can.without(attn_mask=SUMS_FIRST)
        self.length = self.feature.length
        self.heads = self.feature.heads
        if self.heads is not None:
            self.can = self.can.without(gqa="its feature map has parameters for each head")

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
        dtype = v.dtype
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3]), state
        if self.training and state is None:
            self.feature.advance()
        start = 0 if state is None else state.next_position
        with disable_autocast(q):
            q, _ = self.feature(at_least_float32(q), start, True)
            k, log_scale = self.feature(at_least_float32(k), start, False)
            v = at_least_float32(v)
            if mask is not None:
                masked = ~mask[:, None, :, None]
                v = v.masked_fill(masked, 0)
                if log_scale is None:
                    k = k.masked_fill(masked, 0)
                else:
                    log_scale = log_scale.masked_fill(masked[..., 0], -torch.inf)
            if causal:
                before = self.initial_state() if state is None else state
                top, bottom, after = self._causal(q, k, v, log_scale, before)
                state = None if state is None else after
            else:
                top, bottom = _bidirectional(q, k, v, log_scale)
            return safe_divide(top, bottom, self.feature.min_denominator).to(dtype), state

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_scale: Tensor | None,
        state: LinearAttentionState,
    ) -> tuple[Tensor, Tensor, LinearAttentionState]:
        """Numerator (b h n f), denominator (b h n 1) and the next state."""
        if state.kv is not None:
            check_batch(state.kv, q)
        end = state.next_position + q.shape[2]
        group = q.shape[1] // k.shape[1]
        if log_scale is None and q.shape[2] == 1:  # decoding: no chunks to prepare
            kv = k.mT * append_ones(v)
            kv = kv if state.kv is None else kv + state.kv
            out = multiply_state(q, kv)
            return out[..., :-1], out[..., -1:], LinearAttentionState(kv, None, end)
        if group > 1:  # of the query heads that share keys, one at a time; the state is the same
            members = [self._causal(q[:, i::group], k, v, log_scale, state) for i in range(group)]
            tops, bottoms, states = zip(*members, strict=True)
            top, bottom = (torch.stack(x, 2).flatten(1, 2) for x in (tops, bottoms))
            return top, bottom, states[0]
        if log_scale is None:
            top, bottom, kv = causal_linear_scan(q, k, v, state.kv, chunk=self.chunk)
            return top, bottom, LinearAttentionState(kv, None, end)

        # Scale the sums by the largest key so far, never by a later one: that would show in the
        # last digits. A new maximum decays the sums before it.
        largest = _cumulative_max(log_scale.detach(), state.log_scale)
        first = largest[..., :1] if state.log_scale is None else state.log_scale[..., None]
        gate = (torch.cat((first, largest[..., :-1]), -1) - largest).clamp(max=0)
        values = append_ones(v) * (log_scale - largest).exp()[..., None]
        out, kv = decay(q, k, values, gate, state.kv, self.chunk)
        return out[..., :-1], out[..., -1:], LinearAttentionState(kv, largest[..., -1], end)

    def initial_state(self) -> LinearAttentionState:
        """No keys yet."""
        return LinearAttentionState(None, None, 0)


class EfficientAttention(Attention):
    """softmax over features(q) · (softmax over positions(k)ᵀ v)
    (Shen et al. 2021, arXiv 1812.01243)."""

    can = Can(
        "rotary",
        causal="its softmax over positions includes later keys",
        stream="its softmax over positions includes all keys",
        attn_mask=SUMS_FIRST,
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
        weights = at_least_float32(k)
        if mask is None:
            weights = weights.softmax(2)
        else:
            masked = ~mask[:, None, :, None]
            weights = weights.masked_fill(masked, torch.finfo(weights.dtype).min).softmax(2)
            weights = weights.masked_fill(masked, 0)  # if all keys are masked
        summary = weights.mT @ at_least_float32(v)
        return (at_least_float32(q).softmax(-1) @ summary).to(v.dtype), None


def multiply_state(q: Tensor, state: Tensor) -> Tensor:
    """Features of queries (b h n r) times sums over keys (b kv r f) -> (b h n f).

    kv divides h: neighbouring query heads share the keys, and become queries of one head.
    """
    b, h, n, r = q.shape
    kv = state.shape[1]
    return (q.reshape(b, kv, h // kv * n, r) @ state).reshape(b, h, n, state.shape[3])


def append_ones(v: Tensor) -> Tensor:
    """(v 1): (b h m f) -> (b h m f+1)."""
    return F.pad(at_least_float32(v), (0, 1), value=1.0)


def safe_divide(top: Tensor, bottom: Tensor, min_denominator: float | Tensor | None) -> Tensor:
    """top (... f) / bottom (... 1), and zero where no key has any weight.

    Args:
        top: Numerator.
        bottom: Denominator.
        min_denominator: Smallest absolute value of the denominator, if weights may be negative.
            Smaller ones are replaced by it, with their sign.
    """
    if min_denominator is None:
        bottom = bottom.masked_fill(bottom <= 0, 1)
    else:
        least = torch.as_tensor(min_denominator, dtype=top.dtype, device=top.device)
        signed = torch.where(bottom < 0, -least, least)
        bottom = torch.where(bottom.abs() < least, signed, bottom)
    return apply_function(_Quotient, top, bottom)


class _Quotient(torch.autograd.Function):
    """top (... f) / bottom (... 1). The backward pass is written out to read the values twice, not
    five times."""

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


def _bidirectional(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Numerator phi(q)ᵀ Σ phi(k) vᵀ (b h n f) and denominator phi(q)ᵀ Σ phi(k) (b h n 1) over all
    keys."""
    (b, h, n, r), kv = q.shape, k.shape[1]
    if kv != h:  # the query heads that share keys become queries of one head
        top, bottom = _bidirectional(q.reshape(b, kv, h // kv * n, r), k, v, log_scale)
        return top.reshape(b, h, n, v.shape[3]), bottom.reshape(b, h, n, 1)
    if log_scale is None:
        return linear_attention_sums(q, k, v)
    largest = log_scale.detach().amax(-1, keepdim=True)  # cancels in the quotient
    largest = largest.clamp(min=torch.finfo(log_scale.dtype).min)
    weight = (log_scale - largest).exp()[..., None]
    return q @ (k.mT @ (v * weight)), q @ (k.mT @ weight)


def _cumulative_max(log_scale: Tensor, before: Tensor | None) -> Tensor:
    """Largest log-scale up to each token; 0 where there was no key, since the sums are zero
    there."""
    n = log_scale.shape[-1]
    if before is not None:
        log_scale = torch.cat((before[..., None], log_scale), -1)
    largest = cumulative_max(log_scale)[..., log_scale.shape[-1] - n :]
    return largest.masked_fill(largest == -torch.inf, 0)
