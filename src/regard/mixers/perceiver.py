"""Perceiver: latents attend to the tokens and to each other, and the tokens to the latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State

MIXED = "every latent depends on all tokens"


class PerceiverLayer(nn.Module):
    """h = z + MultiHead(norm z, norm s), out = h + MLP(norm h): z (b l d) -> (b l d), with a source
    s (b m d), or s = z.

    Args:
        dim: Model width.
        heads: Number of heads.
        widening: Widening factor of the MLP.
        cross: Attend to a source instead of z.
        residual: Add z. False: h = MultiHead(...).
    """

    def __init__(
        self, dim: int, heads: int, *, widening: int, cross: bool, residual: bool = True
    ) -> None:
        super().__init__()
        self.residual, self.attention = residual, MultiHead(dim, heads, SoftmaxAttention())
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.norm_source = nn.LayerNorm(dim) if cross else None
        self.mlp = nn.Sequential(
            nn.Linear(dim, widening * dim), nn.GELU(), nn.Linear(widening * dim, dim)
        )

    def forward(
        self, z: Tensor, source: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The mask (b m) applies to the source."""
        read = None if self.norm_source is None or source is None else self.norm_source(source)
        h, _ = self.attention.mix(self.norm(z), read, mask, None)
        h = z + h if self.residual else h
        return h + self.mlp(self.norm_mlp(h))


class Perceiver(Mixer):
    """Jaegle et al. 2021, arXiv 2103.03206 and 2107.14795 (Perceiver IO).

        z ← z + MultiHead(z, s), z ← z + MLP(z)      latents z (latents d) read s: the context, or x
        z ← z + MultiHead(z, z), z ← z + MLP(z)      `depth` times
        y = MultiHead(x, z), out = y + MLP(y)        the tokens x read the latents

    with a layer norm before each. The last line has no residual: the block around the mixer adds x.

    Args:
        dim: Model width.
        heads: Number of heads.
        latents: Number of latents.
        depth: Self-attention layers of the latents.
        widening: Widening factor of the MLPs.
        causal: Not supported.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        latents: int,
        depth: int,
        widening: int = 1,
        causal: bool = False,
    ) -> None:
        can = Can(
            causal=MIXED,
            stream=MIXED,
            maps="the tokens attend to latents, which several layers computed",
            attn_mask="tokens reach each other by the latents, which see all of them",
        )
        super().__init__(dim, can=can, causal=causal)
        check_int(1, latents=latents, widening=widening)
        check_int(0, depth=depth)
        self.latents = nn.Parameter(torch.randn(latents, dim))
        self.read = PerceiverLayer(dim, heads, widening=widening, cross=True)
        self.process = nn.ModuleList(
            PerceiverLayer(dim, heads, widening=widening, cross=False) for _ in range(depth)
        )
        self.write = PerceiverLayer(dim, heads, widening=widening, cross=True, residual=False)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        return self.write(x, self._encode(x if context is None else context, mask)), None

    def encode(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Latents (b latents d) after reading x (b n d) and self-attention."""
        x, _ = self._check_inputs(x, None, mask, None)
        return self._encode(x, mask)

    def _encode(self, source: Tensor, mask: Tensor | None) -> Tensor:
        z = self.read(self.latents.expand(source.shape[0], -1, -1), source, mask)
        for layer in self.process:
            z = layer(z)
        return z
