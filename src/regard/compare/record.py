"""The folder of a comparison: plan.json, ledger.sqlite, and runs/ with a folder per run."""

from __future__ import annotations

from dataclasses import dataclass
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
from regard.compare.results import ResultRow, Verdict, compute_verdicts, summarize_runs
from regard.errors import format_validation_error
from regard.json_files import write_json
from regard.models.config import StrictModel

PLAN_FILE, LEDGER_FILE, RUNS_DIR = "plan.json", "ledger.sqlite", "runs"


class ComparisonRecord(StrictModel):
    """What plan.json stores.

    Attributes:
        plan: Settings of the comparison.
        command: The command that repeats it.
        keys: Keys of its runs in order. The folder may also hold runs of other comparisons.
    """

    plan: ComparisonPlan
    command: str
    keys: list[str]


@dataclass(frozen=True)
class ComparisonResult:
    """The outcome of a comparison, computed once for the table, JSON and the page."""

    record: ComparisonRecord
    entries: list[LedgerEntry]
    rows: list[ResultRow]
    verdicts: list[Verdict]


def write_record(folder: Path, record: ComparisonRecord) -> None:
    """Write plan.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN_FILE, record.model_dump(mode="json"))


def read_record(folder: Path) -> ComparisonRecord:
    """Read plan.json; ValueError if it is missing or invalid."""
    try:
        return ComparisonRecord.model_validate_json((folder / PLAN_FILE).read_bytes(), strict=False)
    except OSError:
        raise ValueError(f"{folder} is not a comparison: it has no {PLAN_FILE}") from None
    except ValidationError as error:
        raise ValueError(f"{folder / PLAN_FILE}: {format_validation_error(error)}") from None


def load_result(folder: Path) -> ComparisonResult:
    """Read a comparison and compute its rows and verdicts, whether or not all runs are finished."""
    record = read_record(folder)
    if not (folder / LEDGER_FILE).is_file():
        raise ValueError(f"{folder} is not a comparison: it has no {LEDGER_FILE}")
    ledger = Ledger(folder / LEDGER_FILE)
    known = {entry.key: entry for entry in ledger.entries()}
    ledger.close()
    entries = [known[key] for key in record.keys if key in known]
    rows = summarize_runs(entries)
    for spec in record.plan.tasks:
        for sized in tasks_at_lengths(spec, record.plan.lengths):
            task = cached_task(sized)
            score = constant_baseline_score(task)
            label = spec_label(sized)
            rows.append(ResultRow(CONSTANT_BASELINE, label, task.length, task.metric, [score]))
    statuses = {entry.status for entry in entries}
    return ComparisonResult(record, entries, rows, compute_verdicts(rows, statuses))
