"""Results of a comparison as data: a row per mixer, task and length; verdicts with caveats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from regard.compare.ledger import DONE, FAILED, REFUSED, LedgerEntry
from regard.compare.plan import CONSTANT_BASELINE, DENSE_MIXER, spec_label
from regard.models import ModuleSpec

SIGNIFICANT = 2.0  # standard errors between two means that count as different
SINGLE_SEED_GAP = 0.2  # relative difference that counts as one if there is only one seed
ENOUGH_SEEDS = 3  # fewer give only a rough estimate of the variance
SAME_SIZE = 0.1  # relative difference of parameter counts that needs no caveat


@dataclass(frozen=True)
class ResultRow:
    """One mixer on one task at one length. Numbers are means over seeds.

    Attributes:
        metric: Name of the metric, "" if no run finished.
        scores: Test metric of each seed.
        tokens_per_second: Training throughput.
        peak_bytes: Peak memory of training, the largest of all seeds; NaN where the system does not
            tell it.
        parameters: Parameters of the model.
        steps, seconds: Steps and time of training.
        test_examples: Test examples evaluated, the smallest number of all seeds; 0 if unknown.
        reason: Why there is no score, or how many seeds failed.
    """

    mixer: str
    task: str
    length: int
    metric: str = ""
    scores: list[float] = field(default_factory=list)
    tokens_per_second: float = math.nan
    peak_bytes: float = math.nan
    parameters: int = 0
    steps: float = math.nan
    seconds: float = math.nan
    test_examples: int = 0
    reason: str = ""

    @property
    def score(self) -> float:
        """Mean over seeds; NaN without a finished run."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def std(self) -> float:
        """Standard deviation over seeds; NaN for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; infinite for one seed, whose variance is unknown."""
        return self.std / math.sqrt(len(self.scores)) if len(self.scores) > 1 else math.inf


@dataclass(frozen=True)
class Caveats:
    """Reasons to be careful with a verdict. Every field that is None or False does not apply.

    Attributes:
        seeds: Number of seeds, if it is too small.
        test_examples: Smallest and largest number of test examples, if they differ.
        parameters: Smallest and largest parameter count, if they differ much.
        failed_runs: Some runs of the comparison failed.
        unfinished_runs: Some runs of the comparison have not finished.
    """

    seeds: int | None = None
    test_examples: tuple[int, int] | None = None
    parameters: tuple[int, int] | None = None
    failed_runs: bool = False
    unfinished_runs: bool = False


@dataclass(frozen=True)
class Verdict:
    """What to use for one task and length.

    Attributes:
        recommended: The fastest of the rows that are not significantly worse than the best. None
            if even the best does not beat the constant baseline.
        best: The row with the best score.
        dense: The row of dense softmax attention, if it has a score.
        baseline: The row of the constant baseline, if there is one.
        ties: The other rows that are not significantly worse than the best.
    """

    task: str
    length: int
    recommended: ResultRow | None
    best: ResultRow
    dense: ResultRow | None
    baseline: ResultRow | None
    ties: list[ResultRow]
    caveats: Caveats


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is better. All but accuracy are losses in bits."""
    return metric == "accuracy"


def group_rows(rows: Iterable[ResultRow]) -> dict[tuple[str, int], list[ResultRow]]:
    """Group rows by task and length: only rows of one group can be compared."""
    groups: dict[tuple[str, int], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault((row.task, row.length), []).append(row)
    return groups


def group_metric(rows: Iterable[ResultRow]) -> str:
    """Return the metric of a group, "" if no row has a score."""
    return next((row.metric for row in rows if row.metric), "")


def rank_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Sort the rows of a group, best first, rows without a score last."""
    sign = -1 if higher_is_better(group_metric(rows)) else 1
    return sorted(rows, key=lambda row: (not row.scores, sign * row.score if row.scores else 0))


def summarize_runs(entries: Iterable[LedgerEntry]) -> list[ResultRow]:
    """Average the runs of each mixer, task and length over their seeds."""
    groups: dict[tuple[str, str, int], list[LedgerEntry]] = {}
    for entry in entries:
        groups.setdefault(entry_labels(entry), []).append(entry)
    rows = []
    for labels, group in groups.items():
        results = [e.result for e in group if e.status == DONE and e.result is not None]
        if not results:
            rows.append(ResultRow(*labels, reason=group[0].reason or group[0].status))
            continue
        missing = sum(entry.status != DONE for entry in group)
        peaks = [r["peak_bytes"] for r in results]  # None where the system does not tell it
        rows.append(
            ResultRow(
                *labels,
                metric=results[0]["metric"],
                scores=[r["test"] for r in results],
                tokens_per_second=statistics.fmean(
                    r["tokens"] / max(r["seconds"], 1e-9) for r in results
                ),
                peak_bytes=math.nan if None in peaks else max(peaks),
                parameters=results[0]["parameters"],
                steps=statistics.fmean(r["steps"] for r in results),
                seconds=statistics.fmean(r["seconds"] for r in results),
                test_examples=min(r.get("examples", 0) for r in results),
                reason=f"{missing} of {len(group)} seeds did not finish" if missing else "",
            )
        )
    return rows


def entry_labels(entry: LedgerEntry) -> tuple[str, str, int]:
    """Return the mixer, task and length of a run, as they are shown."""
    settings = entry.settings
    mixer, task = (spec_label(ModuleSpec(**settings[name])) for name in ("mixer", "task"))
    return mixer, task, int(settings["length"])


def compute_verdicts(rows: Iterable[ResultRow], statuses: Collection[str] = ()) -> list[Verdict]:
    """Return a verdict for each task and length that has at least one score.

    Args:
        rows: Rows of a comparison, with those of the constant baseline.
        statuses: Status of each run, for the caveats.
    """
    verdicts = []
    for (task, length), group in group_rows(rows).items():
        baseline = next((row for row in group if row.mixer == CONSTANT_BASELINE), None)
        scored = [row for row in group if row.scores and row.mixer != CONSTANT_BASELINE]
        if not scored:
            continue
        best = rank_rows(scored)[0]
        dense = next((row for row in scored if row.mixer == spec_label(DENSE_MIXER)), None)
        ties: list[ResultRow] = []
        recommended = None
        if baseline is None or beats_baseline(best, baseline):
            ties = [row for row in scored if not scores_differ(row, best)]
            recommended = max(ties, key=lambda row: row.tokens_per_second)
            ties.remove(recommended)
        caveats = find_caveats(group, best, statuses)
        verdicts.append(Verdict(task, length, recommended, best, dense, baseline, ties, caveats))
    return verdicts


def beats_baseline(row: ResultRow, baseline: ResultRow) -> bool:
    """Whether a score beats the constant baseline by more than its sampling error."""
    if not higher_is_better(row.metric):
        return row.score < baseline.score
    p, n = baseline.score, row.test_examples
    sampling_error = math.sqrt(p * (1 - p) / n) if n else 0.0
    return row.score > p + SIGNIFICANT * sampling_error


def scores_differ(a: ResultRow, b: ResultRow) -> bool:
    """Whether two means differ significantly; with one seed, whether they differ by a fifth."""
    difference = abs(a.score - b.score)
    noise = math.hypot(a.standard_error, b.standard_error)
    if math.isinf(noise):
        return difference > SINGLE_SEED_GAP * max(abs(a.score), abs(b.score))
    return difference > SIGNIFICANT * noise


def find_caveats(
    rows: Sequence[ResultRow], best: ResultRow, statuses: Collection[str] = ()
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
    )
