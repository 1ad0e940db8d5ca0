"""Which token comes next: logits (b vocab) are shaped, step by step, and one token is picked for each example.

    choose = Sample(Temperature(0.7), TopKFilter(40), TopPFilter(0.9), seed=1)

Shapes act in the order in which they are written.  What they rule out has a logit of −∞, and one token always stays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from regard.errors import check_int, check_positive

Rows = Sequence[Sequence[int]]  # the tokens so far, prompt and all, of each example


class LogitsProcessor(ABC):
    """Logits to logits: Temperature(0.7)(logits)."""

    @abstractmethod
    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """(b vocab) -> (b vocab); `rows`: the tokens so far, for shapes that look at them."""


class Temperature(LogitsProcessor):
    """x / T: below 1 sharper, above 1 flatter.  T = 0 would be `GreedySearch`."""

    def __init__(self, value: float) -> None:
        if value == 0:
            raise ValueError(
                "temperature must be above 0; for the most probable token alone, choose Greedy()"
            )
        check_positive("temperature", value)
        self.value = value

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        return logits / self.value


class TopKFilter(LogitsProcessor):
    """Only the k most probable tokens (Fan et al. 2018, arXiv 1805.04833); of equals, the first."""

    def __init__(self, k: int) -> None:
        check_int(1, k=k)
        self.k = k

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        return logits.scatter(-1, order[..., self.k :], -torch.inf)


class TopPFilter(LogitsProcessor):
    """The fewest tokens whose probabilities come to p, most probable first (Holtzman et al. 2019, arXiv 1904.09751)."""

    def __init__(self, p: float) -> None:
        check_share("p", p)
        self.p = p

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if self.p == 1:  # rounding must not cost the rarest tokens
            return logits
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        ordered = logits.gather(-1, order).double().softmax(-1)
        before = ordered.cumsum(-1) - ordered  # what the more probable ones come to
        enough = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= self.p)
        return logits.masked_fill(enough, -torch.inf)


class MinPFilter(LogitsProcessor):
    """Only tokens at least p times as probable as the most probable one (Nguyen et al. 2024, arXiv 2407.01082)."""

    def __init__(self, p: float) -> None:
        check_share("p", p)
        self.p = p

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        return logits.masked_fill(
            logits < logits.amax(-1, keepdim=True) + math.log(self.p), -torch.inf
        )


class RepetitionPenalty(LogitsProcessor):
    """Tokens that came before, in the prompt too, are less probable: x / penalty, and x · penalty where x < 0.

    Keskar et al. 2019 (arXiv 1909.05858) divide whatever the sign, which makes tokens with x < 0 more probable; this is the
    reading that has become usual.
    """

    def __init__(self, penalty: float) -> None:
        check_positive("penalty", penalty)
        self.penalty = penalty

    def __call__(self, logits: Tensor, rows: Rows | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if rows is None or len(rows) != len(logits):
            raise ValueError(
                "a penalty on repetition needs the tokens so far, a row for each example"
            )
        came = torch.zeros_like(logits, dtype=torch.bool)
        for i, row in enumerate(rows):
            came[i, list(set(row))] = True
        return torch.where(
            came, torch.where(logits < 0, logits * self.penalty, logits / self.penalty), logits
        )


class DecodingStrategy(ABC):
    """Picks the next token of each example."""

    @abstractmethod
    def pick(self, logits: Tensor, rows: Rows, examples: Sequence[int]) -> Tensor:
        """Logits (b vocab), the tokens so far, and which examples of the call these are -> tokens (b)."""


class GreedySearch(DecodingStrategy):
    """The most probable token; of equals, the first.  Shapes such as `RepetitionPenalty` may change which that is."""

    def __init__(self, *shapes: LogitsProcessor) -> None:
        check_shapes(shapes)
        self.shapes = shapes

    def pick(self, logits: Tensor, rows: Rows, examples: Sequence[int]) -> Tensor:
        """See `DecodingStrategy`."""
        return _shaped(logits, self.shapes, rows, examples).argmax(-1)


class Sampling(DecodingStrategy):
    """A token drawn from softmax(shaped logits).

    The draw depends on the seed, the place of the example in the call and the place of the token, and on nothing else: not
    on the other examples, and not on what was drawn before.
    """

    def __init__(self, *shapes: LogitsProcessor, seed: int = 0) -> None:
        check_int(0, seed=seed)
        check_shapes(shapes)
        self.shapes, self.seed = shapes, seed

    def pick(self, logits: Tensor, rows: Rows, examples: Sequence[int]) -> Tensor:
        """See `DecodingStrategy`; the first token at which the summed probabilities exceed a uniform number."""
        total = _shaped(logits, self.shapes, rows, examples).softmax(-1).cumsum(-1)
        total = total / total[:, -1:]  # ends at 1 exactly, so that some token exceeds any draw
        drawn = [
            uniform(self.seed, example, len(row))
            for example, row in zip(examples, rows, strict=True)
        ]
        return torch.searchsorted(total, total.new_tensor(drawn)[:, None], right=True)[:, 0]


def uniform(*key: int) -> float:
    """A number in [0, 1) that these whole numbers alone decide, as good as drawn."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def check_share(name: str, value: object) -> None:
    """The value must be a number above 0, and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number above 0 and at most 1, not {value!r}")


def check_shapes(shapes: Sequence[object]) -> None:
    """Each must be a shape."""
    for shape in shapes:
        if not isinstance(shape, LogitsProcessor):
            raise TypeError(f"{shape!r} is no shape of logits: give such as Temperature(0.7)")


def _shaped(
    logits: Tensor, shapes: Sequence[LogitsProcessor], rows: Rows, examples: Sequence[int]
) -> Tensor:
    """The logits in float64, shaped; numbers so extreme that none could be compared any more raise."""
    logits = logits.double()
    for shape in shapes:
        logits = shape(logits, rows)
    broken = (logits.isnan() | (logits == torch.inf)).any(-1)
    if broken.any():
        example = examples[int(broken.nonzero()[0])]
        raise ValueError(
            f"the shapes made NaN or +∞ of the logits of example {example}: a temperature or penalty is too extreme"
        )
    return logits
