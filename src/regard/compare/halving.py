"""Successive halving (Jamieson & Talwalkar 2016, arXiv 1502.07943): a budget as a plan of rungs.

In the first rung every candidate trains briefly at each learning rate. The better half, and always
the reference, trains longer in the next rung at its best rate, and so on; in the last rung the
finalists train with several seeds, for half of the time. Every run starts anew. All decisions are
functions of the plan and of the validation scores of finished runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regard.compare.plan import ComparisonPlan, FittedTask, PlannedRun
from regard.models.config import ModuleSpec, StrictModel

FINALISTS = 3  # candidates in the last rung, at most
FINAL_SHARE = 0.5  # of the time, for the last rung
EVAL_SHARE = 0.1  # of the time of a run, at most, for evaluations
RESERVE = 0.1  # of the budget, for estimates that are too low
EVALUATIONS = 2  # of a run on the way, and in the last rung:
FINAL_EVALUATIONS = 5
MIN_STEPS = 25  # of a run: fewer do not tell anything
MIN_EXAMPLES, MAX_EXAMPLES = 64, 2048  # of an evaluation
SEARCH_STEPS = 0.25  # of the steps of the settings, for a search without a budget


class Rung(StrictModel):
    """Runs of equal time, or of equal steps.

    Attributes:
        keep: Number of candidates that take part.
        rates: Learning rates that are tried for each. Empty: its best of the rung before.
        seeds: Seeds of each candidate.
        steps: Training steps by candidate, for all that might take part.
        evaluations: Evaluations on the validation split per run; one on the test split follows.
        eval_examples: Examples of an evaluation, the same for all.
        seconds: Estimated time by candidate of one run; 0 if it is unknown.
    """

    keep: int
    rates: list[float]
    seeds: list[int]
    steps: dict[str, int]
    evaluations: int
    eval_examples: int
    seconds: dict[str, float]

    def estimate(self, jobs: int) -> float:
        """Return the estimated seconds of the rung, with the slowest candidates."""
        slowest = sorted(self.seconds.values(), reverse=True)[: self.keep]
        ends = [0.0] * jobs
        for seconds in slowest * (max(1, len(self.rates)) * len(self.seeds)):
            ends[ends.index(min(ends))] += seconds
        return max(ends)


class GroupSchedule(StrictModel):
    """The rungs of one task at one length.

    Attributes:
        costs: Name of the folder with the measured costs, "" without them.
    """

    task: ModuleSpec
    length: int
    rungs: list[Rung]
    costs: str = ""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a candidate: of a training step, to evaluate an example, and of a run before the
    first step and after the last."""

    step: float
    example: float
    start: float = 0.0


def average_costs(measured: Sequence[Mapping[str, StepCost]]) -> dict[str, StepCost]:
    """Return the means of the costs by label; a label that is not in all is left out."""
    found = {}
    for label in measured[0]:
        own = [costs[label] for costs in measured if label in costs]
        if len(own) == len(measured):
            found[label] = StepCost(
                step=statistics.fmean(each.step for each in own),
                example=statistics.fmean(each.example for each in own),
                start=statistics.fmean(each.start for each in own),
            )
    return found


class BudgetTooSmall(ValueError):
    """The plan cannot answer within the budget.

    Attributes:
        needed: Seconds that could.
    """

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed


class Standing(NamedTuple):
    """The validation score of a candidate in a rung, at its best learning rate."""

    label: str
    lr: float
    score: float


def rung_sizes(candidates: int, *, search: bool) -> list[int]:
    """Return how many candidates take part in each rung."""
    sizes = [candidates]
    if search and candidates <= FINALISTS:
        sizes.append(candidates)
    while sizes[-1] > FINALISTS:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def plan_without_budget(
    plan: ComparisonPlan,
    fitted: FittedTask,
    costs: Mapping[str, StepCost],
) -> list[Rung]:
    """Return a rung in which all candidates train for the steps of the settings, after a search
    if there are several learning rates."""
    settings, labels = plan.settings, list(fitted.specs)
    evaluations = max(1, math.ceil(settings.steps / settings.eval_every))

    def rung(rates: list[float], seeds: list[int], steps: int, evaluations: int) -> Rung:
        seconds = dict.fromkeys(labels, 0.0)
        for label, cost in costs.items():
            examples = (evaluations + 1) * settings.eval_examples
            seconds[label] = cost.start + steps * cost.step + examples * cost.example
        return Rung(
            keep=len(labels),
            rates=rates,
            seeds=seeds,
            steps=dict.fromkeys(labels, steps),
            evaluations=evaluations,
            eval_examples=settings.eval_examples,
            seconds=seconds,
        )

    rates = plan.learning_rates
    if len(rates) == 1:
        return [rung(rates, list(range(plan.seeds)), settings.steps, evaluations)]
    search_steps = max(1, int(SEARCH_STEPS * settings.steps))
    seeds = list(range(1, plan.seeds + 1))  # not that of the search, which chose the rate
    return [
        rung(rates, [0], search_steps, min(EVALUATIONS, search_steps)),
        rung([], seeds, settings.steps, evaluations),
    ]


