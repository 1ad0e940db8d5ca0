"""Losses for `recover`: distillation of layers and models, masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.hf.drift import ModelOutputs, mean_pool, model_outputs
from regard.hf.model_inputs import build_inputs, pad_rows
from regard.models.losses import IGNORE_INDEX
from regard.models.masking import mask_tokens
from regard.tasks.base import Batch, Example, ModelNeeds, Task
from regard.tasks.metrics import MeanMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import RenderedText


class ExampleLosses(NamedTuple):
    """Loss (b) and score (b) from 0 to 1 of each example."""

    loss: Tensor
    score: Tensor


class DistillationScore(MeanMetric):
    """Mean of the scores of `ExampleLosses`."""

    name = "score"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        score = output.score.detach().double().cpu()
        return torch.stack((score, torch.ones_like(score)), -1)


class UnlabelledExamples(Task):
    """Examples without labels: token ids (n), padded in a batch, or floats of one shape."""

    metrics = (DistillationScore(),)

    def __init__(
        self, train: Sequence[Tensor], valid: Sequence[Tensor], pad_token_id: int = 0
    ) -> None:
        self.splits = {"train": train, "valid": valid, "test": valid}
        self.pad_token_id = pad_token_id

    def size(self, split: str) -> int:
        """Number of examples."""
        return len(self.splits[split])

    def example(self, split: str, index: int) -> Example:
        """An example without targets."""
        return Example({"x": self.splits[split][index]}, {})

    @property
    def needs(self) -> ModelNeeds:
        """Nothing: the model exists already."""
        raise Unsupported("Examples without labels are for models that exist already.")

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedText:
        """The shape of an example."""
        return RenderedText(str(tuple(example.inputs["x"].shape)))

    def batch(self, split: str, indexes: Sequence[int]) -> Batch:
        """Examples padded to the longest."""
        rows = [self.splits[split][i] for i in indexes]
        if rows[0].is_floating_point():
            return Batch({"x": torch.stack(rows), "mask": None}, {})
        x, mask = pad_rows(rows, self.pad_token_id)
        return Batch({"x": x, "mask": mask}, {})

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss of the examples."""
        if label_smoothing:
            raise ValueError("label_smoothing applies to classes: these examples have no labels.")
        return output.loss.mean()

    def count_targets(self, batch: Batch) -> int:
        """Number of examples."""
        return batch.size

    def count_tokens(self, batch: Batch) -> int:
        """Number of token ids without padding, or of numbers."""
        x, mask = batch.inputs["x"], batch.inputs["mask"]
        assert x is not None
        return x.numel() if mask is None else int(mask.sum())


class DistillationLoss(nn.Module):
    """Maps tokens x and mask (b, n) to `ExampleLosses`.

    Dropout stays off, since the teacher has none.
    """

    def train(self, mode: bool = True) -> DistillationLoss:
        """Stay in evaluation mode."""
        return super().train(False)


class LayerDistillation(DistillationLoss):
    """Each new layer learns the output of the old one, on the inputs of the old one.

    All layers train at once, and errors of one layer do not reach the next.
    """

    def __init__(self, teacher: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.teacher = (teacher,)  # a tuple, so that it is not registered
        self.paths, self.layers = list(layers), nn.ModuleList(layers.values())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """Relative squared error, and cosine similarity, averaged over layers and tokens."""
        calls: dict[str, tuple[Any, Any, Tensor]] = {}

        def record(path: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], y: Any) -> None:
                kwargs = {
                    name: value for name, value in kwargs.items() if name != "past_key_values"
                }
                calls[path] = (args, kwargs, first_tensor(y).detach())

            return hook

        (teacher,) = self.teacher
        with torch.no_grad(), ExitStack() as stack:
            for path in self.paths:
                module = teacher.get_submodule(path)
                stack.callback(module.register_forward_hook(record(path), with_kwargs=True).remove)
            build_inputs(teacher, x, mask).call(teacher)
        errors, similarities = [], []
        for path, layer in zip(self.paths, self.layers, strict=True):
            args, kwargs, expected = calls[path]
            y = first_tensor(layer(*args, **kwargs))
            token_mask = None if mask is None else fit_mask(mask, y)
            cosine = F.cosine_similarity(y.float(), expected.float(), dim=-1)
            errors.append(relative_error(y, expected, mask))
            similarities.append(mean_pool(cosine[..., None], token_mask)[..., 0])
        return ExampleLosses(torch.stack(errors).mean(0), torch.stack(similarities).mean(0))


