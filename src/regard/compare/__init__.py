"""Compare mixers on a task, a length and a machine: train all of them alike and recommend one.

A `Comparison` measures what the candidates of a `ComparisonPlan` cost, plans the runs and executes
them by a `Schedule`; `load_result` returns the outcome as data: rows, verdicts and caveats.
`regard.compare.formatting` puts them into words.
"""

from regard.compare.comparison import Comparison
from regard.compare.plan import ComparisonPlan, PlannedRun, plan_runs
from regard.compare.record import ComparisonRecord, ComparisonResult, load_result
from regard.compare.results import (
    Caveats,
    CostRow,
    Difference,
    ResultRow,
    RungOutcome,
    SearchPoint,
    Verdict,
    compute_verdicts,
    summarize_runs,
)
from regard.compare.schedule import Schedule

__all__ = [
    "Caveats",
    "Comparison",
    "ComparisonPlan",
    "ComparisonRecord",
    "ComparisonResult",
    "CostRow",
    "Difference",
    "PlannedRun",
    "ResultRow",
    "RungOutcome",
    "Schedule",
    "SearchPoint",
    "Verdict",
    "compute_verdicts",
    "load_result",
    "plan_runs",
    "summarize_runs",
]
