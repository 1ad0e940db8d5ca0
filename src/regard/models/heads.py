"""Model heads: tokens (b, n, d) become logits, numbers or one vector.

Each kind of head is a configuration, which builds the module beside it and knows the loss that it
is trained with by default. A new kind is such a pair and an entry in
`regard.models.config.HeadConfig`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import did_you_mean
from regard.ffn import get_activation
from regard.mixers import PMA
from regard.models.losses import cross_entropy_loss, mse_loss
from regard.models.spec import Size, StrictModel
from regard.norm import Norm
from regard.numerics import masked_softmax, zero_padding_tokens


# ------------------------------------------------------------------------------------------ pooling
class Pooling(nn.Module, ABC):
    """Pools tokens (b, n, d) with mask (b, n), True = keep, to one vector each, (b, d).

    Sequences without a real token give zeros.
    """

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor) -> Tensor: ...


class FirstTokenPooling(Pooling):
    """First real token: the class token of BERT and ViT."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return select_token(x, mask, mask.int().argmax(1))


class LastTokenPooling(Pooling):
    """Last real token, which has seen all others in a causal model."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return select_token(x, mask, mask.shape[1] - 1 - mask.int().flip(1).argmax(1))


class MeanPooling(Pooling):
    """Mean of the real tokens."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        counts = mask.sum(1, keepdim=True).clamp(min=1)
        return zero_padding_tokens(x, mask).sum(1) / counts.to(x.dtype)


class MaxPooling(Pooling):
    """Maximum of each channel over the real tokens."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        largest = x.masked_fill(~mask[..., None], -float("inf")).amax(1)
        return largest.masked_fill(~mask.any(1, keepdim=True), 0)


class AttentionPooling(Pooling):
    """Σ_i softmax_i(w · x_i) x_i, with w (d) learned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        x = zero_padding_tokens(x, mask)
        return (masked_softmax(self.score(x).squeeze(-1), mask).unsqueeze(1) @ x).squeeze(1)


class PMAPooling(Pooling):
    """Pooling by multi-head attention: `regard.mixers.PMA` with one learned query."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = PMA(dim, heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        pooled = self.attention(x, mask).squeeze(1)
        return pooled.masked_fill(~mask.any(1, keepdim=True), 0)


POOLINGS: dict[str, Callable[[int, int], Pooling]] = {
    "cls": lambda dim, heads: FirstTokenPooling(),
    "last": lambda dim, heads: LastTokenPooling(),
    "mean": lambda dim, heads: MeanPooling(),
    "max": lambda dim, heads: MaxPooling(),
    "attention": lambda dim, heads: AttentionPooling(dim),
    "pma": PMAPooling,
}


def build_pooling(name: str, dim: int, heads: int) -> Pooling:
    """Build the pooling of that name."""
    if name not in POOLINGS:
        raise ValueError(f"no pooling {name!r}: {did_you_mean(name, POOLINGS)}")
    return POOLINGS[name](dim, heads)


def select_token(x: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """Token `index` (b) of each sequence, (b, d); zero for sequences without a real token."""
    token = x.gather(1, index[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    return token.masked_fill(~mask.any(1, keepdim=True), 0)


def pool_sequence(pooling: Pooling, x: Tensor, mask: Tensor | None) -> Tensor:
    """Pool tokens (b, n, d); without a mask all of them are real."""
    if x.shape[1] == 0:
        raise ValueError("cannot pool an empty sequence (0 tokens)")
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return pooling(x, mask)


# -------------------------------------------------------------------------------------------- heads
class ModelHead(nn.Module, ABC):
    """Maps tokens (b, n, d) with mask (b, n) to the output of a model."""

    pools: bool = False  # one output per sequence, instead of one per token

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any: ...


class HeadContext(NamedTuple):
    """The model around a head.

    Attributes:
        dim: Width of the tokens.
        heads: Number of attention heads, for a pooling that attends.
        dropout: Dropout probability.
        norm: Builds the norm of the model for a width.
        vocab_size: Size of the vocabulary; None: the model reads no tokens.
        embeddings: Embedding table (vocab_size, e), to share its weights.
    """

    dim: int
    heads: int
    dropout: float
    norm: Callable[[int], Norm]
    vocab_size: int | None = None
    embeddings: Tensor | None = None


class HeadSpec(StrictModel, ABC):
    """Configuration of a head.

    Attributes:
        models: Kinds of models that the head fits.
        needs_vocabulary: Whether its outputs are the tokens of the model.
        predicts_numbers: Whether targets are numbers, not classes.
    """

    models: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    needs_vocabulary: ClassVar[bool] = False
    predicts_numbers: ClassVar[bool] = False
    kind: str

    @abstractmethod
    def build(self, context: HeadContext) -> ModelHead:
        """Build the head."""

    def loss(self, output: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss over all targets: cross-entropy in nats, or mean squared error."""
        if not self.predicts_numbers:
            return cross_entropy_loss(output, labels, label_smoothing=label_smoothing)
        if label_smoothing:
            raise ValueError(
                f"label_smoothing applies to classes, and head {self.kind!r} predicts numbers."
            )
        return mse_loss(output.float(), labels.float())


