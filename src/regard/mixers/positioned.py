"""Any position scheme, put into any mixer that can take it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import Unsupported
from regard.mixer import Attention, Can, Mixer, MultiHead, State, split
from regard.position import Embed, Turn, Unplaced, find_scheme, make_scheme
from regard.prior import Prior

KINDS = (Embed, Turn, Prior)


def positioned(mixer: Mixer, scheme: str | nn.Module, **options: Any) -> Mixer:
    """A copy of the mixer that knows positions: by the name of a scheme, with its options, or by a scheme that was made.

    What goes in with the tokens (`Embed`) suits every mixer; what turns queries and keys (`Turn`) a `MultiHead` whose attention
    compares them; what is added to the scores (`Prior`) a `MultiHead` over `SoftmaxAttention` that has no prior yet.  All else
    raises `Unsupported`, with the reason.
    """
    if not isinstance(scheme, str):
        if options:
            raise TypeError(f"options are for a scheme by name, and this one was made already: {', '.join(options)}")
        return _put(mixer, scheme)
    kind = find_scheme(scheme)
    _check(mixer, kind)
    return _put(mixer, make_scheme(scheme, dim=mixer.dim, causal=mixer.causal, **_heads(mixer), **options))


class Place(NamedTuple):
    """The state of a mixer with an embedding before it: the position of the next token, and the state of the mixer."""

    at: int
    inner: State


class Embedded(Mixer):
    """inner(embed(x)): tokens get their positions on the way in, from 0 on in each sequence."""

    def __init__(self, inner: Mixer, embed: Embed) -> None:
        can, length = inner.can, inner.length
        if embed.length is not None:
            can = can & Can(takes_marks=True, length=f"there are embeddings for {embed.length} positions")
            length = embed.length if length is None else min(length, embed.length)
        super().__init__(inner.dim, can=can, causal=inner.causal, length=length, name=inner.name)
        if embed.dim != inner.dim:
            raise ValueError(f"the embedding is {embed.dim} wide, and the mixer {inner.dim}")
        self.inner, self.embed = inner, embed

    def start(self) -> Place:
        """The first position."""
        return Place(0, self.inner.start())

    def mix(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None, state: State, marks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Embed, then mix."""
        if state is not None:
            y, inner = self.inner.stream(self.embed(x, state.at), state.inner)
            return y, Place(state.at + x.shape[1], inner)
        return self.inner(*self._embedded(x, memory), mask=mask, marks=marks), None

    def weights(self, x: Tensor, memory: Tensor | None, mask: Tensor | None, marks: Tensor | None = None) -> Tensor:
        """The map of the mixer inside."""
        return self.inner.attention(*self._embedded(x, memory), mask=mask, marks=marks)

    def _embedded(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.embed(x), None if memory is None else self.embed(memory)


def _put(mixer: Mixer, scheme: nn.Module) -> Mixer:
    _check(mixer, type(scheme))
    if isinstance(scheme, Embed):
        return deepcopy(mixer) if isinstance(scheme, Unplaced) else Embedded(deepcopy(mixer), scheme)
    assert isinstance(mixer, MultiHead)
    if isinstance(scheme, Turn):
        scheme.turned(_width(mixer))
        return _with(mixer, deepcopy(mixer.inner), scheme)
    assert isinstance(scheme, Prior)
    return _with(mixer, _with_prior(mixer, scheme), mixer.turn)


def _check(mixer: Mixer, kind: type[nn.Module]) -> None:
    """Refuse what no mixer can take, or not this one."""
    if not issubclass(kind, KINDS):
        raise Unsupported(f"{kind.__name__} stands in place of the embedding of words, before the first mixer, not inside one")
    if issubclass(kind, Embed):
        return
    if not isinstance(mixer, MultiHead):
        raise Unsupported(
            f"{mixer.name} cannot take {kind.__name__}: it is no MultiHead, so whether it has queries and keys is its affair. "
            "Positions that go in with the tokens, such as 'sinusoid', suit it"
        )
    if issubclass(kind, Turn) and mixer.turn is not None:
        raise Unsupported(f"{mixer.name} turns its queries and keys already: {mixer.turn!r}")
    if issubclass(kind, Turn) and mixer.inner.turnless is not None:
        raise Unsupported(f"{mixer.name} cannot turn its queries and keys: {mixer.inner.turnless}")


def _with_prior(mixer: MultiHead, prior: Prior) -> SoftmaxAttention:
    """The attention of a mixer, with a prior."""
    inner = mixer.inner
    if not isinstance(inner, SoftmaxAttention):
        raise Unsupported(
            f"{mixer.name} cannot take a prior: {type(inner).__name__} adds none to its scores, as SoftmaxAttention does"
        )
    if inner.prior is not None:
        raise Unsupported(f"{mixer.name} has a prior already: {type(inner.prior).__name__}")
    if inner.scale is not None and (prior.reads or prior.terms > 1):
        raise Unsupported(
            f"{mixer.name} scales its scores by {inner.scale:.3g}, and {type(prior).__name__} is defined for 1/√(e · terms)"
        )
    return SoftmaxAttention(inner.pattern, prior, scale=inner.scale, backend=inner.backend)


def _with(mixer: MultiHead, attention: Attention, turn: Turn | None) -> MultiHead:
    """The same projections around another attention."""
    new = MultiHead(mixer.dim, mixer.heads, attention, kv_heads=mixer.kv_heads, causal=mixer.causal, turn=turn)
    for name, part in mixer.named_children():
        if name not in ("inner", "turn"):
            new.add_module(name, deepcopy(part))
    new.name = mixer.name
    return new.to(_like(mixer)).train(mixer.training)


def _heads(mixer: Mixer) -> dict[str, int]:
    """How many heads there are, and how wide their queries are, where that is known."""
    return {"heads": mixer.heads, "width": _width(mixer)} if isinstance(mixer, MultiHead) else {}


def _width(mixer: MultiHead) -> int:
    """Of the queries of a head: asked by projecting a token, for some recipes change the projection."""
    with torch.no_grad():
        return split(mixer.q(_like(mixer).new_zeros(1, 1, mixer.dim)), mixer.heads).shape[-1]


def _like(mixer: Mixer) -> Tensor:
    """A tensor of its kind and on its device."""
    return next((p.detach() for p in mixer.parameters()), torch.empty(0))
