"""Results of a comparison as data: a row per candidate, task and length; verdicts with caveats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from regard.bench.stats import Ratio
from regard.compare.ledger import DONE, FAILED, REFUSED, LedgerEntry
from regard.compare.plan import Preference, spec_label
from regard.models import ModuleSpec
from regard.tasks.baselines import CONSTANT

RELATIVE_MARGIN = 0.02  # of the score of dense softmax, for metrics without a margin of their own
FASTER = 1.25  # times the speed of dense softmax that make up for leaving it
SMALLER = 0.8  # times the memory of dense softmax that make up for leaving it
BEATS_CONSTANT = 2.0  # standard errors, from the test examples, above the constant baseline
ENOUGH_SEEDS = 3  # fewer give only a rough estimate of the variance
SAME_SIZE = 0.1  # relative difference of parameter counts that needs no caveat

PREFERENCES: dict[str, tuple[Preference, ...]] = {  # what is looked at, in this order
    "score": ("score", "speed"),
    "speed": ("speed", "score"),
    "memory": ("memory", "score"),
    "latency": ("latency", "score"),
}


@dataclass(frozen=True)
class Difference:
    """The difference of the score of one row to that of a reference, paired on the same test
    examples and over seeds.

    Attributes:
        mixer: The row.
        reference: The row that it is compared with: dense softmax, or the default of the part.
        estimate: Mean over seeds of score - score of the reference.
        low, high: 95 % confidence interval; NaN for one seed, whose variance is unknown.
        p: Two-sided p-value; NaN for one seed.
        adjusted_p: p after Holm's correction for the number of mechanisms; that of a baseline is p.
        significant: Whether `adjusted_p` is below 5 %.
        example_error: Standard error that comes from the choice of the test examples alone.
        seeds, examples: Number of seeds and of test examples that were compared.
    """

    mixer: str
    task: str
    length: int
    reference: str
    estimate: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    adjusted_p: float = math.nan
    significant: bool = False
    example_error: float = 0.0
    seeds: int = 1
    examples: int = 0


@dataclass(frozen=True)
class SearchPoint:
    """One run of the search and the halving: a candidate at a learning rate.

    Attributes:
        rung: Number of the rung, from 0.
        lr: Peak learning rate.
        steps: Training steps.
        valid: Best validation score; NaN if the run has none.
        chosen: Whether the candidate continued with this learning rate.
        reason: Why there is no score.
    """

    mixer: str
    task: str
    length: int
    rung: int
    seed: int
    lr: float
    steps: int
    valid: float
    chosen: bool = False
    reason: str = ""


@dataclass(frozen=True)
class CostRow:
    """What a candidate costs, measured apart from learning and interleaved with the others.

    Attributes:
        step_seconds: Median time of a training step.
        step_tokens: Tokens of a training step.
        eval_seconds: Median time to evaluate one example, in batches.
        latency: Median seconds of inference with one example at the full length.
        speedup: Dense time / own time of a training step, paired by round, with a 95 % interval.
        latency_speedup: The same of the latency.
        reason: Why it could not be measured; the numbers are then NaN.
    """

    mixer: str
    task: str
    length: int
    step_seconds: float = math.nan
    step_tokens: float = math.nan
    eval_seconds: float = math.nan
    latency: float = math.nan
    speedup: Ratio | None = None
    latency_speedup: Ratio | None = None
    reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Training throughput."""
        return self.step_tokens / self.step_seconds


@dataclass(frozen=True)
class RungOutcome:
    """One rung: who took part and who continued.

    Attributes:
        index: Number of the rung, from 0.
        rates: Learning rates that were tried for each; empty: the best of the rung before.
        seeds: Seeds of each candidate.
        steps: Training steps of each candidate that took part.
        entered: Candidates that took part.
        survived: Those that continued, best first; in the last rung those that finished. Empty
            while the rung is not complete.
    """

    task: str
    length: int
    index: int
    rates: list[float]
    seeds: list[int]
    steps: dict[str, int]
    entered: list[str]
    survived: list[str]


