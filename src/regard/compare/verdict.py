"""What a comparison says: a row for each mechanism, and a recommendation with its evidence and its doubt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from regard.compare.ledger import DONE, LedgerEntry
from regard.compare.plan import CONSTANT_BASELINE, DENSE_MIXER, spec_label
from regard.models import ModuleSpec

SURE = 2.0  # standard errors between two means that are told apart
GAP = 0.2  # of the greater, between two runs of one seed


@dataclass(frozen=True)
class ResultRow:
    """One mechanism on one task at one length: means over its seeds.

    score     the metric on the test split; `spread` its standard deviation over seeds, NaN for one seed
    speed     tokens trained on in a second; `memory` bytes at the peak; `parameters`
    examples  of the test split that it was judged on, the fewest of its seeds; 0: not known
    why       the reason where there is no score
    """

    mixer: str
    task: str
    length: int
    metric: str = ""
    scores: list[float] = field(default_factory=list)
    speed: float = math.nan
    memory: float = math.nan
    parameters: int = 0
    steps: float = math.nan
    seconds: float = math.nan
    examples: int = 0
    why: str = ""

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite for a single seed: its noise is unknown."""
        return self.spread / math.sqrt(len(self.scores)) if len(self.scores) > 1 else math.inf


@dataclass(frozen=True)
class Verdict:
    """What to take for one task and length, and why; nothing, where nothing was learned."""

    task: str
    length: int
    take: ResultRow | None
    best: ResultRow
    dense: ResultRow | None
    alike: list[ResultRow]  # not told apart from the best
    words: str


def summarize_runs(entries: Iterable[LedgerEntry]) -> list[ResultRow]:
    """A row for each mixer, task and length, in the order in which they came."""
    groups: dict[tuple[str, str, int], list[LedgerEntry]] = {}
    for entry in entries:
        words = entry.words
        key = (
            spec_label(ModuleSpec(**words["mixer"])),
            spec_label(ModuleSpec(**words["task"])),
            int(words["length"]),
        )
        groups.setdefault(key, []).append(entry)
    return [_row(*key, group) for key, group in groups.items()]


def _row(mixer: str, task: str, length: int, group: list[LedgerEntry]) -> ResultRow:
    done = [entry.result for entry in group if entry.status == DONE and entry.result is not None]
    if not done:
        return ResultRow(mixer, task, length, why=group[0].why or group[0].status)
    missing = [entry.why or entry.status for entry in group if entry.status != DONE]
    return ResultRow(
        mixer,
        task,
        length,
        done[0]["metric"],
        [r["test"] for r in done],
        speed=statistics.fmean(r["tokens"] / max(r["seconds"], 1e-9) for r in done),
        memory=max(r["memory"] for r in done),
        parameters=done[0]["parameters"],
        steps=statistics.fmean(r["steps"] for r in done),
        seconds=statistics.fmean(r["seconds"] for r in done),
        examples=min(r.get("examples", 0) for r in done),
        why=f"{len(missing)} of its runs failed" if missing else "",
    )


def compute_verdicts(rows: Iterable[ResultRow]) -> list[Verdict]:
    """A recommendation for each task and length that has at least one score."""
    groups: dict[tuple[str, int], list[ResultRow]] = {}
    constants: dict[tuple[str, int], ResultRow] = {}
    for row in rows:
        if row.mixer == CONSTANT_BASELINE:
            constants[row.task, row.length] = row
        elif row.scores:
            groups.setdefault((row.task, row.length), []).append(row)
    return [_verdict(*place, group, constants.get(place)) for place, group in groups.items()]


def _verdict(task: str, length: int, group: list[ResultRow], constant: ResultRow | None) -> Verdict:
    sign = 1 if group[0].metric == "accuracy" else -1
    best = max(group, key=lambda row: sign * row.score)
    dense = next((row for row in group if row.mixer == spec_label(DENSE_MIXER)), None)
    if constant is not None and not beats_baseline(best, constant):
        words = f"For {task} at {length:,} tokens nothing was learned: {best.mixer}, the best, has {figure(best)}, and a "
        words += f"constant answer {figure(constant)}. Train for longer, or make the task easier."
        return Verdict(task, length, None, best, dense, [], words)
    alike = [row for row in group if not scores_differ(row, best)]
    take = max(alike, key=lambda row: row.speed)
    return Verdict(
        task, length, take, best, dense, alike, _words(task, length, take, best, dense, alike)
    )


def beats_baseline(best: ResultRow, constant: ResultRow) -> bool:
    """Whether a score is better than that of a constant answer, by more than the luck of the examples it was judged on."""
    if best.metric != "accuracy":
        return best.score < constant.score
    luck = (
        math.sqrt(constant.score * (1 - constant.score) / best.examples) if best.examples else 0.0
    )
    return best.score > constant.score + SURE * luck


def scores_differ(a: ResultRow, b: ResultRow) -> bool:
    """Whether two means differ by more than their noise; of one seed it is not known, and a gap of a fifth is asked for."""
    if a is b:
        return False
    noise = math.hypot(a.error, b.error)
    if math.isinf(noise):  # one seed: only a gap that no seed makes
        return abs(a.score - b.score) > GAP * max(abs(a.score), abs(b.score))
    return abs(a.score - b.score) > SURE * noise and a.score != b.score


def _words(
    task: str,
    length: int,
    take: ResultRow,
    best: ResultRow,
    dense: ResultRow | None,
    alike: list[ResultRow],
) -> str:
    """The recommendation in a sentence, then its doubt."""
    text = f"For {task} at {length:,} tokens on this machine, take {take.mixer}: {figure(take)}"
    if dense is not None and take is not dense:
        memory = (
            f" and {take.memory / dense.memory:.2g} × the memory" if dense.memory else ""
        )  # 0: too little to be seen
        text += f", {take.speed / dense.speed:.2g} × the training speed{memory} of dense softmax ({figure(dense)})"
    others = [_beside(row, best) for row in alike if row is not take]
    text += f"; {_near(take, best)} {listed(others)}." if others else "; no other came near."
    if len(take.scores) < 2:
        text += f" One seed only: the noise is not known, and a gap below {GAP:.0%} was taken for it; --seeds 3 would tell."
    return text


def _beside(row: ResultRow, best: ResultRow) -> str:
    """A row that was not taken; that it has the best score is not kept quiet."""
    return f"{row.mixer} ({figure(row)}, the best score)" if row is best else row.mixer


def _near(take: ResultRow, best: ResultRow) -> str:
    """How the row that is taken stands to those beside it."""
    if len(take.scores) > 1:
        return "within noise of"
    return "perhaps no better than" if take is best else "perhaps no worse than"


def figure(row: ResultRow) -> str:
    """ "0.93 ± 0.01 accuracy"."""
    spread = f" ± {row.spread:.2g}" if len(row.scores) > 1 else ""
    return f"{row.score:.3g}{spread} {row.metric}"


def listed(names: list[str]) -> str:
    """ "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
