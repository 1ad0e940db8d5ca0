"""Speed and memory on this machine, always beside dense SDPA in the same run: what `regard bench` does."""

from regard.bench.cell import BenchCell, Contender
from regard.bench.contenders import DenseContender, RecipeContender
from regard.bench.plan import BenchPlan, BenchResult, BenchRow
from regard.bench.schedule import run_bench, start_bench
from regard.bench.stats import Ratio

__all__ = [
    "BenchResult",
    "BenchCell",
    "Contender",
    "DenseContender",
    "RecipeContender",
    "BenchPlan",
    "Ratio",
    "BenchRow",
    "start_bench",
    "run_bench",
]
