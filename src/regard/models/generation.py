"""Generation: a model says what may come next, token by token, with its state carried along.

A model is any function of the next tokens and the state after the ones before:

    step(tokens (b n), state) -> logits (b n vocab), state           state is None before the first token

Prompts of different lengths go together, without padding and without masks: all examples advance at one pace, and where a
prompt goes on its own token is fed in place of a chosen one.  What is known of all examples goes in one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.model import DecodingStep
from regard.models.sampling import DecodingStrategy, GreedySearch
from regard.models.stopping_criteria import StoppingCriteria
from regard.state import State, take

Prompts = Sequence[Sequence[int] | Tensor] | Tensor
NEVER, GREEDY = StoppingCriteria(), GreedySearch()


class GenerationOutput(NamedTuple):
    """What came after a prompt.

    tokens   the new ones; a stop token is the last of them
    logp     of each, its log-probability under the model, before any temperature or other shape
    why      it ended: "length", "token" or "string"
    text     where there is a decoder, cut before the stop
    """

    tokens: list[int]
    logp: list[float]
    why: str
    text: str | None

    @property
    def total(self) -> float:
        """The log-probability of all tokens together."""
        return sum(self.logp)


class GeneratedToken(NamedTuple):
    """One new token, as soon as it is there.

    example  of which prompt
    token    and its log-probability under the model
    text     what became sure by it: never half a character, never a part of a stop string; "" without a decoder
    why      None while there is more to come; then as in `Result`
    """

    example: int
    token: int
    logp: float
    text: str
    why: str | None


@dataclass
class _Row:
    """An example under way: its tokens from the first of the prompt on."""

    example: int
    tokens: list[int]
    prompt: int
    said: int = 0  # characters
    ended: bool = False

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt :]


def generate(
    step: DecodingStep,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    strategy: DecodingStrategy = GREEDY,
    stop: StoppingCriteria = NEVER,
    start: int | None = None,
    state: State = None,
) -> list[GenerationOutput]:
    """Go on from each prompt, by at most `max_new` tokens; the results stand in the order of the prompts.

    prompts   lists or rows of whole numbers, of any lengths
    choose    `GreedySearch()` or `Sampling(...)`
    stop      the tokens and strings at which a text ends
    start     a token to be put before each prompt, which may then be empty
    state     the first state, for a model that needs one: what it looks at belongs in there, examples first
    """
    pieces = stream_tokens(
        step,
        prompts,
        max_new_tokens=max_new_tokens,
        strategy=strategy,
        stop=stop,
        start=start,
        state=state,
    )
    found: list[list[GeneratedToken]] = [[] for _ in prompts]
    for piece in pieces:
        found[piece.example].append(piece)
    return [_result(pieces, stop) for pieces in found]


def stream_tokens(
    step: DecodingStep,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    strategy: DecodingStrategy = GREEDY,
    stop: StoppingCriteria = NEVER,
    start: int | None = None,
    state: State = None,
) -> Iterator[GeneratedToken]:
    """The same, token by token: of each step, the examples in the order of their prompts.  See `generate`."""
    check_int(1, max_new_tokens=max_new_tokens)
    if not isinstance(strategy, DecodingStrategy):
        raise TypeError(f"choose must be such as Greedy() or Sample(TopP(0.9)), not {strategy!r}")
    rows = [
        _Row(i, tokens, len(tokens)) for i, tokens in enumerate(validate_prompts(prompts, start))
    ]
    return _pieces(
        BatchDecoder(step, state, device_of(prompts), stop), rows, max_new_tokens, strategy, stop
    )


@torch.no_grad()
def _pieces(
    pace: BatchDecoder,
    rows: list[_Row],
    max_new_tokens: int,
    strategy: DecodingStrategy,
    stop: StoppingCriteria,
) -> Iterator[GeneratedToken]:
    while rows:
        logits = pace.advance([row.tokens for row in rows])
        due = [i for i, row in enumerate(rows) if len(row.tokens) == pace.at]
        yield from _next(logits[due], [rows[i] for i in due], max_new_tokens, strategy, stop)
        going = [i for i, row in enumerate(rows) if not row.ended]
        rows = [rows[i] for i in going]
        pace.keep(going)


def _next(
    logits: Tensor,
    rows: list[_Row],
    max_new_tokens: int,
    strategy: DecodingStrategy,
    stop: StoppingCriteria,
) -> Iterator[GeneratedToken]:
    """Choose a token for each row, and tell it."""
    examples = [row.example for row in rows]
    check_logits(logits, len(rows[0].tokens), examples)
    picked = strategy.pick(logits, [row.tokens for row in rows], examples)
    logp = logits.double().log_softmax(-1).gather(-1, picked[:, None])[:, 0]
    for row, token, value in zip(rows, picked.tolist(), logp.tolist(), strict=True):
        row.tokens.append(token)
        why = stop.why(row.new) or ("length" if len(row.new) == max_new_tokens else None)
        row.ended = why is not None
        yield GeneratedToken(row.example, token, value, _said(row, stop), why)


def _said(row: _Row, stop: StoppingCriteria) -> str:
    """The text that became sure by the last token; at the end, all that is left."""
    if stop.decode is None:
        return ""
    text = (stop.text(row.new) or "") if row.ended else stop.sure(row.new)
    before, row.said = row.said, max(row.said, len(text))
    return text[before:]


def _result(pieces: list[GeneratedToken], stop: StoppingCriteria) -> GenerationOutput:
    tokens = [piece.token for piece in pieces]
    return GenerationOutput(
        tokens, [piece.logp for piece in pieces], pieces[-1].why or "length", stop.text(tokens)
    )


class BatchDecoder:
    """Feeds rows of different lengths to a model, all at one pace: `at` tokens of each have gone in."""

    def __init__(
        self, step: DecodingStep, state: State, device: torch.device, stop: StoppingCriteria
    ) -> None:
        self.step, self.state, self.device, self.at = step, state, device, 0
        self.rows = 0  # how many went in last
        self.largest = max(
            stop.tokens, default=0
        )  # the model must know all tokens that it is to meet

    def advance(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Feed what is known of all rows: the logits after it, (b vocab)."""
        end = min(map(len, rows))
        chunk = torch.tensor([row[self.at : end] for row in rows], device=self.device)
        if self.at == 0:
            self.largest = max(self.largest, max(map(max, rows)))
        try:
            logits, self.state = pair(self.step(chunk, self.state))
        except Exception as error:
            error.add_note(
                f"at places {self.at} to {end - 1}, where the tokens are {int(chunk.min())} to {int(chunk.max())}"
            )
            raise
        self._check(logits, chunk)
        self.at = end
        return logits[:, -1]

    def keep(self, index: list[int]) -> None:
        """Go on with these rows, in this order."""
        if index and index != list(range(self.rows)):
            self.state = take(self.state, index)

    def _check(self, logits: object, chunk: Tensor) -> None:
        """Logits of the chunk's examples, over all tokens that are in use."""
        if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
            what = (
                f"{tuple(logits.shape)} {logits.dtype}"
                if isinstance(logits, Tensor)
                else type(logits).__name__
            )
            raise ValueError(f"the model must give floating logits (b n vocab), not {what}")
        self.rows = len(chunk)
        if logits.shape[0] != self.rows or logits.shape[1] not in (1, chunk.shape[1]):
            raise ValueError(
                f"for tokens {tuple(chunk.shape)} the model gave logits {tuple(logits.shape)}"
            )
        if logits.shape[2] <= self.largest:
            raise ValueError(
                f"the model gives logits for {logits.shape[2]} tokens, and token {self.largest} is in use"
            )


