"""What a swapped model learns from: the old one layer by layer, the old one as a whole, or texts with gaps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.hf.drift import ModelOutputs, mean_pool, states
from regard.hf.sample import model_inputs, padded
from regard.models.losses import IGNORE_INDEX
from regard.models.masking import mask_tokens
from regard.tasks.base import Batch, Example, Task


class ExampleLosses(NamedTuple):
    """For each example (b): the loss, and how well it was met, from 0 to 1."""

    loss: Tensor
    near: Tensor


class Examples(Task):
    """Examples without labels: tokens (n) each, filled up in a batch, or tensors of one shape."""

    def __init__(self, train: Sequence[Tensor], valid: Sequence[Tensor], fill: int = 0) -> None:
        super().__init__(vocab_size=1, classes=1, length=1)
        self.splits, self.fill = {"train": train, "valid": valid, "test": valid}, fill

    def all(self) -> list[Tensor]:
        """Those to train on, then those held out."""
        return [*self.splits["train"], *self.splits["valid"]]

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.splits[split])

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        return Example(self.splits[split][index], torch.zeros(()))

    def show(self, example: Example) -> str:
        """See `Task`."""
        return str(tuple(example.tokens.shape))

    def batch(self, split: str, indexes: Sequence[int]) -> Batch:
        """Side by side, filled up at the end."""
        rows = [self.splits[split][i] for i in indexes]
        target = torch.zeros(len(rows))
        if rows[0].is_floating_point():
            return Batch(torch.stack(rows), None, target)
        return Batch(*padded(rows, self.fill), target)

    def loss(self, logits: Any, target: Tensor) -> Tensor:
        """The mean over the examples."""
        return logits.loss.mean()

    def score(self, logits: Any, target: Tensor) -> tuple[float, int]:
        """How well it was met, summed over the examples."""
        return float(logits.near.sum()), len(target)


class DistillationLoss(nn.Module):
    """tokens, mask (b n) -> `Answer`.  Dropout stays off: what is to be met has none."""

    def train(self, mode: bool = True) -> DistillationLoss:
        """See the class."""
        return super().train(False)


class LayerByLayer(DistillationLoss):
    """Each new layer is given what the old one is given in the old model, and is to give what that gives.

    All of them at once: no layer waits for those before it, so no error is handed on.
    """

    def __init__(self, teacher: nn.Module, new: dict[str, nn.Module]) -> None:
        super().__init__()
        self.teacher = (teacher,)  # outside the parameters
        self.paths, self.new = list(new), nn.ModuleList(new.values())

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """The share of what the old layers give that the new ones miss, the mean over layers and real tokens."""
        seen: dict[str, tuple[Any, Any, Tensor]] = {}
        (teacher,) = self.teacher
        with torch.no_grad(), ExitStack() as stack:
            for path in self.paths:
                handle = teacher.get_submodule(path).register_forward_hook(
                    noting(seen, path), with_kwargs=True
                )
                stack.callback(handle.remove)
            model_inputs(teacher, tokens, mask).call(teacher)
        misses, nears = [], []
        for path, new in zip(self.paths, self.new, strict=True):
            given, named, want = seen[path]
            got = first_of(new(*given, **named))
            misses.append(relative_error(got, want, mask))
            nears.append(near(got, want, mask))
        return ExampleLosses(torch.stack(misses).mean(0), torch.stack(nears).mean(0))


class Whole(DistillationLoss):
    """The new model is to have the hidden states of the old one after each layer, and to give what it gives."""

    def __init__(self, teacher: nn.Module, student: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.teacher, self.student, self.blocks = (teacher,), student, list(blocks)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """What is missed of hidden states, the mean over layers; and 1 − cosine of embeddings, or Σ p log p/q of logits."""
        (teacher,) = self.teacher
        want = states(teacher, self.blocks, model_inputs(teacher, tokens, mask))
        got = states(self.student, self.blocks, model_inputs(self.student, tokens, mask), live=True)
        hidden = torch.stack(
            [relative_error(got.hidden[path], want.hidden[path], mask) for path in self.blocks]
        ).mean(0)
        apart, same = ends(got, want, len(tokens))
        return ExampleLosses(hidden + apart, same)


class Gaps(DistillationLoss):
    """Masked modelling (Devlin et al. 2019, arXiv 1810.04805): the model says what stood in the gaps.

    gap   the token of a gap; `free` those that never become one
    """

    def __init__(self, student: nn.Module, gap: int, vocab_size: int, free: Sequence[int]) -> None:
        super().__init__()
        self.student, self.gap, self.vocab_size, self.free = student, gap, vocab_size, list(free)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> ExampleLosses:
        """Cross-entropy in nats, and how many gaps were filled rightly; gaps in evaluation are always the same."""
        may = ~torch.isin(tokens, torch.tensor(self.free, device=tokens.device))
        may = may if mask is None else may & mask
        seed = int(torch.randint(1 << 30, ())) if torch.is_grad_enabled() else 0
        read, target = mask_tokens(tokens, self.vocab_size, gap=self.gap, seed=seed, mask=may)
        logits = model_inputs(self.student, read, mask).call(self.student).logits
        each = F.cross_entropy(
            logits.float().flatten(0, 1),
            target.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        there = target != IGNORE_INDEX
        count = there.sum(1).clamp(min=1)
        right = ((logits.argmax(-1) == target) & there).sum(1) / count
        return ExampleLosses(each.view(target.shape).sum(1) / count, right)


def noting(seen: dict[str, Any], path: str) -> Any:
    """A hook that keeps what a module was given and what it gave; caches are not handed on."""

    def note(module: nn.Module, given: Any, named: dict[str, Any], y: Any) -> None:
        seen[path] = (
            given,
            {k: v for k, v in named.items() if k != "past_key_values"},
            first_of(y).detach(),
        )

    return note


def first_of(y: Any) -> Tensor:
    """The tokens in what a layer gives."""
    return y if isinstance(y, Tensor) else y[0]


def relative_error(got: Tensor, want: Tensor, mask: Tensor | None) -> Tensor:
    """|got − want|² / |want|² over the real tokens of each example: (b n d) -> (b)."""
    keep = 1.0 if mask is None else fit(mask, got)[..., None].to(got.dtype)
    apart, size = ((t * keep).square().flatten(1).sum(1) for t in (got - want, want))
    return apart / size.clamp(min=1e-12)


def near(got: Tensor, want: Tensor, mask: Tensor | None) -> Tensor:
    """The mean cosine over the real tokens of each example: (b n d) -> (b)."""
    each = F.cosine_similarity(got.float(), want.float(), dim=-1)
    return mean_pool(each[..., None], None if mask is None else fit(mask, got))[..., 0]


def fit(mask: Tensor, y: Tensor) -> Tensor:
    """As long as the tokens, which some models lengthen."""
    return F.pad(mask, (0, y.shape[1] - mask.shape[1]))


def ends(got: ModelOutputs, want: ModelOutputs, b: int) -> tuple[Tensor, Tensor]:
    """How far apart what comes out is, and how near, (b) each; logits of all tokens are averaged."""
    same = F.cosine_similarity(got.out.float(), want.out.float(), dim=-1)
    if want.name == "embedding":
        return 1 - same, same.detach()
    a, c = (F.log_softmax(s.out.float(), -1) for s in (want, got))
    apart = (a.exp() * (a - c)).sum(-1)
    if apart.shape[0] != b:  # the logits of real tokens in a row: their mean serves all examples
        apart, same = (t.mean().expand(b) for t in (apart, same))
    return apart.flatten(1).mean(1) if apart.dim() > 1 else apart, (
        same.flatten(1).mean(1) if same.dim() > 1 else same
    ).detach()
