"""Early exits: heads after some layers, and no more layers for what is sure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.block import Layer, LayerInputs
from regard.errors import check_choice, check_positive
from regard.mixer import Can, State
from regard.numerics import at_least_float32, zero_padding_tokens
from regard.stack.deferred import DeferredState
from regard.stack.sequential import combine_capabilities, run_layers

WHOLE = "an example leaves as a whole: how deep it goes depends on all of its tokens"


def _entropy(logits: Tensor) -> Tensor:
    return torch.special.entr(logits.softmax(-1)).sum(-1)


SURE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "probability": lambda logits, threshold: logits.softmax(-1).amax(-1) > threshold,
    "entropy": lambda logits, threshold: _entropy(logits) < threshold,
}


class EarlyExitOutput(NamedTuple):
    """What came of each token or example where it left.

    tokens  (b n d)
    logits  (b n c), or (b c) for examples
    depth   (b n), or (b): the layers that it went through; 0 for a left-out token
    """

    tokens: Tensor
    logits: Tensor
    depth: Tensor


class EarlyExitStack(Layer):
    """Layers with heads after some of them.  In evaluation, what a head is sure of goes no deeper.

    heads       {number of layers: head}, the last layer among them.  A head maps (... d) to (... c); it may be one for all
    threshold   of the probability of the likeliest class, above which, or of the entropy in nats, below which a head is sure
    confidence  "probability" or "entropy" (BranchyNet, Teerapittayanon et al. 2016, arXiv 1709.01686)
    per         "token": each leaves by itself, keeps its state, and is seen by the others as it was when it left (Elbayad
                et al. 2020, arXiv 1910.10073; CALM, Schuster et al. 2022, arXiv 2207.07061).  A layer runs as long as one
                token needs it.  "example": the head reads the mean of the real tokens, and examples that leave are taken
                out of the batch
    weights     of the losses of the exits; else their depths (Zhou et al. 2020, arXiv 2006.04152)

    In training all layers run: `every` gives the logits of all exits, and `weigh` makes one loss of theirs.  No gradient
    knows of the threshold.

    A stream with exits per token keeps chunks equal to the whole: a layer that a token left out reads the state that the
    token kept, when a later token comes so deep.  Refusing to stream would forbid what exits are for, decoding; leaving
    the keys out would make the result depend on how the sequence was cut.
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
        check_choice("confidence", confidence, SURE)
        check_choice("per", per, ("token", "example"))
        check_positive("threshold", threshold)
        self._check_heads(heads, len(layers), weights)
        self.by_token = per == "token"
        can = (
            can
            if self.by_token
            else can & Can(supports_global_mask=True, causal=WHOLE, stream=WHOLE)
        )
        super().__init__(layers[0].dim, can=can, causal=causal and self.by_token, length=length)
        self.layers: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.exits = tuple(sorted(heads))
        self.heads: Sequence[nn.Module] = nn.ModuleList(heads[at] for at in self.exits)  # type: ignore[assignment]
        self.threshold, self.confidence = float(threshold), confidence
        self.weights = tuple(self.exits if weights is None else weights)

    @staticmethod
    def _check_heads(
        heads: Mapping[int, nn.Module], depth: int, weights: Sequence[float] | None
    ) -> None:
        if depth not in heads or not set(heads) <= set(range(1, depth + 1)):
            raise ValueError(
                f"heads must stand after layers 1 .. {depth}, and after the last, not after {sorted(heads)}"
            )
        if weights is not None and (
            len(weights) != len(heads) or min(weights) < 0 or not sum(weights) > 0
        ):
            raise ValueError(
                f"weights must be {len(heads)} numbers of at least 0, not all of them 0, not {weights!r}"
            )

    def initial_state(self) -> State:
        """A state for each layer, and nothing that waits."""
        return tuple(DeferredState(layer.initial_state()) for layer in self.layers)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`: the tokens as they left; tells the "depth" of each."""
        late = [DeferredState(None)] * len(self.layers) if state is None else list(state)
        if self.training:
            for i, layer in enumerate(self.layers):
                x, late[i] = late[i].read(layer, x, given)
            return x, None if state is None else tuple(late)
        left = self._left(x, given, late)
        record_aux("depth", lambda: left.depth)
        return left.tokens, None if state is None else tuple(late)

    def classify(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> EarlyExitOutput:
        """The whole sequence, with exits: what `forward` does in evaluation, and all that came of it."""
        given = LayerInputs(mask, context, context_mask, global_attention_mask)
        return self._left(self.checked(x, given), given, [DeferredState(None)] * len(self.layers))

    def answer(self, y: Tensor, depth: Tensor) -> Tensor:
        """The logits of tokens (b n d) that left at `depth` (b n), each by its head: for streams, which tell the depth."""
        logits = self.heads[0](y)
        for at, head in zip(self.exits[1:], self.heads[1:], strict=True):
            logits = torch.where((depth == at)[..., None], head(y), logits)
        return logits

    def every(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The logits of all exits, and no exit is taken: for the loss."""
        given, logits, done = LayerInputs(mask, context, context_mask, global_attention_mask), [], 0
        x = self.checked(x, given)
        for at, head in zip(self.exits, self.heads, strict=True):
            x, _ = run_layers(self.layers[done:at], x, given, None)
            logits.append(head(self._read(x, given)))
            done = at
        return tuple(logits)

    def weigh(self, losses: Sequence[Tensor]) -> Tensor:
        """Σ w_e loss_e / Σ w_e; tells the losses as "exit losses"."""
        if len(losses) != len(self.exits):
            raise ValueError(f"there are {len(self.exits)} exits, and {len(losses)} losses")
        stacked = torch.stack(tuple(losses))
        record_aux("exit losses", lambda: stacked)
        weights = stacked.new_tensor(self.weights)
        return (weights * stacked).sum() / weights.sum()

    def _left(self, x: Tensor, given: LayerInputs, late: list[DeferredState]) -> EarlyExitOutput:
        return self._tokens(x, given, late) if self.by_token else self._examples(x, given)

    def _tokens(self, x: Tensor, given: LayerInputs, late: list[DeferredState]) -> EarlyExitOutput:
        stays = x.new_ones(x.shape[:2], dtype=torch.bool) if given.mask is None else given.mask
        h, depth = (
            x.masked_fill(~stays[..., None], 0),
            torch.zeros(x.shape[:2], dtype=torch.long, device=x.device),
        )
        logits: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if logits is not None and not stays.any():
                late[i] = late[i].wait(h)
                continue
            new, late[i] = late[i].read(layer, h, given)
            h, depth = torch.where(stays[..., None], new, h), depth + stays
            if i + 1 in self.exits:
                found = self._head(i + 1)(h)
                logits = found if logits is None else torch.where(stays[..., None], found, logits)
                stays = stays & ~self._sure(found)
        assert logits is not None  # the last layer has a head
        return EarlyExitOutput(h, logits, depth)

    def _examples(self, x: Tensor, given: LayerInputs) -> EarlyExitOutput:
        here, left = (
            torch.arange(len(x), device=x.device),
            [],
        )  # the examples that are still in the batch
        for i, layer in enumerate(self.layers):
            x, _ = layer.run(x, given, None)
            if i + 1 not in self.exits:
                continue
            logits = self._head(i + 1)(self._read(x, given))
            goes = self._sure(logits) | (i + 1 == len(self.layers))
            left.append(
                (
                    here[goes],
                    EarlyExitOutput(x[goes], logits[goes], torch.full_like(here[goes], i + 1)),
                )
            )
            if goes.all():
                break
            x, here = x[~goes], here[~goes]
            given = LayerInputs(*(t if t is None else t[~goes] for t in given))
        order = torch.cat([numbers for numbers, _ in left]).argsort()
        return EarlyExitOutput(
            *(torch.cat(parts)[order] for parts in zip(*(out for _, out in left), strict=True))
        )

    def _head(self, at: int) -> nn.Module:
        return self.heads[self.exits.index(at)]

    def _sure(self, logits: Tensor) -> Tensor:
        return SURE[self.confidence](at_least_float32(logits), self.threshold)

    def _read(self, x: Tensor, given: LayerInputs) -> Tensor:
        """What a head reads: the tokens, or their mean."""
        if self.by_token:
            return x
        if given.mask is None:
            return x.mean(1)
        return zero_padding_tokens(x, given.mask).sum(1) / given.mask.sum(1, keepdim=True).clamp(
            min=1
        )

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"exits={self.exits}, {self.confidence} {self.threshold}, weights={self.weights}"
