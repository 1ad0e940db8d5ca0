"""Loss functions: outputs and targets -> scalar. Padding and ignored targets cost nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.backends import check_mask
from regard.numerics import at_least_float32

IGNORE_INDEX = -100  # target that does not count
CHUNK_ELEMENTS = 1 << 18  # logits that `ChunkedCrossEntropy` reads at a time: 1 MB of float32


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
    target that counts, the loss is zero, not NaN. It is computed in float32 at least.
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
    rows = logits.flatten(0, -2) if logits.dim() > 1 else logits[None]
    labels = targets.flatten().long()
    if rows.numel() > CHUNK_ELEMENTS and _is_eager_cpu(rows):
        counted_rows = labels != ignore_index
        total = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, labels.masked_fill(~counted_rows, 0), counted_rows, label_smoothing
        )
    else:
        total = F.cross_entropy(
            at_least_float32(rows),
            labels,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )
    return total / counted.sum().clamp(min=1)


def _is_eager_cpu(x: Tensor) -> bool:
    """Whether the tensor has numbers on the CPU now: it is not traced, transformed or fake."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
    )


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of logits (r, c) and targets (r), for the rows that count.

    `F.cross_entropy` writes several tensors as large as the logits, which takes most of its time on
    a CPU if there are thousands of classes. This writes one, the gradient, a few rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, label_smoothing: float
    ) -> Tensor:
        """log Σ exp(x) - (1 - ε) x[target] - ε mean(x), summed over the rows that count (r)."""
        chunk = max(1, CHUNK_ELEMENTS // logits.shape[1])
        sums, expected = [], []
        for part, target in zip(logits.split(chunk), targets.split(chunk), strict=True):
            x = at_least_float32(part)
            sums.append(x.logsumexp(-1))
            of_target = x.gather(1, target[:, None])[:, 0]
            if label_smoothing:
                of_target = torch.lerp(of_target, x.mean(-1), label_smoothing)
            expected.append(of_target)
        log_sum = torch.cat(sums)
        ctx.save_for_backward(logits, targets, counted, log_sum)
        ctx.label_smoothing, ctx.chunk = label_smoothing, chunk
        return (log_sum - torch.cat(expected)).masked_fill(~counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """(softmax(x) - (1 - ε) onehot(target) - ε / c) · gradient, and 0 for other rows."""
        logits, targets, counted, log_sum = ctx.saved_tensors
        smoothing, result = ctx.label_smoothing, torch.empty_like(logits)
        parts = (each.split(ctx.chunk) for each in (result, logits, targets, counted, log_sum))
        for out, x, target, counts, total in zip(*parts, strict=True):
            p = (at_least_float32(x) - total[:, None]).exp_()
            if smoothing:
                p -= smoothing / p.shape[1]
            p[torch.arange(len(p)), target] -= 1 - smoothing
            out.copy_(p.mul_(gradient).masked_fill_(~counts[:, None], 0))
        return result, None, None, None


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
