"""Speed and memory on this machine, always measured together with dense SDPA: `regard bench`."""

from regard.bench.cell import BenchCell, Contender
from regard.bench.contenders import DenseContender, RecipeContender
from regard.bench.plan import BenchPlan, BenchResult, BenchRow
from regard.bench.schedule import run_bench, start_bench
from regard.bench.stats import Ratio

__all__ = [
    "BenchCell",
    "BenchPlan",
    "BenchResult",
    "BenchRow",
    "Contender",
    "DenseContender",
    "Ratio",
    "RecipeContender",
    "run_bench",
    "start_bench",
]
