"""Which mechanism is best for a task, a length and a machine: train all of them alike, and look."""

from regard.compare.plan import Cell, Plan, cells
from regard.compare.schedule import Schedule
from regard.compare.verdict import Row, Verdict, rows_of, verdicts

__all__ = ["Cell", "Plan", "Row", "Schedule", "Verdict", "cells", "rows_of", "verdicts"]
