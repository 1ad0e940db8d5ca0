"""Inputs of models: token ids (b, n), vectors (b, n, width), images (b, c, h, w) or videos
(b, t, c, h, w) -> (b, n, d).

Each kind of input is a configuration, which builds the embedding below it. A new kind is these two
classes and an entry in `InputConfig`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard.backends import check_mask
from regard.models.spec import Size, StrictModel, VocabSize
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


class EmbeddingContext(NamedTuple):
    """The model around an embedding.

    Attributes:
        dim: Width of the tokens.
        dropout: Dropout probability.
        length: Maximum number of tokens; None: not limited.
        norm: Builds the norm of the model for a width.
        position: Builds the positional encoding of the model for a width, a length, and the rows
            and columns of a grid or None.
    """

    dim: int
    dropout: float
    length: int | None
    norm: Callable[[int], Norm]
    position: Callable[[int, int | None, tuple[int, int] | None], nn.Module]


class InputSpec(StrictModel, ABC):
    """Configuration of an input."""

    kind: str

    @property
    def fixed_length(self) -> int | None:
        """Number of tokens, if it is the same for all inputs."""
        return None

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns, if all tokens form a grid."""
        return None

    @abstractmethod
    def count_tokens(self, x: Tensor) -> int:
        """Number of tokens of a batch, with padding."""

    @abstractmethod
    def build(self, context: EmbeddingContext) -> InputEmbedding:
        """Build the embedding."""


# ------------------------------------------------------------------------------------------- tokens
class TokenInput(InputSpec):
    """Token ids (b, n).

    Attributes:
        vocab_size: Number of token ids.
        embedding_dim: Width of the embedding tables, followed by a linear projection to the model
            width. None: the model width, without a projection.
        type_vocab_size: Number of token types (segments in BERT). 0: no token types.
        scale_embeddings: Multiply embeddings by √d (Vaswani et al. 2017).
        norm: Apply the model's norm to the sum of the embeddings.
    """

    kind: Literal["tokens"] = "tokens"
    vocab_size: VocabSize
    embedding_dim: Size | None = None
    type_vocab_size: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    scale_embeddings: bool = False
    norm: bool = False

    def count_tokens(self, x: Tensor) -> int:
        """See `InputSpec`."""
        return x.numel()

    def build(self, context: EmbeddingContext) -> TokenEmbedding:
        """See `InputSpec`."""
        dim = self.embedding_dim or context.dim
        return TokenEmbedding(
            self.vocab_size,
            dim,
            position=context.position(dim, context.length, None),
            type_vocab_size=self.type_vocab_size,
            scale=self.scale_embeddings,
            norm=context.norm(dim) if self.norm else None,
            dropout=context.dropout,
            out_dim=None if self.embedding_dim is None else context.dim,
        )


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


# ------------------------------------------------------------------------------------------ vectors
class VectorInput(InputSpec):
    """Vectors (b, n, width): features, elements of a set, values of a time series."""

    kind: Literal["vectors"] = "vectors"
    width: Size

    def count_tokens(self, x: Tensor) -> int:
        """See `InputSpec`."""
        return x.shape[0] * x.shape[1]

    def build(self, context: EmbeddingContext) -> VectorEmbedding:
        """See `InputSpec`."""
        position = context.position(context.dim, context.length, None)
        return VectorEmbedding(self.width, context.dim, position=position, dropout=context.dropout)


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


# ------------------------------------------------------------------------------------------- images
class PatchInput(InputSpec):
    """Images (b, channels, height, width), split into square patches.

    Attributes:
        patch_size: Side of a patch. Must divide height and width.
        class_token: Prepend a learned class token.
        stem: "linear", or "conv": a sequence of stride-2 convolutions (XCiT).
    """

    kind: Literal["patches"] = "patches"
    height: Size
    width: Size
    patch_size: Size
    channels: Size = 3
    class_token: bool = True
    stem: Literal["linear", "conv"] = "linear"

    @model_validator(mode="after")
    def _check_patch_size(self) -> Self:
        size = self.patch_size
        if self.stem == "conv" and (size < 2 or size & (size - 1)):
            raise ValueError(f"stem 'conv' needs a patch_size that is a power of 2, not {size}")
        if self.height % size or self.width % size:
            raise ValueError(
                f"patch_size {size} does not divide the image size {self.height} × {self.width}"
            )
        return self

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch_size, self.width // self.patch_size

    @property
    def grid(self) -> tuple[int, int] | None:
        """See `InputSpec`: the patches, unless a class token comes before them."""
        return None if self.class_token else self.patches

    @property
    def length(self) -> int:
        """Number of tokens of an image."""
        rows, columns = self.patches
        return rows * columns + self.class_token

    @property
    def fixed_length(self) -> int:
        """See `InputSpec`."""
        return self.length

    def count_tokens(self, x: Tensor) -> int:
        """See `InputSpec`."""
        return len(x) * self.length

    def build(self, context: EmbeddingContext) -> PatchEmbedding:
        """See `InputSpec`."""
        rows, columns = self.patches
        return PatchEmbedding(
            self.patches,
            self.patch_size,
            context.dim,
            position=context.position(context.dim, rows * columns, self.patches),
            channels=self.channels,
            class_token=self.class_token,
            stem=self.stem,
            dropout=context.dropout,
        )


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