@dataclass(frozen=True)
class ResultRow:
    """One candidate on one task at one length. Numbers are means over the seeds of the last rung
    that it reached.

    Attributes:
        mixer: The candidate: a mixer, or the value of another part of the model.
        metric: Name of the metric, "" if no run finished.
        higher_is_better: Direction of the metric.
        scores: Test metric of each seed.
        tokens_per_second: Training throughput, from the costs.
        peak_bytes: Peak memory of training, the largest of all seeds; NaN where the system does not
            tell it.
        parameters: Parameters of the model.
        steps, seconds: Steps and time of training.
        test_examples: Test examples evaluated, the smallest number of all seeds; 0 if unknown.
        reason: Why there is no score, or how many seeds failed.
        is_baseline: Whether this is no candidate, but a baseline of the task.
        lr: Learning rate that the search chose, or the given one.
        latency: Seconds of inference with one example at the full length.
        speedup, latency_speedup: See `CostRow`.
        metrics: All metrics on the test examples, means over seeds, by name.
        difference: Difference to dense softmax; None for dense softmax itself and without a score.
        over_constant: Difference to the constant baseline.
        margin: Difference of the metric that matters; NaN: `RELATIVE_MARGIN` of dense softmax's.
        rung: The last rung that it reached, from 0.
        eliminated: Whether it was left out of the last rung, so that it trained for less time.
        is_reference: Whether this is dense softmax, or the default of the part that varies.
    """

    mixer: str
    task: str
    length: int
    metric: str = ""
    higher_is_better: bool = True
    scores: list[float] = field(default_factory=list)
    tokens_per_second: float = math.nan
    peak_bytes: float = math.nan
    parameters: int = 0
    steps: float = math.nan
    seconds: float = math.nan
    test_examples: int = 0
    reason: str = ""
    is_baseline: bool = False
    lr: float = math.nan
    latency: float = math.nan
    speedup: Ratio | None = None
    latency_speedup: Ratio | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    difference: Difference | None = None
    over_constant: Difference | None = None
    margin: float = math.nan
    rung: int = 0
    eliminated: bool = False
    is_reference: bool = False

    @property
    def score(self) -> float:
        """Mean over seeds; NaN without a finished run."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def std(self) -> float:
        """Standard deviation over seeds; NaN for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else math.nan


@dataclass(frozen=True)
class Caveats:
    """Reasons to be careful with a verdict. Every field that is None or False does not apply.

    Attributes:
        seeds: Number of seeds, if it is too small.
        test_examples: Smallest and largest number of test examples, if they differ.
        parameters: Smallest and largest parameter count, if they differ much.
        failed_runs: Some runs of the comparison failed.
        unfinished_runs: Some runs of the comparison have not finished.
        load: How busy other processes kept the machine while the costs were measured, in words.
        data: What the task says of its data: rows left out, copies across splits.
    """

    seeds: int | None = None
    test_examples: tuple[int, int] | None = None
    parameters: tuple[int, int] | None = None
    failed_runs: bool = False
    unfinished_runs: bool = False
    load: str | None = None
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What to use for one task and length.

    Attributes:
        recommended: Dense softmax, unless another finalist is better by a material and significant
            margin in what is preferred. None if even the best does not beat the constant baseline.
        best: The row with the best score.
        dense: The row of dense softmax attention, or of the default of the part that varies, if it
            has a score.
        baseline: The row of the constant baseline, if there is one.
        better_baseline: The best row of a baseline that beats all candidates, if there is one.
        ties: The other finalists that do not differ significantly from dense softmax.
        caveats: What speaks against relying on it.
        prefer: What the user prefers.
        basis: What made the choice: a preference; "default": no other was better than dense
            softmax; "no reference": dense softmax has no score.
        margin: Difference of the metric that counts as material.
        unproven: Finalists that are materially cheaper than dense softmax and whose score is about
            equal, but where a material loss is not excluded.
    """

    task: str
    length: int
    recommended: ResultRow | None
    best: ResultRow
    dense: ResultRow | None
    baseline: ResultRow | None
    better_baseline: ResultRow | None
    ties: list[ResultRow]
    caveats: Caveats
    prefer: str = "score"
    basis: str = "default"
    margin: float = math.nan
    unproven: list[ResultRow] = field(default_factory=list)


def group_rows(rows: Iterable[ResultRow]) -> dict[tuple[str, int], list[ResultRow]]:
    """Group rows by task and length: only rows of one group can be compared."""
    groups: dict[tuple[str, int], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.task, row.length), []).append(row)
    return groups


def group_metric(rows: Iterable[ResultRow]) -> tuple[str, bool]:
    """Return the metric of a group and whether higher is better; "" if no row has a score."""
    return next(((row.metric, row.higher_is_better) for row in rows if row.metric), ("", True))


def rank_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Sort the rows of a group, best first: those of the last rung and baselines, then those that
    were eliminated, the latest first, then those without a score."""
    sign = -1 if group_metric(rows)[1] else 1

    def key(row: ResultRow) -> tuple[bool, bool, int, float]:
        late = -row.rung if row.eliminated else 0
        return not row.scores, row.eliminated, late, sign * row.score if row.scores else 0

    return sorted(rows, key=key)