def pair(made: object) -> tuple[Tensor, State]:
    """What a step gave, which must be two things."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(
            f"a step gives logits and a state, not {type(made).__name__}: of a model, `model.stream` is the step"
        )
    return made


def check_logits(logits: Tensor, length: int, examples: Sequence[int]) -> None:
    """−∞ rules a token out; NaN and +∞ mean that the model is broken, and so does a row without a finite number."""
    broken = logits.isnan().any(-1) | (logits == torch.inf).any(-1) | (logits == -torch.inf).all(-1)
    if broken.any():
        row = int(broken.nonzero()[0])
        what = (
            "NaN"
            if logits[row].isnan().any()
            else "+∞"
            if (logits[row] == torch.inf).any()
            else "nothing but −∞"
        )
        raise ValueError(f"the logits of example {examples[row]} after {length} tokens hold {what}")


def validate_prompts(prompts: Prompts, start: int | None) -> list[list[int]]:
    """The prompts as lists, with the start token before them."""
    if start is not None:
        check_int(0, start=start)
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | Tensor):
        raise TypeError(f"prompts must be a list of lists of tokens, not {type(prompts).__name__}")
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise TypeError(
            f"prompts must be a list of lists of tokens, or (b n), not a tensor {tuple(prompts.shape)}"
        )
    first = [] if start is None else [start]
    return [first + _prompt(i, prompt, empty=start is not None) for i, prompt in enumerate(prompts)]


def _prompt(i: int, prompt: object, *, empty: bool) -> list[int]:
    found = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(
            f"prompt {i} must be a list of tokens, not {prompt!r}: prompts are a list of lists"
        )
    if not found and not empty:
        raise ValueError(
            f"prompt {i} is empty: give at least one token, or a start token to begin with"
        )
    for token in found:
        check_int(0, **{f"each token of prompt {i}": token})
        if token > torch.iinfo(torch.long).max:
            raise ValueError(f"prompt {i} holds {token}, which no model has a token for")
    return list(found)


def device_of(prompts: Prompts) -> torch.device:
    """Tokens are made where the prompts are; lists are on the CPU."""
    first = prompts if isinstance(prompts, Tensor) else next(iter(prompts), None)
    return first.device if isinstance(first, Tensor) else torch.device("cpu")
