"""Attention Free Transformer (Zhai et al. 2021, arXiv 2105.14103)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int, check_stream_length
from regard.mixer import Can, Mixer, State, check_batch, check_heads, merge_heads, split_heads
from regard.numerics import at_least_float32, attention_mask, masked_softmax

NO_KEYS = -1e30  # log of an empty sum: far below all others, but finite
CHUNK = 64  # minimum chunk size


class ExpSums(NamedTuple):
    """Σ exp(k + w) v = top · exp(peak) and Σ exp(k + w) = bottom · exp(peak), each (... n e),
    without overflow.
    """

    top: Tensor
    bottom: Tensor
    peak: Tensor


class AFTState(NamedTuple):
    """Keys and values within reach of the bias (b h m e), sums over earlier ones, next position."""

    k: Tensor | None
    v: Tensor | None
    far: ExpSums | None
    next: int


class AFTBias(nn.Module, ABC):
    """Position bias w_ij of positions i (... n) and j (... m): (h ... n m), one per head.

    Attributes:
        reach: Largest |i − j| for which w may differ from zero, or None if there is no limit.
        length: Maximum length, or None.
        heads: Number of heads.
    """

    reach: int | None = None
    length: int | None = None
    heads: int = 1

    @abstractmethod
    def forward(self, i: Tensor, j: Tensor) -> Tensor: ...


class PositionBias(AFTBias):
    """w_ij = u_i · s_j with learned u and s (length rank), initialised near zero as in the paper.

    Args:
        length: Maximum length.
        rank: Width of u and s.
        window: w_ij = 0 if |i − j| >= window. Default: no window.
    """

    def __init__(self, length: int, rank: int, window: int | None = None) -> None:
        super().__init__()
        check_int(1, length=length, rank=rank, **({} if window is None else {"window": window}))
        self.u, self.s = (nn.Parameter(0.01 * torch.randn(length, rank)) for _ in range(2))
        self.length, self.reach = length, None if window is None else window - 1

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        last = len(self.u) - 1  # padding of a chunk lies outside of the tables; its weight is zero
        w = (self.u[i.clamp(max=last)] @ self.s[j.clamp(0, last)].mT)[None]
        return w if self.reach is None else w.masked_fill(_distances(i, j).abs() > self.reach, 0)


class KernelBias(AFTBias):
    """w_ij = w[i − j], one kernel per head: w = γ (t − mean t) / std t + β, with t (h kernel), γ
    and β learned.

    γ is initialised to 0.01. With zero, as in the paper, t would have no gradient.
    """

    def __init__(self, heads: int, kernel: int, *, causal: bool) -> None:
        super().__init__()
        check_int(1, kernel=kernel)
        self.heads, self.ahead = heads, 0 if causal else (kernel - 1) // 2
        self.reach = kernel - 1 - self.ahead
        self.table = nn.Parameter(torch.randn(heads, kernel))
        self.gain = nn.Parameter(torch.full((heads, 1), 0.01))
        self.shift = nn.Parameter(torch.zeros(heads, 1))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        tap, size = _distances(i, j) + self.ahead, self.table.shape[1]
        kernel = self.gain * F.layer_norm(self.table, self.table.shape[1:]) + self.shift
        return kernel[:, tap.clamp(0, size - 1)].masked_fill((tap < 0) | (tap >= size), 0)


class AFT(Mixer):
    """out_i = σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij), channel by channel, with a
    position bias w.

    Args:
        dim: Model width.
        bias: `PositionBias` (AFT-full; with a window, AFT-local), `KernelBias` (AFT-conv, one key
            channel per head) or None (AFT-simple).
        causal: Attend to earlier tokens only.
    """

    def __init__(self, dim: int, bias: AFTBias | None = None, *, causal: bool = False) -> None:
        can = Can(
            cross="its biases relate the positions of one sequence",
            attn_mask="keys are summed with weights of positions, before queries are seen",
        )
        length = None if bias is None else bias.length
        if length is not None:
            can = can & Can(length=f"its biases were built for {length} positions")
        if not isinstance(bias, KernelBias):
            can = can.without(heads="only AFT-conv has heads, which kernel= selects")
        super().__init__(dim, can=can, causal=causal, length=length)
        self.heads = 1 if bias is None else bias.heads
        check_heads(dim, self.heads)
        keys = self.heads if isinstance(bias, KernelBias) else dim
        self.q, self.k, self.v = (nn.Linear(dim, width, bias=False) for width in (dim, keys, dim))
        self.bias = bias

    def initial_state(self) -> AFTState:
        """State before the first token."""
        return AFTState(None, None, None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        past = self.initial_state() if state is None else state
        check_stream_length(self.length, past.next + x.shape[1])
        k, v = self._keys(x, mask), split_heads(at_least_float32(self.v(x)), self.heads)
        sums = self._sums(k, v, past.next)
        if past.k is not None and past.v is not None and past.far is not None:
            sums = _merge(_merge(sums, self._sums_over_past(past, k)), past.far)
        # The mean is zero if all keys are masked.
        mean = sums.top / sums.bottom.masked_fill(sums.bottom <= 0, 1)
        y = self.q(x).sigmoid() * merge_heads(mean.expand_as(v)).to(x.dtype)
        return y, None if state is None else self._next_state(past, k, v)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b d n n): each channel counts as a head; its weights include the gate of the query."""
        n = x.shape[1]
        positions = torch.arange(n, device=x.device)
        k = self._keys(x, mask).mT.expand(-1, -1, self.dim // self.heads, -1)[..., None, :]
        scores = k.expand(*k.shape[:3], n, -1)  # (b h e n n)
        if self.bias is not None:
            scores = k + at_least_float32(self.bias(positions, positions))[:, None]
        scores = scores.flatten(1, 2)
        keep = attention_mask(n, n, causal=self.causal, mask=mask, device=x.device)
        return self.q(x).sigmoid().mT[..., None] * masked_softmax(scores, keep).to(x.dtype)

    def _keys(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(b h n e), or (b h n 1) if the channels of a head share them."""
        k = split_heads(at_least_float32(self.k(x)), self.heads)
        return k if mask is None else k.masked_fill(~mask[:, None, :, None], -torch.inf)

    def _sums_over_past(self, state: AFTState, k: Tensor) -> ExpSums:
        """Sums over the keys of the state, for the queries of the new keys."""
        assert state.k is not None
        assert state.v is not None
        check_batch(state.k, k)
        if self.bias is None:
            return _sums(state.k, state.v, None)
        first, last = state.next - state.k.shape[2], state.next + k.shape[2]
        positions = torch.arange(first, last, device=k.device)
        new, old = positions[-k.shape[2] :], positions[: -k.shape[2]]
        return _sums(state.k, state.v, at_least_float32(self.bias(new, old)))

    def _next_state(self, state: AFTState, k: Tensor, v: Tensor) -> AFTState:
        """Append the new keys, and replace those beyond the reach of the bias by their sums."""
        end = state.next + k.shape[2]
        if state.k is not None and state.v is not None:
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
        reach = 0 if self.bias is None else self.bias.reach
        cut = 0 if reach is None else max(0, k.shape[2] - reach)
        far = _sums(k[:, :, :cut], v[:, :, :cut], None)
        if state.far is not None:
            far = _merge(state.far, far)
        return AFTState(k[:, :, cut:], v[:, :, cut:], far, end)

    def _sums(self, k: Tensor, v: Tensor, start: int) -> ExpSums:
        """Sums over all keys, or over those up to each query: (b h n e).

        The first key is at position `start`. Computed in chunks as long as the reach of the bias,
        so that the bias only matters within a chunk and between neighbouring chunks. All other keys
        have the same weight for a whole chunk of queries.
        """
        if torch.compiler.is_exporting():
            return self._sums_unchunked(k, v)
        n, size = k.shape[2], self.chunk_size(k.shape[2])
        padding = (0, 0, 0, -n % size)
        k = F.pad(k, padding, value=-torch.inf).unflatten(2, (-1, size))  # (b h chunks size e)
        v = F.pad(v, padding).unflatten(2, (-1, size))
        i = start + torch.arange(k.shape[2] * size, device=k.device).view(-1, size)

        def bias(offset: int) -> Tensor | None:
            return None if self.bias is None else at_least_float32(self.bias(i, i + offset * size))

        sums = _causal_sums(k, v, bias(0)) if self.causal else _sums(k, v, bias(0))
        if k.shape[2] > 1:
            sums = _merge(sums, _sums_over_earlier_chunks(k, v, bias(-1)))
        if k.shape[2] > 1 and not self.causal:
            w = bias(1)
            w = None if w is None else w.flip(1)
            later = _sums_over_earlier_chunks(k.flip(2), v.flip(2), w)
            sums = _merge(sums, ExpSums(*(t.flip(2) for t in later)))
        return ExpSums(*(t.expand(*t.shape[:3], size, -1).flatten(2, 3)[:, :, :n] for t in sums))

    def _sums_unchunked(self, k: Tensor, v: Tensor) -> ExpSums:
        """Sums for export, where the length is symbolic.

        A later key may have the largest exponent, so causal sums use float64.
        """
        i = torch.arange(k.shape[2], device=k.device)
        w = None if self.bias is None else at_least_float32(self.bias(i, i))
        if not self.causal:
            return ExpSums(*(t.expand(-1, -1, k.shape[2], -1) for t in _sums(k, v, w)))
        w = torch.zeros(k.shape[2], k.shape[2], device=k.device) if w is None else w
        return _sums(k.double(), v.double(), w.double().masked_fill(i > i[:, None], -torch.inf))

    def chunk_size(self, n: int) -> int:
        """Chunk size for n tokens: a power of two if causal, where chunks are halved in turn."""
        if self.bias is None:
            size = min(n, CHUNK) if self.causal else n
        else:
            size = n if self.bias.reach is None else min(n, max(self.bias.reach, CHUNK))
        return 1 << (size - 1).bit_length() if self.causal else size


def _distances(i: Tensor, j: Tensor) -> Tensor:
    """(... n), (... m) -> (... n m)."""
    return i[..., :, None] - j[..., None, :]


def _sums(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Sums over all keys: k and v (... m e), w (... n m) -> (... n e); without w (... 1 e), the
    same for all queries.
    """
    if not k.shape[-2]:
        k, v = F.pad(k, (0, 0, 0, 1), value=-torch.inf), F.pad(v, (0, 0, 0, 1))
        w = None if w is None else F.pad(w, (0, 1))
    peak = k.detach().amax(-2, keepdim=True).clamp(min=NO_KEYS)
    e = (k - peak).exp()
    if w is None:
        return ExpSums((e * v).sum(-2, keepdim=True), e.sum(-2, keepdim=True), peak)
    highest = w.detach().amax(-1, keepdim=True)
    weight = (w - highest).exp()
    return ExpSums(weight @ (e * v), weight @ e, peak + highest)


def _causal_sums(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Sums over j <= i in each chunk (b h chunks size e), by recursive halving.

    The later half of a block takes the sums over its earlier half. All its queries see those keys,
    so the largest exponent is never that of a future key.
    """
    size = 1
    sums = _sums(k[..., None, :], v[..., None, :], _diagonal_blocks(w, 1))
    sums = ExpSums(*(t.flatten(3, 4) for t in sums))
    while size < k.shape[3]:
        blocks = _diagonal_blocks(w, 2 * size)
        early_k, early_v = (t.unflatten(3, (-1, 2, size))[:, :, :, :, 0] for t in (k, v))
        new = _sums(early_k, early_v, None if blocks is None else blocks[..., size:, :size])
        later = [t.expand(*t.shape[:-2], size, -1) for t in new]
        none = [torch.full_like(t, empty) for t, empty in zip(later, (0, 0, NO_KEYS), strict=True)]
        both = (torch.cat(halves, -2).flatten(3, 4) for halves in zip(none, later, strict=True))
        sums, size = _merge(sums, ExpSums(*both)), 2 * size
    return sums


def _sums_over_earlier_chunks(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Sums over all chunks before each chunk, (b h chunks size e): with w over the previous one,
    without over the others.
    """
    previous_k = F.pad(k, (0, 0, 0, 0, 1, 0), value=-torch.inf)[:, :, :-1]
    previous_v = F.pad(v, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    by_chunk = zip(*(t.unbind(2) for t in _sums(k, v, None)), strict=True)
    chunks = [ExpSums(*parts) for parts in by_chunk]
    none = [torch.full_like(t, empty) for t, empty in zip(chunks[0], (0, 0, NO_KEYS), strict=True)]
    far = [ExpSums(*none), ExpSums(*none)]
    for chunk in chunks[:-2]:
        far.append(_merge(far[-1], chunk))
    stacked = ExpSums(*(torch.stack(parts, 2) for parts in zip(*far, strict=True)))
    return _merge(_sums(previous_k, previous_v, w), stacked)


def _merge(a: ExpSums, b: ExpSums) -> ExpSums:
    peak = torch.maximum(a.peak, b.peak)
    scale_a, scale_b = (a.peak - peak).exp(), (b.peak - peak).exp()
    top = a.top * scale_a + b.top * scale_b
    return ExpSums(top, a.bottom * scale_a + b.bottom * scale_b, peak)


def _diagonal_blocks(w: Tensor | None, size: int) -> Tensor | None:
    """Blocks on the diagonal of w (h chunks n n): (h chunks n/size size size)."""
    if w is None:
        return None
    blocks = w.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)
