"""Grouped-query attention: shared heads of keys, repeated heads, and PyTorch's `enable_gqa`.

    python benchmarks/gqa.py                        about five minutes on an idle machine
    python benchmarks/gqa.py --quick                seconds, for a look

32 query heads of 64 on 4 heads of keys and values, float32, in the memory layout of a projection.
Three ways to compute the same:

    shared      regard.attend(q, k, v)
    repeated    regard.attend with k and v after repeat_interleave, which is part of the call
    enable_gqa  torch's scaled_dot_product_attention(..., enable_gqa=True)

The ways take turns. Each row has the median time, how many times faster `shared` is (paired, with
its 95 % interval) and the peak memory that a call adds in a process of its own. Results go to
benchmarks/results/gqa.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.bench.probe import _reset_peak, process_memory
from regard.bench.stats import paired_ratio, time_interleaved
from regard.environment import environment, load_average
from regard.pattern import Band, Causal, Full, Pattern

RESULT = Path(__file__).parent / "results" / "gqa.json"
HEADS, KV_HEADS, WIDTH = 32, 4, 64
COLUMN = 19  # characters of a column of the table
WAYS = ("shared", "repeated", "enable_gqa")
PATTERNS = {"causal": Causal(), "window": Band(127, 0)}
CASES = [
    *(("forward", "causal", n) for n in (512, 2048, 4096)),
    *(("training", "causal", n) for n in (512, 2048, 4096)),
    *((mode, "window", 4096) for mode in ("forward", "training")),
    *(("decode", "causal", n) for n in (512, 4096, 32768)),
]
QUICK = [("forward", "causal", 256), ("training", "window", 256), ("decode", "causal", 512)]


def make_call(way: str, mode: str, name: str, length: int) -> Callable[[], object]:
    """One call, of one new token after `length` others if mode is decode."""
    make = torch.Generator().manual_seed(0)
    n = 1 if mode == "decode" else length

    def heads(count: int, tokens: int) -> Tensor:
        x = torch.randn(1, tokens, count, WIDTH, generator=make)
        return x.transpose(1, 2).requires_grad_(mode == "training")

    q, k, v = heads(HEADS, n), heads(KV_HEADS, length), heads(KV_HEADS, length)
    if mode == "decode":  # a cache holds the tokens of a head one after the other
        k, v = k.contiguous(), v.contiguous()
    pattern: Pattern = Full() if mode == "decode" else PATTERNS[name]
    mask = pattern.dense(n, length) if name == "window" else None
    causal = name == "causal" and mode != "decode"

    def attend() -> Tensor:
        if way == "enable_gqa":
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
        if way == "repeated":
            own = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            return regard.attend(q, *own, pattern=pattern)
        return regard.attend(q, k, v, pattern=pattern)

    def train() -> None:
        for x in (q, k, v):
            x.grad = None
        attend().sum().backward()

    return train if mode == "training" else torch.no_grad()(attend)


def added_memory(way: str, mode: str, name: str, length: int, threads: int) -> int | None:
    """Bytes that a call adds to those of q, k and v, in a process of its own."""
    argument = json.dumps([way, mode, name, length, threads])
    command = [sys.executable, __file__, "--child", argument]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(way: str, mode: str, name: str, length: int, threads: int) -> None:
    """Print the bytes that a call adds."""
    torch.set_num_threads(threads)
    make_call(way, mode, name, 256)()  # loads libraries
    call = make_call(way, mode, name, length)
    _reset_peak()
    before = process_memory("VmRSS")
    call()
    peak = process_memory("VmHWM")
    print(json.dumps(None if before is None or peak is None else max(0, peak - before)))


def measure(mode: str, name: str, length: int, seconds: float) -> dict:
    """Times, ratios and memory of one case."""
    calls = {way: make_call(way, mode, name, length) for way in WAYS}
    repeat = 10 if mode == "decode" or length <= 512 else 1
    times = time_interleaved(calls, seconds, repeat=repeat)
    row: dict = {"mode": mode, "pattern": name, "length": length}
    for way in WAYS:
        row[f"{way}, ms"] = 1e3 * statistics.median(times[way])
        memory = added_memory(way, mode, name, length, torch.get_num_threads())
        row[f"{way}, MB"] = None if memory is None else memory / 1e6
    for way in WAYS[1:]:
        ratio = paired_ratio(times[way], times["shared"])
        row[f"{way} / shared"] = [ratio.median, ratio.low, ratio.high]
    return row


def print_row(row: dict) -> None:
    """One line of the table."""
    milliseconds = [f"{row[f'{way}, ms']:.2f}" for way in WAYS]
    megabytes = [row[f"{way}, MB"] for way in WAYS]
    ratios = [f"{row[f'{way} / shared'][0]:.2f}" for way in WAYS[1:]]
    known = ["" if size is None else f"{size:,.0f}" for size in megabytes]
    numbers = "".join(text.rjust(COLUMN) for text in (*milliseconds, *known, *ratios))
    print(f"{row['mode']:9}{row['pattern']:8}{row['length']:7,}{numbers}", flush=True)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="Short cases; nothing is saved.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Time for each case.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="Threads.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*json.loads(arguments.child))
        return
    torch.set_num_threads(arguments.threads)
    titles = [f"{way}, {unit}" for unit in ("ms", "MB") for way in WAYS]
    titles += [f"{way}/shared" for way in WAYS[1:]]
    head = "".join(title.rjust(COLUMN) for title in titles)
    print(f"{'mode':9}{'pattern':8}{'length':>7}{head}")
    rows = []
    for case in QUICK if arguments.quick else CASES:
        rows.append(measure(*case, 0.5 if arguments.quick else arguments.seconds))
        print_row(rows[-1])
    if not arguments.quick:
        result = {"environment": environment(), "load": load_average(), "rows": rows}
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