def summarize_runs(entries: Iterable[LedgerEntry], reference: str = "vanilla") -> list[ResultRow]:
    """Average the runs of each candidate, task and length over their seeds.

    Args:
        entries: Runs of one rung and learning rate for each candidate.
        reference: Label of dense softmax, or of the default of the part that varies.
    """
    groups: dict[tuple[str, str, int], list[LedgerEntry]] = {}
    for entry in entries:
        groups.setdefault(entry_labels(entry), []).append(entry)
    rows = []
    for labels, group in groups.items():
        first, is_reference = group[0].settings, labels[0] == reference
        rung = int(first.get("rung", 0))
        results = [e.result for e in group if e.status == DONE and e.result is not None]
        has_scores = [r for r in results if r["test"] is not None]
        if not has_scores:
            reason = group[0].reason or group[0].status
            if results:
                reason = f"{results[0]['metric']} has no value on the test examples"
            row = ResultRow(*labels, reason=reason, rung=rung, is_reference=is_reference)
            rows.append(row)
            continue
        missing = sum(entry.status != DONE for entry in group)
        peaks = [r["peak_bytes"] for r in results]  # None where the system does not tell it
        names = set.intersection(*(set(r.get("metrics", {})) for r in results))
        rows.append(
            ResultRow(
                *labels,
                metric=results[0]["metric"],
                higher_is_better=results[0]["higher_is_better"],
                scores=[r["test"] for r in has_scores],
                tokens_per_second=statistics.fmean(
                    r["tokens"] / max(r["seconds"], 1e-9) for r in results
                ),
                peak_bytes=math.nan if None in peaks else max(peaks),
                parameters=results[0]["parameters"],
                steps=statistics.fmean(r["steps"] for r in results),
                seconds=statistics.fmean(r["seconds"] for r in results),
                test_examples=min(r.get("examples", 0) for r in results),
                reason=f"{missing} of {len(group)} seeds did not finish" if missing else "",
                lr=first.get("lr", math.nan),
                metrics={
                    name: statistics.fmean(r["metrics"][name] for r in results)
                    for name in results[0].get("metrics", {})
                    if name in names
                },
                rung=rung,
                is_reference=is_reference,
            )
        )
    return rows


def entry_labels(entry: LedgerEntry) -> tuple[str, str, int]:
    """Return the candidate, task and length of a run, as they are shown."""
    settings = entry.settings
    mixer, task = (spec_label(ModuleSpec(**settings[name])) for name in ("mixer", "task"))
    return mixer, task, int(settings["length"])


def compute_verdicts(
    rows: Iterable[ResultRow],
    statuses: Collection[str] = (),
    *,
    prefer: str = "score",
    load: str | None = None,
    notes: Mapping[tuple[str, int], Sequence[str]] = MappingProxyType({}),
) -> list[Verdict]:
    """Return a verdict for each task and length that has at least one score.

    Args:
        rows: Rows of a comparison, with those of the constant baseline.
        statuses: Status of each run, for the caveats.
        prefer: "score", "speed", "memory" or "latency".
        load: How busy other processes kept the machine, for the caveats.
        notes: What each task at each length says of its data, for the caveats.
    """
    verdicts = []
    for (task, length), group in group_rows(rows).items():
        baselines = [row for row in group if row.scores and row.is_baseline]
        baseline = next((row for row in baselines if row.mixer == CONSTANT), None)
        finalists = [
            row for row in group if row.scores and not row.is_baseline and not row.eliminated
        ]
        if not finalists:
            continue
        best = rank_rows(finalists)[0]
        dense = next((row for row in finalists if row.is_reference), None)
        margin = math.nan
        recommended: ResultRow | None = None
        basis, ties, unproven = "default", list[ResultRow](), list[ResultRow]()
        if dense is None:
            basis, recommended = "no reference", best
        else:
            margin = material_margin(dense)
            others = [row for row in finalists if row is not dense]
            basis, recommended = choose_row(dense, others, margin, prefer)
            ties = [
                row
                for row in finalists
                if row is not recommended
                and row is not dense
                and (row.difference is None or not row.difference.significant)
            ]
            cost: Preference = next(each for each in PREFERENCES[prefer] if each != "score")
            unproven = [
                row
                for row in others
                if recommended is not row
                and is_cheaper(row, dense, cost)
                and not is_noninferior(row, margin)
                and row.difference is not None
                and _gain(row) > -margin
            ]
        if (
            baseline is not None
            and recommended is not None
            and not (beats_baseline(best, baseline) and beats_baseline(recommended, baseline))
        ):
            basis, recommended, ties, unproven = "default", None, [], []
        first = rank_rows([*baselines, *finalists])[0]
        verdicts.append(
            Verdict(
                task,
                length,
                recommended=recommended,
                best=best,
                dense=dense,
                baseline=baseline,
                better_baseline=first if first.is_baseline else None,
                ties=ties,
                caveats=replace(
                    find_caveats(finalists, best, statuses, load),
                    data=tuple(notes.get((task, length), ())),
                ),
                prefer=prefer,
                basis=basis,
                margin=margin,
                unproven=unproven,
            )
        )
    return verdicts