class LMHeadConfig(HeadSpec):
    """Language-modelling head: logits over the vocabulary for each token, (b, n, vocab_size).

    Attributes:
        tie_weights: Share the weights of the token embeddings.
    """

    models: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "seq2seq")
    needs_vocabulary: ClassVar[bool] = True
    kind: Literal["lm"] = "lm"
    tie_weights: bool = True
    bias: bool = False

    def build(self, context: HeadContext) -> LMHead:
        """See `HeadSpec`."""
        assert context.vocab_size is not None
        weight = context.embeddings if self.tie_weights else None
        return LMHead(context.dim, context.vocab_size, weight=weight, bias=self.bias)


class LMHead(ModelHead):
    """Language-modelling head: logits x Wᵀ + b over the vocabulary, (b, n, vocab_size).

    Args:
        weight: Embedding table (vocab_size, d) to share. None: the head has its own.
    """

    def __init__(
        self, dim: int, vocab_size: int, *, weight: Tensor | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, vocab_size, bias=bias)
        if weight is not None:
            if tuple(weight.shape) != (vocab_size, dim):
                raise ValueError(
                    f"cannot tie weights: the embedding table is {tuple(weight.shape)}, "
                    f"the head needs {(vocab_size, dim)}"
                )
            self.proj.weight = weight

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `ModelHead`."""
        return self.proj(x)


class MaskedLMHeadConfig(HeadSpec):
    """BERT's masked-LM head: norm(σ(W x + b)), then vocabulary logits (b, n, vocab_size)."""

    models: ClassVar[tuple[str, ...]] = ("encoder",)
    needs_vocabulary: ClassVar[bool] = True
    kind: Literal["masked_lm"] = "masked_lm"
    tie_weights: bool = True
    activation: str = "gelu"

    def build(self, context: HeadContext) -> MaskedLMHead:
        """See `HeadSpec`."""
        return MaskedLMHead(
            context.dim,
            LMHeadConfig(tie_weights=self.tie_weights, bias=True).build(context),
            norm=context.norm(context.dim),
            activation=get_activation(self.activation),
        )


class MaskedLMHead(ModelHead):
    """norm(σ(W x + b)), then logits over the vocabulary (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(
        self,
        dim: int,
        lm_head: LMHead,
        *,
        norm: Norm,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.transform = nn.Linear(dim, dim)
        self.norm, self.lm_head, self.activation = norm, lm_head, activation

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `ModelHead`."""
        return self.lm_head(self.norm(self.activation(self.transform(x)), mask))


class SequenceClassificationHeadConfig(HeadSpec):
    """Logits over classes for a whole sequence, (b, num_classes).

    Attributes:
        pooling: How tokens become one vector, see `POOLINGS`.
        hidden_layer: Insert a layer tanh(W x + b) before the classifier, as in BERT.
    """

    kind: Literal["sequence_classification"] = "sequence_classification"
    num_classes: Size
    pooling: str = "cls"
    hidden_layer: bool = False

    def build(self, context: HeadContext) -> PredictionHead:
        """See `HeadSpec`."""
        return PredictionHead(
            context.dim,
            self.num_classes,
            pooling=build_pooling(self.pooling, context.dim, context.heads),
            hidden_layer=self.hidden_layer,
            dropout=context.dropout,
        )


class TokenClassificationHeadConfig(HeadSpec):
    """Logits over classes for each token, (b, n, num_classes)."""

    kind: Literal["token_classification"] = "token_classification"
    num_classes: Size

    def build(self, context: HeadContext) -> PredictionHead:
        """See `HeadSpec`."""
        return PredictionHead(context.dim, self.num_classes, dropout=context.dropout)


class RegressionHeadConfig(HeadSpec):
    """Numbers for a whole sequence, (b, num_outputs), or with pooling "none" for each token."""

    predicts_numbers: ClassVar[bool] = True
    kind: Literal["regression"] = "regression"
    num_outputs: Size = 1
    pooling: str = "mean"

    def build(self, context: HeadContext) -> PredictionHead:
        """See `HeadSpec`."""
        pooling = None
        if self.pooling != "none":
            pooling = build_pooling(self.pooling, context.dim, context.heads)
        return PredictionHead(
            context.dim, self.num_outputs, pooling=pooling, dropout=context.dropout
        )


