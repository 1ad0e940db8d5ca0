"""Nyström attention: a few landmarks stand between queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions.softmax import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, QueryMaskAttention, State
from regard.numerics import at_least_float32

USES_FUTURE = "a landmark is a mean over past and future tokens"


class NystromAttention(QueryMaskAttention):
    """Nyström attention (Xiong et al. 2021, arXiv 2102.03902).

        softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V, each scaled by 1/√e

    Q̃ and K̃ are the means of `landmarks` segments of the real tokens, whose sizes differ by at
    most one. ⁺ is the pseudo-inverse. With no more keys or queries than landmarks, attention is
    exact.

    Args:
        heads: Number of heads.
        landmarks: Number of landmarks.
        iterations: Iterations of the pseudo-inverse.
        kernel: Width of a depth-wise convolution over the values, one kernel for each head, added
            to the output. None for no convolution.
    """

    can = Can(
        "rotary",
        causal=USES_FUTURE,
        stream=USES_FUTURE,
        independent_queries="a landmark is a mean of several queries",
        attn_mask="queries reach keys by landmarks, each of which stands for many tokens",
    )

    def __init__(
        self, heads: int, landmarks: int, *, iterations: int = 6, kernel: int | None = None
    ) -> None:
        super().__init__()
        check_int(1, landmarks=landmarks, iterations=iterations)
        self.landmarks, self.iterations, self.inner = landmarks, iterations, SoftmaxAttention()
        self.conv: nn.Conv2d | None = None
        if kernel is not None:
            check_int(1, kernel=kernel)
            if kernel % 2 == 0:
                raise ValueError(f"kernel must be odd, not {kernel}")
            self.heads, size, padding = heads, (kernel, 1), (kernel // 2, 0)
            self.conv = nn.Conv2d(heads, heads, size, padding=padding, groups=heads, bias=False)
            reason = "its convolution adds values at the positions of the queries"
            self.can = self.can.without(cross=reason)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`."""
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        if q.shape[2] <= self.landmarks:
            out = self.inner(q, k, v, mask=mask)[0]
        else:
            out = self._approximate(q, k, v, mask, query_mask)
        return out if self.conv is None else out + self.conv(v), None

    def _approximate(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor:
        """The product of the three matrices with the values, from right to left."""
        q_landmarks, _ = segment_means(q, query_mask, self.landmarks)
        k_landmarks, landmark_mask = segment_means(k, mask, self.landmarks)
        p = k_landmarks.shape[2]
        one_hot = torch.eye(p, dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        middle = self.inner(q_landmarks, k_landmarks, one_hot, mask=landmark_mask)[0]
        outputs = self.inner(q_landmarks, k, v, mask=mask)[0]
        values = pseudo_inverse(middle, self.iterations) @ outputs
        if mask is not None or k.shape[2] <= self.landmarks:
            # with no more tokens than landmarks, each landmark is a token
            count = torch.full((k.shape[0],), k.shape[2], device=k.device)
            count = count if mask is None else mask.sum(1)
            exact = (count <= self.landmarks)[:, None, None, None]
            values = torch.where(exact, segment_means(v, mask, self.landmarks)[0], values)
        out = self.inner(q, k_landmarks, values, mask=landmark_mask)[0]
        if query_mask is not None and query_mask is not mask:
            # with no more real queries than landmarks, each landmark is a query
            rank = (query_mask.cumsum(1) - 1).clamp(0, self.landmarks - 1)
            exact = (query_mask.sum(1) <= self.landmarks)[:, None, None, None]
            own = outputs.gather(2, rank[:, None, :, None].expand_as(out))
            out = torch.where(exact, own, out)
        return out


def segment_means(x: Tensor, mask: Tensor | None, segments: int) -> tuple[Tensor, Tensor | None]:
    """Means of segments of the real tokens.

    The r real tokens are cut into min(s, r) segments whose sizes differ by at most one, with
    s = min(segments, n).

    Args:
        x: (b h n e).
        mask: (b n), True = real token, or None if all are.
        segments: Number of segments.

    Returns:
        The means (b h s e), and which segments have a token (b s), or None if all have.
    """
    b, h, n, e = x.shape
    s = min(segments, n)
    if mask is None and n % s == 0:
        return x.unflatten(2, (s, -1)).mean(3), None
    if mask is None:
        segment = (torch.arange(n, device=x.device) * s // n).expand(b, n)
        weight = x.new_ones(b, n)
    else:
        total, rank = mask.sum(1, keepdim=True), (mask.cumsum(1) - 1).clamp(min=0)
        segment = (rank * total.clamp(max=s) // total.clamp(min=1)).clamp(max=s - 1)
        weight = mask.to(x.dtype)
    index = segment[:, None, :, None].expand_as(x)
    sums = x.new_zeros(b, h, s, e).scatter_add(2, index, x * weight[:, None, :, None])
    count = x.new_zeros(b, s).scatter_add(1, segment, weight)
    means = sums / count.clamp(min=1)[:, None, :, None]
    return means, None if mask is None else count > 0


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """A⁺ (... q p) of A (... p q), by Z ← Z (13 I − A Z (15 I − A Z (7 I − A Z))) / 4 (Razavi et
    al. 2014).

    Starts at Aᵀ / (‖A‖₁ ‖A‖∞) of each matrix. Computed in float32 at least.
    """
    dtype, a = a.dtype, at_least_float32(a)
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.mT / norms.masked_fill(norms == 0, 1)[..., None, None]
    one = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z.to(dtype)
