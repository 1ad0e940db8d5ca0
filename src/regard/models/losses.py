"""Loss functions: outputs and targets -> scalar. Padding and ignored targets cost nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.backends import check_mask

IGNORE_INDEX = -100  # target that does not count


def cross_entropy_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean cross-entropy of logits (..., c) and targets (...) in 0..c-1, or `ignore_index`.

    For classes (b, c), and for token labels, masked tokens and translations (b, n, c). Label
    smoothing ε puts ε / c on every class (Szegedy et al. 2016, arXiv 1512.00567). Without any
    target that counts, the loss is zero, not NaN.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(targets.shape)}"
        )
    counted = targets != ignore_index
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        # on other devices the kernel checks them, and a check here would wait for the device
        wrong = counted & ((targets < 0) | (targets >= logits.shape[-1]))
        if wrong.any():
            raise ValueError(
                f"target {int(targets[wrong][0])} is not in 0..{logits.shape[-1] - 1}, "
                f"nor ignore_index {ignore_index}"
            )
    total = F.cross_entropy(
        logits.flatten(0, -2) if logits.dim() > 1 else logits[None],
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return total / counted.sum().clamp(min=1)


def next_token_loss(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Causal language-modelling loss: logits (b, n, c) at i predict tokens (b, n) at i + 1.

    Padding, mask (b, n) False, and the token after it do not count; a single token costs nothing.
    """
    check_mask(mask, (tokens.shape[0], tokens.shape[1]), "mask")
    targets = tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(~(mask[:, 1:] & mask[:, :-1]), IGNORE_INDEX)
    return cross_entropy_loss(logits[:, :-1], targets, label_smoothing=label_smoothing)


def mse_loss(outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of outputs and targets (b, o), or (b, n, o) with mask (b, n)."""
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs {tuple(outputs.shape)} do not match targets {tuple(targets.shape)}"
        )
    error = (outputs - targets) ** 2
    if mask is None:
        return error.sum() / max(1, error.numel())
    check_mask(mask, (outputs.shape[0], outputs.shape[1]), "mask")
    counted = mask.view(*mask.shape, *[1] * (error.dim() - 2)).expand_as(error)
    return error.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)