def plan_rungs(plan: ComparisonPlan, costs: Mapping[str, StepCost], budget: float) -> list[Rung]:
    """Return the rungs of one task that take `budget` seconds.

    Args:
        costs: Costs of the candidates by label, with as many runs at a time as the plan has jobs.

    Raises:
        BudgetTooSmall: A run would have fewer than `MIN_STEPS` steps; with the budget that could.
    """
    rungs = _plan_rungs(plan, costs, budget)
    enough = min(MIN_STEPS, plan.settings.steps)

    def is_too_small(seconds: float) -> bool:
        return fewest_steps(_plan_rungs(plan, costs, seconds))[0] < enough

    steps, index = fewest_steps(rungs)
    if steps >= enough:
        return rungs
    candidates = [each for each in costs if rungs[index].steps[each] == steps]
    label = max(candidates, key=lambda each: costs[each].step)
    low = high = max(budget, costs[label].start, 1.0)
    while is_too_small(high):
        low, high = high, 2 * high
    while high > 1.05 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_small(middle) else (low, middle)
    own = costs[label]
    raise BudgetTooSmall(
        f"The budget leaves {label} {steps} steps per run in rung {index + 1} of {len(rungs)}, and "
        f"at least {enough} are needed: a step takes {own.step:.2g} s here, and a run "
        f"{own.start:.2g} s beside its steps.",
        high,
    )


def fewest_steps(rungs: Sequence[Rung]) -> tuple[int, int]:
    """Return steps and rung of the shortest run."""
    return min((min(rung.steps.values()), index) for index, rung in enumerate(rungs))


def _plan_rungs(plan: ComparisonPlan, costs: Mapping[str, StepCost], budget: float) -> list[Rung]:
    rates = plan.learning_rates
    sizes = rung_sizes(len(costs), search=len(rates) > 1)
    rungs = []
    for index, size in enumerate(sizes):
        is_last, is_first = index == len(sizes) - 1, index == 0
        share = 1.0
        if len(sizes) > 1:
            share = FINAL_SHARE if is_last else (1 - FINAL_SHARE) / (len(sizes) - 1)
        # seeds of the last rung are new: the choice of the finalists does not depend on them
        seeds = [0] if not is_last else list(range(not is_first, plan.seeds + (not is_first)))
        tried = rates if is_first else []
        runs = size * max(1, len(tried)) * len(seeds)
        seconds = (1 - RESERVE) * share * budget / math.ceil(runs / plan.jobs)
        start = max(cost.start for cost in costs.values())
        evaluations = FINAL_EVALUATIONS if is_last else EVALUATIONS
        slowest = max(cost.example for cost in costs.values())
        examples = EVAL_SHARE * max(seconds - start, 0) / ((evaluations + 1) * slowest)
        examples = round_down(min(max(examples, MIN_EXAMPLES), MAX_EXAMPLES))
        steps = {}
        for label, cost in costs.items():
            left = seconds - cost.start - (evaluations + 1) * examples * cost.example
            steps[label] = min(plan.settings.steps, round_down(max(0.0, left) / cost.step))
        if plan.equal == "steps":
            # as many as the slowest candidates can make in the same time all together; runs on
            # several slots take at most their sum / slots + the longest * (1 - 1 / slots)
            left = seconds - start - (evaluations + 1) * examples * slowest
            wall = max(0.0, left) * math.ceil(runs / plan.jobs)
            dearest = sorted((cost.step for cost in costs.values()), reverse=True)[:size]
            together = runs / size * sum(dearest) + (plan.jobs - 1) * dearest[0]
            common = min(plan.settings.steps, round_down(wall * plan.jobs / together))
            steps = dict.fromkeys(costs, common)
        rungs.append(
            Rung(
                keep=size,
                rates=tried,
                seeds=seeds,
                steps=steps,
                evaluations=evaluations,
                eval_examples=examples,
                seconds={
                    label: cost.start
                    + steps[label] * cost.step
                    + (evaluations + 1) * examples * cost.example
                    for label, cost in costs.items()
                },
            )
        )
    return rungs


def round_down(value: float) -> int:
    """Round down to two digits, so that small changes of the measured costs do not matter."""
    if value < 100:
        return int(value)
    unit = 10 ** (int(math.log10(value)) - 1)
    return int(value // unit * unit)


def rung_runs(
    fitted: FittedTask,
    rungs: Sequence[Rung],
    index: int,
    before: Sequence[Standing] | None,
    reference: str,
) -> list[PlannedRun]:
    """Return the runs of a rung, seeds and rates varying slowest.

    Args:
        before: The ranking after the rung before; None for the first rung.
        reference: The candidate that always survives.
    """
    rung = rungs[index]
    rates = dict.fromkeys(fitted.specs, rung.rates)
    if before is not None:
        kept = choose_survivors(before, rung.keep, reference)
        rates = {each.label: [each.lr] for each in kept}
    return [
        fitted.run(
            label,
            seed=seed,
            lr=rates[label][number],
            steps=rung.steps[label],
            evaluations=rung.evaluations,
            eval_examples=rung.eval_examples,
            rung=index,
            seconds=rung.seconds[label],
            search=len(rung.rates) > 1,
        )
        for seed in rung.seeds
        for number in range(max(map(len, rates.values()), default=0))
        for label in rates
    ]


def rank_candidates(
    scores: Mapping[str, Mapping[float, Sequence[float]]], *, higher_is_better: bool
) -> list[Standing]:
    """Return the candidates by their best learning rate, best first; those without a score are
    left out.

    Args:
        scores: Validation scores by candidate and learning rate, one for each seed.
    """
    sign = -1 if higher_is_better else 1
    standings = []
    for label, by_rate in scores.items():
        means = [
            Standing(label, lr, statistics.fmean(values))
            for lr, values in by_rate.items()
            if values and all(map(math.isfinite, values))
        ]
        if means:
            standings.append(min(means, key=lambda each: sign * each.score))
    return sorted(standings, key=lambda each: sign * each.score)


def choose_survivors(ranking: Sequence[Standing], keep: int, reference: str) -> list[Standing]:
    """Return the best `keep` candidates; the reference is always one of them, if it has a score."""
    kept = list(ranking[:keep])
    dense = next((each for each in ranking if each.label == reference), None)
    if dense is not None and dense not in kept:
        kept[-1] = dense
    return kept