def material_margin(dense: ResultRow) -> float:
    """Return the difference of the metric that counts as material."""
    return RELATIVE_MARGIN * abs(dense.score) if math.isnan(dense.margin) else dense.margin


def choose_row(
    dense: ResultRow, others: Sequence[ResultRow], margin: float, prefer: str
) -> tuple[str, ResultRow]:
    """Return the row to recommend, and what it was chosen for: dense softmax by "default".

    A row is chosen for its score if it is better by a material and significant margin; for its cost
    if that is materially and significantly lower, and its score not materially worse.
    """
    for each in PREFERENCES[prefer]:
        if each == "score":
            better = [row for row in others if is_better(row, margin)]
            if better:
                return each, max(better, key=_gain)
        else:
            cheaper = [
                row
                for row in others
                if is_cheaper(row, dense, each) and is_noninferior(row, margin)
            ]
            if cheaper:
                return each, min(cheaper, key=lambda row: relative_cost(row, dense, each))
    return "default", dense


def _gain(row: ResultRow) -> float:
    """How much better the score is than that of dense softmax."""
    assert row.difference is not None
    return row.difference.estimate if row.higher_is_better else -row.difference.estimate


def is_better(row: ResultRow, margin: float) -> bool:
    """Whether a score is better than that of dense softmax, materially and significantly."""
    return row.difference is not None and row.difference.significant and _gain(row) >= margin


def is_noninferior(row: ResultRow, margin: float) -> bool:
    """Whether the interval of the difference to dense softmax excludes a material loss."""
    if row.difference is None:
        return False
    bound = row.difference.low if row.higher_is_better else -row.difference.high
    return bound > -margin


def relative_cost(row: ResultRow, dense: ResultRow, what: Preference) -> float:
    """Return the cost of a row relative to dense softmax; NaN if it is unknown."""
    if what == "memory":
        return row.peak_bytes / dense.peak_bytes if dense.peak_bytes > 0 else math.nan
    ratio = row.speedup if what == "speed" else row.latency_speedup
    return math.nan if ratio is None else 1 / ratio.median


def is_cheaper(row: ResultRow, dense: ResultRow, what: Preference) -> bool:
    """Whether a cost is lower than that of dense softmax, materially and significantly."""
    if what == "memory":
        return relative_cost(row, dense, what) <= SMALLER
    ratio = row.speedup if what == "speed" else row.latency_speedup
    return ratio is not None and ratio.median >= FASTER and ratio.low > 1


def beats_baseline(row: ResultRow, baseline: ResultRow) -> bool:
    """Whether a score beats the constant baseline by more than the error of the test examples."""
    sign = 1 if row.higher_is_better else -1
    if row.over_constant is None:
        return sign * (row.score - baseline.score) > 0
    error = row.over_constant.example_error
    return sign * row.over_constant.estimate > BEATS_CONSTANT * error


def find_caveats(
    rows: Sequence[ResultRow],
    best: ResultRow,
    statuses: Collection[str] = (),
    load: str | None = None,
) -> Caveats:
    """Collect what speaks against relying on the verdict of a group."""
    examples = [row.test_examples for row in rows if row.test_examples]
    sizes = [row.parameters for row in rows if row.parameters]
    seeds = len(best.scores)
    return Caveats(
        seeds=seeds if seeds < ENOUGH_SEEDS else None,
        test_examples=(min(examples), max(examples)) if len(set(examples)) > 1 else None,
        parameters=(min(sizes), max(sizes))
        if sizes and max(sizes) > (1 + SAME_SIZE) * min(sizes)
        else None,
        failed_runs=FAILED in statuses,
        unfinished_runs=not set(statuses) <= {DONE, REFUSED, FAILED},
        load=load,
    )
