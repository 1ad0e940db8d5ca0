"""Adds a positional encoding to a mixer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Attention, Mixer, MultiHead, State, split_heads
from regard.position import (
    NoPosition,
    PositionEmbedding,
    RotaryEmbedding,
    create_positional_encoding,
    positional_encoding_class,
)
from regard.prior import Prior
from regard.state import per_example

INSIDE = "its queries and keys, if any, are inside another mixer"


def with_position(mixer: Mixer, scheme: str | nn.Module, **options: Any) -> Mixer:
    """Copy a mixer and add a positional encoding.

    A `PositionEmbedding` is added to the tokens and works with every mixer. A `RotaryEmbedding`
    needs a `MultiHead` whose attention compares queries and keys. A `Prior` is added to the scores
    and needs a `MultiHead` of `SoftmaxAttention` without a prior. Other combinations raise
    `Unsupported`.

    Args:
        mixer: The mixer.
        scheme: Name of the encoding, such as "rope", or a module.
        **options: Options of the named encoding.
    """
    if isinstance(scheme, str):
        layer = _check_encoding(mixer, positional_encoding_class(scheme))
        sizes: dict[str, Any] = {"dim": mixer.dim, "causal": mixer.causal}
        if layer is not None:
            sizes |= {"heads": layer.heads, "width": _query_width(layer)}
        encoding = create_positional_encoding(scheme, **sizes, **options)
    else:
        if options:
            names = ", ".join(options)
            raise TypeError(f"options are for a scheme given by name, not for a module: {names}")
        encoding = scheme
        layer = _check_encoding(mixer, type(encoding))

    if isinstance(encoding, NoPosition):
        return deepcopy(mixer)
    if isinstance(encoding, PositionEmbedding):
        return PositionEmbeddedMixer(deepcopy(mixer), encoding)
    assert layer is not None
    if isinstance(encoding, RotaryEmbedding):
        encoding.rotary_dim(_query_width(layer))  # raises if the width does not fit
        return _replace_attention(layer, deepcopy(layer.inner), encoding)
    assert isinstance(encoding, Prior)
    return _replace_attention(layer, _attention_with_prior(layer, encoding), layer.rotary)


@per_example("position", states=["inner"])
class PositionEmbeddedState(NamedTuple):
    """The position of the next token, an int or (b), and the state of the inner mixer."""

    position: int | Tensor
    inner: State


class PositionEmbeddedMixer(Mixer):
    """inner(embed(x)): adds a position embedding to the tokens; sequences start at position 0."""

    def __init__(self, inner: Mixer, embed: PositionEmbedding) -> None:
        can = inner.can.without(
            rotary=INSIDE,
            independent_queries="its embedding depends on the positions of the queries",
        )
        length = inner.length
        if embed.length is not None:
            reason = f"there are embeddings for {embed.length} positions"
            can = can.without(length=reason)
            length = embed.length if length is None else min(length, embed.length)
        super().__init__(inner.dim, can=can, causal=inner.causal, length=length, name=inner.name)
        if embed.dim != inner.dim:
            raise ValueError(
                f"The position embedding has width {embed.dim} but the mixer has dim={inner.dim}."
            )
        self.inner, self.embed = inner, embed

    def initial_state(self) -> PositionEmbeddedState:
        """State at position 0."""
        return PositionEmbeddedState(0, self.inner.initial_state())

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Embed, then mix."""
        if state is not None:
            y, inner = self.inner.stream(self.embed(x, state.position), state.inner)
            return y, PositionEmbeddedState(state.position + x.shape[1], inner)
        context = None if context is None else self.embed(context)
        y = self.inner(
            self.embed(x),
            context,
            mask=mask,
            attn_mask=attn_mask,
            global_attention_mask=global_attention_mask,
            query_mask=query_mask,
        )
        return y, None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map of the inner mixer."""
        context = None if context is None else self.embed(context)
        return self.inner.attention_map(
            self.embed(x),
            context,
            mask=mask,
            attn_mask=attn_mask,
            global_attention_mask=global_attention_mask,
            query_mask=query_mask,
        )


def _check_encoding(mixer: Mixer, kind: type[nn.Module]) -> MultiHead | None:
    """The mixer, if the encoding acts on its queries, keys or scores; None if on its tokens.

    Raises `Unsupported` if the mixer cannot use this kind of encoding.
    """
    name = kind.__name__
    if not issubclass(kind, PositionEmbedding | RotaryEmbedding | Prior):
        raise Unsupported(f"{name} replaces the token embedding of a model; a mixer cannot use it")
    if issubclass(kind, PositionEmbedding):
        return None
    if not isinstance(mixer, MultiHead):
        raise Unsupported(
            f"{mixer.name} cannot use {name}: it is not a MultiHead, so its queries and keys, "
            "if any, are not accessible. Encodings that are added to the tokens work, "
            "such as 'sinusoid'"
        )
    if issubclass(kind, RotaryEmbedding):
        reason = mixer.can.reason("rotary")
        if reason is not None:
            raise Unsupported(f"{mixer.name} cannot use {name}: {reason}")
    return mixer


def _attention_with_prior(mixer: MultiHead, prior: Prior) -> SoftmaxAttention:
    """A copy of the mixer's attention with a prior."""
    inner, name = mixer.inner, type(prior).__name__
    if not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{mixer.name} cannot use {name}: only SoftmaxAttention takes a prior, "
            f"not {type(inner).__name__}"
        )
    if inner.prior is not None:
        raise Unsupported(f"{mixer.name} already has a prior: {type(inner.prior).__name__}")
    if inner.scale is not None and (prior.uses_qk or prior.num_terms > 1):
        raise Unsupported(
            f"{mixer.name} scales its scores by {inner.scale:.3g}, "
            f"but {name} requires 1/√(e · terms)"
        )
    return SoftmaxAttention(inner.pattern, prior, scale=inner.scale, backend=inner.backend)


def _replace_attention(
    mixer: MultiHead, attention: Attention, rotary: RotaryEmbedding | None
) -> MultiHead:
    """A copy of the mixer, with the same projections around another attention."""
    with torch.device("meta"):  # the projections of the mixer take the place of these
        new = MultiHead(
            mixer.dim,
            mixer.heads,
            attention,
            head_dim=mixer.head_dim,
            kv_heads=mixer.kv_heads,
            causal=mixer.causal,
            rotary=rotary,
        )
    for name, module in mixer.named_children():
        if name not in ("inner", "rotary"):
            setattr(new, name, deepcopy(module))
    new.name = mixer.name
    return new.to(_example_tensor(mixer)).train(mixer.training)


def _query_width(mixer: MultiHead) -> int:
    """Width of a head's queries, found by projecting a token: recipes may replace `mixer.q`."""
    token = _example_tensor(mixer).new_zeros(1, 1, mixer.dim)
    with torch.no_grad():
        return split_heads(mixer.q(token), mixer.heads).shape[-1]


def _example_tensor(mixer: Mixer) -> Tensor:
    """A tensor of the mixer's dtype and device."""
    return next((p.detach() for p in mixer.parameters()), torch.empty(0))
