"""The result of one task at one length: rungs, rows, differences and what only one gets right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.compare.costs import COSTS_DIR, MeasuredCosts, read_costs
from regard.compare.halving import (
    GroupSchedule,
    Standing,
    choose_survivors,
    rank_candidates,
)
from regard.compare.ledger import DONE, FAILED, REFUSED, LedgerEntry
from regard.compare.plan import RUNS_DIR, ComparisonPlan, cached_task, spec_label
from regard.compare.results import (
    CostRow,
    Difference,
    ResultRow,
    RungOutcome,
    SearchPoint,
    entry_labels,
    summarize_runs,
)
from regard.compare.statistics import LEVEL, holm, paired_difference
from regard.models import ModuleSpec
from regard.tasks.baselines import CONSTANT
from regard.tasks.metrics import MeanMetric, UndefinedMetric
from regard.train.run import TEST_FILE

Outcomes = tuple[np.ndarray, Tensor]  # indices (n) and statistics (n, k) of test examples


class GroupResult:
    """The result of one task at one length, from its runs.

    Args:
        folder: Folder of the comparison.
        entries: All runs of the group in order.
        schedule: The rungs; None: one rung.
        baselines: Statistics of the baselines on the test sample, or why there are none.

    Attributes:
        selected: The runs that the rows summarize.
    """

    def __init__(
        self,
        folder: Path,
        plan: ComparisonPlan,
        task: ModuleSpec,
        entries: Sequence[LedgerEntry],
        schedule: GroupSchedule | None,
        baselines: dict[str, Tensor | str],
    ) -> None:
        self.folder, self.plan, self.schedule = folder, plan, schedule
        self.task = cached_task(task)
        self.task_label, self.length = spec_label(task), self.task.length
        self.entries, self.baselines = entries, baselines
        self.reference = spec_label(plan.reference)
        self.rankings: list[list[Standing]] = []
        self.rungs = list(self._find_rungs())
        self.costs: MeasuredCosts | None = None
        if schedule is not None and schedule.costs:
            self.costs = read_costs(folder / COSTS_DIR / schedule.costs)
        self.cost_rows: dict[str, CostRow] = {}
        if self.costs is not None:
            self.cost_rows = self.costs.rows(self.task_label, self.length, self.reference)
        self.selected = self._select_entries()
        self.search = list(self._find_search())
        self.rows = self._complete_rows()

    def runs_of(self, index: int) -> list[LedgerEntry]:
        """Return the runs of a rung."""
        return [
            entry
            for entry in self.entries
            if entry.status != REFUSED and entry.settings.get("rung", 0) == index
        ]

    def _find_rungs(self) -> Iterator[RungOutcome]:
        rungs = [] if self.schedule is None else self.schedule.rungs
        for index in range(max(1, len(rungs))):
            entries = self.runs_of(index)
            ranking = rank_entries(entries, self.task.metric.higher_is_better)
            self.rankings.append(ranking)
            if index >= len(rungs) or not entries:
                continue
            rung = rungs[index]
            survivors = ranking
            if index + 1 < len(rungs):
                survivors = choose_survivors(ranking, rungs[index + 1].keep, self.reference)
            complete = all(entry.status in (DONE, FAILED) for entry in entries)
            entered = list(dict.fromkeys(entry_labels(entry)[0] for entry in entries))
            yield RungOutcome(
                self.task_label,
                self.length,
                index,
                rung.rates,
                rung.seeds,
                {label: rung.steps[label] for label in entered if label in rung.steps},
                entered,
                [each.label for each in survivors] if complete else [],
            )

    def best_rate(self, label: str, index: int) -> float | None:
        """Return the best learning rate of a candidate in a rung; None without a score."""
        return next((each.lr for each in self.rankings[index] if each.label == label), None)

    def runs_at_best_rate(self, label: str, index: int) -> list[LedgerEntry]:
        """Return the runs of a candidate in a rung at its best learning rate."""
        own = [entry for entry in self.runs_of(index) if entry_labels(entry)[0] == label]
        lr = self.best_rate(label, index)
        if lr is None or math.isnan(lr):  # no run has a score: they failed, or wait
            return own
        return [entry for entry in own if entry.settings.get("lr", lr) == lr]

    def _select_entries(self) -> list[LedgerEntry]:
        last: dict[str, int] = {}
        for entry in self.entries:
            label, rung = entry_labels(entry)[0], entry.settings.get("rung", 0)
            last[label] = max(last.get(label, 0), rung)
        selected = []
        for label, index in last.items():
            refused = [
                entry
                for entry in self.entries
                if entry.status == REFUSED and entry_labels(entry)[0] == label
            ]
            selected += refused or self.runs_at_best_rate(label, index)
        return selected

    def _find_search(self) -> Iterator[SearchPoint]:
        for index in range(len(self.rankings)):
            for entry in self.runs_of(index):
                label = entry_labels(entry)[0]
                lr = entry.settings.get("lr", math.nan)
                yield SearchPoint(
                    label,
                    self.task_label,
                    self.length,
                    index,
                    entry.settings["seed"],
                    lr,
                    entry.settings.get("steps", 0),
                    math.nan if entry.result is None else entry.result["best"],
                    chosen=self.best_rate(label, index) == lr,
                    reason=entry.reason or ("" if entry.status == DONE else entry.status),
                )

    def _complete_rows(self) -> list[ResultRow]:
        """Rows with costs, differences and what became of each candidate; and of baselines."""
        metric = self.task.metric
        margin = math.nan if metric.margin is None else metric.margin
        rows = []
        for row in summarize_runs(self.selected, self.reference):
            outcome = next((each for each in self.rungs if each.index == row.rung), None)
            eliminated = (
                outcome is not None
                and self.schedule is not None
                and row.rung + 1 < len(self.schedule.rungs)
                and bool(outcome.survived)
                and row.mixer not in outcome.survived
            )
            row = replace(row, margin=margin, eliminated=eliminated)
            cost = self.cost_rows.get(row.mixer)
            if cost is not None and not cost.reason:
                row = replace(
                    row,
                    tokens_per_second=cost.tokens_per_second,
                    latency=cost.latency,
                    speedup=cost.speedup,
                    latency_speedup=cost.latency_speedup,
                )
            if row.scores:
                own = self.outcomes(row.mixer, row.rung)
                constant = self.baselines.get(CONSTANT)
                if isinstance(constant, Tensor):
                    over = self._difference(row.mixer, CONSTANT, own, self._repeat(constant, own))
                    row = replace(row, over_constant=over)
                if not row.is_reference:
                    theirs = self.outcomes(self.reference, row.rung)
                    difference = self._difference(row.mixer, self.reference, own, theirs)
                    row = replace(row, difference=difference)
            rows.append(row)
        rows = correct_significance(rows)
        return rows + [self._baseline_row(*each, margin) for each in self.baselines.items()]

    def _baseline_row(self, name: str, statistics: Tensor | str, margin: float) -> ResultRow:
        metric = self.task.metric
        row = ResultRow(
            name,
            self.task_label,
            self.length,
            metric=metric.name,
            higher_is_better=metric.higher_is_better,
            is_baseline=True,
            margin=margin,
        )
        if isinstance(statistics, str):
            return replace(row, reason=statistics)
        dense = self.outcomes(self.reference, len(self.rankings) - 1)
        own = self._repeat(statistics, dense)
        return replace(
            row,
            scores=[metric.compute(statistics)],
            test_examples=len(statistics),
            difference=self._difference(name, self.reference, own, dense),
        )

    def outcomes(self, label: str, index: int) -> dict[int, Outcomes]:
        """Return the outcomes of a candidate on the test examples in a rung, by seed."""
        found = {}
        for entry in self.runs_at_best_rate(label, index):
            path = self.folder / RUNS_DIR / entry.key / TEST_FILE
            try:
                tensors = load_file(path) if entry.status == DONE else {}
            except (OSError, SafetensorError):  # the folder of the run was deleted
                continue
            if "indices" in tensors and self.task.metric.name in tensors:
                indices = tensors["indices"].numpy()
                found[entry.settings["seed"]] = (indices, tensors[self.task.metric.name])
        return found

    def _repeat(self, statistics: Tensor, like: dict[int, Outcomes]) -> dict[int, Outcomes]:
        """The outcomes of a baseline, the same for each seed of a candidate."""
        indices = self.task.sample("test", len(statistics))
        return dict.fromkeys(like, (indices, statistics))

    def _difference(
        self, label: str, reference: str, own: dict[int, Outcomes], theirs: dict[int, Outcomes]
    ) -> Difference | None:
        """The difference on the test examples and seeds that both have."""
        seeds = sorted(set(own) & set(theirs))
        if not seeds:
            return None
        both = [each[seed] for seed in seeds for each in (own, theirs)]
        common = reduce(np.intersect1d, [indices for indices, _ in both])
        if not len(common):
            return None
        ours, others = (
            [select_examples(each[seed], common) for seed in seeds] for each in (own, theirs)
        )
        try:
            found = paired_difference(self.task.metric, ours, others)
        except UndefinedMetric:
            return None
        return Difference(
            label,
            self.task_label,
            self.length,
            reference,
            found.value,
            found.low,
            found.high,
            found.p,
            found.p,
            found.p < LEVEL,
            found.example_error,
            len(seeds),
            len(common),
        )

    def unique_successes(self) -> dict[str, list[int]]:
        """Return the test examples that only one candidate gets right, in most of its seeds."""
        right: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for row in self.rows:
            if row.is_baseline or not row.scores:
                continue
            outcomes = self.outcomes(row.mixer, row.rung)
            if not outcomes:
                continue
            common = np.sort(reduce(np.intersect1d, [own for own, _ in outcomes.values()]))
            statistics = torch.stack([select_examples(x, common) for x in outcomes.values()])
            if not is_right_or_wrong(self.task.metric, statistics):
                return {}
            right[row.mixer] = common, (statistics[..., 0].mean(0) > 0.5).numpy()
        if len(right) < 2:
            return {}
        common = np.sort(reduce(np.intersect1d, [indices for indices, _ in right.values()]))
        table = np.stack(
            [values[np.searchsorted(indices, common)] for indices, values in right.values()]
        )
        alone = table & (table.sum(0) == 1)
        return {label: common[own].tolist() for label, own in zip(right, alone, strict=True)}


def rank_entries(entries: Sequence[LedgerEntry], higher_is_better: bool) -> list[Standing]:
    """Return the ranking of the candidates of a rung by their validation scores."""
    scores: dict[str, dict[float, list[float]]] = {}
    for entry in entries:
        if entry.status == DONE and entry.result is not None:
            lr = entry.settings.get("lr", math.nan)
            own = scores.setdefault(entry_labels(entry)[0], {})
            own.setdefault(lr, []).append(entry.result["best"])
    return rank_candidates(scores, higher_is_better=higher_is_better)


def correct_significance(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return rows whose differences are corrected for their number (Holm)."""
    adjusted = holm([math.nan if row.difference is None else row.difference.p for row in rows])
    return [
        row
        if row.difference is None
        else replace(row, difference=replace(row.difference, adjusted_p=p, significant=p < LEVEL))
        for row, p in zip(rows, adjusted, strict=True)
    ]


def select_examples(outcomes: Outcomes, indices: np.ndarray) -> Tensor:
    """Return the statistics of some of the examples, in the order of `indices`."""
    own, statistics = outcomes
    order = np.argsort(own)
    return statistics[torch.from_numpy(order[np.searchsorted(own[order], indices)])]


def is_right_or_wrong(metric: object, statistics: Tensor) -> bool:
    """Whether the statistics say of each example if it is right: 0 or 1, of 1."""
    if not isinstance(metric, MeanMetric) or not metric.higher_is_better:
        return False
    value, count = statistics.unbind(-1)
    return bool((count == 1).all() and ((value == 0) | (value == 1)).all())
