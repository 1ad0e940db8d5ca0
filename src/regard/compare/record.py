"""What a comparison was, kept beside its runs, so that its report can be written again: plan.json."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from regard.compare.baseline import constant_baseline_score
from regard.compare.ledger import Ledger, LedgerEntry
from regard.compare.plan import (
    CONSTANT_BASELINE,
    ComparisonPlan,
    cached_task,
    spec_label,
    tasks_at_lengths,
)
from regard.compare.verdict import ResultRow, summarize_runs
from regard.json_files import write_json
from regard.models.config import StrictModel
from regard.tasks import Task

PLAN, LEDGER = "plan.json", "ledger.sqlite"


class ComparisonRecord(StrictModel):
    """A comparison in words.

    command   what to type to have it again
    keys      of its runs, in their order; the folder may hold the runs of other comparisons too
    """

    plan: ComparisonPlan
    command: str
    keys: list[str]


def write_record(folder: Path, record: ComparisonRecord) -> None:
    """Write it into the folder of the comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, record.model_dump(mode="json"))


def read_record(folder: Path) -> ComparisonRecord:
    """What `write_record` wrote."""
    try:
        return ComparisonRecord.model_validate_json((folder / PLAN).read_bytes(), strict=False)
    except OSError:
        raise ValueError(f"{folder} is no comparison: it has no {PLAN}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{folder / PLAN}: {where}: {first['msg']}") from None


def read_entries(folder: Path, record: ComparisonRecord) -> list[LedgerEntry]:
    """The runs of this comparison, as the ledger has them now."""
    if not (folder / LEDGER).is_file():
        raise ValueError(f"{folder} is no comparison: it has no {LEDGER}")
    ledger = Ledger(folder / LEDGER)
    found = {entry.key: entry for entry in ledger.entries()}
    ledger.close()
    return [found[key] for key in record.keys if key in found]


def result_rows(plan: ComparisonPlan, found: list[LedgerEntry]) -> list[ResultRow]:
    """A row for each mechanism, and for each task that of a constant answer."""
    return [*summarize_runs(found), *baselines(plan)]


def baselines(plan: ComparisonPlan) -> list[ResultRow]:
    """The row of a constant answer for each task."""
    found = [
        (part, cached_task(part)) for p in plan.tasks for part in tasks_at_lengths(p, plan.lengths)
    ]
    return [
        ResultRow(CONSTANT_BASELINE, spec_label(part), m.length, m.metric, [_constant(m)])
        for part, m in found
    ]


@lru_cache(16)
def _constant(made: Task) -> float:
    """The table asks for it, and so does the page; to draw so many examples may take seconds."""
    return constant_baseline_score(made)
