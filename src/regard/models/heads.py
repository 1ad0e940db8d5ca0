"""What comes out: tokens (b n d) become logits, classes, numbers or one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import did_you_mean
from regard.mixers import PMA
from regard.norm import Norm
from regard.numerics import masked_softmax


class Pooling(nn.Module, ABC):
    """Tokens (b n d), mask (b n), True = a real token -> one vector each, (b d); zero where there is no real token."""

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor) -> Tensor: ...


class FirstTokenPooling(Pooling):
    """The first real token: the class token of BERT and ViT."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return taken(x, mask, mask.int().argmax(1))


class LastTokenPooling(Pooling):
    """The last real token: the one that has seen all others in a causal model."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return taken(x, mask, mask.shape[1] - 1 - mask.int().flip(1).argmax(1))


class MeanPooling(Pooling):
    """The mean of the real tokens."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return blank(x, mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1).to(x.dtype)


class MaxPooling(Pooling):
    """The largest value of each channel over the real tokens."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        best = x.masked_fill(~mask[..., None], -float("inf")).amax(1)
        return best.masked_fill(~mask.any(1, keepdim=True), 0)


class AttentionPooling(Pooling):
    """Σ_i softmax_i(w · x_i) x_i, with w (d) learned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        x = blank(x, mask)
        return (masked_softmax(self.score(x).squeeze(-1), mask).unsqueeze(1) @ x).squeeze(1)


class PMAPooling(Pooling):
    """A learned vector asks the tokens by attention: `regard.mixers.PMA` with one seed."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ask = PMA(dim, heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """See `Pooling`."""
        return self.ask(x, mask).squeeze(1).masked_fill(~mask.any(1, keepdim=True), 0)


POOLINGS: dict[str, Callable[[int, int], Pooling]] = {
    "cls": lambda dim, heads: FirstTokenPooling(),
    "last": lambda dim, heads: LastTokenPooling(),
    "mean": lambda dim, heads: MeanPooling(),
    "max": lambda dim, heads: MaxPooling(),
    "attention": lambda dim, heads: AttentionPooling(dim),
    "pma": PMAPooling,
}


def build_pooling(name: str, dim: int, heads: int) -> Pooling:
    """The pooling of that name."""
    if name not in POOLINGS:
        raise ValueError(f"no pooling {name!r}: {did_you_mean(name, POOLINGS)}")
    return POOLINGS[name](dim, heads)


def blank(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros where a token is left out: NaN would survive a weight of zero."""
    return x.masked_fill(~mask[..., None], 0)


def taken(x: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    """The token at place `at` (b) of each example, (b d)."""
    found = x.gather(1, at[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    return found.masked_fill(~mask.any(1, keepdim=True), 0)


class ModelHead(nn.Module, ABC):
    """Tokens (b n d), mask (b n) -> what the model says."""

    pools: bool = False  # one answer for all tokens together

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class LMHead(ModelHead):
    """Logits x Wᵀ + b over the vocabulary, (b n vocab).

    table   W (vocab d) of the embeddings, to share; None: the head has its own
    """

    def __init__(
        self, dim: int, vocab_size: int, *, table: Tensor | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Linear(dim, vocab_size, bias=bias)
        if table is not None:
            if tuple(table.shape) != (vocab_size, dim):
                raise ValueError(
                    f"the table to share is {tuple(table.shape)}, and the head needs {(vocab_size, dim)}"
                )
            self.words.weight = table

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Head`."""
        return self.words(x)


class MaskedLMHead(ModelHead):
    """norm(σ(W x + b)), then logits over the vocabulary with a bias (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(
        self,
        dim: int,
        words: LMHead,
        *,
        norm: Norm,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.transform, self.norm, self.words, self.activation = (
            nn.Linear(dim, dim),
            norm,
            words,
            activation,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Head`."""
        return self.words(self.norm(self.activation(self.transform(x)), mask))


class PredictionHead(ModelHead):
    """W x + b on the pooled tokens, (b outputs), or on each, (b n outputs): classes, tags or numbers.

    pool     None: each token by itself
    hidden   tanh(W x + b) stands before
    """

    def __init__(
        self,
        dim: int,
        outputs: int,
        *,
        pool: Pooling | None = None,
        hidden: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.pool, self.hidden, self.pools = (
            pool,
            nn.Linear(dim, dim) if hidden else None,
            pool is not None,
        )
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(dim, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Head`."""
        x = x if self.pool is None else pooled(self.pool, x, mask)
        x = x if self.hidden is None else self.hidden(x).tanh()
        return self.last(self.dropout(x))


class MatchingHead(ModelHead):
    """W₂ relu(W₁ [u, v, u ∘ v, u − v] + b₁) + b₂, where u and v are two sequences, each pooled.  Its tokens are (2b n d), two
    rows that follow each other being a pair, and its logits (b outputs)."""

    def __init__(
        self, dim: int, outputs: int, *, pool: Pooling, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.pool, self.first, self.last = (
            pool,
            nn.Linear(4 * dim, hidden),
            nn.Linear(hidden, outputs),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Head`."""
        u, v = pooled(self.pool, x, mask).unflatten(0, (-1, 2)).unbind(1)
        return self.last(self.dropout(self.first(torch.cat((u, v, u * v, u - v), -1)).relu()))


class PoolingHead(ModelHead):
    """One vector for all tokens, (b d); of length 1 where `unit`."""

    pools = True

    def __init__(self, pool: Pooling, *, unit: bool = False) -> None:
        super().__init__()
        self.pool, self.unit = pool, unit

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Head`."""
        y = pooled(self.pool, x, mask)
        return F.normalize(y, dim=-1) if self.unit else y


def pooled(pool: Pooling, x: Tensor, mask: Tensor | None) -> Tensor:
    """Pool, with all tokens real where no mask tells otherwise."""
    if x.shape[1] == 0:
        raise ValueError("there are no tokens to pool: the input is empty")
    return pool(
        x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    )
