"""A whole comparison: fit the candidates, measure their costs, plan the rungs, execute them.

The plan and the costs are stored before anything is trained. What follows is a function of the plan
and of finished runs, so a comparison that was killed continues to the same result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from regard.compare.costs import MeasuredCosts, read_costs
from regard.compare.group import rank_entries
from regard.compare.halving import (
    BudgetTooSmall,
    GroupSchedule,
    Rung,
    StepCost,
    average_costs,
    plan_rungs,
    plan_without_budget,
    rung_runs,
)
from regard.compare.load import LoadWatch
from regard.compare.plan import (
    ComparisonPlan,
    FittedTask,
    PlannedRun,
    cached_task,
    fit_tasks,
    spec_label,
)
from regard.compare.record import (
    PLAN_FILE,
    ComparisonRecord,
    add_load,
    baseline_statistics,
    read_record,
    write_record,
)
from regard.compare.schedule import Schedule

COST_SHARE = 0.08  # of a budget, for the measurement of costs
COST_SECONDS = 10.0  # of the measurement for each task and length, at most
SIDE_BY_SIDE = 0.5  # of that time, for measuring runs at the same time as well


class Comparison:
    """A comparison in a folder; `prepare` plans it and `run` executes it.

    Args:
        schedule: Executes the runs. Its folder is that of the comparison.
        plan: Settings.
        command: The command that repeats the comparison.
        reserve: Seconds of the budget that are used before and after: to start, and for the page.
        plan_folder: Folder of another comparison with the same settings, whose steps and learning
            rates are used. None: a budget becomes a plan by the costs that are measured here.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: ComparisonPlan,
        command: str,
        *,
        reserve: float = 0.0,
        plan_folder: Path | None = None,
    ) -> None:
        self.schedule, self.root, self.plan = schedule, schedule.root, plan
        self.reserve, self.plan_folder = reserve, plan_folder
        self.record = ComparisonRecord(plan=plan, command=command, keys=[])
        self.fitted: list[FittedTask] = []

    @property
    def reference(self) -> str:
        """Label of the candidate that always survives."""
        return spec_label(self.plan.reference)

    def prepare(self, begin: float | None = None) -> None:
        """Fit the candidates, measure their costs and plan the rungs; a comparison that is resumed
        keeps its plan.

        Args:
            begin: `time.monotonic()` from which the budget counts. None: now.

        Raises:
            BudgetTooSmall: The budget does not suffice.
        """
        begin = time.monotonic() if begin is None else begin
        given = () if self.plan_folder is None else given_schedule(self.plan_folder, self.plan)
        self.fitted = fit_tasks(self.plan)
        stored = stored_schedule(self.root, self.plan)
        if stored:
            self.record = self.record.model_copy(update={"schedule": stored})
        folders = {}
        for index, fitted in enumerate(self.fitted):
            try:
                if fitted.specs:
                    costs_name = stored[index].costs if stored else None
                    folders[index] = self._measure(fitted, costs_name)
            except ValueError:
                if self.plan.budget is not None:
                    raise
                # the run of the candidate that ended the process will say why in its row
        costs = {index: read_costs(folder) for index, folder in folders.items()}
        if self.plan.budget is not None:
            self.fitted = [
                refuse_unmeasured(fitted, costs.get(index))
                for index, fitted in enumerate(self.fitted)
            ]
        if stored:
            return
        if given:
            rungs = {index: group.rungs for index, group in enumerate(given)}
        elif self.plan.budget is None:
            rungs = {}
            for index, fitted in enumerate(self.fitted):
                if fitted.specs:
                    known = self._step_costs(fitted, costs.get(index))
                    rungs[index] = plan_without_budget(self.plan, fitted, known)
        else:
            rungs = self._plan_budget(costs, begin - self.reserve)
        schedule = [
            GroupSchedule(
                task=fitted.task,
                length=fitted.length,
                rungs=rungs.get(index, []),
                costs=folders[index].name if index in folders else "",
            )
            for index, fitted in enumerate(self.fitted)
        ]
        self.record = self.record.model_copy(update={"schedule": tuple(schedule)})

    def _plan_budget(
        self, measured: Mapping[int, MeasuredCosts | None], begin: float
    ) -> dict[int, list[Rung]]:
        """Plan the rungs of each task for what is left of the budget.

        The baselines are computed here: nobody knows how long they take, and the plan before tells
        on how many examples.
        """
        assert self.plan.budget is not None
        costs = {
            index: self._step_costs(fitted, measured[index])
            for index, fitted in enumerate(self.fitted)
            if fitted.specs and index in measured
        }
        for index, rungs in self._plan_rungs(costs, begin).items():
            baseline_statistics(self.root, self.fitted[index].task, rungs[-1].eval_examples)
        return self._plan_rungs(costs, begin)

    def _plan_rungs(
        self, costs: Mapping[int, Mapping[str, StepCost]], begin: float
    ) -> dict[int, list[Rung]]:
        """Plan the rungs of each task; `begin` is the time from which the budget counts."""
        assert self.plan.budget is not None
        spent, rungs = time.monotonic() - begin, {}
        for index, known in costs.items():
            try:
                share = (self.plan.budget - spent) / len(costs)
                rungs[index] = plan_rungs(self.plan, known, share)
            except BudgetTooSmall as error:
                needed = error.needed * len(costs) + spent
                message = describe_refusal(error, needed, self.fitted[index])
                raise BudgetTooSmall(message, needed) from None
        return rungs

    def _step_costs(
        self, fitted: FittedTask, measured: MeasuredCosts | None
    ) -> dict[str, StepCost]:
        """The costs of the candidates that could be measured, at `jobs` runs at a time."""
        if measured is None:
            return {}
        alone = measured.step_costs(fitted.specs)
        jobs, budget = self.plan.jobs, self.plan.budget
        if jobs == 1 or budget is None or self.schedule.executor.has_queue or not alone:
            return alone
        seconds = SIDE_BY_SIDE * min(COST_SECONDS, COST_SHARE * budget / len(self.fitted))
        specs = {label: fitted.specs[label] for label in alone}
        measured_each = self.schedule.measure_side_by_side(specs, seconds)
        return average_costs([costs.step_costs(alone) for costs in measured_each])

    def _measure(self, fitted: FittedTask, stored: str | None) -> Path:
        """Measure the costs of the candidates of a task, or return those of the stored plan."""
        if stored:
            folder = self.schedule.costs_folder(stored)
            if read_costs(folder) is not None:
                return folder
        seconds = COST_SECONDS
        if self.plan.budget is not None:
            seconds = min(seconds, COST_SHARE * self.plan.budget / len(self.fitted))
        return self.schedule.measure_costs(fitted.specs, seconds)

    def notes(self) -> list[str]:
        """Return what the tasks say of their data: rows left out, copies across splits."""
        notes = [note for fitted in self.fitted for note in cached_task(fitted.task).notes()]
        return list(dict.fromkeys(notes))

    def estimate(self) -> float:
        """Return the estimated seconds of all rungs; 0 without measured costs."""
        return sum(
            rung.estimate(self.plan.jobs) for group in self.record.schedule for rung in group.rungs
        )

    def later_seconds(self, index: int) -> float:
        """Return the estimated seconds of all runs after a rung, added up."""
        return sum(
            max(rung.seconds.values()) * rung.keep * len(rung.seeds)
            for group in self.record.schedule
            for rung in group.rungs[index + 1 :]
        )

    def run(self, on_rung: Callable[[int, list[PlannedRun]], None] = lambda *_: None) -> None:
        """Execute all rungs.

        Args:
            on_rung: Called with the number of each rung and its runs, before they start.
        """
        write_record(self.root, self.record)
        watch = None if self.schedule.executor.has_queue else LoadWatch()
        try:
            count = max((len(group.rungs) for group in self.record.schedule), default=0)
            for index in range(max(1, count)):
                runs = [
                    run for number in range(len(self.fitted)) for run in self._runs(number, index)
                ]
                keys = list(dict.fromkeys([*self.record.keys, *(run.key for run in runs)]))
                self.record = self.record.model_copy(update={"keys": keys})
                write_record(self.root, self.record)
                on_rung(index, runs)
                self.schedule.run(runs)
        finally:
            load = None if watch is None else watch.load()
            if load is not None:
                add_load(self.root, load)

    def _runs(self, number: int, index: int) -> list[PlannedRun]:
        """The runs of a task in a rung; refusals come with the first."""
        fitted, group = self.fitted[number], self.record.schedule[number]
        refused = fitted.refused if index == 0 else []
        if index >= len(group.rungs):
            return refused
        before = None
        if index:
            previous = {run.key for run in self._runs(number, index - 1)}
            entries = [entry for entry in self.schedule.ledger.entries() if entry.key in previous]
            higher = cached_task(fitted.task).metric.higher_is_better
            before = rank_entries(entries, higher)
        return rung_runs(fitted, group.rungs, index, before, self.reference) + refused


