"""How the time of a run is shared out, where it is limited: steps, a look at each tenth, and the last evaluations."""

from __future__ import annotations

LAST = 0.2  # of the time, at most, for the last two evaluations
GLANCE = 0.02  # and for each one on the way
MARKS = 10  # of those on the way


class TimeBudget:
    """Decides by the clock; where there is no limit it decides nothing.

    seconds   for all of a run; None: no limit
    step      what the last step took, with what was due after it
    judging   what an evaluation of all examples takes, as far as is known
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.step, self.marks = seconds, 0.0, 0
        self.judging = 0.0 if seconds is None else LAST * seconds

    @property
    def training(self) -> float:
        """When the last step is to be over, so that the model can still be judged."""
        assert self.seconds is not None
        return self.seconds - min(2 * self.judging, LAST * self.seconds)

    def over(self, clock: float) -> bool:
        """Whether there is no time for one step more."""
        return self.seconds is not None and clock + self.step > self.training

    def fraction(self, clock: float) -> float:
        """How much of the time for steps has passed, from 0 to 1."""
        return 0.0 if self.seconds is None else min(clock / self.training, 1.0)

    def passed(self, fraction: float) -> bool:
        """Whether one tenth more is over; asked again, it is not."""
        marks = 0 if self.seconds is None else int(MARKS * fraction)
        new, self.marks = marks > self.marks, max(marks, self.marks)
        return new

    def limit(self, now: float, *, last: bool) -> float | None:
        """When an evaluation that begins now must end: on the way soon, at last after half of what is left."""
        if self.seconds is None:
            return None
        return now + (max(self.seconds - now, 0) / 2 if last else GLANCE * self.seconds)
