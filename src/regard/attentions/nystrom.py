"""Nyström attention: a few landmarks stand between all queries and all keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions.softmax import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Attention, Can, State
from regard.numerics import at_least_float32

WHOLE = "a landmark is a mean over tokens of the past and of the future"


class NystromAttention(Attention):
    """softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V, each scaled by 1/√e (Xiong et al. 2021, arXiv 2102.03902).

    Q̃ and K̃ are the means of `landmarks` segments of the query_mask tokens, alike in size up to one.  ⁺ is the pseudo-inverse,
    by `iterations` steps of Razavi et al., begun at Aᵀ / ‖A‖₁ ‖A‖∞ of each matrix by itself.  Where there are no more keys,
    or no more queries, than landmarks, attention is exact.

    kernel   adds a depth-wise convolution over the values, so wide, one kernel for each head; None: none
    """

    needs_query_mask = True

    def __init__(
        self, heads: int, landmarks: int, *, iterations: int = 6, kernel: int | None = None
    ) -> None:
        super().__init__()
        check_int(
            1,
            landmarks=landmarks,
            iterations=iterations,
            **({} if kernel is None else {"kernel": kernel}),
        )
        if kernel is not None and kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that it has a middle, not {kernel}")
        self.landmarks, self.iterations, self.inner = landmarks, iterations, SoftmaxAttention()
        self.conv: nn.Conv2d | None = None
        self.can = Can(causal=WHOLE, stream=WHOLE)
        if kernel is not None:
            self.heads = heads
            self.conv = nn.Conv2d(
                heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False
            )
            self.can = self.can & Can(
                supports_global_mask=True,
                cross="its convolution adds values at the place of the query",
            )

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
        """See `Attention.forward`; query_mask (b n) says which queries count."""
        if mask is not None:
            k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
        few = q.shape[2] <= self.landmarks
        out = (
            self.inner(q, k, v, mask=mask)[0]
            if few
            else self._approximate(q, k, v, mask, query_mask)
        )
        return out if self.conv is None else out + self.conv(v), None

    def _approximate(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor:
        """n queries ask the key landmarks; what these hold was asked for by the query landmarks."""
        short_q, _ = segment_means(q, query_mask, self.landmarks)
        short_k, held = segment_means(k, mask, self.landmarks)
        one = torch.eye(short_k.shape[2], dtype=k.dtype, device=k.device).expand(
            *k.shape[:2], -1, -1
        )
        between = self.inner(short_q, short_k, one, mask=held)[0]
        asked = self.inner(short_q, k, v, mask=mask)[0]
        values = pseudo_inverse(between, self.iterations) @ asked
        if (
            mask is not None or k.shape[2] <= self.landmarks
        ):  # where tokens are few, each landmark is one of them
            total = (
                torch.full((k.shape[0],), k.shape[2], device=k.device)
                if mask is None
                else mask.sum(1)
            )
            exact = (total <= self.landmarks)[:, None, None, None]
            values = torch.where(exact, segment_means(v, mask, self.landmarks)[0], values)
        return self.inner(q, short_k, values, mask=held)[0]


def segment_means(
    x: Tensor, query_mask: Tensor | None, segments: int
) -> tuple[Tensor, Tensor | None]:
    """x (b h n e), query_mask (b n) -> (b h s e) with s = min(segments, n), and which of the segments hold a token, (b s).

    The r query_mask tokens are cut into min(s, r) runs whose sizes differ by at most one; None: every segment holds a token.
    """
    b, h, n, e = x.shape
    size = min(segments, n)
    if query_mask is None and n % size == 0:
        return x.unflatten(2, (size, -1)).mean(3), None
    if query_mask is None:
        at = (torch.arange(n, device=x.device) * size // n).expand(b, n)
        weight = x.new_ones(b, n)
    else:
        total = query_mask.sum(1, keepdim=True)
        at = (
            (query_mask.cumsum(1) - 1).clamp(min=0) * total.clamp(max=size) // total.clamp(min=1)
        ).clamp(max=size - 1)
        weight = query_mask.to(x.dtype)
    sums = x.new_zeros(b, h, size, e).scatter_add(
        2, at[:, None, :, None].expand_as(x), x * weight[:, None, :, None]
    )
    count = x.new_zeros(b, size).scatter_add(1, at, weight)
    return sums / count.clamp(min=1)[:, None, :, None], None if query_mask is None else count > 0


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """A⁺ (... q p) of a (... p q), by Z ← Z (13 I − A Z (15 I − A Z (7 I − A Z))) / 4; in float32 at least."""
    kind, a = a.dtype, at_least_float32(a)
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.transpose(-1, -2) / norms.masked_fill(norms == 0, 1)[..., None, None]
    one = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z.to(kind)