def stored_schedule(root: Path, plan: ComparisonPlan) -> tuple[GroupSchedule, ...]:
    """Return the rungs that were planned for the same settings in a folder, () without them."""
    if not (root / PLAN_FILE).exists():
        return ()
    record = read_record(root)
    return record.schedule if record.plan == plan else ()


def given_schedule(folder: Path, plan: ComparisonPlan) -> tuple[GroupSchedule, ...]:
    """Return the rungs of another comparison; ValueError if its settings are others."""
    record = read_record(folder)
    fields = type(plan).model_fields
    other = [name for name in fields if getattr(record.plan, name) != getattr(plan, name)]
    if other:
        raise ValueError(
            f"The comparison in {folder} has other settings ({', '.join(other)}): give the same "
            "options, or omit --plan-from."
        )
    if not record.schedule:
        raise ValueError(f"The comparison in {folder} has no plan yet.")
    return record.schedule


def refuse_unmeasured(fitted: FittedTask, measured: MeasuredCosts | None) -> FittedTask:
    """Return a task without the candidates whose cost is unknown: they cannot be planned for."""
    reasons: Mapping[str, str] = {}
    if measured is not None:
        reasons = {label: each.reason for label, each in measured.times.items() if each.reason}
    refused = [
        PlannedRun(fitted.candidates[label], fitted.task, fitted.length, 0, None, reason)
        for label, reason in reasons.items()
        if label in fitted.specs
    ]
    specs = {label: spec for label, spec in fitted.specs.items() if label not in reasons}
    return fitted._replace(specs=specs, refused=[*fitted.refused, *refused])


def describe_refusal(error: BudgetTooSmall, needed: float, fitted: FittedTask) -> str:
    """Return why a budget does not suffice, and what could."""
    place = f"{fitted.label} at {fitted.length:,} tokens"
    return (
        f"The budget is too small for {place}. {error} --budget {format_duration(needed)} could be "
        "enough; so could fewer candidates, tasks or seeds, one learning rate (--lr 1e-3), a "
        "smaller model or a shorter --lengths."
    )


def format_duration(seconds: float) -> str:
    """Return a duration as `--budget` takes it, rounded up: "90s", "4m30s", "2h10m"."""
    if seconds < 100:
        return f"{math.ceil(seconds)}s"
    if seconds < 3600:
        minutes, rest = divmod(math.ceil(seconds / 10) * 10, 60)
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours}h{minutes}m" if minutes else f"{hours}h"
