"""What a run will do, for the user to read before it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.models.config import LMHeadConfig
from regard.tasks.base import SPLITS, Task
from regard.tasks.processors import TextProcessor
from regard.train.sampler import batch_indices
from regard.train.settings import UNLIMITED_STEPS, TrainSettings

SAMPLE = 256  # examples whose length is looked at
ENDLESS = 1 << 32  # a split of so many examples is generated


@dataclass(frozen=True)
class RunOverview:
    """What a run will do.

    Attributes:
        sizes: Number of examples of each split.
        classes: Number of classes; None: the task has none.
        length: Maximum number of tokens.
        cut: Share of a sample of the training texts that have as many tokens as that, or had more;
            None: not known.
        parameters: Number of parameters.
        tokens: Tokens of the first step.
        transfer: What was loaded from another run; "" for none.
        constant_loss: Loss of the best constant predictions; None: not known.
    """

    sizes: dict[str, int]
    classes: int | None
    length: int
    cut: float | None
    parameters: int
    tokens: int
    settings: TrainSettings
    device: torch.device
    processes: int
    transfer: str = ""
    constant_loss: float | None = None

    def lines(self) -> list[str]:
        """Lines of text: data, model and training."""
        s = self.settings
        sizes = ", ".join(
            f"{split} {'endless' if size >= ENDLESS else format(size, ',')}"
            for split, size in self.sizes.items()
        )
        data = [sizes, f"at most {self.length:,} tokens"]
        if self.classes is not None:
            data.insert(1, f"{self.classes:,} classes")
        if self.cut:
            data[-1] += f" ({100 * self.cut:.0f} % of the texts reach that; the rest is cut off)"
        limits = [] if s.steps == UNLIMITED_STEPS else [f"{s.steps:,} steps"]
        if s.max_seconds is not None:
            limits.append(f"{s.max_seconds:,.0f} s")
        device = f"{self.device} in {s.dtype}"
        if self.processes > 1:
            device += f", {self.processes} processes"
        training = [
            f"{' or '.join(limits)} of {s.batch_size} examples "
            f"({self.tokens:,} tokens in the first)",
            f"lr {s.lr:g} {s.schedule}, {s.warmup_steps:,} steps of warmup",
            device,
        ]
        lines = [f"data: {'; '.join(data)}", f"model: {self.parameters:,} parameters"]
        if self.transfer:
            lines.append(f"from: {self.transfer}")
        lines.append(f"training: {'; '.join(training)}")
        if s.steps < s.warmup_steps:
            lines.append(
                f"warning: {s.steps:,} steps end within the warmup of {s.warmup_steps:,}: the "
                f"learning rate reaches {s.steps / s.warmup_steps:.0%} of its peak. "
                "Use more --steps or less --warmup."
            )
        return lines


def describe_run(
    task: Task,
    settings: TrainSettings,
    *,
    parameters: int,
    device: torch.device,
    processes: int,
    transfer: str = "",
    constant_loss: float | None = None,
) -> RunOverview:
    """What a run will do; reads one batch and, for texts, a sample of the training split."""
    size = task.size("train")
    lengths_by_example = task.lengths_of("train") if settings.group_by_length else None
    first = batch_indices(
        size, settings.batch_size, 0, seed=settings.seed, lengths=lengths_by_example
    )
    cut = None
    is_text = isinstance(task.processor, TextProcessor)
    if is_text and not isinstance(task.needs.head, LMHeadConfig):
        sample = task.sample("train", min(SAMPLE, size)).tolist()
        lengths = [task.example("train", index).inputs["x"].shape[-1] for index in sample]
        cut = sum(n >= task.length for n in lengths) / len(lengths)
    return RunOverview(
        sizes={split: task.size(split) for split in SPLITS},
        classes=getattr(task.needs.head, "num_classes", None),
        length=task.length,
        cut=cut,
        parameters=parameters,
        tokens=task.count_tokens(task.batch("train", first)),
        settings=settings,
        device=device,
        processes=processes,
        transfer=transfer,
        constant_loss=constant_loss,
    )
