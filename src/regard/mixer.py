"""The one interface: a mixer maps tokens (b n d) to tokens (b n d), and says what it can do.

Letters, everywhere: b examples, h heads, n queries, m keys, d width of a token, e width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.backends import check_mask
from regard.can import (
    CAPABILITIES as CAPABILITIES,
    Can as Can,  # for all that write mixers
)
from regard.errors import Unsupported, check_int
from regard.position.rotary import RotaryEmbedding
from regard.state import State as State, check_state

NO_COMMON_PLACES = (
    "positions turn its queries and keys, and those of two sequences are not comparable"
)


class Mixer(nn.Module, ABC):
    """(b n d) -> (b n d).  A subclass writes `mix`, once, and the same code trains, decodes and draws.

    dim     the width d of a token
    can     what it promises; whatever else is asked raises `Unsupported`, with the reason
    causal  fixed when built: for many mechanisms it changes the parameters
    length  the longest sequence, None: any
    name    what it is called in messages
    """

    def __init__(
        self,
        dim: int,
        *,
        can: Can,
        causal: bool = False,
        length: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__ if name is None else name
        check_int(1, dim=dim)
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, not {causal!r}")
        self.dim, self.can, self.causal, self.length = dim, can, causal, length
        if causal:
            self._need("causal", "be causal")

    @abstractmethod
    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """The mechanism: x (b n d), memory (b m d) or None for x itself, mask (b m) -> (b n d) and the next state.

        `state` is None for a whole sequence.  Left-out tokens are zero already.
        """

    def initial_state(self) -> State:
        """The state before the first chunk, built like those after it; None or () stands for what is still to come.

        In every state each tensor has the examples as its first dimension, and what is the same for all examples is no
        tensor but a number or a numpy array: so `regard.state.take` can reorder, repeat and drop examples.
        """
        raise Unsupported(f"{self.name} cannot run chunk by chunk")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of x (b n d), among themselves or with those of memory (b m d).

        mask   (b m), True = a real token, over `memory` where given, else over x
        marks  (b n), True = a marked token, for mechanisms that treat some tokens specially
        """
        x, context = self._check_inputs(x, context, mask, global_attention_mask)
        extra = (
            {}
            if global_attention_mask is None
            else {"global_attention_mask": global_attention_mask}
        )
        return self.mix(x, context, mask, None, **extra)[0] if x.numel() else x

    def stream(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        """The next chunk of a causal sequence, of any length: (b n d) -> (b n d) and the state for the chunk after it.

        `state=None` starts a sequence.  `regard.state.take` makes of a state that of other examples.
        """
        if not self.causal:
            raise Unsupported(
                f"{self.name} was not built causal, so the first chunk would depend on the last"
            )
        self._need("stream", "run chunk by chunk")
        x, _ = self._check_inputs(x, None, None, None)
        first = self.initial_state()
        state = first if state is None else state
        check_state(state, first, x.shape[0])
        return self.mix(x, None, None, state) if x.numel() else (x, state)

    def _need(self, promise: str, what: str) -> None:
        reason = self.can.reason(promise)
        if reason is not None:
            raise Unsupported(f"{self.name} cannot {what}: {reason}")

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Refuse what is not promised, say what is malformed, and blank what is left out."""
        check_tokens(x, self.dim)
        check_dtype(x, self, "mixer")
        if context is not None:
            self._need("cross", "look at another sequence")
            if self.causal:
                raise Unsupported(
                    f"{self.name} was built causal, and another sequence has no past or future to it"
                )
            check_tokens(context, self.dim, "context")
            if context.shape[0] != x.shape[0] or context.dtype != x.dtype:
                raise ValueError(
                    f"memory {tuple(context.shape)} {context.dtype} does not fit x {tuple(x.shape)} {x.dtype}"
                )
            if context.shape[1] == 0:
                raise ValueError("memory has no tokens to look at")
        if mask is not None:
            self._need("mask", "leave tokens out")
        if global_attention_mask is not None:
            self._need("global_attention_mask", "treat marked tokens")
        source, name = (x, "x") if context is None else (context, "context")
        if self.length is not None and source.shape[1] > self.length:
            raise ValueError(
                f"{name} has {source.shape[1]} tokens, and this was built for at most {self.length}"
            )
        check_mask(mask, (source.shape[0], source.shape[1]), "mask")
        check_mask(global_attention_mask, (x.shape[0], x.shape[1]), "global_attention_mask")
        if mask is None:
            return x, context
        blank = source.masked_fill(
            ~mask[..., None], 0
        )  # NaN in padding would survive a weight of zero
        return (blank, None) if context is None else (x, blank)

    def attention_map(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The map (b h n m): how much of each value ends up in each output, head by head."""
        self._need("maps", "show an attention map")
        x, context = self._check_inputs(x, context, mask, global_attention_mask)
        return self.weights(
            x,
            context,
            mask,
            **(
                {}
                if global_attention_mask is None
                else {"global_attention_mask": global_attention_mask}
            ),
        )

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """What `attention` returns, for mixers that have it."""
        raise Unsupported(f"{self.name} has no attention map")


class Attention(nn.Module, ABC):
    """What stands inside `MultiHead`: heads in, heads out, linear in its values."""

    can: Can = Can()
    length: int | None = None  # the longest sequence, None: any
    heads: int | None = None  # how many it was made for, None: any
    supports_gqa: bool = False  # takes fewer heads of keys than of queries
    needs_query_mask: bool = (
        False  # is told which queries are real: attend(..., real=), (b n), left out where all are
    )
    shared_qk: bool = False  # keys are made of the queries, so there is no projection to keys
    no_rotary_reason: str | None = (
        None  # why queries and keys may not be turned by their positions; None: they may
    )

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        """q (b h n e), k (b h m e), v (b h m f), mask (b m) -> (b h n f) and the next state; None for a whole sequence."""

    def initial_state(self) -> State:
        """The state before the first chunk."""
        raise Unsupported(f"{type(self).__name__} cannot run chunk by chunk")


class RotaryState(NamedTuple):
    """The state of a `MultiHead` that turns: the position of the next token, and the state of its attention."""

    at: int
    inner: State


class MultiHead(Mixer):
    """Project to heads, attend, merge: out = W⁰ [head_1 .. head_h] (Vaswani et al. 2017, arXiv 1706.03762).

    kv_heads   fewer heads of keys and values, each shared by heads / kv_heads queries
    bias       whether the projections have one
    project    False: no projections at all, tokens attend as they are
    turn       turns queries and keys by their positions, such as `Rope()`
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        attention: Attention,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = False,
        project: bool = True,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        can = (
            attention.can
            if rotary is None
            else attention.can & Can(supports_global_mask=True, cross=NO_COMMON_PLACES)
        )
        super().__init__(
            dim, can=can, causal=causal, length=attention.length, name=type(attention).__name__
        )
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(dim, heads)
        check_int(1, kv_heads=kv_heads)
        if heads % kv_heads:
            raise ValueError(
                f"heads must be divisible by kv_heads, and {heads} is not by {kv_heads}"
            )
        if not project and kv_heads != heads:
            raise ValueError("without projections there are as many heads of keys as of queries")
        if attention.heads not in (None, heads):
            raise ValueError(f"the attention was made for {attention.heads} heads, not for {heads}")
        if rotary is not None and attention.no_rotary_reason is not None:
            raise Unsupported(
                f"{self.name} cannot turn its queries and keys: {attention.no_rotary_reason}"
            )
        self.heads, self.kv_heads, self.inner, self.rotary = heads, kv_heads, attention, rotary
        kv = dim // heads * kv_heads
        projections: list[nn.Module] = [
            nn.Linear(dim, width, bias=bias) if project else nn.Identity()
            for width in (dim, kv, kv, dim)
        ]
        self.q, self.k, self.v, self.out = projections
        if attention.shared_qk:
            if kv_heads != heads:
                raise ValueError(
                    f"{self.name} makes its keys of the queries, so kv_heads must be {heads}, not {kv_heads}"
                )
            del self.k

    def initial_state(self) -> State:
        """The state of the attention before the first chunk, and the position where that would be lost."""
        return (
            self.inner.initial_state()
            if self.rotary is None
            else RotaryState(0, self.inner.initial_state())
        )

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Project, attend, merge."""
        y, state = self.mix_heads(x, context, mask, state, global_attention_mask)
        return self.out(y), state

    def mix_heads(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """All but the last projection: the results of the heads side by side, (b n d)."""
        at, inner = state if isinstance(state, RotaryState) else (0, state)
        q, k, v = self.project(x, context, at)
        more = self._more(context, mask, global_attention_mask)
        y, inner = self.inner(q, k, v, causal=self.causal, mask=mask, state=inner, **more)
        return merge_heads(y), RotaryState(at + x.shape[1], inner) if isinstance(
            state, RotaryState
        ) else inner

    def project(
        self, x: Tensor, context: Tensor | None, at: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b h n e), keys and values (b h m e), or fewer heads of them where the attention shares them.

        at   the position of the first token, where queries and keys are turned
        """
        source = x if context is None else context
        q, v = split_heads(self.q(x), self.heads), split_heads(self.v(source), self.kv_heads)
        if self.inner.shared_qk:
            k = q if context is None else split_heads(self.q(context), self.heads)
        else:
            k = split_heads(self.k(source), self.kv_heads)
        if self.rotary is not None:
            q, k = self.rotary(q, k, at, at)
        if self.kv_heads != self.heads and not self.inner.supports_gqa:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return q, k, v

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention of the identity: since it is linear in its values, that is its map, whatever it does inside."""
        q, k, v = self.project(x, context)
        return self.inner(
            q,
            k,
            identity_values(k, v),
            causal=self.causal,
            mask=mask,
            **self._more(context, mask, global_attention_mask),
        )[0]

    def _more(
        self, context: Tensor | None, mask: Tensor | None, global_attention_mask: Tensor | None
    ) -> dict[str, Tensor]:
        """What only some attentions ask for.  A mask over another sequence says nothing about the queries."""
        more = (
            {}
            if global_attention_mask is None
            else {"global_attention_mask": global_attention_mask}
        )
        if self.inner.needs_query_mask and context is None and mask is not None:
            more["query_mask"] = mask
        return more

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dim={self.dim}, heads={self.heads}, causal={self.causal}"


def check_tokens(x: Tensor, dim: int, name: str = "x") -> None:
    """Tokens must be (b n dim), of a floating type."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating tensor of shape (b n {dim}), not {what}")
    if x.shape[2] != dim:
        raise ValueError(f"{name} must have width {dim}, as built, not {x.shape[2]}")


def check_dtype(x: Tensor, module: nn.Module, what: str) -> None:
    """Tokens must be of the type of the parameters, but under autocast."""
    mine = next((p.dtype for p in module.parameters()), x.dtype)
    if mine != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x is of {x.dtype}, and the {what} of {mine}: convert one of them, as by {what}.to({x.dtype})"
        )


def check_heads(dim: int, heads: int) -> None:
    """Heads share the width of a token evenly."""
    check_int(1, dim=dim, heads=heads)
    if dim % heads:
        raise ValueError(f"dim must be divisible by heads, and {dim} is not by {heads}")


def check_batch(state: Tensor, new: Tensor) -> None:
    """A stream goes on with the examples it began with."""
    if state.shape[0] != new.shape[0] or state.dtype != new.dtype:
        raise ValueError(
            f"the stream began with {state.shape[0]} examples of {state.dtype}, and goes on with {new.shape[0]} of {new.dtype}"
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b n h*e) -> (b h n e)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(y: Tensor) -> Tensor:
    """(b h n e) -> (b n h*e)."""
    return y.transpose(1, 2).flatten(2)


def identity_values(k: Tensor, v: Tensor) -> Tensor:
    """Values (b h m m) that tell tokens apart, for keys (b h m e): what an attention makes of them is its map."""
    return torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
