"""Early exits: heads after some layers, and no further layers once a head is confident."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.block import Layer, LayerInputs
from regard.errors import check_choice, check_positive
from regard.mixer import State
from regard.numerics import at_least_float32, zero_padding_tokens
from regard.stack.deferred import DeferredState
from regard.stack.sequential import combine_capabilities, run_layers

EXITS_AS_A_WHOLE = "an example exits as a whole: its depth depends on all of its tokens"


def is_probable(logits: Tensor, threshold: float) -> Tensor:
    """Whether the probability of the most likely class is above the threshold."""
    return logits.softmax(-1).amax(-1) > threshold


def has_low_entropy(logits: Tensor, threshold: float) -> Tensor:
    """Whether the entropy, in nats, is below the threshold."""
    return torch.special.entr(logits.softmax(-1)).sum(-1) < threshold


CONFIDENCE_TESTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "probability": is_probable,
    "entropy": has_low_entropy,
}


class EarlyExitOutput(NamedTuple):
    """Output of each token or example at its exit.

    Attributes:
        tokens: (b, n, d).
        logits: (b, n, c), or (b, c) for exits per example.
        depth: (b, n) or (b): number of layers run; 0 for padding.
    """

    tokens: Tensor
    logits: Tensor
    depth: Tensor


class EarlyExitState(NamedTuple):
    """State of an `EarlyExitStack`: one for each layer."""

    layers: tuple[DeferredState, ...]


class EarlyExitStack(Layer):
    """Layers with heads after some of them. In evaluation, confident tokens or examples exit.

    In training all layers run: `all_logits` returns the logits of all exits, and `weighted_loss`
    combines their losses. The threshold gets no gradient.

    A stream with exits per token gives the same result as the whole sequence: layers that a token
    skipped read its last hidden state when a later token gets that deep. Skipping those keys
    instead would make the result depend on the chunks.

    Args:
        heads: {number of layers: head}, including the last layer. A head maps (..., d) to (..., c);
            exits may share one.
        threshold: Probability of the most likely class above which, or entropy in nats below which,
            a head is confident.
        confidence: "probability" or "entropy" (BranchyNet, Teerapittayanon et al. 2016,
            arXiv 1709.01686).
        per: "token": each token exits by itself, keeps its hidden state, and is seen by others as
            it was when it exited (Elbayad et al. 2020, arXiv 1910.10073; CALM, Schuster et al.
            2022, arXiv 2207.07061). A layer runs while one token needs it. "example": the head
            reads the mean of the real tokens, and examples that exit leave the batch.
        weights: Weights of the losses of the exits. Default: their depths (Zhou et al. 2020,
            arXiv 2006.04152).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        heads: Mapping[int, nn.Module],
        *,
        threshold: float,
        confidence: str = "probability",
        per: str = "token",
        weights: Sequence[float] | None = None,
    ) -> None:
        can, causal, length = combine_capabilities(layers)
        check_choice("confidence", confidence, CONFIDENCE_TESTS)
        check_choice("per", per, ("token", "example"))
        check_positive("threshold", threshold)
        depth = len(layers)
        if depth not in heads or not set(heads) <= set(range(1, depth + 1)):
            raise ValueError(
                f"heads must follow layers 1 .. {depth}, including the last, not {sorted(heads)}"
            )
        if weights is not None and (
            len(weights) != len(heads) or min(weights) < 0 or not sum(weights) > 0
        ):
            raise ValueError(
                f"weights must be {len(heads)} numbers >= 0, not all of them 0, not {weights!r}"
            )
        self.per_token = per == "token"
        if not self.per_token:
            can = can.without(causal=EXITS_AS_A_WHOLE, stream=EXITS_AS_A_WHOLE)
        super().__init__(layers[0].dim, can=can, causal=causal and self.per_token, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.exits = tuple(sorted(heads))
        self.heads: Sequence[nn.Module] = nn.ModuleList(heads[i] for i in self.exits)  # type: ignore[assignment]
        self.threshold, self.confidence = float(threshold), confidence
        self.weights = tuple(self.exits if weights is None else weights)

    def initial_state(self) -> State:
        """States of all layers, with no deferred tokens."""
        return EarlyExitState(tuple(DeferredState(layer.initial_state()) for layer in self.layers))

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`. Returns the tokens at their exits; records the auxiliary output "depth"."""
        states = self._empty_states() if state is None else list(state.layers)
        if self.training:
            for i, layer in enumerate(self.layers):
                x, states[i] = states[i].run_layer(layer, x, inputs)
        else:
            output = self._run_exits(x, inputs, states)
            record_aux("depth", lambda: output.depth)
            # tokens that left early wait in the states, which must not be views of the output
            x = output.tokens if state is None else output.tokens.clone()
        return x, None if state is None else EarlyExitState(tuple(states))

    def predict(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> EarlyExitOutput:
        """Run a whole sequence with exits, as in evaluation; also return logits and depths."""
        inputs = LayerInputs(mask, context, context_mask, global_attention_mask)
        return self._run_exits(self.validate_inputs(x, inputs), inputs, self._empty_states())

    def exit_logits(self, y: Tensor, depth: Tensor) -> Tensor:
        """Logits of tokens (b, n, d) by the head of their `depth` (b, n), for streams."""
        logits = self.heads[0](y)
        for exit_depth, head in zip(self.exits[1:], self.heads[1:], strict=True):
            logits = torch.where((depth == exit_depth)[..., None], head(y), logits)
        return logits

    def all_logits(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits of all exits, without exiting, for training."""
        inputs = LayerInputs(mask, context, context_mask, global_attention_mask)
        x, logits, start = self.validate_inputs(x, inputs), [], 0
        for end, head in zip(self.exits, self.heads, strict=True):
            x, _ = run_layers(self.layers[start:end], x, inputs, None)
            logits.append(head(self._head_input(x, inputs)))
            start = end
        return tuple(logits)

    def weighted_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Σ w_e loss_e / Σ w_e. Records the auxiliary output "exit_losses"."""
        if len(losses) != len(self.exits):
            raise ValueError(f"expected {len(self.exits)} losses, one per exit, not {len(losses)}")
        stacked = torch.stack(tuple(losses))
        record_aux("exit_losses", lambda: stacked)
        weights = stacked.new_tensor(self.weights)
        return (weights * stacked).sum() / weights.sum()

    def _empty_states(self) -> list[DeferredState]:
        return [DeferredState(None)] * len(self.layers)

    def _run_exits(
        self, x: Tensor, inputs: LayerInputs, states: list[DeferredState]
    ) -> EarlyExitOutput:
        if self.per_token:
            return self._run_token_exits(x, inputs, states)
        return self._run_example_exits(x, inputs)

    def _run_token_exits(
        self, x: Tensor, inputs: LayerInputs, states: list[DeferredState]
    ) -> EarlyExitOutput:
        active = x.new_ones(x.shape[:2], dtype=torch.bool) if inputs.mask is None else inputs.mask
        h = zero_padding_tokens(x, active)
        depth = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        logits: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if logits is not None and not active.any():
                states[i] = states[i].defer(h)
                continue
            new, states[i] = states[i].run_layer(layer, h, inputs)
            h, depth = torch.where(active[..., None], new, h), depth + active
            if i + 1 in self.exits:
                new_logits = self._head_after(i + 1)(h)
                if logits is None:
                    logits = new_logits
                else:
                    logits = torch.where(active[..., None], new_logits, logits)
                active = active & ~self._is_confident(new_logits)
        assert logits is not None  # the last layer has a head
        return EarlyExitOutput(h, logits, depth)

    def _run_example_exits(self, x: Tensor, inputs: LayerInputs) -> EarlyExitOutput:
        remaining = torch.arange(len(x), device=x.device)  # examples still in the batch
        exited = []
        for i, layer in enumerate(self.layers):
            x, _ = layer.run(x, inputs, None)
            if i + 1 not in self.exits:
                continue
            logits = self._head_after(i + 1)(self._head_input(x, inputs))
            exits = self._is_confident(logits) | (i + 1 == len(self.layers))
            depth = torch.full_like(remaining[exits], i + 1)
            exited.append((remaining[exits], EarlyExitOutput(x[exits], logits[exits], depth)))
            if exits.all():
                break
            x, remaining = x[~exits], remaining[~exits]
            inputs = LayerInputs(*(t if t is None else t[~exits] for t in inputs))
        order = torch.cat([examples for examples, _ in exited]).argsort()
        parts = zip(*(output for _, output in exited), strict=True)
        return EarlyExitOutput(*(torch.cat(tensors)[order] for tensors in parts))

    def _head_after(self, depth: int) -> nn.Module:
        return self.heads[self.exits.index(depth)]

    def _is_confident(self, logits: Tensor) -> Tensor:
        return CONFIDENCE_TESTS[self.confidence](at_least_float32(logits), self.threshold)

    def _head_input(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Tokens, or for exits per example their mean."""
        if self.per_token:
            return x
        if inputs.mask is None:
            return x.mean(1)
        counts = inputs.mask.sum(1, keepdim=True).clamp(min=1)
        return zero_padding_tokens(x, inputs.mask).sum(1) / counts

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"exits={self.exits}, {self.confidence} {self.threshold}, weights={self.weights}"
