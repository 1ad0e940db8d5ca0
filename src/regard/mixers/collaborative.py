"""Converts multi-head attention into collaborative heads (Cordonnier et al. 2020)."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported, check_int
from regard.head_mixing import SharedProjection
from regard.mixer import MultiHead


def collaborate(mixer: MultiHead, width: int, *, rounds: int = 100, seed: int = 0) -> MultiHead:
    """Convert a multi-head layer into one whose heads share `width` dimensions of queries and keys.

    The scores of head i are x W_q^i (W_k^i)ᵀ xᵀ. These h matrices (d d) are approximated by A
    diag(m_i) Bᵀ, with A and B common to all heads, by alternating least squares. With width = h e
    the result is exact.

    Args:
        mixer: Softmax attention with linear projections and without a bias or rotary embedding.
        width: Width of the shared projections.
        rounds: Rounds of least squares.
        seed: Seed of the initial directions.
    """
    check_int(1, width=width, rounds=rounds)
    if not isinstance(mixer, MultiHead) or not isinstance(mixer.inner, SoftmaxAttention):
        raise Unsupported("collaborate needs softmax attention inside a MultiHead")
    if mixer.kv_heads != mixer.heads:
        raise Unsupported("collaborate needs a MultiHead without kv_heads")
    if mixer.rotary is not None:
        raise Unsupported("collaborate needs bilinear scores, but rotary depends on positions")
    if mixer.q_norm is not None:
        raise Unsupported("collaborate needs bilinear scores, but qk_norm depends on the tokens")
    q, k = mixer.q, mixer.k
    if not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
        raise Unsupported("collaborate needs linear projections of queries and keys")
    if q.bias is not None:
        raise Unsupported("collaborate needs projections without a bias")
    by_head = [w.detach().double().unflatten(0, (mixer.heads, -1)) for w in (q.weight, k.weight)]
    inner = deepcopy(mixer.inner)
    if inner.scale is None:  # keep the scale of the old width
        inner.scale = mixer.head_dim**-0.5
    new = MultiHead(mixer.dim, mixer.heads, inner, head_dim=mixer.head_dim, causal=mixer.causal)
    mixing, left, right = _common_factors(*by_head, width, rounds, seed)
    new.q, new.k = (
        SharedProjection(mixer.dim, mixer.heads, width, mixed=mixed) for mixed in (True, False)
    )
    new.v, new.out = deepcopy(mixer.v), deepcopy(mixer.out)
    with torch.no_grad():
        for own, value in (
            (new.q.mix, mixing),
            (new.q.weight.weight, left.T),
            (new.k.weight.weight, right.T),
        ):
            own.copy_(value)
    return new.to(q.weight)


def _common_factors(
    q: Tensor, k: Tensor, width: int, rounds: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Factors (h e d) of q and k -> m (h w), A and B (d w), with q_iᵀ k_i ≈ A diag(m_i) Bᵀ."""
    h, e, _ = q.shape
    if width >= h * e:
        spare = width - h * e
        mixing = F.pad(torch.eye(h, dtype=q.dtype).repeat_interleave(e, 1), (0, spare))
        return mixing, *(F.pad(x.flatten(0, 1).T, (0, spare)) for x in (q, k))  # type: ignore[return-value]
    whole = torch.einsum("hed,hef->hdf", q, k)
    make = torch.Generator().manual_seed(seed)
    left, right = (
        _main_directions(x.flatten(1), width, make)
        for x in (whole.transpose(0, 1), whole.permute(2, 0, 1))
    )
    for _ in range(rounds):
        mixing = _solve_factor(torch.einsum("hdf,dw,fw->hw", whole, left, right), left, right)
        left = _solve_factor(torch.einsum("hdf,hw,fw->dw", whole, mixing, right), mixing, right)
        right = _solve_factor(torch.einsum("hdf,hw,dw->fw", whole, mixing, left), mixing, left)
    return mixing, left, right


def _main_directions(x: Tensor, width: int, make: torch.Generator) -> Tensor:
    """Leading left singular vectors of x (d ...), filled up with random vectors: (d width)."""
    found = torch.linalg.svd(x, full_matrices=False).U[:, :width]
    more = torch.randn(len(x), width - found.shape[1], dtype=x.dtype, generator=make)
    return torch.cat((found, more), 1)


def _solve_factor(product: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Least squares for one factor: product (… w) times the inverse Gram matrix of the others."""
    gram = (one.T @ one) * (other.T @ other)
    return torch.linalg.lstsq(gram, product.T).solution.T