class ModelDistillation(DistillationLoss):
    """The model learns the hidden states of the original after each block, and its output."""

    def __init__(self, teacher: nn.Module, student: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.teacher, self.student, self.blocks = (teacher,), student, list(blocks)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """Error of hidden states plus 1 − cosine of embeddings, or KL divergence of logits."""
        (teacher,) = self.teacher
        expected = model_outputs(teacher, self.blocks, build_inputs(teacher, x, mask))
        inputs = build_inputs(self.student, x, mask)
        outputs = model_outputs(self.student, self.blocks, inputs, training=True)
        errors = [
            relative_error(outputs.hidden[path], expected.hidden[path], mask)
            for path in self.blocks
        ]
        loss, score = output_loss(outputs, expected, len(x))
        return ExampleLosses(torch.stack(errors).mean(0) + loss, score)


class MaskedLMLoss(DistillationLoss):
    """Masked language modelling (Devlin et al. 2019, arXiv 1810.04805).

    Args:
        special_token_ids: Tokens that are never masked.
    """

    def __init__(
        self,
        student: nn.Module,
        mask_token_id: int,
        vocab_size: int,
        special_token_ids: Sequence[int],
    ) -> None:
        super().__init__()
        self.student, self.mask_token_id, self.vocab_size = student, mask_token_id, vocab_size
        self.special_token_ids = list(special_token_ids)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """Cross-entropy in nats, and accuracy. Evaluation always masks the same tokens."""
        maskable = ~torch.isin(x, torch.tensor(self.special_token_ids, device=x.device))
        maskable = maskable if mask is None else maskable & mask
        seed = int(torch.randint(1 << 30, ())) if torch.is_grad_enabled() else 0
        masked, target = mask_tokens(
            x, self.vocab_size, mask_token_id=self.mask_token_id, seed=seed, mask=maskable
        )
        logits = build_inputs(self.student, masked, mask).call(self.student).logits
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            target.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        is_target = target != IGNORE_INDEX
        count = is_target.sum(1).clamp(min=1)
        correct = ((logits.argmax(-1) == target) & is_target).sum(1)
        return ExampleLosses(loss.view(target.shape).sum(1) / count, correct / count)


def first_tensor(y: Any) -> Tensor:
    """The tokens in the output of a layer."""
    return y if isinstance(y, Tensor) else y[0]


def fit_mask(mask: Tensor, y: Tensor) -> Tensor:
    """A mask as long as the tokens: some models lengthen their inputs."""
    return F.pad(mask, (0, y.shape[1] - mask.shape[1]))


def relative_error(y: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """|y − expected|² / |expected|² over the tokens of each example: (b, n, d) -> (b)."""
    keep = 1.0 if mask is None else fit_mask(mask, y)[..., None].to(y.dtype)
    error, size = ((t * keep).square().flatten(1).sum(1) for t in (y - expected, expected))
    return error / size.clamp(min=1e-12)


def output_loss(outputs: ModelOutputs, expected: ModelOutputs, batch: int) -> tuple[Tensor, Tensor]:
    """Loss and cosine similarity (b) of the outputs of two models."""
    cosine = F.cosine_similarity(outputs.output.float(), expected.output.float(), dim=-1)
    if expected.kind == "embedding":
        return 1 - cosine, cosine.detach()
    log_p, log_q = (F.log_softmax(out.output.float(), -1) for out in (expected, outputs))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if (
        divergence.shape[0] != batch
    ):  # one row for each token of the batch: the mean serves all examples
        divergence, cosine = (t.mean().expand(batch) for t in (divergence, cosine))
    divergence, cosine = (t.flatten(1).mean(1) if t.dim() > 1 else t for t in (divergence, cosine))
    return divergence, cosine.detach()
