"""Text generation from any model with a state.

A model is a function of the next tokens and the state after the previous ones:

    step(tokens (b, n), state) -> logits (b, n, vocab_size), state      state is None at the start

Prompts of different lengths need no padding and no masks: all sequences advance together, and where
a prompt continues, its own token is fed instead of a selected one. Tokens that are known for all
sequences are fed as one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.device import resolve_device
from regard.errors import check_int
from regard.models.model import DecodingStep
from regard.models.sampling import DecodingStrategy, GreedySearch
from regard.models.stopping_criteria import StoppingCriteria
from regard.state import State, take

Prompts = Sequence[Sequence[int] | Tensor] | Tensor
NEVER_STOP, GREEDY = StoppingCriteria(), GreedySearch()


class GenerationOutput(NamedTuple):
    """Continuation of a prompt.

    Attributes:
        tokens: New tokens, including a stop token.
        logprobs: Log-probability of each token under the model, before any processing.
        finish_reason: "length", "stop_token" or "stop_string".
        text: Decoded text, cut before the stop; None without a decoder.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str | None

    @property
    def total_logprob(self) -> float:
        """Log-probability of all tokens together."""
        return sum(self.logprobs)


class GeneratedToken(NamedTuple):
    """One new token, as soon as it is generated.

    Attributes:
        prompt_index: Index of the prompt.
        token: The token, and `logprob`, its log-probability under the model.
        text: Text that this token completed: no incomplete character, and no part of a stop string;
            "" without a decoder.
        finish_reason: None if more tokens follow; else as in `GenerationOutput`.
    """

    prompt_index: int
    token: int
    logprob: float
    text: str
    finish_reason: str | None


@dataclass
class _Sequence:
    """A sequence in progress, including the prompt."""

    index: int
    tokens: list[int]
    prompt_length: int
    emitted: int = 0  # characters
    finished: bool = False

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def generate(
    step: DecodingStep,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    strategy: DecodingStrategy = GREEDY,
    stop: StoppingCriteria = NEVER_STOP,
    bos_token_id: int | None = None,
    state: State = None,
    device: str | torch.device | None = None,
) -> list[GenerationOutput]:
    """Continue each prompt by at most `max_new_tokens` tokens.

    Args:
        step: Model, such as `model.stream` of a decoder.
        prompts: Lists or rows of token ids, of any lengths.
        strategy: `GreedySearch()` or `Sampling(...)`.
        stop: Stop tokens and strings.
        bos_token_id: Token to put before each prompt, which may then be empty.
        state: Initial state, for models that need one, such as a context; batch dimension first.
        device: Device of the tokens that the model receives. Default: that of the prompts, which
            is the CPU for lists.

    Returns:
        One output per prompt, in order.
    """
    stream = stream_tokens(
        step,
        prompts,
        max_new_tokens=max_new_tokens,
        strategy=strategy,
        stop=stop,
        bos_token_id=bos_token_id,
        state=state,
        device=device,
    )
    generated: list[list[GeneratedToken]] = [[] for _ in prompts]
    for token in stream:
        generated[token.prompt_index].append(token)
    outputs = []
    for each in generated:
        tokens, logprobs = [t.token for t in each], [t.logprob for t in each]
        reason = each[-1].finish_reason or "length"
        outputs.append(GenerationOutput(tokens, logprobs, reason, stop.text(tokens)))
    return outputs


def stream_tokens(
    step: DecodingStep,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    strategy: DecodingStrategy = GREEDY,
    stop: StoppingCriteria = NEVER_STOP,
    bos_token_id: int | None = None,
    state: State = None,
    device: str | torch.device | None = None,
) -> Iterator[GeneratedToken]:
    """Generate token by token; within a step, in the order of the prompts. See `generate`."""
    check_int(1, max_new_tokens=max_new_tokens)
    if not isinstance(strategy, DecodingStrategy):
        raise TypeError(
            "strategy must be a DecodingStrategy such as GreedySearch() or "
            f"Sampling(TopPFilter(0.9)), not {strategy!r}"
        )
    sequences = [
        _Sequence(i, tokens, len(tokens))
        for i, tokens in enumerate(validate_prompts(prompts, bos_token_id))
    ]
    decoder = BatchDecoder(step, state, token_device(prompts, device), stop)
    return _generate_tokens(decoder, sequences, max_new_tokens, strategy, stop)


@torch.no_grad()
def _generate_tokens(
    decoder: BatchDecoder,
    sequences: list[_Sequence],
    max_new_tokens: int,
    strategy: DecodingStrategy,
    stop: StoppingCriteria,
) -> Iterator[GeneratedToken]:
    while sequences:
        logits = decoder.advance([sequence.tokens for sequence in sequences])
        due = [i for i, each in enumerate(sequences) if len(each.tokens) == decoder.position]
        logits, due_sequences = logits[due], [sequences[i] for i in due]
        indices, tokens = [s.index for s in due_sequences], [s.tokens for s in due_sequences]
        check_logits(logits, decoder.position, indices)
        selected = strategy.select(logits, tokens, indices)
        logprobs = logits.double().log_softmax(-1).gather(-1, selected[:, None])[:, 0]

        for sequence, token, logprob in zip(
            due_sequences, selected.tolist(), logprobs.tolist(), strict=True
        ):
            sequence.tokens.append(token)
            reason = stop.finish_reason(sequence.new)
            if reason is None and len(sequence.new) == max_new_tokens:
                reason = "length"
            sequence.finished = reason is not None
            text = _emit_text(sequence, stop)
            yield GeneratedToken(sequence.index, token, logprob, text, reason)

        remaining = [i for i, sequence in enumerate(sequences) if not sequence.finished]
        sequences = [sequences[i] for i in remaining]
        decoder.select(remaining)


