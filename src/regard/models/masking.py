"""Token masking for masked language modelling."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends import check_mask
from regard.errors import check_int
from regard.models.losses import IGNORE_INDEX

MASKED, REPLACED = 0.8, 0.1  # fractions of the selected tokens; the rest is unchanged


def mask_tokens(
    tokens: Tensor,
    vocab_size: int,
    *,
    mask_token_id: int,
    seed: int,
    mask: Tensor | None = None,
    mlm_probability: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Mask tokens (b, n) as in BERT (Devlin et al. 2019, arXiv 1810.04805).

    Each token is selected with `mlm_probability`. Of those, 80 % become `mask_token_id`, 10 % a
    random token, and 10 % stay.

    Args:
        mask: (b, n), True = may be selected: real tokens, without special tokens.

    Returns:
        Inputs and targets for `cross_entropy_loss`, (b, n) each. Targets are the selected tokens,
        and `IGNORE_INDEX` elsewhere.
    """
    check_int(1, vocab_size=vocab_size)
    check_int(0, mask_token_id=mask_token_id)
    check_mask(mask, (tokens.shape[0], tokens.shape[1]), "mask")
    if not 0 <= mlm_probability <= 1:
        raise ValueError(f"mlm_probability must be from 0 to 1, not {mlm_probability!r}")
    if mask_token_id >= vocab_size:
        raise ValueError(f"mask_token_id must be below {vocab_size}, not {mask_token_id!r}")
    generator = torch.Generator().manual_seed(seed)
    chance, action = (
        torch.rand(tokens.shape, generator=generator).to(tokens.device) for _ in range(2)
    )
    random_tokens = torch.randint(vocab_size, tokens.shape, generator=generator).to(tokens)
    selected = chance < mlm_probability
    if mask is not None:
        selected = selected & mask
    inputs = torch.where(selected & (action < MASKED), mask_token_id, tokens)
    replaced = selected & (action >= MASKED) & (action < MASKED + REPLACED)
    inputs = torch.where(replaced, random_tokens, inputs)
    return inputs, tokens.masked_fill(~selected, IGNORE_INDEX)
