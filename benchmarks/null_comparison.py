"""How often one of several copies of dense softmax is called better than another.

All copies are the same recipe; only the seeds differ. Every pair is tested at 5 % as
`regard compare` does, without a correction, so about 5 % or fewer should differ.

    python benchmarks/null_comparison.py --copies 8 --seeds 3 --steps 300 --task listops
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from regard.compare.statistics import LEVEL, paired_difference
from regard.models import module_spec
from regard.tasks import create_task
from regard.train.run import TEST_FILE, RunSpec, run_training
from regard.train.settings import TrainSettings


def main() -> None:
    """Train the copies and print the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="listops")
    parser.add_argument("--length", type=int, default=64)
    for name, default in (("copies", 8), ("seeds", 3), ("steps", 300), ("examples", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    task = create_task(given.task, length=given.length)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for copy in range(given.copies):
            own = []
            for seed in range(given.seeds):
                run = Path(folder) / f"{copy}-{seed}"
                settings = TrainSettings(
                    steps=given.steps,
                    eval_every=given.steps,
                    eval_examples=given.examples,
                    seed=copy * given.seeds + seed,
                )
                spec = RunSpec(
                    task=module_spec(given.task, length=given.length), dim=32, settings=settings
                )
                run_training(spec, run)
                own.append(load_file(run / TEST_FILE)[task.metric.name])
            outcomes.append(own)
    pairs = list(itertools.combinations(outcomes, 2))
    different = sum(paired_difference(task.metric, *pair).p < LEVEL for pair in pairs)
    print(
        json.dumps(
            {
                **vars(given),
                "scores": [[task.metric.compute(x) for x in own] for own in outcomes],
                "pairs": len(pairs),
                "different": different,
                "rate": different / len(pairs),
                "error": math.sqrt(LEVEL * (1 - LEVEL) / len(pairs)),
                "load_average": os.getloadavg()[0],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