def _emit_text(sequence: _Sequence, stop: StoppingCriteria) -> str:
    """Text that the last token completed; at the end, all remaining text."""
    if stop.decode is None:
        return ""
    new = sequence.new
    text = (stop.text(new) or "") if sequence.finished else stop.final_text(new)
    start, sequence.emitted = sequence.emitted, max(sequence.emitted, len(text))
    return text[start:]


class BatchDecoder:
    """Feeds sequences of different lengths to a model; `position` tokens of each have been fed."""

    def __init__(
        self, step: DecodingStep, state: State, device: torch.device, stop: StoppingCriteria
    ) -> None:
        self.step, self.state, self.device, self.position = step, state, device, 0
        self.batch = 0
        self.largest_token = max(stop.tokens, default=0)  # the model must have logits for it

    def advance(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Feed the tokens known for all sequences; return the next logits (b, vocab_size), on the
        CPU."""
        end = min(map(len, sequences))
        chunk = torch.tensor([row[self.position : end] for row in sequences], device=self.device)
        if self.position == 0:
            self.largest_token = max(self.largest_token, max(map(max, sequences)))
        try:
            output = self.step(chunk, self.state)
            if not isinstance(output, tuple) or len(output) != 2:
                raise TypeError(
                    f"a step returns logits and a state, not {type(output).__name__}: "
                    "for a model, use `model.stream`"
                )
            logits, self.state = output
        except Exception as error:
            error.add_note(
                f"at positions {self.position} to {end - 1}, "
                f"with tokens {int(chunk.min())} to {int(chunk.max())}"
            )
            raise
        self._check_shape(logits, chunk)
        self.position = end
        return logits[:, -1].cpu()  # tokens are selected in float64, which MPS does not have

    def select(self, index: list[int]) -> None:
        """Continue with these sequences, in this order."""
        if index and index != list(range(self.batch)):
            self.state = take(self.state, index)

    def _check_shape(self, logits: object, chunk: Tensor) -> None:
        """Check that there are logits for the chunk's sequences and for all tokens in use."""
        if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
            got = type(logits).__name__
            if isinstance(logits, Tensor):
                got = f"{tuple(logits.shape)} {logits.dtype}"
            raise ValueError(
                f"the model must return floating-point logits (b, n, vocab_size), not {got}"
            )
        self.batch = len(chunk)
        if logits.shape[0] != self.batch or logits.shape[1] not in (1, chunk.shape[1]):
            raise ValueError(
                f"the model returned logits {tuple(logits.shape)} for tokens {tuple(chunk.shape)}"
            )
        if logits.shape[2] <= self.largest_token:
            raise ValueError(
                f"the model has logits for {logits.shape[2]} tokens, "
                f"but token {self.largest_token} is in use"
            )


def check_logits(logits: Tensor, length: int, indices: Sequence[int]) -> None:
    """Check for NaN, +∞ and rows of −∞. Single values of −∞ exclude a token and are fine."""
    largest = logits.amax(-1)  # NaN if there is one
    if not largest.isfinite().all():
        row = int((~largest.isfinite()).nonzero()[0])
        is_nan, is_infinite = bool(largest[row].isnan()), bool(largest[row] > 0)
        value = "NaN" if is_nan else "+∞" if is_infinite else "only −∞"
        raise ValueError(f"the logits of prompt {indices[row]} after {length} tokens are {value}")


def validate_prompts(prompts: Prompts, bos_token_id: int | None) -> list[list[int]]:
    """Prompts as lists of token ids, after the BOS token."""
    if bos_token_id is not None:
        check_int(0, bos_token_id=bos_token_id)
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | Tensor):
        raise TypeError(f"prompts must be a list of lists of tokens, not {type(prompts).__name__}")
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise TypeError(
            "prompts must be a list of lists of tokens, or a tensor (b, n), "
            f"not a tensor {tuple(prompts.shape)}"
        )
    validated = []
    for i, prompt in enumerate(prompts):
        tokens = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        if isinstance(tokens, str) or not isinstance(tokens, Sequence):
            raise TypeError(
                f"prompt {i} must be a list of tokens, not {prompt!r}: prompts are a list of lists"
            )
        if not tokens and bos_token_id is None:
            raise ValueError(f"prompt {i} is empty: give at least one token, or a bos_token_id")
        for token in tokens:
            check_int(0, **{f"each token of prompt {i}": token})
            if token > torch.iinfo(torch.long).max:
                raise ValueError(f"prompt {i} has token {token}, which exceeds int64")
        validated.append([*([] if bos_token_id is None else [bos_token_id]), *tokens])
    return validated


def token_device(prompts: Prompts, device: str | torch.device | None) -> torch.device:
    """The device by name, or that of the prompts; lists are on the CPU."""
    if device is not None:
        return resolve_device(device)
    first = prompts if isinstance(prompts, Tensor) else next(iter(prompts), None)
    return first.device if isinstance(first, Tensor) else torch.device("cpu")
