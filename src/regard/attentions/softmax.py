"""Softmax attention over a pattern, exactly."""

from __future__ import annotations

from torch import Tensor

from regard.attend import attend, check_backend
from regard.attend.traced import spell
from regard.attentions.cached import Cached, Place, can_over
from regard.mixer import Can
from regard.pattern import Causal, Full, Pattern
from regard.prior import Prior

_FULL = Full()


class SoftmaxAttention(Cached):
    """softmax(q kᵀ scale + prior) v, over the pairs that the pattern allows; exact, by whichever executor is fastest.

    scale    of the scores, 1/sqrt(e) unless given, or what a prior of several terms asks for
    backend  see `regard.attend`
    """

    shares = True

    def __init__(
        self, pattern: Pattern = Full(), prior: Prior | None = None, *, scale: float | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.pattern, self.past = pattern, pattern & Causal()
        for each in (self.pattern, self.past):
            spell(each)
        self.prior, self.scale, self.backend = prior, scale, backend
        self.length, self.heads = pattern.limit, pattern.heads or (None if prior is None else prior.heads)
        self.can = can_over(pattern, relates=prior is not None)
        if prior is not None and prior.length is not None:
            self.can = self.can & Can(takes_marks=True, length=f"its prior was built for {prior.length} positions")
            self.length = prior.length if self.length is None else min(self.length, prior.length)
        if prior is not None and prior.reads:
            self.turnless = "its prior reads the queries and keys, and turned ones would tell it something else"

    def over(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, *, mask: Tensor | None = None, marks: Tensor | None = None
    ) -> Tensor:
        """See `Cached.over`."""
        elsewhere = type(place.k_at) is not int or place.k_at or place.q_at
        if elsewhere and self.prior is None and place.pattern == _FULL:  # positions say nothing then
            place = Place(_FULL)
        return attend(
            q, k, v, pattern=place.pattern, prior=self.prior, mask=mask, marks=marks, scale=self.scale,
            q_at=place.q_at, k_at=place.k_at, backend=self.backend,
        )  # fmt: skip
