"""ETC: a few global tokens that see all, and long tokens that see near ones and the global ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import check_int, did_you_mean
from regard.mixer import Can, Mixer, MultiHead, State, check_heads
from regard.pattern import Band, Full, Keys, Pattern, Queries
from regard.position.bias import RelativeLabels

READS_ALL = "its global tokens read the whole sequence"


class ETC(Mixer):
    """Extended Transformer Construction (Ainslie et al. 2020, arXiv 2004.08483).

    The first `globals` tokens are the global input, the others the long input:

        long i:    one softmax over the global tokens and the long ones within `radius`  (l2g, l2l)
        global i:  one softmax over all tokens                                           (g2g, g2l)

    of q_i · (k_j + a) / √e, with a learned vector a for the label of the pair; see
    `RelativeLabels`.

    Args:
        dim: Model width.
        heads: Number of heads.
        globals: Number of global tokens.
        radius: Window of the long tokens, on each side (±radius).
        clip: Largest relative distance with its own label.
        segment: Long tokens per global token. Default: they do not belong together.
        shared: Use one set of projections. False: queries and output have one per kind of token,
            keys and values one for each of the four pieces.
        masks: Patterns over all positions that restrict the pieces "g2g", "g2l", "l2g" and "l2l".
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        globals: int,
        radius: int,
        clip: int,
        segment: int | None = None,
        shared: bool = False,
        masks: Mapping[str, Pattern] | None = None,
    ) -> None:
        check_heads(dim, heads)
        check_int(0, globals=globals, radius=radius)
        labels = partial(
            RelativeLabels, heads, dim // heads, globals=globals, clip=clip, segment=segment
        )
        piece = _piece_patterns(masks or {})
        first = Keys(0, globals)
        long_keys = (Band(radius, radius) & ~first & piece["l2l"]) | (first & piece["l2g"])
        global_keys = (first & piece["g2g"]) | (~first & piece["g2l"])
        near = SoftmaxAttention(long_keys, labels())
        far = SoftmaxAttention(Queries(0, globals) & global_keys, labels())
        limits = [x for x in (near.length, far.length) if x is not None]
        super().__init__(
            dim,
            can=near.can & far.can & Can(causal=READS_ALL, stream=READS_ALL),
            length=min(limits, default=None),
        )
        self.heads, self.globals = heads, globals
        self.long = MultiHead(dim, heads, near)
        self.all = None
        if globals:
            self.all = MultiHead(dim, heads, far)
            if shared:
                for name in ("q", "k", "v", "out"):
                    setattr(self.all, name, SharedModule(getattr(self.long, name)))
            else:
                for part in (self.long, self.all):
                    part.k, part.v = (GlobalLocalLinear(dim, globals) for _ in range(2))

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        y, _ = self.long.mix(x, None, mask, None, attn_mask=attn_mask)
        if self.all is None:
            return y, None
        rows = None if attn_mask is None else attn_mask[:, :, : self.globals]
        z, _ = self.all.mix(x[:, : self.globals], x, mask, None, attn_mask=rows)
        return torch.cat((z, y[:, self.globals :]), 1), None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map: the rows of the global tokens, then those of the long ones."""
        near = self.long.weights(x, None, mask, attn_mask=attn_mask)
        if self.all is None:
            return near
        rows = None if attn_mask is None else attn_mask[:, :, : self.globals]
        far = self.all.weights(x[:, : self.globals], x, mask, attn_mask=rows)
        return torch.cat((far, near[:, :, self.globals :]), 2)


def _piece_patterns(masks: Mapping[str, Pattern]) -> dict[str, Pattern]:
    """The pattern of each of the four pieces; `Full()` if it is not in `masks`."""
    pieces = ("g2g", "g2l", "l2g", "l2l")
    for name, pattern in masks.items():
        if name not in pieces:
            raise ValueError(f"masks has no piece {name!r}: {did_you_mean(name, pieces)}")
        if not isinstance(pattern, Pattern):
            raise ValueError(f"masks[{name!r}] must be a Pattern, not {pattern!r}")
    return {name: masks.get(name, Full()) for name in pieces}


class GlobalLocalLinear(nn.Module):
    """Linear layer (b n d) -> (b n d) with separate weights for the first `globals` tokens."""

    def __init__(self, dim: int, globals: int) -> None:
        super().__init__()
        self.globals = globals
        self.first, self.rest = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x[:, : self.globals]), self.rest(x[:, self.globals :])), 1)


class SharedModule(nn.Module):
    """Calls another module without registering it, so its parameters are counted and saved once."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = (other,)  # a tuple hides it from nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.other[0](x)
