"""Linear attention: the sum over keys is taken first, so that cost grows with n, and a state of fixed size streams."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_whole
from regard.feature import EluPlusOne, Feature
from regard.mixer import Attention, check_batch


class Sums(NamedTuple):
    """What all keys so far amount to: Σ phi(k) vᵀ (b h r f) and Σ phi(k) (b h r); None: no key yet."""

    kv: Tensor | None
    k: Tensor | None


class LinearAttention(Attention):
    """out_i = phi(q_i)ᵀ Σ_j phi(k_j) v_jᵀ / phi(q_i)ᵀ Σ_j phi(k_j) (Katharopoulos et al. 2020, arXiv 2006.16236).

    Causal sums run over j <= i.  They are taken chunk by chunk: inside a chunk by masked products, before it by a state,
    so that memory is n r f / chunk and never n r f.
    """

    def __init__(self, feature: Feature | None = None, *, chunk: int = 64) -> None:
        super().__init__()
        check_whole(1, chunk=chunk)
        self.feature = EluPlusOne() if feature is None else feature
        self.chunk = chunk

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: Sums | None = None
    ) -> tuple[Tensor, Sums | None]:
        """See `Attention.attend`."""
        q, k = self.feature(q), self.feature(k)
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        if causal:
            out, new = self._causal(q, k, v, state)
            return out, None if state is None else new
        return _divide(q @ (k.transpose(-1, -2) @ v), (q @ k.sum(2)[..., None])), None

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, state: Sums | None) -> tuple[Tensor, Sums]:
        if state is not None and state.kv is not None:
            check_batch(state.kv, q)
        n, c = q.shape[2], min(self.chunk, q.shape[2])
        q, k, v = (_chunks(x, c) for x in (q, k, v))  # (b h n/c c r)
        kv, ks = k.transpose(-1, -2) @ v, k.sum(3)  # of each chunk: (b h n/c r f), (b h n/c r)
        past, after = _before(kv, None if state is None else state.kv)
        past_k, after_k = _before(ks, None if state is None else state.k)
        inside = (q @ k.transpose(-1, -2)).tril()
        top = inside @ v + q @ past
        bottom = inside.sum(-1, keepdim=True) + q @ past_k[..., None]
        return _divide(top, bottom).flatten(2, 3)[:, :, :n], Sums(after, after_k)

    def start(self) -> Sums:
        """No key yet."""
        return Sums(None, None)


def _chunks(x: Tensor, size: int) -> Tensor:
    """(b h n r) -> (b h n/size size r), filled up with zeros, which add nothing."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _before(each: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums over the chunks before each one, (b h chunks ...), and over all of them."""
    total = torch.zeros_like(each[:, :, :1]) if first is None else first[:, :, None]
    sums = torch.cat((total, each), 2).cumsum(2)
    return sums[:, :, :-1], sums[:, :, -1]


def _divide(top: Tensor, bottom: Tensor) -> Tensor:
    """top / bottom; where no key has any weight both are zero, and so is the result."""
    return top / bottom.masked_fill(bottom <= 0, 1)
