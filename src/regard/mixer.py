"""The interface of token mixers, and the multi-head attention layer.

- `Mixer`: maps tokens (b, n, d) to tokens (b, n, d). Subclasses implement `mix`.
- `MultiHead`: the mixer that projects tokens to heads and calls an `Attention`.
- `Attention`: maps queries, keys and values to outputs, head by head.
- `Can`: the capabilities of a mixer, with a reason for each one it lacks.

Shapes, everywhere: b batch, h heads, n queries, m keys, d model width, e head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.auxiliary import collect_aux
from regard.backends import check_mask
from regard.backends.call import broadcastable_attn_mask
from regard.can import CAPABILITIES as CAPABILITIES, Can as Can
from regard.errors import Unsupported, check_choice, check_int
from regard.norm import LayerNorm, RMSNorm
from regard.pattern import lengths_from_cu_seqlens
from regard.position.rotary import RotaryEmbedding
from regard.state import (
    JoinedState,
    State as State,
    check_state,
    per_example,
    run_by_group,
    start_groups,
)

QK_NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}

# How error messages name what was asked for, and recipes that have the capability.
_REQUESTS = {
    "causal": ("causal=True", "Causal alternatives: local, linear, performer."),
    "cross": ("cross-attention", "Alternatives with cross-attention: vanilla, linear, nystrom."),
    "independent_queries": (
        "cross-attention in a causal block",
        "Alternatives with independent queries: vanilla, linear, performer.",
    ),
    "mask": ("a padding mask", "Alternatives that take a mask: vanilla, local, linear."),
    "attn_mask": (
        "a pair mask (attn_mask)",
        "Alternatives that take one: vanilla, local, bigbird.",
    ),
    "stream": ("streaming", "Alternatives that stream: local, linear, performer."),
    "maps": ("attention maps", "Alternatives with attention maps: vanilla, local, linear."),
    "global_attention_mask": ("a global_attention_mask", "Alternative: longformer."),
}


class Mixer(nn.Module, ABC):
    """Base class for token mixers: maps tokens (b, n, d) to tokens (b, n, d).

    Subclasses implement `mix`. The same code path serves training, incremental decoding (`stream`)
    and attention maps.

    Args:
        dim: Model width d.
        can: Capabilities. Anything else raises `Unsupported` with the reason.
        causal: Whether position i may only depend on positions <= i. Fixed at construction, because
            the causal form of many mixers has other parameters.
        length: Maximum sequence length, or None for any length.
        name: Name in error messages. Defaults to the class name.

    Attributes:
        runs_joined_states: Whether `mix` takes a `regard.state.JoinedState`, because it passes its
            state on. Otherwise `stream` calls `mix` once for each group of examples.
        stack_name: Stack that a model uses unless its configuration names another, see
            `regard.models.stacks.STACKS`. Mixers that hand more than tokens to the next layer have
            a stack that passes it on.
        requires_stack: Whether models refuse the mixer in other stacks, and as cross-attention.
        reads_query_mask: Whether `mix` takes a `query_mask` although its queries are independent,
            for an auxiliary loss over real queries.
    """

    runs_joined_states: bool = False
    reads_query_mask: bool = False
    stack_name: str = "sequential"
    requires_stack: bool = False

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
        check_int(1, dim=dim)
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be True or False, not {causal!r}")
        self.name = type(self).__name__ if name is None else name
        self.dim, self.can, self.causal, self.length = dim, can, causal, length
        if causal:
            self._require("causal")

    @abstractmethod
    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """Mix the tokens.

        Args:
            x: Tokens (b, n, d). Masked tokens are zero.
            context: Tokens to attend to (b, m, d), or None for x itself.
            mask: (b, m), True = keep, or None.
            state: State of the stream, or None for a whole sequence.

        A mixer that has `attn_mask` or `global_attention_mask`, or lacks `independent_queries`,
        takes the keyword argument of that name or `query_mask` too; see `forward`.

        Returns:
            Tokens (b, n, d) and the next state.
        """

    def initial_state(self) -> State:
        """State of a stream before its first chunk.

        In every state, tensors have the batch as their first dimension. What all examples share is
        a number or a numpy array. So `regard.state` can reorder, repeat, drop, join and split
        examples. `None` and `()` stand for values that appear later. No state is a view of the
        tokens that were streamed, so the caller may reuse their memory.
        """
        raise Unsupported(f"{self.name} does not support streaming")

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of a whole sequence, or of several packed sequences.

        Args:
            x: Tokens (b, n, d).
            context: Sequence (b, m, d) for cross-attention. Defaults to x.
            mask: Padding mask, True = keep: (b, m) over the context if there is one, else (b, n).
            attn_mask: Pair mask, True = keep: (n, m), (b, n, m) or (b, h, n, m), for mixers that
                take one.
            global_attention_mask: (b, n), True = global token, for mixers that take one.
            query_mask: Padding mask of x (b, n), True = keep, next to a context. It matters to
                mixers without the capability `independent_queries`, and to auxiliary losses
                over queries.
            cu_seqlens: Offsets (s + 1) of s packed sequences, as in FlashAttention: 0, the end of
                each sequence, the last of them n. x is then (1, n, d), and the result is that of
                each sequence alone. Other arguments keep their shapes.
        """
        lengths = None
        if cu_seqlens is not None:
            lengths = self._check_packed(x, context, cu_seqlens)
        longest = max(lengths, default=0) if lengths is not None else None
        x, context = self._check_inputs(x, context, mask, global_attention_mask, longest)
        x, masks = self._optional_masks(x, context, attn_mask, global_attention_mask, query_mask)
        if not x.numel():
            return x
        if lengths is None or len(lengths) == 1:
            return self.mix(x, context, mask, None, **masks)[0]
        return self.mix_packed(x, lengths, mask, **masks)

    def mix_packed(
        self,
        x: Tensor,
        lengths: tuple[int, ...],
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix several sequences that follow each other in x. Sequences of equal length form a
        batch, so this is exact for every mixer; a mixer with a faster way overrides it.

        Args:
            x: Tokens (1, n, d). Masked tokens are zero.
            lengths: Lengths of the sequences, with sum n.
            mask: (1, n), True = keep, or None.
            attn_mask: (1, 1 or h, n, n), True = keep, or None.
            global_attention_mask: (1, n), or None.
        """
        starts_by_length, start = defaultdict(list), 0
        for length in lengths:
            starts_by_length[length].append(start)
            start += length
        outputs, order = [], []
        for length, starts in starts_by_length.items():
            rows = torch.tensor(starts, device=x.device)[:, None]
            rows = rows + torch.arange(length, device=x.device)  # (sequences, length)
            masks = {}
            if attn_mask is not None:
                own = attn_mask[0][:, rows[:, :, None], rows[:, None, :]]
                masks["attn_mask"] = own.transpose(0, 1)
            if global_attention_mask is not None:
                masks["global_attention_mask"] = global_attention_mask[0, rows]
            own_mask = None if mask is None else mask[0, rows]
            outputs.append(self.mix(x[0, rows], None, own_mask, None, **masks)[0].flatten(0, 1))
            order.append(rows.flatten())
        if len(outputs) == 1:
            return outputs[0][None]
        return torch.cat(outputs)[torch.cat(order).argsort()][None]

    def stream(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        """Process the next chunk of a causal sequence.

        Args:
            x: Tokens (b, n, d), any number of them.
            state: State returned for the previous chunk, or None to start a sequence. The examples
                of a state from `regard.state.join` may stand at different positions.

        Returns:
            Tokens (b, n, d) and the state for the next chunk.
        """
        if not self.causal:
            raise Unsupported(
                f"{self.name} was built with causal=False and does not support streaming: the "
                "first chunk would depend on the last. Build it with causal=True."
            )
        self._require("stream")
        x, _ = self._check_inputs(x)
        first = self.initial_state()
        state = first if state is None else state
        check_state(state, first, x.shape[0])
        if not x.numel():
            return x, state
        if isinstance(state, JoinedState):
            state = start_groups(state, first)
        if isinstance(state, JoinedState) and not self.runs_joined_states:
            return run_by_group(lambda group, x: self.mix(x, None, None, group), state, x)
        return self.mix(x, None, None, state)

    def attention_map(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map (b, h, n, m): the weight of each value in each output, for each head.

        It is that of evaluation mode, and nothing changes: a map in training draws no noise, drops
        no weights, moves no averages and records no auxiliary outputs.
        """
        self._require("maps")
        x, context = self._check_inputs(x, context, mask, global_attention_mask)
        x, masks = self._optional_masks(x, context, attn_mask, global_attention_mask, query_mask)
        with evaluation_mode(self):
            return self.weights(x, context, mask, **masks)

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """Compute the attention map. Implemented by mixers that have one."""
        raise Unsupported(f"{self.name} does not support attention maps")

    def _require(self, capability: str) -> None:
        """Raise `Unsupported`, with the reason and alternatives, if a capability is missing."""
        reason = self.can.reason(capability)
        if reason is not None:
            request, alternatives = _REQUESTS[capability]
            raise Unsupported(f"{self.name} does not support {request}: {reason}. {alternatives}")

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        longest: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Check the arguments. Return x and the context with masked tokens set to zero.

        `longest` is the length of the longest sequence, if several are packed.
        """
        check_tokens(x, self.dim)
        check_dtype(x, self, "mixer")
        if context is not None:
            self._require("cross")
            if self.causal:
                raise Unsupported(
                    f"{self.name} was built with causal=True and does not support cross-attention: "
                    "the context has no order relative to x. Build it with causal=False."
                )
            check_tokens(context, self.dim, "context")
            if context.shape[0] != x.shape[0] or context.dtype != x.dtype:
                raise ValueError(
                    f"context {tuple(context.shape)} {context.dtype} does not match "
                    f"x {tuple(x.shape)} {x.dtype}: batch size and dtype must be the same"
                )
            if context.shape[1] == 0:
                raise ValueError("context has no tokens to attend to")
        if mask is not None:
            self._require("mask")
        if global_attention_mask is not None:
            self._require("global_attention_mask")
        source, name = (x, "Input") if context is None else (context, "Context")
        longest = source.shape[1] if longest is None else longest
        if self.length is not None and longest > self.length:
            raise ValueError(
                f"{name} has {longest} tokens but the mixer was built with length={self.length}."
            )
        check_mask(mask, (source.shape[0], source.shape[1]), "mask")
        check_mask(global_attention_mask, (x.shape[0], x.shape[1]), "global_attention_mask")
        if mask is None:
            return x, context
        source = source.masked_fill(~mask[..., None], 0)  # 0 * NaN would still be NaN
        return (source, None) if context is None else (x, source)

    def _check_packed(
        self, x: Tensor, context: Tensor | None, cu_seqlens: Tensor
    ) -> tuple[int, ...]:
        """Check that x (1, n, d) holds packed sequences. Return their lengths."""
        check_tokens(x, self.dim)
        if context is not None:
            raise Unsupported(
                f"{self.name} does not support cu_seqlens with a context: packed sequences attend "
                "to themselves. Pass the sequences as a batch, with padding masks."
            )
        if x.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens needs x of shape (1, n, {self.dim}) with all sequences in one row, "
                f"not {tuple(x.shape)}"
            )
        return lengths_from_cu_seqlens(cu_seqlens, x.shape[1])

    def _optional_masks(
        self,
        x: Tensor,
        context: Tensor | None,
        attn_mask: Tensor | None,
        global_attention_mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x, and keyword arguments for `mix` and `weights`, checked. Only mixers that have the
        capability accept them, and `query_mask` only those whose queries influence each other or
        that have `reads_query_mask`."""
        masks = {}
        if attn_mask is not None:
            self._require("attn_mask")
            m = x.shape[1] if context is None else context.shape[1]
            heads = getattr(self, "heads", None) if self.can.heads else 1
            attn_mask = broadcastable_attn_mask(attn_mask, x.shape[0], heads, x.shape[1], m)
            assert attn_mask is not None
            masks["attn_mask"] = attn_mask
        if global_attention_mask is not None:
            masks["global_attention_mask"] = global_attention_mask
        if query_mask is not None:
            if context is None:
                raise ValueError("query_mask without a context: pass it as mask")
            check_mask(query_mask, (x.shape[0], x.shape[1]), "query_mask")
            if not self.can.independent_queries:
                self._require("mask")
                x, masks["query_mask"] = x.masked_fill(~query_mask[..., None], 0), query_mask
            elif self.reads_query_mask:
                masks["query_mask"] = query_mask
        return x, masks


class Attention(nn.Module, ABC):
    """Base class for the attention inside `MultiHead`. The output is linear in the values.

    Attributes:
        can: Capabilities. If it has `gqa`, k and v may have fewer heads than q.
        length: Maximum sequence length, or None for any length.
        heads: Number of heads it was built for, or None for any number.
        dropout: Probability of dropping a weight in training, see `set_dropout`.
    """

    can: Can = Can()
    length: int | None = None
    heads: int | None = None
    dropout: float = 0.0

    def set_dropout(self, dropout: float) -> None:
        """Drop attention weights with this probability in training, 0 <= dropout < 1.

        Raises `Unsupported` without the capability `dropout`.
        """
        is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
        if not is_number or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a number from 0 to less than 1, not {dropout!r}")
        if dropout and not self.can.dropout:
            reason = self.can.reason("dropout")
            raise Unsupported(f"{type(self).__name__} does not support dropout: {reason}")
        for part in self.modules():
            if isinstance(part, Attention):
                part.dropout = dropout

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
        """Attend.

        Args:
            q: Queries (b, h, n, e).
            k: Keys (b, h, m, e).
            v: Values (b, h, m, f).
            causal: Whether query i may only see keys <= i.
            mask: (b, m), True = keep, or None.
            state: State of the stream, or None for a whole sequence.

        Returns:
            Outputs (b, h, n, f) and the next state.
        """

    def initial_state(self) -> State:
        """State of a stream before its first chunk. See `Mixer.initial_state`."""
        raise Unsupported(f"{type(self).__name__} does not support streaming")


class SharedQKAttention(Attention):
    """Base class for attention whose keys are its queries: q and k are the same tensor, and
    `MultiHead` has no key projection."""


class QueryMaskAttention(Attention):
    """Base class for attention in which queries influence each other, so that it has to know
    which of them are padding."""

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
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """See `Attention.forward`.

        Args:
            query_mask: (b, n), True = real query, or None if all are real.
        """


class PackedAttention(Attention):
    """An attention that takes packed sequences in one call. The others run on one sequence at a
    time."""

    @abstractmethod
    def attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[int, ...],
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend within each of several sequences that follow each other.

        Args:
            q: Queries (1, h, n, e).
            k: Keys (1, h, n, e).
            v: Values (1, h, n, f).
            lengths: Lengths of the sequences, with sum n.
            causal: Whether query i may only see keys <= i.
            mask: (1, n), True = keep, or None.
            attn_mask: (1, 1 or h, n, n), True = keep, or None.
            global_attention_mask: (1, n), or None.

        Returns:
            Outputs (1, h, n, f).
        """


@per_example("position", states=["inner"])
class RotaryState(NamedTuple):
    """State of a `MultiHead` with rotary embeddings.

    Attributes:
        position: Position of the next token; (b) if it differs between examples.
        inner: State of the attention.
    """

    position: int | Tensor
    inner: State


class MultiHead(Mixer):
    """Multi-head attention: project to heads, attend, merge, project
    (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        dim: Model width d.
        heads: Number of heads h.
        attention: The attention to apply to the heads.
        head_dim: Width e of a head. Defaults to dim / heads. With another width, the projections
            map dim to heads * head_dim and back.
        kv_heads: Number of key/value heads, each shared by heads / kv_heads query heads. Defaults
            to heads.
        causal: Whether position i may only depend on positions <= i.
        bias: Whether the projections have a bias.
        project: If False, there are no projections: the tokens themselves are split into heads.
        rotary: Rotary embedding of queries and keys, such as `Rope()`.
        qk_norm: Norm of queries and keys over the width of a head, before rotary embeddings: "rms"
            (or True), as in Qwen3, "layer", as in ViT-22B, or False.
        dropout: Probability of dropping an attention weight in training. Kept weights are divided
            by 1 - dropout. Needs the capability `dropout`.
    """

    runs_joined_states = True

    def __init__(
        self,
        dim: int,
        heads: int,
        attention: Attention,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = False,
        project: bool = True,
        rotary: RotaryEmbedding | None = None,
        qk_norm: str | bool = False,
        dropout: float = 0.0,
    ) -> None:
        can = attention.can
        if rotary is not None:
            can = can.without(
                cross="its rotary embedding compares positions within one sequence",
                rotary="it already has a rotary embedding",
            )
        name = type(attention).__name__
        super().__init__(dim, can=can, causal=causal, length=attention.length, name=name)
        kv_heads = heads if kv_heads is None else kv_heads
        if head_dim is None:
            check_heads(dim, heads)
            head_dim = dim // heads
        check_int(1, heads=heads, head_dim=head_dim, kv_heads=kv_heads)
        if heads % kv_heads:
            raise ValueError(f"heads={heads} must be divisible by kv_heads={kv_heads}")
        if kv_heads != heads and not project:
            raise ValueError(f"project=False needs kv_heads={heads}, not {kv_heads}")
        if heads * head_dim != dim and not project:
            raise ValueError(f"project=False needs head_dim={dim // heads}, not {head_dim}")
        if kv_heads != heads and isinstance(attention, SharedQKAttention):
            raise ValueError(
                f"{name} shares queries and keys: kv_heads must be {heads}, not {kv_heads}"
            )
        if attention.heads not in (None, heads):
            raise ValueError(f"{name} was built for {attention.heads} heads, not {heads}")
        if rotary is not None and not attention.can.rotary:
            reason = attention.can.reason("rotary")
            raise Unsupported(f"{name} does not support rotary embeddings: {reason}")
        if dropout:
            attention.set_dropout(dropout)
        qk_norm = "rms" if qk_norm is True else qk_norm
        if qk_norm is not False:
            check_choice("qk_norm", qk_norm, QK_NORMS)
        self.heads, self.head_dim, self.kv_heads = heads, head_dim, kv_heads
        self.inner, self.rotary = attention, rotary
        self.reads_query_mask = isinstance(attention, QueryMaskAttention)
        q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
        self.q: nn.Module = nn.Linear(dim, q_dim, bias=bias) if project else nn.Identity()
        self.k: nn.Module = nn.Linear(dim, kv_dim, bias=bias) if project else nn.Identity()
        self.v: nn.Module = nn.Linear(dim, kv_dim, bias=bias) if project else nn.Identity()
        self.out: nn.Module = nn.Linear(q_dim, dim, bias=bias) if project else nn.Identity()
        self.q_norm = QK_NORMS[qk_norm](head_dim) if qk_norm else None
        self.k_norm = QK_NORMS[qk_norm](head_dim) if qk_norm else None
        if isinstance(attention, SharedQKAttention):
            del self.k, self.k_norm

    def initial_state(self) -> State:
        """State of the attention; with rotary embeddings also the position of the next token."""
        state = self.inner.initial_state()
        return state if self.rotary is None else RotaryState(0, state)

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
        """Project, attend, merge, project. See `Mixer.mix`."""
        y, state = self.mix_heads(
            x, context, mask, state, global_attention_mask, attn_mask, query_mask
        )
        return self.out(y), state

    def mix_packed(
        self,
        x: Tensor,
        lengths: tuple[int, ...],
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """See `Mixer.mix_packed`. One call, if the attention takes packed sequences and they are
        not of equal length."""
        if not isinstance(self.inner, PackedAttention) or len(set(lengths)) == 1:
            return super().mix_packed(x, lengths, mask, attn_mask, global_attention_mask)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
        q, k, v = self.project(x, None, positions=positions)
        masks = self._masks(mask, global_attention_mask, attn_mask, mask)
        y = self.inner.attend_packed(q, k, v, lengths, causal=self.causal, **masks)
        return self.out(merge_heads(y))

    def mix_heads(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Everything but the output projection: the merged heads (b, n, h * e), and the next
        state."""
        start, inner = state if isinstance(state, RotaryState) else (0, state)
        if isinstance(state, JoinedState) and self.rotary is not None:  # some read no token yet
            return run_by_group(lambda g, x: self.mix_heads(x, None, None, g), state, x)
        if state is not None and nn.Identity in (type(self.q), type(self.v)):
            x = x.clone()  # a state must not be a view of the caller's tokens
        q, k, v = self.project(x, context, start)
        query_mask = mask if context is None else query_mask
        masks = self._masks(mask, global_attention_mask, attn_mask, query_mask)
        y, inner = run_attention(self.inner, q, k, v, causal=self.causal, state=inner, **masks)
        if isinstance(state, RotaryState):
            inner = RotaryState(start + x.shape[1], inner)
        return merge_heads(y), inner

    def project(
        self,
        x: Tensor,
        context: Tensor | None,
        start: int | Tensor = 0,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b, h, n, e), keys and values (b, h, m, e); fewer key heads if the attention
        supports GQA.

        Args:
            x: Tokens (b, n, d).
            context: Tokens (b, m, d) to attend to, or None for x.
            start: Position of the first token, an int or (b), for rotary embeddings.
            positions: Positions (n) of all tokens, instead of `start`.
        """
        source = x if context is None else context
        q, v = self.project_queries(x), split_heads(self.v(source), self.kv_heads)
        if isinstance(self.inner, SharedQKAttention):
            k = q if context is None else self.project_queries(context)
        else:
            k = self.project_keys(source)
        if not q.dtype == k.dtype == v.dtype and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)  # `nn.Identity` keeps that of x
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if self.rotary is not None and positions is not None:
            q, k = self.rotary.rotate_at(q, positions), self.rotary.rotate_at(k, positions)
        elif self.rotary is not None:
            q, k = self.rotary(q, k, start, start)
        if self.kv_heads != self.heads and not self.inner.can.gqa:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return q, k, v

    def project_queries(self, x: Tensor) -> Tensor:
        """Queries (b, h, n, e) of tokens (b, n, d), normalised but not rotated."""
        q = split_heads(self.q(x), self.heads)
        return q if self.q_norm is None else self.q_norm(q)

    def project_keys(self, x: Tensor) -> Tensor:
        """Keys (b, kv_heads, n, e) of tokens (b, n, d), normalised but not rotated."""
        k = split_heads(self.k(x), self.kv_heads)
        return k if self.k_norm is None else self.k_norm(k)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        global_attention_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map (b, h, n, m): the output for one-hot values, since attention is linear in
        them."""
        q, k, v = self.project(x, context)
        if not q.numel() or not k.numel():
            return q.new_zeros(q.shape[0], self.heads, q.shape[2], k.shape[2])
        query_mask = mask if context is None else query_mask
        masks = self._masks(mask, global_attention_mask, attn_mask, query_mask)
        return self.inner(q, k, identity_values(k, v), causal=self.causal, **masks)[0]

    def _masks(
        self,
        mask: Tensor | None,
        global_attention_mask: Tensor | None,
        attn_mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """Mask arguments of the attention, those that it takes."""
        masks = {"mask": mask}
        if attn_mask is not None:
            masks["attn_mask"] = attn_mask
        if global_attention_mask is not None:
            masks["global_attention_mask"] = global_attention_mask
        if query_mask is not None and isinstance(self.inner, QueryMaskAttention):
            masks["query_mask"] = query_mask
        return masks

    def extra_repr(self) -> str:
        """Shown by `print`."""
        head_dim = "" if self.heads * self.head_dim == self.dim else f", head_dim={self.head_dim}"
        return f"dim={self.dim}, heads={self.heads}{head_dim}, causal={self.causal}"


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, the parts of a module are in evaluation mode, and their auxiliary outputs are
    discarded. Afterwards each part is in the mode that it was in."""
    in_training = [part for part in module.modules() if part.training]
    for part in in_training:
        part.training = False
    try:
        with collect_aux():
            yield
    finally:
        for part in in_training:
            part.training = True


def run_attention(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, *, state: State, **arguments: Any
) -> tuple[Tensor, State]:
    """Call an attention; with a `JoinedState`, once for each group of examples.

    Args:
        attention: The attention.
        q: Queries (b, h, n, e).
        k: Keys (b, h, m, e).
        v: Values (b, h, m, f).
        state: State of the stream, or None for a whole sequence.
        arguments: Other arguments of `Attention.forward`.
    """
    if not isinstance(state, JoinedState):
        y, state = attention(q, k, v, state=state, **arguments)
        return y, state

    def run(group: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        y, group = attention(q, k, v, state=group, **arguments)
        return y, group

    return run_by_group(run, state, q, k, v)


def check_tokens(x: Tensor, dim: int, name: str = "x") -> None:
    """Check that x is a floating-point tensor (b, n, dim)."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name} must be a floating-point tensor of shape (b, n, {dim}), not {got}"
        )
    if x.shape[2] != dim:
        raise ValueError(f"{name} must have width {dim}, not {x.shape[2]}")


def check_dtype(x: Tensor, module: nn.Module, kind: str) -> None:
    """Check that x has the dtype of the parameters, unless autocast is on."""
    dtype = next((p.dtype for p in module.parameters()), x.dtype)
    if dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"x is {x.dtype} but the {kind} is {dtype}. "
            f"Convert one of them, for example with {kind}.to({x.dtype})."
        )


def check_heads(dim: int, heads: int) -> None:
    """Check that the heads divide the model width."""
    check_int(1, dim=dim, heads=heads)
    if dim % heads:
        raise ValueError(f"dim={dim} must be divisible by heads={heads}")


def check_batch(state: Tensor, new: Tensor) -> None:
    """Check that a stream continues with the batch size and dtype it started with."""
    if state.shape[0] != new.shape[0] or state.dtype != new.dtype:
        raise ValueError(
            f"The stream started with {state.shape[0]} examples of {state.dtype} and cannot "
            f"continue with {new.shape[0]} of {new.dtype}."
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, h * e) -> (b, h, n, e)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(y: Tensor) -> Tensor:
    """(b, h, n, e) -> (b, n, h * e)."""
    return y.transpose(1, 2).flatten(2)


def identity_values(k: Tensor, v: Tensor) -> Tensor:
    """One-hot values (b, h, m, m) for keys (b, h, m, e). Attending to them gives the attention
    map."""
    return torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
