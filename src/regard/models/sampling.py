"""Decoding strategies: process logits (b, vocab_size) and select one token per sequence.

    strategy = Sampling(Temperature(0.7), TopKFilter(40), TopPFilter(0.9), seed=1)

Processors apply in order. Excluded tokens get a logit of −∞; at least one token always remains.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from regard.errors import check_int, check_positive

TokenLists = Sequence[Sequence[int]]  # tokens so far, with the prompt, of each sequence


class LogitsProcessor(ABC):
    """Maps logits to logits: `Temperature(0.7)(logits)`."""

    @abstractmethod
    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """(b, vocab_size) -> (b, vocab_size); `tokens` so far, for processors that need them."""


class Temperature(LogitsProcessor):
    """x / T: sharper below 1, flatter above 1. For T = 0 use `GreedySearch`."""

    def __init__(self, value: float) -> None:
        if value == 0:
            raise ValueError("temperature must be above 0: use GreedySearch() instead of 0")
        check_positive("temperature", value)
        self.value = value

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        return logits / self.value


class TopKFilter(LogitsProcessor):
    """Keeps the k most probable tokens, ties: the first (Fan et al. 2018, arXiv 1805.04833)."""

    def __init__(self, k: int) -> None:
        check_int(1, k=k)
        self.k = k

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        return logits.scatter(-1, order[..., self.k :], -torch.inf)


class TopPFilter(LogitsProcessor):
    """Nucleus sampling: keeps the fewest most probable tokens whose probabilities sum to p
    (Holtzman et al. 2019, arXiv 1904.09751)."""

    def __init__(self, p: float) -> None:
        check_probability("p", p)
        self.p = p

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if self.p == 1:  # rounding must not exclude the rarest tokens
            return logits
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        ordered = logits.gather(-1, order).double().softmax(-1)
        before = ordered.cumsum(-1) - ordered  # sum over more probable tokens
        excluded = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= self.p)
        return logits.masked_fill(excluded, -torch.inf)


class MinPFilter(LogitsProcessor):
    """Keeps tokens at least p times as probable as the most probable one (Nguyen et al. 2024,
    arXiv 2407.01082)."""

    def __init__(self, p: float) -> None:
        check_probability("p", p)
        self.p = p

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        lowest = logits.amax(-1, keepdim=True) + math.log(self.p)
        return logits.masked_fill(logits < lowest, -torch.inf)


class TypicalFilter(LogitsProcessor):
    """Locally typical sampling: keeps the fewest tokens whose probabilities sum to p, those first
    whose information −log p(x) is nearest to the entropy (Meister et al. 2022, arXiv 2202.00666).

    It can exclude the most probable token, where that is much less surprising than is typical.
    """

    def __init__(self, p: float) -> None:
        check_probability("p", p)
        self.p = p

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if self.p == 1:
            return logits
        logp = logits.double().log_softmax(-1)
        probabilities = logp.exp()
        entropy = -(probabilities * logp).nansum(-1, keepdim=True)  # 0 · −∞ counts as 0
        order = (-logp - entropy).abs().sort(dim=-1, stable=True).indices
        ordered = probabilities.gather(-1, order)
        before = ordered.cumsum(-1) - ordered  # sum over more typical tokens
        excluded = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= self.p)
        return logits.masked_fill(excluded, -torch.inf)


class NoRepeatNGram(LogitsProcessor):
    """Excludes tokens that would complete n tokens that stand in prompt or output already
    (Paulus et al. 2017, arXiv 1705.04304).

    Where this excludes all tokens, it excludes none.
    """

    def __init__(self, n: int) -> None:
        check_int(1, n=n)
        self.n = n

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if tokens is None or len(tokens) != len(logits):
            raise ValueError("NoRepeatNGram needs the tokens so far of each sequence")
        excluded = torch.zeros_like(logits, dtype=torch.bool)
        for i, row in enumerate(tokens):
            row = list(row)
            last = row[len(row) - self.n + 1 :]  # the first n − 1 tokens of the next n-gram
            for end in range(self.n - 1, len(row)):
                if row[end - self.n + 1 : end] == last:
                    excluded[i, row[end]] = True
        result = logits.masked_fill(excluded, -torch.inf)
        nothing_left = (result == -torch.inf).all(-1, keepdim=True)
        return torch.where(nothing_left, logits, result)


class RepetitionPenalty(LogitsProcessor):
    """Makes tokens of prompt and output less probable: x / penalty, or x · penalty if x < 0.

    Keskar et al. 2019 (arXiv 1909.05858) divide regardless of the sign, which makes tokens with x <
    0 more probable; this is the common reading.
    """

    def __init__(self, penalty: float) -> None:
        check_positive("penalty", penalty)
        self.penalty = penalty

    def __call__(self, logits: Tensor, tokens: TokenLists | None = None) -> Tensor:
        """See `LogitsProcessor`."""
        if tokens is None or len(tokens) != len(logits):
            raise ValueError("RepetitionPenalty needs the tokens so far of each sequence")
        repeated = torch.zeros_like(logits, dtype=torch.bool)
        for i, row in enumerate(tokens):
            repeated[i, list(set(row))] = True
        penalized = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(repeated, penalized, logits)


class DecodingStrategy(ABC):
    """Selects the next token of each sequence, after some logits processors."""

    def __init__(self, *processors: LogitsProcessor) -> None:
        for processor in processors:
            if not isinstance(processor, LogitsProcessor):
                raise TypeError(
                    f"expected logits processors such as Temperature(0.7), not {processor!r}"
                )
        self.processors = processors

    @abstractmethod
    def select(self, logits: Tensor, tokens: TokenLists, indices: Sequence[int]) -> Tensor:
        """Next tokens (b) from logits (b, vocab_size), tokens so far and prompt indices."""

    def process(self, logits: Tensor, tokens: TokenLists, indices: Sequence[int]) -> Tensor:
        """Apply the processors, in float64."""
        logits = logits.double()
        for processor in self.processors:
            logits = processor(logits, tokens)
        broken = (logits.isnan() | (logits == torch.inf)).any(-1)
        if broken.any():
            index = indices[int(broken.nonzero()[0])]
            raise ValueError(
                f"the logits processors gave NaN or +∞ for prompt {index}: "
                "a temperature or penalty is too extreme"
            )
        return logits


class GreedySearch(DecodingStrategy):
    """Selects the most probable token; of equals, the first."""

    def select(self, logits: Tensor, tokens: TokenLists, indices: Sequence[int]) -> Tensor:
        """See `DecodingStrategy`."""
        return self.process(logits, tokens, indices).argmax(-1)


class Sampling(DecodingStrategy):
    """Samples from softmax(processed logits).

    A sample depends only on the seed, the index of the prompt and the position of the token: not on
    other prompts or earlier samples.

    Args:
        seed: Seed of all prompts, or a list with the seed of each. With a list, a prompt continues
            as it does alone with its seed, wherever it stands in the batch.
    """

    def __init__(self, *processors: LogitsProcessor, seed: int | Sequence[int] = 0) -> None:
        for each in seed if isinstance(seed, list | tuple) else [seed]:
            check_int(0, seed=each)
        super().__init__(*processors)
        self.seed = seed

    def select(self, logits: Tensor, tokens: TokenLists, indices: Sequence[int]) -> Tensor:
        """See `DecodingStrategy`. Inverse transform sampling."""
        cumulative = self.process(logits, tokens, indices).softmax(-1).cumsum(-1)
        cumulative = cumulative / cumulative[:, -1:]  # ends at exactly 1, above any sample
        samples = [
            uniform(*self._key(index), len(row)) for index, row in zip(indices, tokens, strict=True)
        ]
        values = cumulative.new_tensor(samples)[:, None]
        return torch.searchsorted(cumulative, values, right=True)[:, 0]

    def _key(self, index: int) -> tuple[int, int]:
        """Seed and index of a prompt; one with a seed of its own counts as alone."""
        if isinstance(self.seed, int):
            return self.seed, index
        if index >= len(self.seed):
            raise ValueError(f"seed has {len(self.seed)} seeds, but there is a prompt {index}")
        return self.seed[index], 0


def uniform(*key: int) -> float:
    """Pseudo-random number in [0, 1), a function of these integers."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def check_probability(name: str, value: object) -> None:
    """Check for a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number above 0 and at most 1, not {value!r}")
