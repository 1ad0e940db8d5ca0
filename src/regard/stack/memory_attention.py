"""Attention to hidden states of earlier calls, for stacks with a memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported
from regard.mixer import MultiHead, check_batch, merge_heads
from regard.numerics import zero_padding_tokens

NO_GLOBAL_MASK = "the tokens in its memory have no global_attention_mask"


class HiddenStates(NamedTuple):
    """Hidden states (b, m, d) and their mask (b, m), True = keep; None: all are real."""

    x: Tensor
    mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of states m."""
        return self.x.shape[1]

    def append_to(self, past: HiddenStates | None) -> HiddenStates:
        """`past` followed by these states."""
        if past is None:
            return self
        check_batch(past.x, self.x)
        x = torch.cat((past.x, self.x), 1)
        if past.mask is None or self.mask is None:
            return HiddenStates(x)
        return HiddenStates(x, torch.cat((past.mask, self.mask), 1))

    def slice(self, start: int, end: int) -> HiddenStates:
        """States start..end-1."""
        return HiddenStates(
            self.x[:, start:end], None if self.mask is None else self.mask[:, start:end]
        )

    def last(self, count: int) -> HiddenStates:
        """The last `count` states, or all if there are fewer."""
        return self.slice(max(0, self.length - count), self.length)

    def detach(self) -> HiddenStates:
        """Detach from the autograd graph, with zeros for padding."""
        return HiddenStates(zero_padding_tokens(self.x.detach(), self.mask), self.mask)


class MemoryAttention(NamedTuple):
    """A block whose attention can read keys from a memory of hidden states."""

    block: Block
    mixer: MultiHead
    inner: KVCacheAttention

    def prepare(self, states: HiddenStates) -> Tensor:
        """Input of the mixer, (b, m, d): normalised by the residual, with zeros for padding."""
        x = self.block.mixer_residual.prepare(states.x, states.mask)
        return zero_padding_tokens(x, states.mask)

    def project_queries(self, states: HiddenStates, start: int) -> Tensor:
        """Queries (b, h, n, e) of states from position `start` on."""
        q = self.mixer.project_queries(self.prepare(states))
        return q if self.mixer.rotary is None else self.mixer.rotary(q, q, start, start)[0]

    def project_keys(self, states: HiddenStates, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values (b, h, m, e) of states from position `start` on."""
        _, k, v = self.mixer.project(self.prepare(states), None, start)
        return k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, mask: Tensor | None
    ) -> Tensor:
        """Mixer output (b, n, d): causal attention of q (b, h, n, e) to k and v (b, h, m, e)."""
        positions = CallPositions(self.inner.causal_pattern, q_start, k_start)
        return self.mixer.out(merge_heads(self.inner.attend(q, k, v, positions, mask=mask)))

    def run(self, x: Tensor, past: HiddenStates | None, inputs: LayerInputs, start: int) -> Tensor:
        """Run the block on x (b, n, d) from position `start` on: queries from x, keys and values
        from the past, which directly precedes x, and from x."""
        both = HiddenStates(x, inputs.mask).append_to(past)
        before = both.length - x.shape[1]
        y = self.prepare(both)
        if self.mixer.rotary is None:
            q, k, v = self.mixer.project(y[:, before:], y)
        else:  # rotary embeddings place queries and keys at the same position
            q, k, v = self.mixer.project(y, None, start - before)
            q = q[:, :, before:]
        return self.block.finish(x, self.attend(q, k, v, start, start - before, both.mask), inputs)


def find_memory_attention(layer: Layer) -> MemoryAttention | None:
    """Memory attention of a block with KV-cache attention; None for any other layer."""
    if (
        isinstance(layer, Block)
        and isinstance(layer.mixer, MultiHead)
        and isinstance(layer.mixer.inner, KVCacheAttention)
    ):
        return MemoryAttention(layer, layer.mixer, layer.mixer.inner)
    return None


def require_memory_attention(layer: Layer, stack: str) -> MemoryAttention:
    """Memory attention of a block; raises for any other layer, naming the stack."""
    attention = find_memory_attention(layer)
    if attention is None:
        raise Unsupported(
            f"{layer_name(layer)} cannot attend to the memory of {stack}: "
            "its mixer has no keys and values to cache"
        )
    return attention


def layer_name(layer: Layer) -> str:
    """Name of a layer in messages."""
    return layer.mixer.name if isinstance(layer, Block) else type(layer).__name__


def check_causal(layers: Sequence[Layer], stack: str) -> None:
    """Check that all layers are causal."""
    for i, layer in enumerate(layers):
        if not layer.causal:
            raise Unsupported(
                f"{stack} needs causal layers: build layer {i} ({layer_name(layer)}) "
                "with causal=True"
            )
