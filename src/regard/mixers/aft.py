"""AFT: keys weigh values channel by channel, and queries only gate the result (Zhai et al. 2021, arXiv 2105.14103)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import check_int, check_stream_length
from regard.mixer import Can, Mixer, State, check_batch, check_heads, merge_heads, split_heads
from regard.numerics import at_least_float32, attention_mask, masked_softmax

LOW = -1e30  # stands for the largest exponent of no keys: far below all others, and yet finite
CHUNK = 64  # tokens, where no bias asks for more


class ExpSums(NamedTuple):
    """Σ exp(k + w) v = top · exp(peak) and Σ exp(k + w) = bottom · exp(peak), each (... n e): nothing overflows."""

    top: Tensor
    bottom: Tensor
    peak: Tensor


class AFTState(NamedTuple):
    """Keys and values that a bias may still reach, (b h m e) each; the sums of all before them; and how many there were."""

    k: Tensor | None
    v: Tensor | None
    far: ExpSums | None
    next: int


class AFTBias(nn.Module, ABC):
    """w_ij of positions i (... n) and j (... m): (h ... n m), the same for all channels of a head.

    reach   how far apart the two may be before w is zero; None: there is no such bound
    length  positions that there are; None: any
    """

    reach: int | None = None
    length: int | None = None
    heads: int = 1

    @abstractmethod
    def forward(self, i: Tensor, j: Tensor) -> Tensor: ...


class PositionBias(AFTBias):
    """w_ij = u_i · s_j, with u and s (length rank) learned; begins near zero, as in the paper.

    window   w_ij = 0 where |i − j| >= window; None: nowhere
    """

    def __init__(self, length: int, rank: int, window: int | None = None) -> None:
        super().__init__()
        check_int(1, length=length, rank=rank, **({} if window is None else {"window": window}))
        self.u, self.s = (nn.Parameter(0.01 * torch.randn(length, rank)) for _ in range(2))
        self.length, self.reach = length, None if window is None else window - 1

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """A product of two tables."""
        last = len(self.u) - 1  # what a chunk is filled up with has no place, and no weight either
        w = (self.u[i.clamp(max=last)] @ self.s[j.clamp(0, last)].mT)[None]
        return w if self.reach is None else w.masked_fill(_gaps(i, j).abs() > self.reach, 0)


class KernelBias(AFTBias):
    """w_ij = w[i − j], a kernel for each head and zero beyond it: γ (t − mean t) / std t + β, with t (h kernel), γ, β learned.

    γ begins at 0.01, not at zero as in the paper: there t would have no gradient.
    """

    def __init__(self, heads: int, kernel: int, *, causal: bool) -> None:
        super().__init__()
        check_int(1, kernel=kernel)
        self.heads, self.ahead = heads, 0 if causal else (kernel - 1) // 2
        self.reach = kernel - 1 - self.ahead
        self.table = nn.Parameter(torch.randn(heads, kernel))
        self.gain, self.shift = (
            nn.Parameter(torch.full((heads, 1), 0.01)),
            nn.Parameter(torch.zeros(heads, 1)),
        )

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """Looked up by how far apart they are."""
        at = _gaps(i, j) + self.ahead
        normal = F.layer_norm(self.table, self.table.shape[1:])
        found = (self.gain * normal + self.shift)[:, at.clamp(0, self.table.shape[1] - 1)]
        return found.masked_fill((at < 0) | (at >= self.table.shape[1]), 0)


class AFT(Mixer):
    """out_i = σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij), all elementwise but w, a bias of positions.

    bias   `PositionBias` (AFT-full, and with a window AFT-local) or `KernelBias` (AFT-conv), whose heads have a key each;
           None: there is no bias (AFT-simple)
    """

    def __init__(self, dim: int, bias: AFTBias | None = None, *, causal: bool = False) -> None:
        can, length = (
            Can(cross="its biases are of the positions of one sequence"),
            None if bias is None else bias.length,
        )
        if length is not None:
            can = can & Can(length=f"its biases were built for {length} positions")
        super().__init__(dim, can=can, causal=causal, length=length)
        self.heads = 1 if bias is None else bias.heads
        check_heads(dim, self.heads)
        keys = self.heads if isinstance(bias, KernelBias) else dim
        self.q, self.k, self.v = (nn.Linear(dim, width, bias=False) for width in (dim, keys, dim))
        self.bias = bias

    def initial_state(self) -> AFTState:
        """Nothing yet."""
        return AFTState(None, None, None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        past = self.initial_state() if state is None else state
        check_stream_length(self.length, past.next + x.shape[1])
        k, v = self._keys(x, mask), split_heads(at_least_float32(self.v(x)), self.heads)
        sums = self._sums(k, v, past.next)
        for earlier in self._earlier(past, k):
            sums = _merge(sums, earlier)
        y = self.q(x).sigmoid() * merge_heads(_divide(sums).expand_as(v)).to(x.dtype)
        return y, None if state is None else self._after(past, k, v)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b d n n): each channel is a head of its own, and the gate of the query belongs to its weights."""
        at, k = torch.arange(x.shape[1], device=x.device), self._keys(x, mask)
        k = k.mT.expand(-1, -1, self.dim // self.heads, -1)[..., None, :]  # (b h e 1 n)
        w = None if self.bias is None else at_least_float32(self.bias(at, at))[:, None]
        scores = (k.expand(*k.shape[:3], x.shape[1], -1) if w is None else k + w).flatten(1, 2)
        keep = attention_mask(
            at.shape[0], at.shape[0], causal=self.causal, mask=mask, device=x.device
        )
        return self.q(x).sigmoid().mT[..., None] * masked_softmax(scores, keep).to(x.dtype)

    def _keys(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(b h n e), or (b h n 1) where the channels of a head share them."""
        k = split_heads(at_least_float32(self.k(x)), self.heads)
        return k if mask is None else k.masked_fill(~mask[:, None, :, None], -torch.inf)

    def _earlier(self, state: AFTState, k: Tensor) -> list[ExpSums]:
        """What the new keys' queries have of the stream before them."""
        if state.k is None or state.v is None or state.far is None:
            return []
        check_batch(state.k, k)
        at = torch.arange(state.next - state.k.shape[2], state.next + k.shape[2], device=k.device)
        new, old = at[-k.shape[2] :], at[: -k.shape[2]]
        w = None if self.bias is None else at_least_float32(self.bias(new, old))
        return [_sums(state.k, state.v, w), state.far]

    def _after(self, state: AFTState, k: Tensor, v: Tensor) -> AFTState:
        """Keys beyond the reach of the bias become sums."""
        end = state.next + k.shape[2]
        if state.k is not None and state.v is not None:
            k, v = torch.cat((state.k, k), 2), torch.cat((state.v, v), 2)
        reach = 0 if self.bias is None else self.bias.reach
        gone = 0 if reach is None else max(0, k.shape[2] - reach)
        new = _sums(k[:, :, :gone], v[:, :, :gone], None)
        return AFTState(
            k[:, :, gone:],
            v[:, :, gone:],
            new if state.far is None else _merge(state.far, new),
            end,
        )

    def _sums(self, k: Tensor, v: Tensor, at: int) -> ExpSums:
        """Over all keys, or over those up to each query: (b h n e), the first of them at position `at`.

        In chunks as long as the bias reaches.  It tells apart the keys of a query's own chunk and of the chunks beside it; all
        others weigh the same for the whole chunk.
        """
        if torch.compiler.is_exporting():
            return self._at_once(k, v)
        n, size = k.shape[2], self.size(k.shape[2])
        k, v = _chunks(k, size, -torch.inf), _chunks(v, size, 0)
        i = at + torch.arange(k.shape[2] * size, device=k.device).view(-1, size)

        def bias(to: int) -> Tensor | None:
            return None if self.bias is None else at_least_float32(self.bias(i, i + to * size))

        sums = _past(k, v, bias(0)) if self.causal else _sums(k, v, bias(0))
        if k.shape[2] > 1:
            sums = _merge(sums, _before(k, v, bias(-1)))
        if k.shape[2] > 1 and not self.causal:
            w = bias(1)
            after = _before(k.flip(2), v.flip(2), None if w is None else w.flip(1))
            sums = _merge(sums, ExpSums(*(t.flip(2) for t in after)))
        return ExpSums(*(t.expand(*t.shape[:3], size, -1).flatten(2, 3)[:, :, :n] for t in sums))

    def _at_once(self, k: Tensor, v: Tensor) -> ExpSums:
        """For a length that is not known: one chunk, without halves.  Causal, a later key may be the peak, so in double."""
        i = torch.arange(k.shape[2], device=k.device)
        w = None if self.bias is None else at_least_float32(self.bias(i, i))
        if not self.causal:
            return ExpSums(*(t.expand(-1, -1, k.shape[2], -1) for t in _sums(k, v, w)))
        w = torch.zeros(k.shape[2], k.shape[2], device=k.device) if w is None else w
        return _sums(k.double(), v.double(), w.double().masked_fill(i > i[:, None], -torch.inf))

    def size(self, n: int) -> int:
        """Of a chunk, of n tokens; a power of two where it is halved again and again."""
        reach = (
            None
            if self.bias is None and not self.causal
            else 0
            if self.bias is None
            else self.bias.reach
        )
        size = n if reach is None else min(n, max(reach, CHUNK))
        return 1 << (size - 1).bit_length() if self.causal else size


def _gaps(i: Tensor, j: Tensor) -> Tensor:
    """(... n), (... m) -> (... n m)."""
    return i[..., :, None] - j[..., None, :]


def _chunks(x: Tensor, size: int, fill: float) -> Tensor:
    """(b h n e) -> (b h chunks size e)."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size), value=fill).unflatten(2, (-1, size))


def _sums(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Over all keys: k and v (... m e), w (... n m) -> (... n e); without w it is (... 1 e), the same for all queries."""
    if not k.shape[-2]:
        k, v = F.pad(k, (0, 0, 0, 1), value=-torch.inf), F.pad(v, (0, 0, 0, 1))
        w = None if w is None else F.pad(w, (0, 1))
    peak = k.detach().amax(-2, keepdim=True).clamp(min=LOW)
    e = (k - peak).exp()
    if w is None:
        return ExpSums((e * v).sum(-2, keepdim=True), e.sum(-2, keepdim=True), peak)
    highest = w.detach().amax(-1, keepdim=True)
    weight = (w - highest).exp()
    return ExpSums(weight @ (e * v), weight @ e, peak + highest)


def _past(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Sums over j <= i in each chunk (b h chunks size e), by halves: the later half takes sums over the earlier one, and so do
    the halves of the halves, down to a token and itself.

    So the largest exponent is looked for among keys that all queries of the half may see, and never in the future.
    """
    full, size = k.shape[3], 1
    sums = _flat(_sums(k[..., None, :], v[..., None, :], _squares(w, 1)))
    while size < full:
        blocks = _squares(w, 2 * size)
        earlier_k, earlier_v = (t.unflatten(3, (-1, 2, size))[:, :, :, :, 0] for t in (k, v))
        new = _sums(earlier_k, earlier_v, None if blocks is None else blocks[..., size:, :size])
        sums, size = _merge(sums, _flat(_later(new, size))), 2 * size
    return sums


def _before(k: Tensor, v: Tensor, w: Tensor | None) -> ExpSums:
    """Sums over all chunks before each, (b h chunks size e): over the last one by w, over the others one after the other."""
    last = _sums(
        F.pad(k, (0, 0, 0, 0, 1, 0), value=-torch.inf)[:, :, :-1],
        F.pad(v, (0, 0, 0, 0, 1, 0))[:, :, :-1],
        w,
    )
    each = [
        ExpSums(*parts) for parts in zip(*(t.unbind(2) for t in _sums(k, v, None)), strict=True)
    ]
    none = ExpSums(
        torch.zeros_like(each[0].top),
        torch.zeros_like(each[0].bottom),
        torch.full_like(each[0].peak, LOW),
    )
    far = [none, none]
    for one in each[:-2]:
        far.append(_merge(far[-1], one))
    return _merge(last, ExpSums(*(torch.stack(parts, 2) for parts in zip(*far, strict=True))))


def _merge(a: ExpSums, b: ExpSums) -> ExpSums:
    peak = torch.maximum(a.peak, b.peak)
    less, more = (a.peak - peak).exp(), (b.peak - peak).exp()
    return ExpSums(a.top * less + b.top * more, a.bottom * less + b.bottom * more, peak)


def _divide(sums: ExpSums) -> Tensor:
    """top / bottom; zero where no key counts."""
    return sums.top / sums.bottom.masked_fill(sums.bottom <= 0, 1)


def _squares(w: Tensor | None, size: int) -> Tensor | None:
    """The blocks of w (h chunks n n) on its diagonal: (h chunks n/size size size)."""
    if w is None:
        return None
    return (
        w.unflatten(3, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=2, dim2=4).movedim(-1, 2)
    )


def _later(sums: ExpSums, size: int) -> ExpSums:
    """Sums for the later half of each block, (... blocks size e) or (... blocks 1 e), and none for the earlier half."""
    parts = [t.expand(*t.shape[:-2], size, -1) for t in sums]
    none = [torch.full_like(t, empty) for t, empty in zip(parts, (0, 0, LOW), strict=True)]
    return ExpSums(*(torch.cat(pair, -2) for pair in zip(none, parts, strict=True)))


def _flat(sums: ExpSums) -> ExpSums:
    """Blocks of a chunk in a row."""
    return ExpSums(*(t.flatten(3, 4) for t in sums))
