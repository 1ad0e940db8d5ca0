"""Gaps for a masked model to fill."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends import check_mask
from regard.errors import check_int
from regard.models.losses import IGNORE_INDEX

HIDDEN, SWAPPED = (
    0.8,
    0.1,
)  # shares of the chosen tokens; the rest stays, so that a model cannot trust what it sees


def mask_tokens(
    tokens: Tensor,
    vocab_size: int,
    *,
    gap: int,
    seed: int,
    mask: Tensor | None = None,
    rate: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """tokens (b n) -> what the model reads, and what it is to say, (b n) each, for `cross_entropy_loss`
    (Devlin et al. 2019, arXiv 1810.04805).

    Each token is chosen with probability `rate`.  Of those, 80 % become the token `gap`, 10 % any token of the vocabulary, and
    10 % stay.  Targets are the chosen tokens, and `IGNORE_INDEX` elsewhere.

    mask   (b n), True = may be chosen: real tokens, without such as stand for beginnings and ends
    """
    check_int(1, vocab_size=vocab_size)
    check_int(0, gap=gap)
    check_mask(mask, (tokens.shape[0], tokens.shape[1]), "mask")
    if not 0 <= rate <= 1 or gap >= vocab_size:
        raise ValueError(
            f"rate must be from 0 to 1, and gap below {vocab_size}, not {rate!r} and {gap!r}"
        )
    generator = torch.Generator().manual_seed(seed)
    chance, fate = (
        torch.rand(tokens.shape, generator=generator).to(tokens.device) for _ in range(2)
    )
    other = torch.randint(vocab_size, tokens.shape, generator=generator).to(tokens)
    chosen = chance < rate if mask is None else (chance < rate) & mask
    read = torch.where(chosen & (fate < HIDDEN), gap, tokens)
    read = torch.where(chosen & (fate >= HIDDEN) & (fate < HIDDEN + SWAPPED), other, read)
    return read, tokens.masked_fill(~chosen, IGNORE_INDEX)
