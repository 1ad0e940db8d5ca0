"""regard demo: the main job, small enough to watch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.comparing import compare

MIXERS = "local:window=8,sparse_strided:stride=8,linear,performer,retnet,delta_rule"
TASKS = "copy:length=49:symbols=8,selective_copy:length=32:symbols=8:count=4"
STEPS, RATE, BATCH, DIM, HEADS = (
    100_000,
    5e-3,
    64,
    32,
    2,
)  # more steps than there is time for; small, so that there is time


def demo(
    budget: Annotated[str, typer.Option(help="Time for all.")] = "150s",
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare seven mechanisms on two tasks, and recommend one for each: some three minutes on two cores.

    Example: regard demo --budget 5m
    """
    jobs = min(2, os.cpu_count() or 1)
    words = f"--mixers {MIXERS} --tasks {TASKS} --budget {budget} --steps {STEPS} --rate {RATE} --batch {BATCH} --dim {DIM} "
    typer.echo(f"regard compare {words}--heads {HEADS} --jobs {jobs} --out {out}\n")
    compare(
        mixers=MIXERS,
        tasks=TASKS,
        budget=budget,
        steps=STEPS,
        rate=RATE,
        batch=BATCH,
        dim=DIM,
        heads=HEADS,
        jobs=jobs,
        out=out,
    )
