"""Training speed of one run alone, and of two side by side with different threads and waiting.

python benchmarks/side_by_side.py --steps 100
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from regard.bench.machine import measure_load
from regard.compare.executors import PASSIVE_WAITING
from regard.json_files import write_json
from regard.models import module_spec
from regard.train.run import SPEC_FILE, RunSpec, read_result
from regard.train.settings import TrainSettings

CASES = (  # runs at a time, threads each, passive waiting
    (1, 2, False),
    (1, 1, False),
    (2, 2, False),
    (2, 2, True),
    (2, 1, False),
    (2, 1, True),
)


def tokens_per_second(
    root: Path, runs: int, threads: int, passive: bool, steps: int
) -> list[float]:
    """Train several runs at the same time and return the speed of each."""
    settings = TrainSettings(steps=steps, eval_every=steps, eval_examples=1)
    spec = RunSpec(task=module_spec("copy", length=129), settings=settings, threads=threads)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for name in PASSIVE_WAITING:
        environment.pop(name, None)
    if passive:
        environment |= PASSIVE_WAITING
    folders = [root / f"{runs}-{threads}-{passive}-{number}" for number in range(runs)]
    code = (
        "import sys; from regard.train.run import read_spec, run_training;"
        "run_training(read_spec(sys.argv[1]), sys.argv[1])"
    )
    processes = []
    for folder in folders:
        folder.mkdir()
        write_json(folder / SPEC_FILE, spec.model_dump(mode="json"))
        processes.append(subprocess.Popen([sys.executable, "-c", code, folder], env=environment))
    for process in processes:
        process.wait()
    results = [read_result(folder) for folder in folders]
    return [result["tokens"] / result["seconds"] for result in results]


def main() -> None:
    """Measure all cases and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for runs, threads, passive in CASES:
            load = measure_load()
            speeds = tokens_per_second(Path(root), runs, threads, passive, given.steps)
            rows.append(
                {
                    "runs": runs,
                    "threads": threads,
                    "passive": passive,
                    "tokens_per_second": [round(speed) for speed in speeds],
                    "others_before": load.others,
                    "load_average": load.average,
                }
            )
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
