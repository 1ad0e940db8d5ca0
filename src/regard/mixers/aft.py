"""AFT: keys weigh values channel by channel, and queries only gate the result (Zhai et al. 2021, arXiv 2105.14103)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.common import at_least_single, check_stream_length, kept, softmax_over
from regard.errors import check_whole
from regard.mixer import Can, Mixer, State, check_batch

LOW = -1e30  # stands for the largest exponent of no keys: far below all others, and yet finite


class Sums(NamedTuple):
    """Σ exp(k + w) v = top · exp(peak) and Σ exp(k + w) = bottom · exp(peak), each (... n d): nothing overflows."""

    top: Tensor
    bottom: Tensor
    peak: Tensor


class Cache(NamedTuple):
    """All keys and values of a stream, (b m d)."""

    k: Tensor
    v: Tensor


class PositionBias(nn.Module):
    """w_ij = u_i · s_j, with u and s (length rank) learned; begins near zero, as in the paper."""

    def __init__(self, length: int, rank: int) -> None:
        super().__init__()
        check_whole(1, length=length, rank=rank)
        self.u, self.s = (nn.Parameter(0.01 * torch.randn(length, rank)) for _ in range(2))

    def forward(self, start: int, end: int, keys: slice) -> Tensor:
        """(end − start, keys), of queries from `start` to `end`."""
        return self.u[start:end] @ self.s[keys].mT


class AFT(Mixer):
    """out_i = σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij), all elementwise but w (n n), a bias of positions.

    length   the longest sequence; None: there is no bias (AFT-simple), and no limit
    rank     of w
    """

    def __init__(self, dim: int, length: int | None, rank: int, *, causal: bool = False) -> None:
        can = Can(cross="its biases are of the positions of one sequence")
        if length is not None:
            can = can & Can(length=f"its biases were built for {length} positions")
        super().__init__(dim, can=can, causal=causal, length=length)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.bias = None if length is None else PositionBias(length, rank)

    def start(self) -> State:
        """Nothing yet."""
        return ()

    def mix(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        k, v = self._keys(x, mask), at_least_single(self.v(x))
        past, at = (None, 0) if not state else self._past(state, x)
        sums = self._past_sums(k, v, at) if self.causal else _sums(k, v, self._bias(0, x.shape[1], slice(0, x.shape[1])))
        if past is not None:
            sums = _merge(sums, past)
        y = self.q(x).sigmoid() * _divide(sums).to(x.dtype)
        return y, None if state is None else self._after(state, k, v)

    def weights(self, x: Tensor, memory: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b d n n): each channel is a head of its own, and the gate of the query belongs to its weights."""
        n, k = x.shape[1], self._keys(x, mask).mT[:, :, None]
        w = self._bias(0, n, slice(0, n))
        scores = k.expand(-1, -1, n, -1) if w is None else k + w
        keep = kept(n, n, causal=self.causal, mask=mask, device=x.device)
        return self.q(x).sigmoid().mT[..., None] * softmax_over(scores, keep).to(x.dtype)

    def _keys(self, x: Tensor, mask: Tensor | None) -> Tensor:
        k = at_least_single(self.k(x))
        return k if mask is None else k.masked_fill(~mask[..., None], -torch.inf)

    def _bias(self, start: int, end: int, keys: slice) -> Tensor | None:
        return None if self.bias is None else at_least_single(self.bias(start, end, keys))

    def _past(self, state: Cache | Sums, x: Tensor) -> tuple[Sums, int]:
        """What the tokens before this chunk amount to, and how many there were, where that matters."""
        check_batch(state[0], at_least_single(x))
        if isinstance(state, Sums):
            return state, 0
        at = state.k.shape[1]
        check_stream_length(self.length, at + x.shape[1])
        return _sums(state.k, state.v, self._bias(at, at + x.shape[1], slice(0, at))), at

    def _after(self, state: Cache | Sums | tuple[()], k: Tensor, v: Tensor) -> Cache | Sums:
        """Without a bias sums are enough; with one, each key may count anew."""
        if self.bias is None:
            new = _sums(k, v, None)
            return _merge(state, new) if isinstance(state, Sums) else new
        return Cache(torch.cat((state.k, k), 1), torch.cat((state.v, v), 1)) if isinstance(state, Cache) else Cache(k, v)

    def _past_sums(self, k: Tensor, v: Tensor, at: int) -> Sums:
        """Sums over j <= i, by halves: the later half of each block takes sums over its earlier half, of all sizes 1, 2, 4 ...

        So the largest exponent is looked for among keys that all queries of the half may see, and never in the future.
        """
        n = k.shape[1]
        full = 1 << max(0, n - 1).bit_length()
        k, v = F.pad(k, (0, 0, 0, full - n), value=-torch.inf), F.pad(v, (0, 0, 0, full - n))
        w = self._bias(at, at + n, slice(at, at + n))
        w = None if w is None else F.pad(w, (0, full - n, 0, full - n))
        sums = _flat(_sums(k[:, :, None], v[:, :, None], _squares(w, 1)))
        size = 1
        while size < full:
            blocks = _squares(w, 2 * size)
            earlier_k, earlier_v = (t.unflatten(1, (-1, 2, size))[:, :, 0] for t in (k, v))
            new = _sums(earlier_k, earlier_v, None if blocks is None else blocks[:, size:, :size])
            sums = _merge(sums, _flat(_later(new, size)))
            size *= 2
        return Sums(*(t[:, :n] for t in sums))


def _sums(k: Tensor, v: Tensor, w: Tensor | None) -> Sums:
    """Over all keys: k and v (... m d), w (... n m) -> (... n d); without w it is (... 1 d), the same for all queries."""
    peak = k.detach().amax(-2, keepdim=True).clamp(min=LOW)
    e = (k - peak).exp()
    if w is None:
        return Sums((e * v).sum(-2, keepdim=True), e.sum(-2, keepdim=True), peak)
    highest = w.detach().amax(-1, keepdim=True)
    weight = (w - highest).exp()
    return Sums(weight @ (e * v), weight @ e, peak + highest)


def _merge(a: Sums, b: Sums) -> Sums:
    peak = torch.maximum(a.peak, b.peak)
    less, more = (a.peak - peak).exp(), (b.peak - peak).exp()
    return Sums(a.top * less + b.top * more, a.bottom * less + b.bottom * more, peak)


def _divide(sums: Sums) -> Tensor:
    """top / bottom; zero where no key counts."""
    return sums.top / sums.bottom.masked_fill(sums.bottom <= 0, 1)


def _squares(w: Tensor | None, size: int) -> Tensor | None:
    """The blocks of w (n n) on its diagonal: (n/size size size)."""
    if w is None:
        return None
    return w.unflatten(1, (-1, size)).unflatten(0, (-1, size)).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _later(sums: Sums, size: int) -> Sums:
    """Sums for the later half of each block, (b blocks size d) or (b blocks 1 d), and none for the earlier half."""
    top, bottom, peak = (t.expand(-1, -1, size, -1) for t in sums)
    none = torch.zeros_like(top)
    pairs = ((none, top), (none, bottom), (none + LOW, peak))
    return Sums(*(torch.stack(pair, 2).flatten(2, 3) for pair in pairs))


def _flat(sums: Sums) -> Sums:
    return Sums(*(t.flatten(1, 2) for t in sums))