class SegmentationHeadConfig(HeadSpec):
    """Logits over classes for each pixel of an image in patches, (b, num_classes, height, width).

    Attributes:
        rows: Rows of patches.
        columns: Columns of patches.
        patch_size: Side of a patch in pixels.
    """

    models: ClassVar[tuple[str, ...]] = ("encoder",)
    kind: Literal["segmentation"] = "segmentation"
    num_classes: Size
    rows: Size
    columns: Size
    patch_size: Size

    def build(self, context: HeadContext) -> SegmentationHead:
        """See `HeadSpec`."""
        grid = self.rows, self.columns
        return SegmentationHead(
            context.dim, self.num_classes, grid, self.patch_size, dropout=context.dropout
        )

    def loss(self, output: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy in nats over the pixels that have a class."""
        flat = output.movedim(1, -1)
        return cross_entropy_loss(flat, labels, label_smoothing=label_smoothing)


class SegmentationHead(ModelHead):
    """A linear layer from each token to the logits of the pixels of its patch (Strudel et al. 2021,
    arXiv 2105.05633, section 3.2, without interpolation: a patch has logits of its own).

    A class token before the patches is left out.

    Args:
        grid: Rows and columns of patches.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        grid: tuple[int, int],
        patch_size: int,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.grid, self.patch_size = grid, patch_size
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(dim, num_classes * patch_size**2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (b, n, d) -> logits (b, num_classes, height, width)."""
        patches = self.out(self.dropout(x[:, -self.grid[0] * self.grid[1] :]))
        logits: Tensor = F.pixel_shuffle(patches.mT.unflatten(-1, self.grid), self.patch_size)
        return logits


class PredictionHead(ModelHead):
    """W x + b of the pooled tokens, (b, outputs), or of each token, (b, n, outputs).

    Args:
        pooling: None: one output per token.
        hidden_layer: Insert a layer tanh(W x + b).
    """

    def __init__(
        self,
        dim: int,
        outputs: int,
        *,
        pooling: Pooling | None = None,
        hidden_layer: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.pooling, self.pools = pooling, pooling is not None
        self.hidden = nn.Linear(dim, dim) if hidden_layer else None
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(dim, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `ModelHead`."""
        if self.pooling is not None:
            x = pool_sequence(self.pooling, x, mask)
        if self.hidden is not None:
            x = self.hidden(x).tanh()
        return self.out(self.dropout(x))


class MatchingHeadConfig(HeadSpec):
    """Logits over classes for a pair of sequences, (b, num_classes).

    W₂ relu(W₁ [u, v, u ∘ v, u − v]) of the pooled sequences u and v
    (Tay et al. 2020, arXiv 2011.04006, after Mou et al. 2016, arXiv 1512.08422).

    Attributes:
        hidden: Rows of W₁. None: the model width.
    """

    models: ClassVar[tuple[str, ...]] = ("dual_encoder",)
    kind: Literal["matching"] = "matching"
    num_classes: Size
    pooling: str = "mean"
    hidden: Size | None = None

    def build(self, context: HeadContext) -> MatchingHead:
        """See `HeadSpec`."""
        return MatchingHead(
            context.dim,
            self.num_classes,
            pooling=build_pooling(self.pooling, context.dim, context.heads),
            hidden=self.hidden or context.dim,
            dropout=context.dropout,
        )


class MatchingHead(ModelHead):
    """W₂ relu(W₁ [u, v, u ∘ v, u − v] + b₁) + b₂ of two pooled sequences u and v.

    Maps tokens (2b, n, d), where consecutive rows are a pair, to logits (b, outputs).
    """

    def __init__(
        self, dim: int, outputs: int, *, pooling: Pooling, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.pooling, self.dropout = pooling, nn.Dropout(dropout)
        self.hidden, self.out = nn.Linear(4 * dim, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `ModelHead`."""
        u, v = pool_sequence(self.pooling, x, mask).unflatten(0, (-1, 2)).unbind(1)
        return self.out(self.dropout(self.hidden(torch.cat((u, v, u * v, u - v), -1)).relu()))


class PoolingHeadConfig(HeadSpec):
    """One vector for a whole sequence, (b, d); `normalize` scales it to length 1."""

    predicts_numbers: ClassVar[bool] = True
    kind: Literal["pooling"] = "pooling"
    pooling: str = "mean"
    normalize: bool = False

    def build(self, context: HeadContext) -> PoolingHead:
        """See `HeadSpec`."""
        pooling = build_pooling(self.pooling, context.dim, context.heads)
        return PoolingHead(pooling, normalize=self.normalize)


class PoolingHead(ModelHead):
    """Pooled vector (b, d); `normalize` scales it to length 1."""

    pools = True

    def __init__(self, pooling: Pooling, *, normalize: bool = False) -> None:
        super().__init__()
        self.pooling, self.normalize = pooling, normalize

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `ModelHead`."""
        y = pool_sequence(self.pooling, x, mask)
        return F.normalize(y, dim=-1) if self.normalize else y
