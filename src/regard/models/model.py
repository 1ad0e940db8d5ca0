"""Models: embedding -> stack of layers -> head, for any mixers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.block import Layer
from regard.errors import Unsupported, check_stream_length
from regard.mixer import Mixer, State, evaluation_mode
from regard.models.config import ModelConfig
from regard.models.embeddings import InputEmbedding
from regard.models.heads import ModelHead
from regard.norm import Norm
from regard.state import (
    JoinedState,
    check_batch_size,
    per_example,
    run_by_group,
    start_groups,
)

# tokens (b, n), state -> logits (b, n, vocab_size), state
DecodingStep = Callable[[Tensor, Any], tuple[Tensor, Any]]


@per_example("position", states=["layers"])
class StreamState(NamedTuple):
    """State of a streaming model: the number of tokens read, an int or (b), and the states of the
    layers."""

    position: int | Tensor
    layers: State


class Seq2SeqStreamState(NamedTuple):
    """State of a streaming seq2seq decoder: the encoded source (b, m, d), its mask (b, m), and the
    state of the decoder."""

    context: Tensor
    mask: Tensor | None
    decoder: StreamState | None


class Backbone(nn.Module):
    """Embedding, layers, and a final norm if the last residual needs one: input -> (b, n, d)."""

    def __init__(self, embed: InputEmbedding, layers: Layer, norm: Norm | None = None) -> None:
        super().__init__()
        self.embed, self.stack, self.norm = embed, layers, norm

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Process a whole sequence; return (b, n, d) and its mask; n + 1 with a class token."""
        y, mask = self.embed(x, mask, token_type_ids=token_type_ids)
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
        state: StreamState | JoinedState | None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, StreamState]:
        """Process the next chunk; return (b, n, d) and the state for the next chunk."""
        if isinstance(state, JoinedState):
            check_batch_size(state, x.shape[0])
            state = start_groups(state, StreamState(0, self.stack.initial_state()))
        if isinstance(state, JoinedState):

            def run(group: StreamState | None, x: Tensor, *others: Tensor | None) -> Any:
                return self.stream(x, group, context=others[0], context_mask=others[1])

            return run_by_group(run, state, x, context, context_mask)
        if not isinstance(state, StreamState | None):
            raise TypeError(
                f"state must be the StreamState of the last chunk, not {type(state).__name__}"
            )
        start, layers = (0, None) if state is None else state
        if isinstance(start, Tensor):
            check_batch_size(start, x.shape[0])
        y, _ = self.embed(x, start=start)
        end = start + y.shape[1]
        check_stream_length(self.stack.length, end)
        y, layers = self.stack.stream(y, layers, context=context, context_mask=context_mask)
        return y if self.norm is None else self.norm(y), StreamState(end, layers)


class Model(nn.Module, ABC):
    """Base class of models. `config` is None for a model that was not built from one."""

    config: ModelConfig | None = None

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Process whole inputs; see the subclasses for the arguments and the output."""


class SingleStackModel(Model):
    """Model with one backbone: head(backbone(x)).

    Args:
        head: None: return the tokens (b, n, d).
    """

    def __init__(self, backbone: Backbone, head: ModelHead | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        output_mask: Tensor | None = None,
    ) -> Tensor:
        """Process whole sequences.

        Args:
            x: Input of the embedding.
            mask: (b, n), True = keep.
            token_type_ids: (b, n), for models with token types.
            global_attention_mask: (b, n), True = token with global attention.
            output_mask: (b, n), True = token whose output is needed. The output is then (1, k, o)
                for these k tokens, in order; not for heads with one output per sequence.
        """
        y, mask = self.backbone(
            x, mask, token_type_ids=token_type_ids, global_attention_mask=global_attention_mask
        )
        if output_mask is not None:
            if self.head is not None and self.head.pools:
                raise ValueError(
                    f"output_mask selects tokens, but {type(self.head).__name__} gives one output "
                    "per sequence"
                )
            y, mask = y[output_mask][None], None
        return y if self.head is None else self.head(y, mask)

    def attention_maps(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Attention maps (b, h, n, n) of each layer; None for mixers without one."""
        calls = record_mixer_calls(
            self.backbone,
            x,
            mask,
            token_type_ids=token_type_ids,
            global_attention_mask=global_attention_mask,
        )
        return [call.attention_map() for call in calls]


