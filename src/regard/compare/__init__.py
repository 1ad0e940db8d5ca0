"""Compare mixers on a task, a length and a machine: train all of them alike and recommend one.

`plan_runs` lists the runs of a `ComparisonPlan`, `Schedule` executes them, and `load_result`
returns the outcome as data: rows, verdicts and caveats. `regard.compare.formatting` puts them into
words.
"""

from regard.compare.plan import ComparisonPlan, PlannedRun, plan_runs
from regard.compare.record import ComparisonRecord, ComparisonResult, load_result
from regard.compare.results import Caveats, ResultRow, Verdict, compute_verdicts, summarize_runs
from regard.compare.schedule import Schedule

__all__ = [
    "Caveats",
    "ComparisonPlan",
    "ComparisonRecord",
    "ComparisonResult",
    "PlannedRun",
    "ResultRow",
    "Schedule",
    "Verdict",
    "compute_verdicts",
    "load_result",
    "plan_runs",
    "summarize_runs",
]
