"""Models: embed -> layers -> head.  None of them names a mechanism: the layers hold any mixer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.block import Layer
from regard.errors import Unsupported, check_stream_length
from regard.mixer import Mixer, State
from regard.models.config import ModelConfig
from regard.models.embeddings import InputEmbedding
from regard.models.heads import ModelHead
from regard.norm import Norm

DecodingStep = Callable[
    [Tensor, Any], tuple[Tensor, Any]
]  # tokens (b n), state -> logits (b n vocab), state


class StreamState(NamedTuple):
    """Where a stream stands: how many tokens it has read, and the states of its layers."""

    at: int
    layers: State


class Seq2SeqStreamState(NamedTuple):
    """Where a decoder stands that looks at a source: what was read of it (b m d), its mask (b m), and how far it has come."""

    context: Tensor
    mask: Tensor | None
    reached: StreamState | None


class Backbone(nn.Module):
    """Embed, layers, and a norm where the last residual leaves a bare sum: the input -> (b n d)."""

    def __init__(self, embed: InputEmbedding, layers: Layer, norm: Norm | None = None) -> None:
        super().__init__()
        self.embed, self.stack, self.norm = embed, layers, norm

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The whole sequence -> (b n d) and its mask, which a class token makes longer."""
        y, mask = self.embed(x, mask, types=types)
        y = self.stack(
            y,
            context,
            mask=mask,
            context_mask=context_mask,
            global_attention_mask=global_attention_mask,
        )
        return y if self.norm is None else self.norm(y, mask), mask

    def stream(
        self,
        x: Tensor,
        state: StreamState | None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, StreamState]:
        """The next chunk -> (b n d) and the state for the chunk after it."""
        if not isinstance(state, StreamState | None):
            raise TypeError(
                f"this is no state of a model, but of type {type(state).__name__}: give what the last chunk gave"
            )
        at, layers = (0, None) if state is None else state
        y, _ = self.embed(x, at=at)
        check_stream_length(self.stack.length, at + y.shape[1])
        y, layers = self.stack.stream(y, layers, context=context, context_mask=context_mask)
        return y if self.norm is None else self.norm(y), StreamState(at + y.shape[1], layers)


class Model(nn.Module, ABC):
    """What all models have: a call, maps, and the configuration that they were built from (None: by hand)."""

    config: ModelConfig | None = None

    @abstractmethod
    def forward(self, *given: Any, **named: Any) -> Tensor:
        """The whole sequence -> what the head says; see the subclasses for what goes in."""


