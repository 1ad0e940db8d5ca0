"""How to train, as one small record that is kept beside the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from regard.errors import check_choice, nearest


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,  # to zero (Loshchilov & Hutter 2017, arXiv 1608.03983)
    "constant": lambda progress: 1.0,
    "rsqrt": lambda progress: 1.0,  # 1 / √step after the warm-up (Vaswani et al. 2017, arXiv 1706.03762); see `Settings.factor`
}


class Settings(BaseModel):
    """How to train.

    steps       updates of the weights
    batch       examples for an update, over all processes
    accumulate  parts that a batch is cut into, one after the other, to save memory
    rate        of AdamW after the warm-up; `decay` of weights that are matrices; `betas` of its averages
    schedule    "cosine", "rsqrt" or "constant", after `warmup` steps of linear rise
    clip        the greatest norm of the gradient; None: any
    precision   "float32", or "bfloat16" for autocast
    ema         of the weights that are evaluated, such as 0.999; None: the weights themselves
    seconds     stop after so long, with the schedule brought to its end by then; None: no limit
    evaluate    every so many steps, on `examples` of the validation split
    patience    stop after so many evaluations without a better one; None: never
    save        a checkpoint every so many steps
    seed        of the weights, of the order of examples, and of dropout
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(1000, ge=1)
    batch: int = Field(32, ge=1)
    accumulate: int = Field(1, ge=1)
    rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.98)
    schedule: str = "cosine"
    warmup: int = Field(50, ge=0)
    clip: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    precision: str = "float32"
    ema: float | None = Field(None, gt=0, lt=1)
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    evaluate: int = Field(100, ge=1)
    examples: int = Field(512, ge=1)
    patience: int | None = Field(None, ge=1)
    save: int = Field(500, ge=1)
    seed: int = Field(0, ge=0)

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        check_choice("schedule", value, SCHEDULES)
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


def settings(given: Mapping[str, Any]) -> Settings:
    """Settings from plain values; what is wrong raises ValueError, with the nearest name that exists."""
    for name in given:
        if name not in Settings.model_fields:
            raise ValueError(f"no setting {name!r}: {nearest(str(name), Settings.model_fields)}")
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}") from None
