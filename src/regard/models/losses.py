"""Losses, as functions: logits and targets -> a scalar.  What is left out, or is not there at all, costs nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends import check_mask

IGNORE_INDEX = -100  # a target that does not count


def cross_entropy_loss(
    logits: Tensor, targets: Tensor, *, ignore: int = IGNORE_INDEX, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy in the mean over all targets that count: logits (... c), targets (...) of 0..c-1, or `ignore`.

    For classes (b c), tags, masked tokens and translations (b n c).  Smoothing ε puts ε / c on every choice (Szegedy et al.
    2016, arXiv 1512.00567).  Where no target counts the loss is zero, not NaN.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} want targets {tuple(logits.shape[:-1])}, not {tuple(targets.shape)}"
        )
    counted = targets != ignore
    wrong = counted & ((targets < 0) | (targets >= logits.shape[-1]))
    if not (wrong.is_meta or torch.compiler.is_compiling()) and wrong.any():
        raise ValueError(
            f"target {int(targets[wrong][0])}: there are {logits.shape[-1]} choices, and {ignore} is not counted"
        )
    flat = logits.flatten(0, -2) if logits.dim() > 1 else logits[None]
    total = F.cross_entropy(
        flat,
        targets.flatten().long(),
        ignore_index=ignore,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return total / counted.sum().clamp(min=1)


def next_token_loss(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Each token is foretold by those before it: logits (b n c), tokens (b n), mask (b n), True = a real token.

    What comes after a left-out token, and the left-out token itself, does not count; a single token costs nothing.
    """
    check_mask(mask, (tokens.shape[0], tokens.shape[1]), "mask")
    targets = tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORE_INDEX)
    return cross_entropy_loss(logits[:, :-1], targets, label_smoothing=label_smoothing)


def mse_loss(numbers: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean squared error: numbers and targets (b o), or (b n o) with a mask (b n), True = counts."""
    if numbers.shape != targets.shape:
        raise ValueError(
            f"numbers {tuple(numbers.shape)} do not fit targets {tuple(targets.shape)}"
        )
    error = (numbers - targets) ** 2
    if mask is None:
        return error.sum() / max(1, error.numel())
    check_mask(mask, (numbers.shape[0], numbers.shape[1]), "mask")
    counted = mask.view(*mask.shape, *[1] * (error.dim() - 2)).expand_as(error)
    return error.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)