class SingleStackModel(Model):
    """The input -> head(norm(layers(embed(x)))).

    head   None: the tokens (b n d) themselves
    """

    @abstractmethod
    def __init__(self, backbone: Backbone, head: ModelHead | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """x as the embedding takes it, mask (b n), True = a real token, types (b n), marks (b n), True = a marked token."""
        y, mask = self.backbone(x, mask, types=types, global_attention_mask=global_attention_mask)
        return y if self.head is None else self.head(y, mask)

    def attention(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> list[Tensor | None]:
        """The maps (b h n n), layer by layer; None for a layer whose mixer has none."""
        return mixer_attention_maps(
            self.backbone,
            lambda: self.backbone(
                x, mask, types=types, global_attention_mask=global_attention_mask
            ),
        )


class Encoder(SingleStackModel):
    """Every token may look at every other."""

    def __init__(self, backbone: Backbone, head: ModelHead | None = None) -> None:
        super().__init__(backbone, head)


class DualEncoder(Model):
    """Two sequences, read one by one by the same encoder, and what the head says of them together (as in the retrieval task of
    Tay et al. 2020, arXiv 2011.04006)."""

    def __init__(self, backbone: Backbone, head: ModelHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (b 2 n), mask (b 2 n), True = a real token -> logits (b classes)."""
        y, mask = self.backbone(*single(x, mask))
        return self.head(y, mask)

    def attention(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor | None]:
        """The maps (b 2 h n n), layer by layer; None for a layer whose mixer has none."""
        maps = [
            seen.map()
            for seen in record_mixer_calls(self.backbone, lambda: self.backbone(*single(x, mask)))
        ]
        return [None if each is None else each.unflatten(0, (-1, 2)) for each in maps]


def single(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pairs (b 2 n) -> sequences (2b n), and their mask."""
    if x.dim() != 3 or x.shape[1] != 2:
        raise ValueError(f"pairs are (b 2 n), not {tuple(x.shape)}")
    if mask is not None and mask.shape != x.shape:
        raise ValueError(f"the mask of pairs {tuple(x.shape)} is as large, not {tuple(mask.shape)}")
    return x.flatten(0, 1), None if mask is None else mask.flatten(0, 1)


class Decoder(SingleStackModel):
    """A causal model: each token sees itself and those before it (Radford et al. 2018).  With a language head, it tells what
    comes next."""

    def __init__(self, backbone: Backbone, head: ModelHead | None = None) -> None:
        check_causal(backbone)
        super().__init__(backbone, head)

    def stream(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """The next chunk, of any length: what the whole would give for it, and the state for the chunk after it."""
        if self.head is not None and self.head.pools:
            raise Unsupported(
                "its head gives one answer for all tokens, so there is none for a chunk"
            )
        y, state = self.backbone.stream(x, state)
        return y if self.head is None else self.head(y), state


class Seq2SeqAttention(NamedTuple):
    """The maps of an encoder–decoder, layer by layer: (b h m m), (b h n n) and across (b h n m); None where there is none."""

    encoder: list[Tensor | None]
    decoder: list[Tensor | None]
    across: list[Tensor | None]


class Seq2Seq(Model):
    """An encoder that reads, and a causal decoder that looks at what was read (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, encoder: Backbone, decoder: Backbone, head: ModelHead | None = None) -> None:
        super().__init__()
        check_causal(decoder)
        self.encoder, self.decoder, self.head = encoder, decoder, head

    def encode(self, source: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The source -> (b m d), and its mask (b m)."""
        return self.encoder(source, mask)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source, mask (b m) over it, target (b n), target_mask (b n) -> what the head says of each target token."""
        context, mask = self.encode(source, mask)
        y, target_mask = self.decoder(target, target_mask, context=context, context_mask=mask)
        return y if self.head is None else self.head(y, target_mask)

    def stream(
        self,
        x: Tensor,
        state: StreamState | None = None,
        *,
        context: Tensor,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, StreamState]:
        """The next chunk of the target, with what `encode` gave."""
        y, state = self.decoder.stream(x, state, context=context, context_mask=context_mask)
        return y if self.head is None else self.head(y), state

    def given(self, source: Tensor, mask: Tensor | None = None) -> DecodingStep:
        """A step over target tokens for this source, read once: (tokens, state) -> (logits, state).

        What was read is carried in the state, so that it goes along when examples are dropped or repeated.
        """
        first = Seq2SeqStreamState(*self.encode(source, mask), None)

        def step(
            tokens: Tensor, state: Seq2SeqStreamState | None
        ) -> tuple[Tensor, Seq2SeqStreamState]:
            now = first if state is None else state
            logits, reached = self.stream(
                tokens, now.reached, context=now.context, context_mask=now.mask
            )
            return logits, now._replace(reached=reached)

        return step

    def attention(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Seq2SeqAttention:
        """All maps; see `Seq2SeqAttention`."""
        seen = record_mixer_calls(
            self, lambda: self(source, target, mask=mask, target_mask=target_mask)
        )
        reading, writing = (
            set(map(id, backbone.modules())) for backbone in (self.encoder, self.decoder)
        )
        return Seq2SeqAttention(
            [s.map() for s in seen if id(s.mixer) in reading],
            [s.map() for s in seen if id(s.mixer) in writing and s.context is None],
            [s.map() for s in seen if id(s.mixer) in writing and s.context is not None],
        )


def check_causal(backbone: Backbone) -> None:
    """A decoder tells what comes next, so no layer of it may know."""
    if not backbone.stack.can.causal:
        raise Unsupported(f"a decoder needs a causal stack: {backbone.stack.can.reason('causal')}")
    if not backbone.stack.causal:
        raise Unsupported("a decoder needs causal layers, and one of these was not built causal")


# ---------------------------------------------------------------------------------------------- maps
class MixerCall(NamedTuple):
    """One call of a mixer: its tokens, and what stood beside them."""

    mixer: Mixer
    x: Tensor
    context: Tensor | None
    mask: Tensor | None
    global_attention_mask: Tensor | None

    def map(self) -> Tensor | None:
        """(b h n m), or None where the mixer has none."""
        if not self.mixer.can.maps:
            return None
        return self.mixer.attention_map(
            self.x, self.context, mask=self.mask, global_attention_mask=self.global_attention_mask
        )


def mixer_attention_maps(module: nn.Module, call: Callable[[], object]) -> list[Tensor | None]:
    """The maps of all mixers that a call runs, in order."""
    return [seen.map() for seen in record_mixer_calls(module, call)]


def check_seen(module: nn.Module, seen: list[MixerCall]) -> None:
    """Every mixer must have been called: stacks with a memory ask the parts of a mixer, past it."""
    unseen = {id(mixer) for mixer in outer_mixers(module)} - {id(one.mixer) for one in seen}
    if unseen:
        raise Unsupported(
            "the stack does not call its mixers whole, but looks at a memory by parts of them: there are no maps"
        )


def outer_mixers(module: nn.Module) -> list[Mixer]:
    """The mixers of a module, without those that are parts of other mixers."""
    if isinstance(module, Mixer):
        return [module]
    found = [mixer for child in module.children() for mixer in outer_mixers(child)]
    return list({id(mixer): mixer for mixer in found}.values())


def record_mixer_calls(module: nn.Module, call: Callable[[], object]) -> list[MixerCall]:
    """Run, and keep what each mixer was called with, in the order of the calls."""
    seen: list[MixerCall] = []

    def note(mixer: Any, given: Any, named: dict[str, Any]) -> None:
        context = given[1] if len(given) > 1 else named.get("context")
        seen.append(
            MixerCall(
                mixer, given[0], context, named.get("mask"), named.get("global_attention_mask")
            )
        )

    with ExitStack() as hooks:
        for mixer in outer_mixers(module):
            hooks.callback(mixer.register_forward_pre_hook(note, with_kwargs=True).remove)
        call()
    check_seen(module, seen)
    return seen
