"""What goes in becomes tokens of the model's width: (b n) numbers, (b n width) vectors or (b c h w) images -> (b n d)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor, nn

from regard.backends import check_mask
from regard.norm import Norm

Embedded = tuple[Tensor, Tensor | None]


class InputEmbedding(nn.Module, ABC):
    """The input -> tokens (b n d), and their mask (b n)."""

    @abstractmethod
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, types: Tensor | None = None, at: int = 0
    ) -> Embedded:
        """x, mask (b n) over its tokens, types (b n) where the kind knows them; the first token stands at `at`."""


class TokenEmbedding(InputEmbedding):
    """Token numbers (b n) -> norm(tokens · √d or 1 + types + position), (b n d).

    position   (b n d), at -> (b n d)
    out        a linear layer behind all that gives this width; None: there is none
    types      how many types of tokens; 0: none.  Where a call gives no types, all are of type 0, as in BERT
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        position: nn.Module,
        types: int = 0,
        scale: bool = False,
        norm: Norm | None = None,
        dropout: float = 0.0,
        out: int | None = None,
    ) -> None:
        super().__init__()
        self.project = None if out is None else nn.Linear(dim, out)
        self.tokens, self.position, self.norm = nn.Embedding(vocab_size, dim), position, norm
        self.types = nn.Embedding(types, dim) if types else None
        self.scale, self.dropout = dim**0.5 if scale else 1.0, nn.Dropout(dropout)
        nn.init.normal_(
            self.tokens.weight, std=dim**-0.5 if scale else 0.02
        )  # tied weights give logits of this size
        if self.types is not None:
            nn.init.normal_(self.types.weight, std=0.02)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, types: Tensor | None = None, at: int = 0
    ) -> Embedded:
        """See `Embed`."""
        y = self.tokens(numbers(x, mask, self.tokens.num_embeddings, "token")) * self.scale
        y = self.position(y + self._typed(x, mask, types), at)
        y = y if self.norm is None else self.norm(y, mask)
        return self.dropout(y if self.project is None else self.project(y)), mask

    def _typed(self, x: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        if self.types is None:
            if types is not None:
                raise ValueError("types were given, and this model tells no types of tokens apart")
            return self.tokens.weight.new_zeros(())
        if types is None:
            return self.types.weight[0]
        if types.shape != x.shape:
            raise ValueError(
                f"types must have the shape of the tokens, {tuple(x.shape)}, not {tuple(types.shape)}"
            )
        return self.types(numbers(types, mask, self.types.num_embeddings, "type"))


class VectorEmbedding(InputEmbedding):
    """Vectors (b n width) -> W x + b + position, (b n d)."""

    def __init__(self, width: int, dim: int, *, position: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.position, self.dropout = (
            nn.Linear(width, dim),
            position,
            nn.Dropout(dropout),
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, types: Tensor | None = None, at: int = 0
    ) -> Embedded:
        """See `Embed`."""
        refuse_types(types)
        width = self.project.in_features
        if x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():
            raise ValueError(
                f"the input must be a floating tensor of shape (b n {width}), not {tuple(x.shape)} {x.dtype}"
            )
        check_mask(mask, (x.shape[0], x.shape[1]), "mask")
        x = x if mask is None else x.masked_fill(~mask[..., None], 0)
        return self.dropout(self.position(self.project(x), at)), mask


class PatchEmbedding(InputEmbedding):
    """Images (b channels height width) -> a token for each patch, row by row, and before them a learned one where `cls`
    (Dosovitskiy et al. 2021, arXiv 2010.11929).

    A convolution with stride `patch`, which is the same as a linear layer on each patch.  The class token has no position:
    it is learned itself.

    grid   rows and columns of patches
    stem   "convolutions": log₂ patch of them, 3 × 3 with stride 2, each with a batch norm, and gelu between them, which double
           the width up to d (El-Nouby et al. 2021, arXiv 2106.09681)
    """

    def __init__(
        self,
        grid: tuple[int, int],
        patch: int,
        dim: int,
        *,
        position: nn.Module,
        channels: int = 3,
        cls: bool = True,
        stem: str = "linear",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape = (channels, grid[0] * patch, grid[1] * patch)
        self.position = position
        linear = stem == "linear"
        self.project = (
            nn.Conv2d(channels, dim, patch, stride=patch)
            if linear
            else convolutions(channels, dim, patch)
        )
        self.cls = nn.Parameter(torch.randn(dim) * 0.02) if cls else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, types: Tensor | None = None, at: int = 0
    ) -> Embedded:
        """x (b c h w), mask (b n) over the patches -> (b n d) and its mask, both one longer where there is a class token."""
        refuse_types(types)
        if x.dim() != 4 or x.shape[1:] != self.shape or not x.is_floating_point():
            raise ValueError(
                f"images must be floating, of shape (b {' '.join(map(str, self.shape))}), not {tuple(x.shape)}"
            )
        if at:
            raise ValueError("an image is read at once, not in chunks")
        y = self.position(self.project(x).flatten(2).transpose(1, 2), at)
        check_mask(mask, (y.shape[0], y.shape[1]), "mask")
        if self.cls is not None:
            y = torch.cat((self.cls.to(y.dtype).expand(y.shape[0], 1, -1), y), 1)
            mask = None if mask is None else torch.cat((mask.new_ones(mask.shape[0], 1), mask), 1)
        return self.dropout(y), mask


def convolutions(channels: int, dim: int, patch: int) -> nn.Sequential:
    """An image (b c h w) -> (b d h/patch w/patch), halving it step by step."""
    steps = patch.bit_length() - 1
    if dim % (1 << (steps - 1)):
        raise ValueError(
            f"{steps} convolutions double the width, so dim must be divisible by {1 << (steps - 1)}, not {dim}"
        )
    widths = [channels, *(dim >> (steps - 1 - step) for step in range(steps))]
    found: list[nn.Module] = []
    for step, (a, b) in enumerate(pairwise(widths)):
        found += [nn.GELU()] * (step > 0)
        found.append(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b))
        )
    return nn.Sequential(*found)


def refuse_types(types: Tensor | None) -> None:
    """Only tokens have types."""
    if types is not None:
        raise ValueError("types are for models that read token numbers")


def numbers(x: Tensor, mask: Tensor | None, count: int, what: str) -> Tensor:
    """Numbers (b n) below `count`; where the mask leaves tokens out, anything may stand, and 0 is taken."""
    if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{what}s must be whole numbers (b n), int64 or int32, not {tuple(x.shape)} {x.dtype}"
        )
    check_mask(mask, (x.shape[0], x.shape[1]), "mask")
    x = x if mask is None else x.masked_fill(~mask, 0)
    if x.is_meta or torch.compiler.is_compiling():
        return x  # there are no values to look at
    wrong = (x < 0) | (x >= count)
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{what} {int(x[row, place])} at place {place} of example {row}: this model knows {count} {what}s, 0 to {count - 1}"
        )
    return x