# -------------------------------------------------------------------------------------------- video
class VideoInput(InputSpec):
    """Videos (b, frames, channels, height, width), split into tubelets.

    Attributes:
        tubelet: Frames of a tubelet. Must divide frames.
        patch_size: Side of a tubelet in pixels. Must divide height and width.
    """

    kind: Literal["video"] = "video"
    frames: Size
    height: Size
    width: Size
    patch_size: Size
    tubelet: Size = 1
    channels: Size = 1

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.height % self.patch_size or self.width % self.patch_size:
            raise ValueError(
                f"patch_size {self.patch_size} does not divide the image size {self.height} × "
                f"{self.width}"
            )
        if self.frames % self.tubelet:
            raise ValueError(f"tubelet {self.tubelet} does not divide the {self.frames} frames")
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """See `InputSpec`: a row for each time, with all patches of a frame. So axial attention in
        two passes is divided attention in space and time (Bertasius et al. 2021)."""
        patches = (self.height // self.patch_size) * (self.width // self.patch_size)
        return self.frames // self.tubelet, patches

    @property
    def length(self) -> int:
        """Number of tokens of a video."""
        times, patches = self.grid
        return times * patches

    @property
    def fixed_length(self) -> int:
        """See `InputSpec`."""
        return self.length

    def count_tokens(self, x: Tensor) -> int:
        """See `InputSpec`."""
        return len(x) * self.length

    def build(self, context: EmbeddingContext) -> VideoEmbedding:
        """See `InputSpec`."""
        return VideoEmbedding(
            (self.frames, self.channels, self.height, self.width),
            (self.tubelet, self.patch_size),
            context.dim,
            position=context.position(context.dim, self.length, self.grid),
            dropout=context.dropout,
        )


class VideoEmbedding(InputEmbedding):
    """Videos (b, frames, channels, height, width) -> one token per tubelet, time by time and row by
    row: a linear layer on its pixels (Arnab et al. 2021, arXiv 2103.15691).

    Args:
        shape: Frames, channels, height and width.
        tubelet: Frames of a tubelet, and its side in pixels.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        tubelet: tuple[int, int],
        dim: int,
        *,
        position: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape, self.position, self.dropout = shape, position, nn.Dropout(dropout)
        frames, side = tubelet
        size = (frames, side, side)
        self.project = nn.Conv3d(shape[1], dim, size, stride=size)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> Embedded:
        """See `InputEmbedding`; mask (b, n) over the tubelets."""
        refuse_token_types(token_type_ids)
        if x.dim() != 5 or x.shape[1:] != self.shape or not x.is_floating_point():
            raise ValueError(
                f"videos must be floating-point, of shape (b, {', '.join(map(str, self.shape))}), "
                f"not {tuple(x.shape)} {x.dtype}"
            )
        if isinstance(start, Tensor) or start:
            raise ValueError("a video cannot be streamed in chunks: give it whole")
        y = self.position(self.project(x.transpose(1, 2)).flatten(2).transpose(1, 2), start)
        check_mask(mask, (y.shape[0], y.shape[1]), "mask")
        return self.dropout(y), mask


# ----------------------------------------------------------------------------------------- features
class FeatureInput(InputSpec):
    """Feature ids (b, k, n): each token has k features, such as a word, its shape and its affixes.

    Attributes:
        num_features: Number of different features; id 0 is an unknown one.
        features_per_token: k.
    """

    kind: Literal["features"] = "features"
    num_features: VocabSize
    features_per_token: Size

    def count_tokens(self, x: Tensor) -> int:
        """See `InputSpec`."""
        return x.shape[0] * x.shape[-1]

    def build(self, context: EmbeddingContext) -> FeatureEmbedding:
        """See `InputSpec`."""
        return FeatureEmbedding(
            self.num_features,
            self.features_per_token,
            context.dim,
            position=context.position(context.dim, context.length, None),
            norm=context.norm(context.dim),
            dropout=context.dropout,
        )


class FeatureEmbedding(InputEmbedding):
    """Feature ids (b, k, n) -> norm(sum of the k embeddings) + position, (b, n, d).

    Unknown features (id 0) and padding add nothing.
    """

    def __init__(
        self,
        num_features: int,
        features_per_token: int,
        dim: int,
        *,
        position: nn.Module,
        norm: Norm,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.features_per_token = features_per_token
        self.tokens = nn.Embedding(num_features, dim, padding_idx=0)
        self.position, self.norm, self.dropout = position, norm, nn.Dropout(dropout)
        with torch.no_grad():
            nn.init.normal_(self.tokens.weight, std=0.05)
            self.tokens.weight[0].zero_()

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
        if x.dim() != 3 or x.shape[1] != self.features_per_token:
            raise ValueError(
                f"features must have the shape (b, {self.features_per_token}, n), not "
                f"{tuple(x.shape)}"
            )
        rows = None if mask is None else mask[:, None].expand_as(x).flatten(1)
        ids = check_ids(x.flatten(1), rows, self.tokens.num_embeddings, "feature")
        y = self.norm(self.tokens(ids.view_as(x)).sum(1), mask)
        return self.dropout(self.position(y, start)), mask


InputConfig = Annotated[
    TokenInput | FeatureInput | VectorInput | PatchInput | VideoInput, Field(discriminator="kind")
]


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
