"""Speed and memory on this machine, always beside dense SDPA in the same run: what `regard bench` does."""

from regard.bench.cell import Cell, Contender
from regard.bench.contenders import Dense, Ours
from regard.bench.plan import Bench, Plan, Row
from regard.bench.schedule import begin, run
from regard.bench.stats import Ratio

__all__ = ["Bench", "Cell", "Contender", "Dense", "Ours", "Plan", "Ratio", "Row", "begin", "run"]
