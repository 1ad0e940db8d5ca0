"""Beam search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.generation import (
    NEVER_STOP,
    BatchDecoder,
    GenerationOutput,
    Prompts,
    check_logits,
    token_device,
    validate_prompts,
)
from regard.models.model import DecodingStep
from regard.models.stopping_criteria import StoppingCriteria
from regard.numerics import at_least_float32
from regard.state import State

MAX_LENGTH_PENALTY = 16  # keeps length^penalty finite for any length


@dataclass(frozen=True)
class BeamSearchConfig:
    """Settings of beam search.

    Attributes:
        num_beams: Hypotheses that are followed at a time.
        num_return_sequences: Results per prompt, at most `num_beams`.
        length_penalty: α in the score Σ log p / (number of new tokens)^α. 0 is the plain sum, which
            favours short texts.
        early_stopping: Stop as soon as `num_beams` hypotheses have finished. False: stop when no
            unfinished hypothesis can improve the result.
    """

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        check_int(1, num_beams=self.num_beams, num_return_sequences=self.num_return_sequences)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams ({self.num_beams}), "
                f"not {self.num_return_sequences}"
            )
        penalty, limit = self.length_penalty, MAX_LENGTH_PENALTY
        if (
            isinstance(penalty, bool)
            or not isinstance(penalty, int | float)
            or not abs(penalty) <= limit
        ):
            raise ValueError(
                f"length_penalty must be a number from -{limit} to {limit}, not {penalty!r}"
            )

    def score(self, total: float, length: int) -> float:
        """Score of a hypothesis with that log-probability and length."""
        return total / length**self.length_penalty


class _Hypothesis(NamedTuple):
    """New tokens, their log-probabilities, and the sum of these."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0


class _Finished(NamedTuple):
    score: float
    hypothesis: _Hypothesis
    reason: str


@dataclass
class _Search:
    """Search for one prompt: active hypotheses of equal length, and finished ones, best first."""

    index: int
    prompt: list[int]
    active: list[_Hypothesis] = field(default_factory=lambda: [_Hypothesis()])
    finished: list[_Finished] = field(default_factory=list)


def beam_search(
    step: DecodingStep,
    prompts: Prompts,
    beams: BeamSearchConfig,
    *,
    max_new_tokens: int,
    stop: StoppingCriteria = NEVER_STOP,
    bos_token_id: int | None = None,
    state: State = None,
    device: str | torch.device | None = None,
) -> list[list[GenerationOutput]]:
    """Search for the most probable continuations of each prompt.

    A hypothesis ends at a stop or after `max_new_tokens` tokens; finished ones are compared by
    their scores. With as many beams as there are texts, the search is exhaustive. See `generate`
    for the other arguments.

    Returns:
        For each prompt, the best continuations, best first: `num_return_sequences`, or fewer if
        there are no more.
    """
    check_int(1, max_new_tokens=max_new_tokens)
    searches = [
        _Search(i, prompt) for i, prompt in enumerate(validate_prompts(prompts, bos_token_id))
    ]
    decoder = BatchDecoder(step, state, token_device(prompts, device), stop)
    _run_searches(decoder, searches, beams, max_new_tokens, stop)
    return [
        [
            GenerationOutput(list(h.tokens), list(h.logprobs), reason, stop.text(list(h.tokens)))
            for _, h, reason in search.finished[: beams.num_return_sequences]
        ]
        for search in searches
    ]


@torch.no_grad()
def _run_searches(
    decoder: BatchDecoder,
    searches: list[_Search],
    beams: BeamSearchConfig,
    max_new_tokens: int,
    stop: StoppingCriteria,
) -> None:
    """Advance all searches together; those still reading their prompt have one hypothesis."""
    while any(search.active for search in searches):
        rows = [[*search.prompt, *h.tokens] for search in searches for h in search.active]
        logits = decoder.advance(rows)
        due = [
            search.index
            for search in searches
            for h in search.active
            if len(search.prompt) + len(h.tokens) == decoder.position
        ]
        is_due = [len(row) == decoder.position for row in rows]
        if not all(is_due):
            logits = logits[torch.tensor(is_due)]
        check_logits(logits, decoder.position, due)
        best = _best_tokens(logits, beams, stop)
        start, first, parents = 0, 0, []
        for search in searches:
            own = list(range(start, start + len(search.active)))
            start += len(own)
            if own and is_due[own[0]]:
                end = first + len(own)
                extended = _extend(search, best[first:end], beams, max_new_tokens, stop)
                own, first = [own[i] for i in extended], end
            parents += own
        decoder.select(parents)


