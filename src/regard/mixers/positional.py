"""Any position scheme, put into any mixer that can take it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Attention, Can, Mixer, MultiHead, State, split_heads
from regard.position import (
    NoPosition,
    PositionEmbedding,
    RotaryEmbedding,
    create_positional_encoding,
    positional_encoding_class,
)
from regard.prior import Prior

KINDS = (PositionEmbedding, RotaryEmbedding, Prior)


def with_position(mixer: Mixer, scheme: str | nn.Module, **options: Any) -> Mixer:
    """A copy of the mixer that knows positions: by the name of a scheme, with its options, or by a scheme that was made.

    What goes in with the tokens (`Embed`) suits every mixer; what turns queries and keys (`RotaryEmbedding`) a `MultiHead` whose attention
    compares them; what is added to the scores (`Prior`) a `MultiHead` over `SoftmaxAttention` that has no prior yet.  All else
    raises `Unsupported`, with the reason.
    """
    if not isinstance(scheme, str):
        if options:
            raise TypeError(
                f"options are for a scheme by name, and this one was made already: {', '.join(options)}"
            )
        return _put(mixer, scheme)
    kind = positional_encoding_class(scheme)
    _check(mixer, kind)
    return _put(
        mixer,
        create_positional_encoding(
            scheme, dim=mixer.dim, causal=mixer.causal, **_heads(mixer), **options
        ),
    )


class PositionEmbeddedState(NamedTuple):
    """The state of a mixer with an embedding before it: the position of the next token, and the state of the mixer."""

    at: int
    inner: State


class PositionEmbeddedMixer(Mixer):
    """inner(embed(x)): tokens get their positions on the way in, from 0 on in each sequence."""

    def __init__(self, inner: Mixer, embed: PositionEmbedding) -> None:
        can, length = inner.can, inner.length
        if embed.length is not None:
            can = can & Can(
                supports_global_mask=True,
                length=f"there are embeddings for {embed.length} positions",
            )
            length = embed.length if length is None else min(length, embed.length)
        super().__init__(inner.dim, can=can, causal=inner.causal, length=length, name=inner.name)
        if embed.dim != inner.dim:
            raise ValueError(f"the embedding is {embed.dim} wide, and the mixer {inner.dim}")
        self.inner, self.embed = inner, embed

    def initial_state(self) -> PositionEmbeddedState:
        """The first position."""
        return PositionEmbeddedState(0, self.inner.initial_state())

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Embed, then mix."""
        if state is not None:
            y, inner = self.inner.stream(self.embed(x, state.at), state.inner)
            return y, PositionEmbeddedState(state.at + x.shape[1], inner)
        return self.inner(
            *self._embedded(x, context), mask=mask, global_attention_mask=global_attention_mask
        ), None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The map of the mixer inside."""
        return self.inner.attention_map(
            *self._embedded(x, context), mask=mask, global_attention_mask=global_attention_mask
        )

    def _embedded(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.embed(x), None if context is None else self.embed(context)


def _put(mixer: Mixer, scheme: nn.Module) -> Mixer:
    _check(mixer, type(scheme))
    if isinstance(scheme, PositionEmbedding):
        return (
            deepcopy(mixer)
            if isinstance(scheme, NoPosition)
            else PositionEmbeddedMixer(deepcopy(mixer), scheme)
        )
    assert isinstance(mixer, MultiHead)
    if isinstance(scheme, RotaryEmbedding):
        scheme.rotary_dim(_width(mixer))
        return _with(mixer, deepcopy(mixer.inner), scheme)
    assert isinstance(scheme, Prior)
    return _with(mixer, _with_prior(mixer, scheme), mixer.rotary)


def _check(mixer: Mixer, kind: type[nn.Module]) -> None:
    """Refuse what no mixer can take, or not this one."""
    if not issubclass(kind, KINDS):
        raise Unsupported(
            f"{kind.__name__} stands in place of the embedding of words, before the first mixer, not inside one"
        )
    if issubclass(kind, PositionEmbedding):
        return
    if not isinstance(mixer, MultiHead):
        raise Unsupported(
            f"{mixer.name} cannot take {kind.__name__}: it is no MultiHead, so whether it has queries and keys is its affair. "
            "Positions that go in with the tokens, such as 'sinusoid', suit it"
        )
    if issubclass(kind, RotaryEmbedding) and mixer.rotary is not None:
        raise Unsupported(f"{mixer.name} turns its queries and keys already: {mixer.rotary!r}")
    if issubclass(kind, RotaryEmbedding) and mixer.inner.no_rotary_reason is not None:
        raise Unsupported(
            f"{mixer.name} cannot turn its queries and keys: {mixer.inner.no_rotary_reason}"
        )


def _with_prior(mixer: MultiHead, prior: Prior) -> SoftmaxAttention:
    """The attention of a mixer, with a prior."""
    inner = mixer.inner
    if not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{mixer.name} cannot take a prior: {type(inner).__name__} adds none to its scores, as SoftmaxAttention does"
        )
    if inner.prior is not None:
        raise Unsupported(f"{mixer.name} has a prior already: {type(inner.prior).__name__}")
    if inner.scale is not None and (prior.uses_qk or prior.num_terms > 1):
        raise Unsupported(
            f"{mixer.name} scales its scores by {inner.scale:.3g}, and {type(prior).__name__} is defined for 1/√(e · terms)"
        )
    return SoftmaxAttention(inner.pattern, prior, scale=inner.scale, backend=inner.backend)


def _with(mixer: MultiHead, attention: Attention, rotary: RotaryEmbedding | None) -> MultiHead:
    """The same projections around another attention."""
    new = MultiHead(
        mixer.dim,
        mixer.heads,
        attention,
        kv_heads=mixer.kv_heads,
        causal=mixer.causal,
        rotary=rotary,
    )
    for name, part in mixer.named_children():
        if name not in ("inner", "rotary"):
            new.add_module(name, deepcopy(part))
    new.name = mixer.name
    return new.to(_like(mixer)).train(mixer.training)


def _heads(mixer: Mixer) -> dict[str, int]:
    """How many heads there are, and how wide their queries are, where that is known."""
    return {"heads": mixer.heads, "width": _width(mixer)} if isinstance(mixer, MultiHead) else {}


def _width(mixer: MultiHead) -> int:
    """Of the queries of a head: asked by projecting a token, for some recipes change the projection."""
    with torch.no_grad():
        return split_heads(mixer.q(_like(mixer).new_zeros(1, 1, mixer.dim)), mixer.heads).shape[-1]


def _like(mixer: Mixer) -> Tensor:
    """A tensor of its kind and on its device."""
    return next((p.detach() for p in mixer.parameters()), torch.empty(0))
