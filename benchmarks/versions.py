"""Time the same calls in two checkouts of Regard, interleaved in one run.

    git worktree add /tmp/before v0.1.0
    python benchmarks/versions.py /tmp/before/src src --lengths 2048,8192

Each checkout runs in a process of its own. The processes take turns, one call at a time and with
alternating order, so a busy moment of the machine hits both. The table shows the median of the
paired ratios, second / first, with a 95 % bootstrap interval: above 1 means the second is slower.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

CASES = ("dense", "window", "bigbird", "linear")
MODES = ("forward", "training", "decode")

WORKER = """
import json, sys, time
import torch, regard
from regard import Band, Full

def build(case, length, mode):
    heads, width, causal = 8, 64, mode == "decode"
    grad = mode == "training"
    torch.manual_seed(0)
    if case in ("dense", "window") and mode != "decode":
        q, k, v = (torch.randn(1, heads, length, width, requires_grad=grad) for _ in range(3))
        pattern = Full() if case == "dense" else Band(128, 128)
        forward = lambda: regard.attend(q, k, v, pattern=pattern)
    else:
        name = {"dense": "vanilla", "window": "local"}.get(case, case)
        options = {"length": max(length, 64) * 2} if case == "bigbird" else {}
        causal = causal or case == "linear"
        mixer = regard.create(name, dim=heads * width, heads=heads, causal=causal, **options)
        x = torch.randn(1, length, heads * width, requires_grad=grad)
        if mode == "decode":
            with torch.no_grad():
                _, state = mixer.stream(x)
            token = torch.randn(1, 1, heads * width)
            forward = lambda: mixer.stream(token, state)[0]
        else:
            forward = lambda: mixer(x)
    if not grad:
        def call():
            with torch.no_grad():
                forward()
        return call
    def call():
        forward().sum().backward()
    return call

print("ready", flush=True)
call = None
for line in sys.stdin:
    request = json.loads(line)
    if "case" in request:
        call = build(request["case"], request["length"], request["mode"])
        for _ in range(2):
            call()
    start = time.perf_counter()
    for _ in range(request["repeat"]):
        call()
    print(time.perf_counter() - start, flush=True)
"""


class Worker:
    """A process that runs calls of one checkout on request."""

    def __init__(self, source: Path, threads: int) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a waiting process must not spin on the cores
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.read()

    def read(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker stopped; its error is printed above")
        return line

    def run(self, **request) -> float:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(self.read())


def compare(workers: tuple[Worker, Worker], case: str, length: int, mode: str, seconds: float):
    """Paired ratios, second / first, for one call."""
    import numpy as np

    first = [worker.run(case=case, length=length, mode=mode, repeat=1) for worker in workers]
    repeat = max(1, round(0.02 / max(first)))
    rounds = int(min(60, max(8, seconds / (sum(first) * repeat))))
    times = []
    for i in range(rounds):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        pair = [0.0, 0.0]
        for which in order:
            pair[which] = workers[which].run(repeat=repeat) / repeat
        times.append(pair)
    pairs = np.array(times)
    ratios = pairs[:, 1] / pairs[:, 0]
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, 1), (0.025, 0.975))
    return {
        "case": case,
        "length": length,
        "mode": mode,
        "first_ms": float(np.median(pairs[:, 0]) * 1e3),
        "second_ms": float(np.median(pairs[:, 1]) * 1e3),
        "ratio": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="src folder of the first checkout")
    parser.add_argument("second", type=Path, help="src folder of the second checkout")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--modes", default="forward,training", help=f"of {', '.join(MODES)}")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=15.0, help="time for each call")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    for source in (options.first, options.second):
        if not (source / "regard" / "__init__.py").is_file():
            parser.error(f"{source} has no regard package; give the src folder of a checkout")
    workers = Worker(options.first, options.threads), Worker(options.second, options.threads)
    rows = []
    print("case      mode       length   first ms  second ms  ratio  95 % interval")
    for mode in options.modes.split(","):
        for case in options.cases.split(","):
            for length in map(int, options.lengths.split(",")):
                row = compare(workers, case, length, mode, options.seconds)
                rows.append(row)
                print(
                    f"{case:9} {mode:9} {length:7,d} {row['first_ms']:10.3f} "
                    f"{row['second_ms']:10.3f}"
                    f"  {row['ratio']:.3f}  {row['low']:.3f} to {row['high']:.3f}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
