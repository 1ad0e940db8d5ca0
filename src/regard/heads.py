"""What heads have to do with each other: they talk, they share their projections, or they are kept apart."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported, check_positive, check_whole
from regard.mixer import Attention, MultiHead, State
from regard.notes import tell


class Talk(nn.Module):
    """Heads talk: (b h n m) -> (b g n m), out_g = Σ_h W_gh x_h (Shazeer et al. 2020, arXiv 2003.02436).

    It starts as the identity, so that training starts from heads that are apart; where heads are fewer on one side, they
    are taken in turn.
    """

    def __init__(self, heads: int, new: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(heads)[torch.arange(new) % heads])

    def forward(self, x: Tensor) -> Tensor:
        """(b h n m) -> (b g n m)."""
        return torch.einsum("gh,bhnm->bgnm", self.weight, x)


class Shared(nn.Module):
    """One projection for all heads, (b n d) -> (b n h*w): head i is `mix_i ⊙ (W x)`, or `W x` itself where nothing mixes.

    What the heads of Cordonnier et al. 2020 (arXiv 2006.16362) have in common.
    """

    def __init__(self, dim: int, heads: int, width: int, *, mixed: bool) -> None:
        super().__init__()
        self.heads, self.weight = heads, nn.Linear(dim, width, bias=False)
        self.mix = nn.Parameter(torch.rand(heads, width) + 0.5) if mixed else None

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n h*w)."""
        one = self.weight(x).unsqueeze(-2)
        every = one.expand(*x.shape[:-1], self.heads, -1) if self.mix is None else one * self.mix.to(one.dtype)
        return every.flatten(-2)


def collaborate(mixer: MultiHead, width: int, *, rounds: int = 100, seed: int = 0) -> MultiHead:
    """A multi-head layer whose heads share `width` dimensions of queries and keys, near to the one given.

    Head i of the old layer scores by x W_q^i (W_k^i)ᵀ xᵀ.  These h matrices (d d) are written as A diag(m_i) Bᵀ with one A
    and one B for all, by alternating least squares; the width h e gives them back exactly, less is an approximation.
    """
    check_whole(1, width=width, rounds=rounds)
    if not isinstance(mixer, MultiHead) or not isinstance(mixer.inner, SoftmaxAttention) or mixer.kv_heads != mixer.heads:
        raise Unsupported("only softmax attention in MultiHead, with as many heads of keys as of queries, can be shared out")
    q, k = mixer.q, mixer.k
    if not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
        raise Unsupported("only a layer with plain projections can be shared out")
    if q.bias is not None:
        raise Unsupported("the projections have a bias, which a shared bilinear form has no place for")
    by_head = [w.detach().double().unflatten(0, (mixer.heads, -1)) for w in (q.weight, k.weight)]
    inner = deepcopy(mixer.inner)
    if inner.scale is None:  # that of the old width, for the new one is another
        inner.scale = (mixer.dim // mixer.heads) ** -0.5
    new = MultiHead(mixer.dim, mixer.heads, inner, causal=mixer.causal)
    mixing, left, right = _common_factors(*by_head, width, rounds, seed)
    new.q, new.k = (Shared(mixer.dim, mixer.heads, width, mixed=mixed) for mixed in (True, False))
    new.v, new.out = deepcopy(mixer.v), deepcopy(mixer.out)
    with torch.no_grad():
        for own, value in ((new.q.mix, mixing), (new.q.weight.weight, left.T), (new.k.weight.weight, right.T)):
            own.copy_(value)
    return new.to(q.weight)


def _common_factors(q: Tensor, k: Tensor, width: int, rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per-head factors (h e d) of q and k -> m (h w), A (d w), B (d w) with q_iᵀ k_i ≈ A diag(m_i) Bᵀ."""
    h, e, _ = q.shape
    if width >= h * e:
        spare = width - h * e
        mixing = F.pad(torch.eye(h, dtype=q.dtype).repeat_interleave(e, 1), (0, spare))
        return mixing, *(F.pad(x.flatten(0, 1).T, (0, spare)) for x in (q, k))  # type: ignore[return-value]
    whole = torch.einsum("hed,hef->hdf", q, k)
    make = torch.Generator().manual_seed(seed)
    left, right = (_main_directions(x.flatten(1), width, make) for x in (whole.transpose(0, 1), whole.permute(2, 0, 1)))
    for _ in range(rounds):
        mixing = _solved(torch.einsum("hdf,dw,fw->hw", whole, left, right), left, right)
        left = _solved(torch.einsum("hdf,hw,fw->dw", whole, mixing, right), mixing, right)
        right = _solved(torch.einsum("hdf,hw,dw->fw", whole, mixing, left), mixing, left)
    return mixing, left, right


def _main_directions(x: Tensor, width: int, make: torch.Generator) -> Tensor:
    """The first left singular vectors of x (d ...), and random ones beyond them: (d width)."""
    found = torch.linalg.svd(x, full_matrices=False).U[:, :width]
    more = torch.randn(len(x), width - found.shape[1], dtype=x.dtype, generator=make)
    return torch.cat((found, more), 1)


def _solved(product: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The best third factor for two that are fixed: product (… w) by the Gram matrix (w w) of the two."""
    gram = (one.T @ one) * (other.T @ other)
    return torch.linalg.lstsq(gram, product.T).solution.T


class Disagreeing(Attention):
    """Any attention whose heads are asked to differ (Li et al. 2018, arXiv 1810.10183).

    What the heads have in common is told as a cost, `penalty` times the mean over all pairs of heads (i, j), i = j too, of

    "subspace"   cos(v_i, v_j), the values, token by token
    "positions"  Σ_jk |A_i ⊙ A_j|, the maps, query by query
    "outputs"    cos(o_i, o_j), the results, token by token
    """

    KINDS = ("subspace", "positions", "outputs")
    asks_queries = True

    def __init__(self, inner: Attention, *, kind: str = "outputs", penalty: float = 1.0) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, self.KINDS))}, not {kind!r}")
        check_positive("penalty", penalty)
        self.inner, self.kind, self.penalty = inner, kind, penalty
        self.can, self.length, self.heads, self.shares = inner.can, inner.length, inner.heads, inner.shares

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `Attention.attend`; real (b n) says which queries count.  A stream tells nothing: it does not train."""
        out, after = self.inner.attend(q, k, v, causal=causal, mask=mask, state=state)
        if state is not None:
            return out, after

        def common() -> Tensor:
            if self.kind == "subspace":
                return _alike(F.normalize(v, dim=-1), mask)
            if self.kind == "outputs":
                return _alike(F.normalize(out, dim=-1), real)
            one = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
            return _alike(self.inner.attend(q, k, one, causal=causal, mask=mask)[0].abs(), real)

        tell("disagreement", lambda: self.penalty * common(), is_cost=True)
        return out, after

    def start(self) -> State:
        """The state of the attention inside."""
        return self.inner.start()


def _alike(x: Tensor, real: Tensor | None) -> Tensor:
    """The mean over real tokens, examples and pairs of heads of x_i · x_j, for x (b h n e)."""
    total = x.sum(1)  # Σ_ij x_i · x_j = |Σ_i x_i|²
    each = (total * total).sum(-1) / x.shape[1] ** 2
    return each.mean() if real is None else each[real].sum() / real.sum().clamp(min=1)
