"""Training settings, saved with every run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from regard.device import parse_device, resolve_dtype
from regard.errors import check_choice, did_you_mean, format_validation_error

CHOICES = {
    "schedule": ("cosine", "rsqrt", "noam", "constant"),
    "keep": ("best", "last"),
    "parallel": ("ddp", "fsdp"),
}
UNLIMITED_STEPS = 10**9  # for runs that end by time
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainSettings(BaseModel):
    """How to train a model. The optimizer is AdamW.

    Args:
        steps: Number of optimizer steps.
        batch_size: Examples per step, over all processes.
        accumulation_steps: Number of parts a batch is split into to save memory (gradient
            accumulation).
        group_by_length: Put examples of similar lengths into one batch, to pad little, if
            the task knows the lengths (`Task.lengths_of`).
        label_smoothing: Share of the target probability that is spread over all classes in the
            training loss (Szegedy et al. 2016, arXiv 1512.00567); 0: none. For classes only.
        lr: Peak learning rate; for schedule "noam", the factor of its formula.
        weight_decay: Weight decay of matrices; vectors and scalars are not decayed.
        betas: AdamW's betas.
        schedule: Learning rate after the warmup: "cosine" to zero (Loshchilov & Hutter 2017, arXiv
            1608.03983), "rsqrt", lr * sqrt(warmup_steps / step), or "constant". "noam" is the
            schedule of the original Transformer (Vaswani et al. 2017, arXiv 1706.03762), warmup
            included: lr * dim**-0.5 * min(step**-0.5, step * warmup_steps**-1.5). It has the shape
            of "rsqrt", and its peak is lr * (dim * warmup_steps)**-0.5.
        warmup_steps: Steps of linear warmup.
        max_grad_norm: Gradients are clipped to this norm. None: not clipped.
        device: "auto" (cuda if available, else mps, else cpu), "cpu", "cuda", "cuda:1" or "mps", or
            a `torch.device`. A run may resume on another device.
        dtype: "float32", or "bfloat16" or "float16" for mixed precision, or a `torch.dtype`:
            weights stay in float32, and the forward pass runs under autocast. float16 scales the
            loss (`GradScaler`).
        ema_decay: Evaluate and save an exponential moving average of the weights, such as 0.999.
            None: the weights.
        max_seconds: Time limit of the whole run, evaluations included; the schedule ends with it.
            None: no limit.
        eval_every: Steps between evaluations. With `max_seconds` there is also a short one at each
            tenth of the time.
        eval_examples: Number of examples of the validation split to evaluate on.
        keep: The weights that are saved and tested: "best", those of the evaluation with the best
            validation metric (of equal ones that with the lowest loss), or "last".
        patience: Stop after this many evaluations without improvement. None: never.
        save_every: Steps between checkpoints.
        seed: Seed of the weights, of what the mixers draw (random features, hashes, random blocks),
            of the order of the examples and of dropout.
        parallel: How several processes share a model: "ddp" (a copy each) or "fsdp" (a shard of
            every weight each).
        tensorboard: Also write TensorBoard event files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: AtLeastOne = 1000
    batch_size: AtLeastOne = 32
    accumulation_steps: AtLeastOne = 1
    group_by_length: bool = True
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    schedule: str = "cosine"
    warmup_steps: AtLeastZero = 50
    max_grad_norm: Positive | None = 1.0
    device: str = "auto"
    dtype: str = "float32"
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_seconds: Positive | None = None
    eval_every: AtLeastOne = 100
    eval_examples: AtLeastOne = 512
    keep: str = "best"
    patience: AtLeastOne | None = None
    save_every: AtLeastOne = 500
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    parallel: str = "ddp"
    tensorboard: bool = False

    @field_validator(*CHOICES)
    @classmethod
    def _check_choices(cls, value: str, info: ValidationInfo) -> str:
        check_choice(str(info.field_name), value, CHOICES[str(info.field_name)])
        return value

    @field_validator("device", mode="before")
    @classmethod
    def _device_name(cls, value: Any) -> str:
        name = str(value) if isinstance(value, torch.device) else value
        parse_device(name)
        return str(name)

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> str:
        return str(resolve_dtype(value)).removeprefix("torch.")

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.schedule == "noam" and not self.warmup_steps:
            raise ValueError("schedule 'noam' needs warmup_steps >= 1")
        return self

    def lr_factor(self, step: int, progress: float, dim: int | None = None) -> float:
        """The factor on `lr` at a step (from 0) and a completed fraction of the training.

        Args:
            dim: Width of the model, for schedule "noam".
        """
        if self.schedule == "noam":
            if dim is None:
                raise ValueError(
                    "schedule 'noam' depends on the width of the model: it needs a model with a "
                    "configuration, from regard.models.build."
                )
            number = step + 1
            return float(dim**-0.5 * min(number**-0.5, number * self.warmup_steps**-1.5))
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "rsqrt":
            return math.sqrt(max(self.warmup_steps, 1) / (step + 1))
        return (
            0.5 * (1 + math.cos(math.pi * min(progress, 1.0))) if self.schedule == "cosine" else 1.0
        )


def parse_settings(values: Mapping[str, Any]) -> TrainSettings:
    """Build settings from plain values; a wrong name or value raises a ValueError that names it."""
    for name in values:
        if name not in TrainSettings.model_fields:
            raise ValueError(
                f"No setting {name!r}: {did_you_mean(str(name), TrainSettings.model_fields)}"
            )
    try:
        return TrainSettings(**values)
    except ValidationError as error:
        raise ValueError(format_validation_error(error)) from None
