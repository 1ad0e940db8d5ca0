"""The model that `regard cost` speaks of: an embedding, blocks of one mixer, a head over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.block import Block
from regard.errors import check_whole
from regard.ffn import MLP
from regard.measure.work import Call, Work, formula, kept, together, work
from regard.norm import LayerNorm
from regard.registry import Recipe, create
from regard.stack import Plain

LIMITS = {"dim": 1 << 24, "layers": 1 << 12, "vocab": 1 << 32, "hidden": 1 << 28}  # numbers beyond are no sizes


@dataclass(frozen=True)
class Sizes:
    """What a model is built with.

    recipe    the mixer of every block, built with `options`
    hidden    width inside the feed-forward layers, four times `dim` unless given
    """

    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)
    dim: int = 512
    layers: int = 6
    vocab: int = 32_000
    hidden: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, dim=self.dim, layers=self.layers, vocab=self.vocab)
        if self.hidden is not None:
            check_whole(1, hidden=self.hidden)
        given = {"dim": self.dim, "layers": self.layers, "vocab": self.vocab, "hidden": self.hidden or 1}
        for name, size in given.items():
            if size > LIMITS[name]:
                raise ValueError(f"{name} must be at most {LIMITS[name]:,}, not {size:,}")


class TokenModel(nn.Module):
    """tokens (b n) -> logits (b n vocab)."""

    def __init__(self, vocab: int, stack: Plain) -> None:
        super().__init__()
        self.embedding, self.stack = nn.Embedding(vocab, stack.dim), stack
        self.norm, self.head = LayerNorm(stack.dim), nn.Linear(stack.dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.norm(self.stack(self.embedding(tokens))))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy; the logits are let go as soon as they were read."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


@formula(TokenModel)
def _token_model(module: TokenModel, call: Call) -> Work:
    """The parts, and the probabilities that the loss keeps."""
    stack = work(module.stack, call)
    loss = kept(call.rows * (module.head.out_features + 2))
    ends = {"norm": work(module.norm, call), "head": work(module.head, call), "loss": loss}
    total = together(embedding=work(module.embedding, call), **stack.parts, **ends)
    return total


def build(sizes: Sizes) -> TokenModel:
    """The model of these sizes, on the device at hand.  Whatever describes models otherwise is to be plugged in here."""
    mixers = [create(sizes.recipe.name, dim=sizes.dim, **sizes.options) for _ in range(sizes.layers)]
    return TokenModel(sizes.vocab, Plain([Block(mixer, MLP(sizes.dim, sizes.hidden)) for mixer in mixers]))


def on_meta(sizes: Sizes) -> TokenModel:
    """The same without numbers: whatever its size, it takes no memory."""
    try:
        with torch.device("meta"):
            return build(sizes)
    except RuntimeError as error:  # a tensor of more bytes than can be counted
        raise ValueError(f"a tensor of it would be larger than torch can describe: {error}") from error
