"""How to train, as one small record that is kept beside the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from regard.errors import check_choice, did_you_mean


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,  # to zero (Loshchilov & Hutter 2017, arXiv 1608.03983)
    "constant": lambda progress: 1.0,
    "rsqrt": lambda progress: (
        1.0
    ),  # 1 / √step after the warm-up (Vaswani et al. 2017, arXiv 1706.03762); see `TrainSettings.factor`
}


class TrainSettings(BaseModel):
    """How to train.

    steps       updates of the weights
    batch       examples for an update, over all processes
    accumulate  parts that a batch is cut into, one after the other, to save memory
    rate        of AdamW after the warm-up; `decay` of weights that are matrices; `betas` of its averages
    schedule    "cosine", "rsqrt" or "constant", after `warmup` steps of linear rise
    clip        the greatest norm of the gradient; None: any
    precision   "float32", or "bfloat16" for autocast
    ema         of the weights that are evaluated, such as 0.999; None: the weights themselves
    seconds     for all of the run, its evaluations too, with the schedule brought to its end by then; None: no limit
    evaluate    every so many steps, on `state_batch_size` of the validation split; where `processor_seconds` are given, a short one at each tenth
    patience    stop after so many evaluations without a better one; None: never
    save        a checkpoint every so many steps
    seed        of the weights, of the order of examples, and of dropout
    parallel    how several processes share the model: "ddp", a copy on each, or "fsdp", a share of each weight
    tensorboard  write files for TensorBoard too
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[int, Field(ge=1)] = 1000
    batch: Annotated[int, Field(ge=1)] = 32
    accumulate: Annotated[int, Field(ge=1)] = 1
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    schedule: str = "cosine"
    warmup: Annotated[int, Field(ge=0)] = 50
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    precision: str = "float32"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    evaluate: Annotated[int, Field(ge=1)] = 100
    examples: Annotated[int, Field(ge=1)] = 512
    patience: Annotated[int, Field(ge=1)] | None = None
    save: Annotated[int, Field(ge=1)] = 500
    seed: Annotated[int, Field(ge=0)] = 0
    parallel: str = "ddp"
    tensorboard: bool = False

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        check_choice("schedule", value, SCHEDULES)
        return value

    @field_validator("parallel")
    @classmethod
    def _known_parallel(cls, value: str) -> str:
        check_choice("parallel", value, ("ddp", "fsdp"))
        return value

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, value: str) -> str:
        check_choice("precision", value, ("float32", "bfloat16"))
        return value

    def factor(self, step: int, progress: float) -> float:
        """What the rate is multiplied with at a step (the first is 0), when so much of the training is over (0 to 1)."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "rsqrt":
            return math.sqrt(max(self.warmup, 1) / (step + 1))
        return SCHEDULES[self.schedule](min(progress, 1.0))


def parse_settings(given: Mapping[str, Any]) -> TrainSettings:
    """Settings from plain values; what is wrong raises ValueError, with the nearest name that exists."""
    for name in given:
        if name not in TrainSettings.model_fields:
            raise ValueError(
                f"no setting {name!r}: {did_you_mean(str(name), TrainSettings.model_fields)}"
            )
    try:
        return TrainSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}"
        ) from None