class Encoder(SingleStackModel):
    """Encoder: every token may attend to every other."""


class Decoder(SingleStackModel):
    """Causal model: token i depends only on tokens <= i (Radford et al. 2018)."""

    def __init__(self, backbone: Backbone, head: ModelHead | None = None) -> None:
        check_causal(backbone)
        super().__init__(backbone, head)

    def stream(self, x: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """Process the next chunk, of any length: the same output as for the whole sequence."""
        if self.head is not None and self.head.pools:
            raise Unsupported(
                f"{type(self.head).__name__} gives one output per sequence and cannot be streamed"
            )
        y, state = self.backbone.stream(x, state)
        return y if self.head is None else self.head(y), state


class DualEncoder(Model):
    """One encoder reads two sequences separately; the head matches them (as in the retrieval task
    of Tay et al. 2020, arXiv 2011.04006)."""

    def __init__(self, backbone: Backbone, head: ModelHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Token ids x (b, 2, n), mask (b, 2, n), True = keep -> logits (b, num_classes)."""
        y, mask = self.backbone(*flatten_pairs(x, mask))
        return self.head(y, mask)

    def attention_maps(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor | None]:
        """Attention maps (b, 2, h, n, n) of each layer; None for mixers without one."""
        calls = record_mixer_calls(self.backbone, *flatten_pairs(x, mask))
        maps = [call.attention_map() for call in calls]
        return [None if each is None else each.unflatten(0, (-1, 2)) for each in maps]


def flatten_pairs(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pairs (b, 2, n) and their mask -> sequences (2b, n)."""
    if x.dim() != 3 or x.shape[1] != 2:
        raise ValueError(f"a dual encoder reads pairs (b, 2, n), not {tuple(x.shape)}")
    if mask is not None and mask.shape != x.shape:
        raise ValueError(
            f"mask must have the shape of the pairs, {tuple(x.shape)}, not {tuple(mask.shape)}"
        )
    return x.flatten(0, 1), None if mask is None else mask.flatten(0, 1)


class Seq2SeqAttention(NamedTuple):
    """Attention maps of a seq2seq model, layer by layer; None for mixers without one.

    Attributes:
        encoder: (b, h, m, m).
        decoder: (b, h, n, n).
        cross: (b, h, n, m).
    """

    encoder: list[Tensor | None]
    decoder: list[Tensor | None]
    cross: list[Tensor | None]


class EncoderDecoder(Model):
    """Base class of models that read a source and write a target.

    `encode` reads the source once; `decode` and `stream` return the output for each target token,
    which depends on the source and on the target tokens up to it.
    """

    decoder: nn.Module

    @abstractmethod
    def encode(self, source: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Encode the source: the context (b, m, d) and its mask (b, m)."""

    @abstractmethod
    def decode(
        self,
        target: Tensor,
        context: Tensor,
        *,
        context_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Process a whole target; `context` and `context_mask` come from `encode`."""

    @abstractmethod
    def stream(
        self,
        x: Tensor,
        state: Any = None,
        *,
        context: Tensor,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Process the next chunk of the target; `context` and `context_mask` come from `encode`."""

    @abstractmethod
    def attention_maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Seq2SeqAttention:
        """Attention maps of encoder, decoder and cross-attention."""

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source, mask (b, m) and target, target_mask (b, n) -> output per target token."""
        context, mask = self.encode(source, mask)
        return self.decode(target, context, context_mask=mask, target_mask=target_mask)

    def decoding_step(self, source: Tensor, mask: Tensor | None = None) -> DecodingStep:
        """Encode the source once and return a step over target tokens for `generate`.

        The encoded source is part of the state, so that it follows when sequences are dropped or
        repeated.
        """
        first = Seq2SeqStreamState(*self.encode(source, mask), None)

        def step(
            tokens: Tensor, state: Seq2SeqStreamState | None
        ) -> tuple[Tensor, Seq2SeqStreamState]:
            if isinstance(state, JoinedState):
                return run_by_group(lambda group, tokens: step(tokens, group), state, tokens)
            state = first if state is None else state
            logits, decoder = self.stream(
                tokens, state.decoder, context=state.context, context_mask=state.mask
            )
            return logits, state._replace(decoder=decoder)

        return step


class Seq2Seq(EncoderDecoder):
    """Encoder and causal decoder with cross-attention (Vaswani et al. 2017, arXiv 1706.03762)."""

    decoder: Backbone

    def __init__(self, encoder: Backbone, decoder: Backbone, head: ModelHead | None = None) -> None:
        super().__init__()
        check_causal(decoder)
        self.encoder, self.decoder, self.head = encoder, decoder, head

    def encode(self, source: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `EncoderDecoder`."""
        return self.encoder(source, mask)

    def decode(
        self,
        target: Tensor,
        context: Tensor,
        *,
        context_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """See `EncoderDecoder`."""
        y, target_mask = self.decoder(
            target, target_mask, context=context, context_mask=context_mask
        )
        return y if self.head is None else self.head(y, target_mask)

    def stream(
        self,
        x: Tensor,
        state: StreamState | None = None,
        *,
        context: Tensor,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, StreamState]:
        """See `EncoderDecoder`."""
        y, state = self.decoder.stream(x, state, context=context, context_mask=context_mask)
        return y if self.head is None else self.head(y), state

    def attention_maps(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Seq2SeqAttention:
        """See `EncoderDecoder`."""
        calls = record_mixer_calls(self, source, target, mask=mask, target_mask=target_mask)
        in_encoder = set(map(id, self.encoder.modules()))
        maps = Seq2SeqAttention([], [], [])
        for call in calls:
            if id(call.mixer) in in_encoder:
                maps.encoder.append(call.attention_map())
            elif call.context is None:
                maps.decoder.append(call.attention_map())
            else:
                maps.cross.append(call.attention_map())
        return maps


def check_causal(backbone: Backbone) -> None:
    """Check that the layers of a decoder are causal."""
    stack = backbone.stack
    if not stack.can.causal:
        raise Unsupported(f"a decoder needs a causal stack: {stack.can.reason('causal')}")
    if not stack.causal:
        raise Unsupported("a decoder needs causal layers: build all of them with causal=True")


# ----------------------------------------------------------------------------------- attention maps
class MixerCall(NamedTuple):
    """Arguments of one call of a mixer."""

    mixer: Mixer
    x: Tensor
    context: Tensor | None
    mask: Tensor | None
    global_attention_mask: Tensor | None
    query_mask: Tensor | None

    def attention_map(self) -> Tensor | None:
        """Attention map (b, h, n, m); None if the mixer has none."""
        if not self.mixer.can.maps:
            return None
        return self.mixer.attention_map(
            self.x,
            self.context,
            mask=self.mask,
            global_attention_mask=self.global_attention_mask,
            query_mask=self.query_mask,
        )


def outer_mixers(module: nn.Module) -> list[Mixer]:
    """Mixers of a module, without mixers inside other mixers."""
    if isinstance(module, Mixer):
        return [module]
    found = [mixer for child in module.children() for mixer in outer_mixers(child)]
    return list({id(mixer): mixer for mixer in found}.values())


def record_mixer_calls(module: nn.Module, *args: Any, **kwargs: Any) -> list[MixerCall]:
    """Call a module in evaluation mode and return the calls of its mixers, in order."""
    calls: list[MixerCall] = []

    def record(mixer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        context = args[1] if len(args) > 1 else kwargs.get("context")
        names = ("mask", "global_attention_mask", "query_mask")
        calls.append(MixerCall(mixer, args[0], context, *map(kwargs.get, names)))

    mixers = outer_mixers(module)
    with ExitStack() as hooks, evaluation_mode(module):
        for mixer in mixers:
            hooks.callback(mixer.register_forward_pre_hook(record, with_kwargs=True).remove)
        module(*args, **kwargs)
    if {id(mixer) for mixer in mixers} - {id(call.mixer) for call in calls}:
        # Stacks with a memory call the projections of a mixer, not the mixer.
        raise Unsupported("this stack bypasses the forward of its mixers: it has no attention maps")
    return calls
