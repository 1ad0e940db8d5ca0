"""Beam search: the most probable texts, as far as a few at a time can find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.generation import (
    NEVER,
    BatchDecoder,
    GenerationOutput,
    Prompts,
    check_logits,
    device_of,
    validate_prompts,
)
from regard.models.model import DecodingStep
from regard.models.stopping_criteria import StoppingCriteria
from regard.state import State

STEEPEST = 16  # length^penalty is then a number of floating point, whatever the length


@dataclass(frozen=True)
class BeamSearchConfig:
    """How to search.

    count     hypotheses that are followed at a time
    best      results for each prompt, at most `count`
    penalty   α in the score  Σ log p / (number of new tokens)^α: 0 is the plain sum, and favours short texts
    early     stop as soon as `count` texts have ended; else when no text under way can come among the best any more
    """

    count: int
    best: int = 1
    penalty: float = 1.0
    early: bool = False

    def __post_init__(self) -> None:
        check_int(1, count=self.count, best=self.best)
        if self.best > self.count:
            raise ValueError(f"best must be at most the {self.count} beams, not {self.best}")
        if (
            isinstance(self.penalty, bool)
            or not isinstance(self.penalty, int | float)
            or not abs(self.penalty) <= STEEPEST
        ):
            raise ValueError(
                f"penalty must be a number from -{STEEPEST} to {STEEPEST}, not {self.penalty!r}"
            )

    def score(self, total: float, length: int) -> float:
        """What texts are compared by."""
        return total / length**self.penalty


class _Text(NamedTuple):
    """A hypothesis: its new tokens, their log-probabilities and sum."""

    tokens: tuple[int, ...] = ()
    logp: tuple[float, ...] = ()
    total: float = 0.0


class _Ended(NamedTuple):
    score: float
    text: _Text
    why: str


@dataclass
class _Search:
    """One prompt: the hypotheses under way, all of one length, and those that have ended, best first."""

    example: int
    prompt: list[int]
    going: list[_Text] = field(default_factory=lambda: [_Text()])
    ended: list[_Ended] = field(default_factory=list)

    def rows(self) -> list[list[int]]:
        return [self.prompt + list(text.tokens) for text in self.going]


def beam_search(
    step: DecodingStep,
    prompts: Prompts,
    beams: BeamSearchConfig,
    *,
    max_new_tokens: int,
    stop: StoppingCriteria = NEVER,
    start: int | None = None,
    state: State = None,
) -> list[list[GenerationOutput]]:
    """Of each prompt, the best texts that were found, best first; fewer than `beams.best` where there are no more.

    A text ends by a stop, or with `max_new` tokens, and all that have ended are compared by their scores.  With as many
    beams as there are texts, the search is exhaustive.  The other arguments are those of `generate`.
    """
    check_int(1, max_new_tokens=max_new_tokens)
    searches = [_Search(i, prompt) for i, prompt in enumerate(validate_prompts(prompts, start))]
    _run(BatchDecoder(step, state, device_of(prompts), stop), searches, beams, max_new_tokens, stop)
    return [[_result(ended, stop) for ended in search.ended[: beams.best]] for search in searches]


@torch.no_grad()
def _run(
    pace: BatchDecoder,
    searches: list[_Search],
    beams: BeamSearchConfig,
    max_new_tokens: int,
    stop: StoppingCriteria,
) -> None:
    """All searches at one pace; those whose prompts are still going in have one hypothesis, and wait."""
    while any(search.going for search in searches):
        rows = [row for search in searches for row in search.rows()]
        logits = pace.advance(rows)
        first, parents = 0, []
        for search in searches:
            mine = list(range(first, first + len(search.going)))
            first += len(mine)
            if mine and len(rows[mine[0]]) == pace.at:
                check_logits(logits[mine], pace.at, [search.example] * len(mine))
                mine = [mine[i] for i in _extend(search, logits[mine], beams, max_new_tokens, stop)]
            parents += mine
        pace.keep(parents)


def _extend(
    search: _Search,
    logits: Tensor,
    beams: BeamSearchConfig,
    max_new_tokens: int,
    stop: StoppingCriteria,
) -> list[int]:
    """Every hypothesis by one token: the best are followed, those that end are kept.  Returns whom each came from."""
    going: list[_Text] = []
    parents: list[int] = []
    for parent, text in _candidates(search.going, logits, beams, stop):
        why = stop.why(list(text.tokens)) or (
            "length" if len(text.tokens) == max_new_tokens else None
        )
        if why is not None:
            search.ended.append(_Ended(beams.score(text.total, len(text.tokens)), text, why))
        elif len(going) < beams.count:
            going.append(text)
            parents.append(parent)
    search.ended = sorted(search.ended, key=lambda ended: -ended.score)[: beams.count]
    search.going = [] if _is_over(search.ended, going, beams, max_new_tokens) else going
    return parents[: len(search.going)]


def _candidates(
    texts: list[_Text], logits: Tensor, beams: BeamSearchConfig, stop: StoppingCriteria
) -> Iterator[tuple[int, _Text]]:
    """Hypotheses with one token more, most probable first: enough that, whatever ends, `count` can go on."""
    logp = logits.double().log_softmax(-1)
    total = (logp + logp.new_tensor([text.total for text in texts])[:, None]).flatten()
    # which strings end by a token is not known before it is decoded, so all tokens may be needed
    enough = len(total) if stop.strings else min(len(total), beams.count * (1 + len(stop.tokens)))
    best = total.topk(enough)
    for place, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        if value == -torch.inf:
            return
        parent, token = divmod(place, logp.shape[1])
        text = texts[parent]
        yield parent, _Text((*text.tokens, token), (*text.logp, logp[parent, token].item()), value)


def _is_over(
    ended: list[_Ended], going: list[_Text], beams: BeamSearchConfig, max_new_tokens: int
) -> bool:
    """Whether no hypothesis under way can still change the result.

    A sum of log-probabilities only falls, so the best that a text can come to is its sum now, at the length that flatters
    it most: the longest for a penalty above 0, else the next.
    """
    if not going or (beams.early and len(ended) >= beams.count):
        return True
    if len(ended) < beams.best:
        return False
    length = max_new_tokens if beams.penalty > 0 else len(going[0].tokens) + 1
    return ended[beams.best - 1].score >= beams.score(max(text.total for text in going), length)


def _result(ended: _Ended, stop: StoppingCriteria) -> GenerationOutput:
    tokens = list(ended.text.tokens)
    return GenerationOutput(tokens, list(ended.text.logp), ended.why, stop.text(tokens))
