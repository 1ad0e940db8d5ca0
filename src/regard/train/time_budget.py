"""Divide the time limit of a run between steps, short evaluations on the way, and the final
evaluations."""

from __future__ import annotations

FINAL_SHARE = 0.2  # of the time limit, at most, for the final evaluations on valid and test
SHORT_SHARE = 0.02  # of the time limit, for each evaluation on the way
NUM_CHECKPOINTS = 10  # evaluations on the way


class TimeBudget:
    """Decides by the clock when to evaluate and when to stop; without a limit, it never does.

    Args:
        max_seconds: Time limit of the run, or None.

    Attributes:
        step_seconds: Time of the last step, including the evaluation and the checkpoint after it.
        eval_seconds: Estimated time of an evaluation on all examples.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.max_seconds, self.step_seconds, self.checkpoints_passed = max_seconds, 0.0, 0
        self.eval_seconds = 0.0 if max_seconds is None else FINAL_SHARE * max_seconds

    @property
    def training_seconds(self) -> float:
        """When the last step must be finished, to leave time for the final evaluations."""
        assert self.max_seconds is not None
        return self.max_seconds - min(2 * self.eval_seconds, FINAL_SHARE * self.max_seconds)

    def is_over(self, elapsed: float) -> bool:
        """Whether there is no time for another step."""
        return self.max_seconds is not None and elapsed + self.step_seconds > self.training_seconds

    def fraction(self, elapsed: float) -> float:
        """Completed fraction of the time for steps, from 0 to 1."""
        return 0.0 if self.max_seconds is None else min(elapsed / self.training_seconds, 1.0)

    def pass_checkpoint(self, fraction: float) -> bool:
        """Whether another tenth of the time has passed since the last call."""
        passed = 0 if self.max_seconds is None else int(NUM_CHECKPOINTS * fraction)
        is_new = passed > self.checkpoints_passed
        self.checkpoints_passed = max(passed, self.checkpoints_passed)
        return is_new

    def eval_deadline(self, now: float, *, final: bool) -> float | None:
        """When an evaluation that starts now must end: soon on the way, after half of the remaining
        time at the end."""
        if self.max_seconds is None:
            return None
        return now + (
            max(self.max_seconds - now, 0) / 2 if final else SHORT_SHARE * self.max_seconds
        )
