"""Which mechanism is best for a task, a length and a machine: train all of them alike, and look."""

from regard.compare.plan import ComparisonPlan, PlannedRun, plan_runs
from regard.compare.schedule import Schedule
from regard.compare.verdict import ResultRow, Verdict, compute_verdicts, summarize_runs

__all__ = [
    "PlannedRun",
    "ComparisonPlan",
    "ResultRow",
    "Schedule",
    "Verdict",
    "plan_runs",
    "summarize_runs",
    "compute_verdicts",
]
