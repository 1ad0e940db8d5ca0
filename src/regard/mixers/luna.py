"""Luna: a short sequence packs the long one, and the long one reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from regard.attentions import SoftmaxAttention
from regard.errors import check_choice, check_int
from regard.mixer import (
    Can,
    Mixer,
    MultiHead,
    State,
    check_batch,
    check_heads,
    check_tokens,
    merge_heads,
    split_heads,
)
from regard.numerics import at_least_float32, disable_autocast
from regard.state import per_example

CHUNK = 64
CAN = Can(
    maps="the packed sequence is projected again and mixed over heads",
    attn_mask="tokens reach each other by the packed sequence, which mixes all of them",
)


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # more precise than elu(x) + 1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": partial(F.softplus, beta=math.log(2.0)),
    "elu": _elu_plus_one,
}


@per_example("tokens")
class LunaState(NamedTuple):
    """Σ k_jᵀ a_j (b h e p), Σ a_jᵀ v_j (b h p e), both None at first, and the number of tokens, an
    int or (b)."""

    scores: Tensor | None
    values: Tensor | None
    tokens: int | Tensor


class Luna(Mixer):
    """Ma et al. 2021, arXiv 2106.01540, with p (packed d) learned.

    pack     y_p = softmax(p W_q (c W_k)ᵀ / √e) c W_v        c is the context, or x
    unpack   y_x = MultiHead(x, y_p, y_p)

    `update` takes the packed sequence of the layer before as p, and returns its own; in a model,
    `regard.stack.LunaStack` does this.

    Attributes:
        p: None in all but the first layer of a `LunaStack`.
    """

    stack_name = "luna"
    p: nn.Parameter | None

    def __init__(self, dim: int, heads: int, *, packed: int) -> None:
        super().__init__(dim, can=CAN)
        check_int(1, packed=packed)
        self.p = nn.Parameter(torch.randn(packed, dim))
        self.pack, self.unpack = (MultiHead(dim, heads, SoftmaxAttention()) for _ in range(2))
        self.pack.out = nn.Identity()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        return self._update(x, self._learned(x), context, mask)[0], None

    def update(
        self,
        x: Tensor,
        p: Tensor | None = None,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output y_x, and the packed sequence y_p (b packed d) that the next layer takes as p."""
        x, context = self._check_inputs(x, context, mask, None)
        if p is not None:
            check_tokens(p, self.dim, "p")
        return self._update(x, self._learned(x) if p is None else p, context, mask)

    def _learned(self, x: Tensor) -> Tensor:
        """The learned p for each example, (b packed d)."""
        if self.p is None:
            raise ValueError(
                "this Luna layer takes p from the layer before it in its LunaStack: use `update`"
            )
        return self.p.expand(x.shape[0], -1, -1)

    def _update(
        self, x: Tensor, p: Tensor, context: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        packed, _ = self.pack.mix_heads(p, x if context is None else context, mask, None)
        return self.unpack.mix(x, packed, None, None)[0], packed


class CausalLuna(Mixer):
    """Causal Luna. With a_j = ω(p W_p (x_j W_c)ᵀ / √e) for token j, and t tokens up to i:

        w_i = softmax(q_i Σ_{j≤i} k_jᵀ a_j / t √e)
        out_i = w_i Σ_{j≤i} a_jᵀ v_j / t

    ω replaces the softmax over tokens, which would see the future. There is no packed sequence for
    the next layer, because it would contain all tokens.

    Args:
        dim: Model width.
        heads: Number of heads.
        packed: Length of the packed sequence.
        activation: ω: "softplus" (base 2, so that a score of 0 has weight 1) or "elu" (elu + 1).
    """

    def __init__(self, dim: int, heads: int, *, packed: int, activation: str = "softplus") -> None:
        super().__init__(dim, can=CAN, causal=True, name="Luna")
        check_int(1, packed=packed)
        check_heads(dim, heads)
        check_choice("activation", activation, ACTIVATIONS)
        self.activation = activation
        self.heads, self.p = heads, nn.Parameter(torch.randn(packed, dim))
        self.pack_q, self.pack_k, self.q, self.k, self.v, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(6)
        )

    def initial_state(self) -> LunaState:
        """State before the first token."""
        return LunaState(None, None, 0)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        scores, values, tokens = self.initial_state() if state is None else state
        c, q, k, v = (
            at_least_float32(split_heads(f(x), self.heads))
            for f in (self.pack_k, self.q, self.k, self.v)
        )
        if scores is not None:
            check_batch(scores, k)
        p = at_least_float32(split_heads(self.pack_q(self.p)[None], self.heads))
        with disable_autocast(x):  # long sums need precision
            scale = 1 / math.sqrt(q.shape[-1])
            pack = c @ p.transpose(-1, -2) * scale
            pack = ACTIVATIONS[self.activation](pack)  # (b h n p)
            before = tokens[:, None] if isinstance(tokens, Tensor) else tokens
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[None] + before
            if mask is not None:
                pack, count = pack * mask[:, None, :, None], mask.cumsum(1)
            count = count.clamp(min=1)[:, None, :, None].to(q.dtype)
            found, scores = causal_products(q * scale, k, pack, scores)
            out, values = causal_products((found / count).softmax(-1), pack, v, values)
        y = self.out(merge_heads((out / count).to(x.dtype)))
        return y, None if state is None else LunaState(scores, values, tokens + x.shape[1])


@_disable_dynamo  # with a symbolic length, PyTorch views a product that is not contiguous
def causal_products(q: Tensor, y: Tensor, z: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """q_i (S + Σ_{j≤i} y_jᵀ z_j) for each i, and S plus the whole sum: q, y (b h n r), z (b h n f),
    S (b h r f).

    Computed in chunks: masked products within a chunk, and the sums over the chunks before it.
    """
    n = q.shape[2]
    size = min(CHUNK, n)
    q, y, z = (F.pad(x, (0, 0, 0, -n % size)).unflatten(2, (-1, size)) for x in (q, y, z))
    each = y.transpose(-1, -2) @ z
    first = torch.zeros_like(each[:, :, 0]) if first is None else first
    sums = torch.cat((first[:, :, None], each), 2).cumsum(2)
    out = (q @ y.transpose(-1, -2)).tril() @ z + q @ sums[:, :, :-1]
    return out.flatten(2, 3)[:, :, :n], sums[:, :, -1]
