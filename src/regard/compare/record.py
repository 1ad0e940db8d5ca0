"""The folder of a comparison.

plan.json        the settings, and the rungs that were planned from the costs
ledger.sqlite    the status and result of each run
costs/           what the candidates cost, a folder for each task and length
runs/            a folder for each run
baselines.json   statistics of the baselines on the test examples
load.json        how busy other processes kept the machine during the runs
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel, FiniteFloat, ValidationError
from torch import Tensor

from regard.compare.executors import JOBS_DIR
from regard.compare.group import GroupResult
from regard.compare.halving import GroupSchedule
from regard.compare.ledger import Ledger, LedgerEntry, check_ledger
from regard.compare.load import Load, merge_loads
from regard.compare.plan import (
    RUNS_DIR as RUNS_DIR,
    ComparisonPlan,
    cached_task,
    spec_label,
    tasks_at_lengths,
)
from regard.compare.results import (
    CostRow,
    Difference,
    ResultRow,
    RungOutcome,
    SearchPoint,
    Verdict,
    compute_verdicts,
    entry_labels,
)
from regard.errors import describe_stored_error
from regard.folder_lock import LOCK_FILE
from regard.json_files import CorruptFile, read_json, write_json
from regard.models.config import ModuleSpec, StrictModel
from regard.output_folders import check_output_folder
from regard.plugins import load_known_plugins, require_plugins
from regard.tasks import Task
from regard.train.run import StoredResult

PLAN_FILE, LEDGER_FILE = "plan.json", "ledger.sqlite"
BASELINES_FILE, LOAD_FILE = "baselines.json", "load.json"


class ComparisonRecord(StrictModel):
    """What plan.json stores.

    Attributes:
        plan: Settings of the comparison.
        command: The command that repeats it.
        keys: Keys of its runs so far, in order. The folder may also hold runs of other comparisons.
        schedule: The rungs of each task and length; empty until they are planned.
    """

    plan: ComparisonPlan
    command: str
    keys: list[str]
    schedule: tuple[GroupSchedule, ...] = ()


class StoredBaselines(StrictModel):
    """What baselines.json stores: task and number of examples -> name -> statistics of each test
    example, or why there are none."""

    statistics: dict[str, dict[str, list[list[FiniteFloat]] | str]]


@dataclass(frozen=True)
class ComparisonResult:
    """The outcome of a comparison, computed once for the table, JSON and the page.

    Attributes:
        record: The plan and the command.
        entries: The runs that the rows summarize: of each candidate those of the last rung that it
            reached, at the learning rate that was chosen; and refusals.
        rows: A row for each candidate and baseline, task and length.
        verdicts: A verdict for each task and length that has a score.
        search: Every run of the search and the halving.
        costs: What each candidate costs, measured apart.
        rungs: Who took part in each rung, and who continued.
        differences: Paired differences to dense softmax, of candidates and baselines.
        load: Sentences on how busy other processes kept the machine during measurements and runs;
            empty if it was quiet.
        unique_successes: By task and length and candidate: indices of the test examples that this
            candidate alone gets right, in most of its seeds. Empty for metrics that do not say
            whether an example is right.
    """

    record: ComparisonRecord
    entries: list[LedgerEntry]
    rows: list[ResultRow]
    verdicts: list[Verdict]
    search: list[SearchPoint] = field(default_factory=list)
    costs: list[CostRow] = field(default_factory=list)
    rungs: list[RungOutcome] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    unique_successes: dict[tuple[str, int], dict[str, list[int]]] = field(default_factory=dict)


def check_comparison_folder(folder: Path) -> None:
    """Raise ValueError if a folder contains files, but no comparison."""
    if (folder / PLAN_FILE).exists():
        read_record(folder)
    check_output_folder(folder, "comparison", LEDGER_FILE, others=[PLAN_FILE, JOBS_DIR, LOCK_FILE])
    check_ledger(folder / LEDGER_FILE)


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
        message = describe_stored_error(folder / PLAN_FILE, error, "the plan of a comparison")
        raise ValueError(message) from None


class EntrySettings(BaseModel):
    """The settings of a ledger entry, to validate them; see `PlannedRun.settings`."""

    mixer: ModuleSpec
    task: ModuleSpec
    length: int
    seed: int


def check_entry(folder: Path, entry: LedgerEntry) -> None:
    """Raise `CorruptFile` if a row of the ledger was edited."""
    try:
        EntrySettings.model_validate(entry.settings)
        if not all(isinstance(each, str) for each in (entry.name, entry.status, entry.reason)):
            raise CorruptFile(f"{folder / LEDGER_FILE} is damaged: run {entry.key} has no name.")
        if entry.result is not None:
            StoredResult.model_validate(entry.result)
    except ValidationError as error:
        where = f"Run {entry.key} in {folder / LEDGER_FILE}"
        raise CorruptFile(describe_stored_error(where, error, "a run of a comparison")) from None


def baseline_statistics(folder: Path, spec: ModuleSpec, examples: int) -> dict[str, Tensor | str]:
    """Statistics of the baselines of a task on the test examples of the runs, or why not.

    They are computed once and stored in baselines.json. The first part of a sample is a sample, so
    those of more examples are used too.
    """
    task = cached_task(spec)
    path, name = folder / BASELINES_FILE, spec.model_dump_json()
    test = task.sample("test", examples).tolist()
    try:
        stored = StoredBaselines.model_validate(read_json(path))
    except (OSError, CorruptFile, ValidationError):  # none yet, or damaged: compute them
        stored = StoredBaselines(statistics={})
    found: dict[str, list[list[float]] | str] = {}
    for key, values in stored.statistics.items():
        known, _, number = key.rpartition(" ")
        count = int(number) if known == name and number.isdecimal() else 0
        if count >= examples and task.sample("test", count)[: len(test)].tolist() == test:
            found = dict(values)
    unavailable = {}  # not stored: the package may be installed later
    for label, baseline in task.baselines().items():
        if label in found:
            continue
        try:
            found[label] = baseline(test).double().tolist()
        except ImportError as error:
            unavailable[label] = str(error)
        except ValueError as error:
            found[label] = str(error)
        stored.statistics[f"{name} {examples}"] = found
        with suppress(OSError):  # in a folder that cannot be written, they are computed again
            write_json(path, stored.model_dump(mode="json"))
    found |= unavailable
    return {label: _check_statistics(task, found[label], len(test)) for label in task.baselines()}


def _check_statistics(task: Task, values: list[list[float]] | str, examples: int) -> Tensor | str:
    """The statistics of the first examples, or why they give no score."""
    if isinstance(values, str):
        return values
    statistics = torch.tensor(values[:examples], dtype=torch.float64)
    try:
        task.metric.compute(statistics)
    except ValueError as error:
        return str(error)
    return statistics


def load_result(folder: Path) -> ComparisonResult:
    """Read a comparison and compute its rows and verdicts, whether or not all runs are finished."""
    record = read_record(folder)
    load_known_plugins(record.plan.plugins)
    require_plugins(record.plan.plugins, folder, warnings.warn)
    if not (folder / LEDGER_FILE).is_file():
        raise ValueError(f"{folder} is not a comparison: it has no {LEDGER_FILE}")
    ledger = Ledger(folder / LEDGER_FILE)
    known = {entry.key: entry for entry in ledger.entries()}
    ledger.close()
    entries = [known[key] for key in record.keys if key in known]
    for entry in entries:
        check_entry(folder, entry)
    schedules = {(spec_label(each.task), each.length): each for each in record.schedule}
    groups = []
    for spec in record.plan.tasks:
        for sized in tasks_at_lengths(spec, record.plan.lengths):
            key = (spec_label(sized), cached_task(sized).length)
            own = [entry for entry in entries if entry_labels(entry)[1:] == key]
            schedule, examples = schedules.get(key), record.plan.settings.eval_examples
            if schedule is not None and schedule.rungs:
                examples = schedule.rungs[-1].eval_examples
            baselines = baseline_statistics(folder, sized, examples)
            groups.append(GroupResult(folder, record.plan, sized, own, schedule, baselines))
    loads = [each.costs.machine_load() for each in groups if each.costs is not None]
    measured = merge_loads([each for each in loads if each is not None])
    trained = merge_loads(read_loads(folder))
    busy = [
        f"{each.describe(what)}."
        for each, what in ((measured, "Costs were measured"), (trained, "The runs were executed"))
        if each is not None and each.is_busy
    ]
    statuses = {entry.status for entry in entries}
    rows = [row for group in groups for row in group.rows]
    return ComparisonResult(
        record,
        [entry for group in groups for entry in group.selected],
        rows,
        compute_verdicts(
            rows,
            statuses,
            prefer=record.plan.prefer,
            load=" ".join(busy) if busy else None,
            notes={(each.task_label, each.length): notes_of_task(each.task) for each in groups},
        ),
        search=[point for group in groups for point in group.search],
        costs=[cost for group in groups for cost in group.cost_rows.values()],
        rungs=[rung for group in groups for rung in group.rungs],
        differences=[row.difference for row in rows if row.difference is not None],
        load=busy,
        unique_successes={
            (group.task_label, group.length): group.unique_successes() for group in groups
        },
    )


def notes_of_task(task: Task) -> list[str]:
    """What a task says of its data, and how the metric that decides was computed."""
    metric = task.metric
    return [*task.notes(), *([f"{metric.name}: {metric.signature}."] if metric.signature else [])]


def read_loads(folder: Path) -> list[Load]:
    """Return how busy other processes kept the machine in each session of a comparison."""
    try:
        return [Load(**each) for each in read_json(folder / LOAD_FILE)]
    except (OSError, CorruptFile, TypeError):  # none yet, or damaged
        return []


def add_load(folder: Path, load: Load) -> None:
    """Store the load of a session."""
    write_json(folder / LOAD_FILE, [asdict(each) for each in (*read_loads(folder), load)])