def _best_tokens(
    logits: Tensor, beams: BeamSearchConfig, stop: StoppingCriteria
) -> list[tuple[list[int], list[float]]]:
    """The most probable tokens of each row of logits and their log-probabilities, best first: as
    many as can be considered, see `_count_considered`."""
    logits = at_least_float32(logits)
    values, tokens = logits.topk(_count_considered(logits.shape[1], beams, stop))
    logprobs = (values.double() - logits.logsumexp(-1, keepdim=True).double()).tolist()
    return list(zip(tokens.tolist(), logprobs, strict=True))


def _count_considered(available: int, beams: BeamSearchConfig, stop: StoppingCriteria) -> int:
    """How many of the available candidates of a search are considered: enough for `num_beams`
    active hypotheses, even if each has a more probable stop token."""
    if stop.strings:  # which tokens complete one is known only after decoding
        return available
    return min(available, beams.num_beams * (1 + len(stop.tokens)))


def _extend(
    search: _Search,
    best: list[tuple[list[int], list[float]]],
    beams: BeamSearchConfig,
    max_new_tokens: int,
    stop: StoppingCriteria,
) -> list[int]:
    """Extend all hypotheses by one token; return the parents of those that stay active.

    Args:
        best: The best tokens and their log-probabilities for each hypothesis, see `_best_tokens`.
    """
    candidates = [
        (hypothesis.total + logprob, parent, token, logprob)
        for parent, (hypothesis, row) in enumerate(zip(search.active, best, strict=True))
        for token, logprob in zip(*row, strict=True)
        if logprob > -torch.inf
    ]
    # of equal ones first those of the first hypothesis, and the smallest token
    candidates.sort(key=lambda each: (-each[0], each[1], each[2]))
    active: list[_Hypothesis] = []
    parents: list[int] = []
    for total, parent, token, logprob in candidates[
        : _count_considered(len(candidates), beams, stop)
    ]:
        tokens, values, _ = search.active[parent]
        hypothesis = _Hypothesis((*tokens, token), (*values, logprob), total)
        length = len(hypothesis.tokens)
        reason = stop.finish_reason(list(hypothesis.tokens))
        if reason is None and length == max_new_tokens:
            reason = "length"
        if reason is not None:
            score = beams.score(hypothesis.total, length)
            search.finished.append(_Finished(score, hypothesis, reason))
        elif len(active) < beams.num_beams:
            active.append(hypothesis)
            parents.append(parent)
    search.finished = sorted(search.finished, key=lambda f: -f.score)[: beams.num_beams]
    search.active = [] if _is_done(search.finished, active, beams, max_new_tokens) else active
    return parents[: len(search.active)]


def _is_done(
    finished: list[_Finished],
    active: list[_Hypothesis],
    beams: BeamSearchConfig,
    max_new_tokens: int,
) -> bool:
    """Whether no active hypothesis can still change the result.

    A sum of log-probabilities only decreases, so the bound of a hypothesis is its current sum, at
    the length with the best score: the maximum for a positive length penalty, else the next.
    """
    if not active or (beams.early_stopping and len(finished) >= beams.num_beams):
        return True
    if len(finished) < beams.num_return_sequences:
        return False
    length = max_new_tokens if beams.length_penalty > 0 else len(active[0].tokens) + 1
    bound = beams.score(max(hypothesis.total for hypothesis in active), length)
    return finished[beams.num_return_sequences - 1].score >= bound
