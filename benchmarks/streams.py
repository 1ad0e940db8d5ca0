"""Decoding streams that stand at different positions: one joined batch, or one by one.

    python benchmarks/streams.py                     about a minute on a free core
    python benchmarks/streams.py --streams 8 --times 3

A model of 4 layers, 256 wide, random weights, one thread, float32. Each of 32 streams has read a
prompt of its own length and reads one token more:

    joined   one call for all, from `regard.state.join` of their states
    equal    one call for as many streams that stand at the same position, the mean of the others
    single   one call for each stream

The three take turns, and the median of each is kept. Results go to benchmarks/results/streams.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.stack import SequentialStack
from regard.state import join

RESULT = Path(__file__).parent / "results" / "streams.json"
LAYERS, WIDTH, HEADS = 4, 256, 4
SHORTEST, LONGEST = 64, 1024  # tokens of a prompt
STEPS = 8  # tokens that a timing decodes
MECHANISMS = {"vanilla": {}, "local": {"window": 128}, "linear": {}, "memory_compressed": {}}


def build(name: str) -> SequentialStack:
    """Layers with one mechanism."""
    torch.manual_seed(0)
    mixers = [
        regard.create(name, dim=WIDTH, heads=HEADS, causal=True, **MECHANISMS[name])
        for _ in range(LAYERS)
    ]
    return SequentialStack([Block(mixer, MLP(WIDTH)) for mixer in mixers]).eval()


def seconds(step: Callable[[], None]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


@torch.inference_mode()
def measure(name: str, streams: int, times: int) -> dict:
    """Milliseconds to decode a token of each stream, in the three ways."""
    model = build(name)
    lengths = torch.linspace(SHORTEST, LONGEST, streams).long().tolist()
    own = [model.stream(torch.randn(1, n, WIDTH))[1] for n in lengths]
    middle = sum(lengths) // streams
    equal = model.stream(torch.randn(streams, middle, WIDTH))[1]
    tokens = torch.randn(streams, 1, WIDTH)
    batches = {"joined": [(join(own), tokens)], "equal": [(equal, tokens)]}
    batches["single"] = [(state, tokens[i : i + 1]) for i, state in enumerate(own)]

    def decode(way: str) -> None:
        for state, token in batches[way]:
            for _ in range(STEPS):
                _, state = model.stream(token, state)

    for way in batches:
        decode(way)
    found = {way: [] for way in batches}
    for _ in range(times):
        for way in batches:
            found[way].append(seconds(lambda way=way: decode(way)) / STEPS * 1e3)
    row = {"mechanism": name, **MECHANISMS[name], "streams": streams}
    row |= {f"{way}, ms a step": statistics.median(found[way]) for way in batches}
    row["single / joined"] = row["single, ms a step"] / row["joined, ms a step"]
    row["joined / equal"] = row["joined, ms a step"] / row["equal, ms a step"]
    return row


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=32, help="Number of streams.")
    parser.add_argument("--times", type=int, default=15, help="Timings of each way.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in MECHANISMS:
        row = measure(name, arguments.streams, arguments.times)
        rows.append(row)
        values = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        print(", ".join(f"{key} {value}" for key, value in zip(row, values, strict=True)))
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    result = {"torch": torch.__version__, "load": load, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
