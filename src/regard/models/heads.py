"""Model heads: tokens (b, n, d) become logits, numbers or one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import did_you_mean
from regard.mixers import PMA
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
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


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
