"""regard demo: the main job, small enough to watch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.comparing import compare

MIXERS = "local:window=16,sparse_strided:stride=8,linear,performer,retnet,delta_rule"
TASKS = "recall:pairs=8,copy"
STEPS, RATE = 100_000, 3e-3  # more steps than there is time for


def demo(
    budget: Annotated[str, typer.Option(help="Time for all.")] = "150s",
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare seven mechanisms on two tasks of 64 tokens, and recommend one for each: some three minutes on two cores.

    Example: regard demo --budget 5m
    """
    jobs = min(2, os.cpu_count() or 1)
    words = f"--mixers {MIXERS} --tasks {TASKS} --lengths 64 --budget {budget} --steps {STEPS} --rate {RATE} --jobs {jobs}"
    typer.echo(f"regard compare {words} --out {out}\n")
    compare(mixers=MIXERS, tasks=TASKS, lengths="64", budget=budget, steps=STEPS, rate=RATE, jobs=jobs, out=out)
