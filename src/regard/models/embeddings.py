"""Input embeddings: token ids (b, n), vectors (b, n, width) or images (b, c, h, w) -> (b, n, d)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor, nn

from regard.backends import check_mask
from regard.norm import Norm
from regard.numerics import zero_padding_tokens

Embedded = tuple[Tensor, Tensor | None]


class InputEmbedding(nn.Module, ABC):
    """Maps the input of a model to tokens (b, n, d) and their mask (b, n)."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> Embedded:
        """Embed x.

        Args:
            mask: (b, n), True = keep.
            token_type_ids: (b, n), for models with token types.
            start: Position of the first token; (b) if it differs between examples.
        """


class TokenEmbedding(InputEmbedding):
    """Token ids (b, n) -> norm(token embeddings · √d or 1 + token types + position), (b, n, d).

    Args:
        position: Maps (b, n, d) and the position of the first token to (b, n, d).
        type_vocab_size: Number of token types; 0: none. Calls without `token_type_ids` use type 0,
            as in BERT.
        out_dim: Width of a linear projection applied last. None: no projection.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        position: nn.Module,
        type_vocab_size: int = 0,
        scale: bool = False,
        norm: Norm | None = None,
        dropout: float = 0.0,
        out_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.project = None if out_dim is None else nn.Linear(dim, out_dim)
        self.tokens, self.position, self.norm = nn.Embedding(vocab_size, dim), position, norm
        self.token_types = nn.Embedding(type_vocab_size, dim) if type_vocab_size else None
        self.scale, self.dropout = dim**0.5 if scale else 1.0, nn.Dropout(dropout)
        # Tied weights then give logits of order 1.
        nn.init.normal_(self.tokens.weight, std=dim**-0.5 if scale else 0.02)
        if self.token_types is not None:
            nn.init.normal_(self.token_types.weight, std=0.02)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> Embedded:
        """See `InputEmbedding`."""
        y = self.tokens(check_ids(x, mask, self.tokens.num_embeddings, "token")) * self.scale
        if self.token_types is None:
            if token_type_ids is not None:
                raise ValueError("token_type_ids given, but the model has no token types")
        elif token_type_ids is None:
            y = y + self.token_types.weight[0]
        else:
            if token_type_ids.shape != x.shape:
                raise ValueError(
                    f"token_type_ids must have the shape of the tokens, {tuple(x.shape)}, "
                    f"not {tuple(token_type_ids.shape)}"
                )
            count = self.token_types.num_embeddings
            y = y + self.token_types(check_ids(token_type_ids, mask, count, "token type"))
        y = self.position(y, start)
        if self.norm is not None:
            y = self.norm(y, mask)
        return self.dropout(y if self.project is None else self.project(y)), mask


class VectorEmbedding(InputEmbedding):
    """Vectors (b, n, width) -> W x + b + position, (b, n, d)."""

    def __init__(self, width: int, dim: int, *, position: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.position = nn.Linear(width, dim), position
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> Embedded:
        """See `InputEmbedding`."""
        refuse_token_types(token_type_ids)
        width = self.project.in_features
        if x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():
            raise ValueError(
                f"input must be a floating-point tensor of shape (b, n, {width}), "
                f"not {tuple(x.shape)} {x.dtype}"
            )
        check_mask(mask, (x.shape[0], x.shape[1]), "mask")
        return self.dropout(self.position(self.project(zero_padding_tokens(x, mask)), start)), mask


class PatchEmbedding(InputEmbedding):
    """Images (b, channels, height, width) -> one token per patch, row by row
    (Dosovitskiy et al. 2021, arXiv 2010.11929).

    A convolution with stride `patch_size`, equivalent to a linear layer on each patch. The learned
    class token, if any, comes first and has no position.

    Args:
        grid: Rows and columns of patches.
        stem: "linear", or "conv": log₂ patch_size convolutions, 3 × 3 with stride 2, each with
            batch norm and GELU between them, doubling the width up to d (El-Nouby et al. 2021,
            arXiv 2106.09681).
    """

    def __init__(
        self,
        grid: tuple[int, int],
        patch_size: int,
        dim: int,
        *,
        position: nn.Module,
        channels: int = 3,
        class_token: bool = True,
        stem: str = "linear",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape = (channels, grid[0] * patch_size, grid[1] * patch_size)
        self.position = position
        self.project = (
            nn.Conv2d(channels, dim, patch_size, stride=patch_size)
            if stem == "linear"
            else conv_stem(channels, dim, patch_size)
        )
        self.class_token = nn.Parameter(torch.randn(dim) * 0.02) if class_token else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> Embedded:
        """Images x (b, c, h, w), mask (b, n) over the patches -> (b, n, d) and its mask, both one
        longer with a class token."""
        refuse_token_types(token_type_ids)
        if x.dim() != 4 or x.shape[1:] != self.shape or not x.is_floating_point():
            raise ValueError(
                f"images must be floating-point, of shape (b, {', '.join(map(str, self.shape))}), "
                f"not {tuple(x.shape)} {x.dtype}"
            )
        if isinstance(start, Tensor) or start:
            raise ValueError("an image cannot be streamed in chunks: give it whole")
        y = self.position(self.project(x).flatten(2).transpose(1, 2), start)
        check_mask(mask, (y.shape[0], y.shape[1]), "mask")
        if self.class_token is not None:
            y = torch.cat((self.class_token.to(y.dtype).expand(y.shape[0], 1, -1), y), 1)
            if mask is not None:
                mask = torch.cat((mask.new_ones(mask.shape[0], 1), mask), 1)
        return self.dropout(y), mask


def conv_stem(channels: int, dim: int, patch_size: int) -> nn.Sequential:
    """Stride-2 convolutions: images (b, c, h, w) -> (b, d, h / patch_size, w / patch_size)."""
    steps = patch_size.bit_length() - 1
    if dim % (1 << (steps - 1)):
        raise ValueError(
            f"stem 'conv' doubles the width {steps - 1} times, "
            f"so dim must be divisible by {1 << (steps - 1)}, not {dim}"
        )
    widths = [channels, *(dim >> (steps - 1 - step) for step in range(steps))]
    modules: list[nn.Module] = []
    for step, (a, b) in enumerate(pairwise(widths)):
        modules += [nn.GELU()] * (step > 0)
        conv = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
        modules.append(nn.Sequential(conv, nn.BatchNorm2d(b)))
    return nn.Sequential(*modules)


def refuse_token_types(token_type_ids: Tensor | None) -> None:
    """Only token ids have types."""
    if token_type_ids is not None:
        raise ValueError("token_type_ids are for models that read token ids")


def check_ids(x: Tensor, mask: Tensor | None, count: int, name: str) -> Tensor:
    """Check that ids (b, n) lie in [0, count). Padding may hold anything and is replaced by 0."""
    if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} ids must be int64 or int32 of shape (b, n), not {tuple(x.shape)} {x.dtype}"
        )
    check_mask(mask, (x.shape[0], x.shape[1]), "mask")
    x = x if mask is None else x.masked_fill(~mask, 0)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return x  # no values, or the device checks them: reading them here would wait for it
    wrong = (x < 0) | (x >= count)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} id {int(x[row, column])} at position {column} of sequence {row} "
            f"is not in 0..{count - 1}"
        )
    return x
