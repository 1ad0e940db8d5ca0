"""Packed sequences of different lengths beside a padded batch: time and memory.

    python benchmarks/packed.py                            some minutes on a free core
    python benchmarks/packed.py --longest 512 --rounds 3

A batch of sequences with random lengths, of which 10, 50 or 90 % would be padding, float32, 8 heads
of width 64. "attend" is softmax attention alone, "layer" a whole mixer with its projections:

    sdpa          padded; PyTorch's scaled_dot_product_attention with a mask (attend only)
    padded        padded; regard.attend or the mixer, with a padding mask
    packed        one row without padding; regard.attend or the mixer, with cu_seqlens
    new lengths   the same with other lengths in every round, so that each call is planned again, as
                  the first layer of a model does for every batch

The cases of a row take turns, in a rotating order, and the median of each is kept. "ratio" is
padded / packed. Memory is the peak resident memory of a process that runs one case, less what it
had before. Results go to benchmarks/results/packed.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.environment import environment, load_average

RESULT = Path(__file__).parent / "results" / "packed.json"
HEADS, HEAD_DIM = 8, 64
DIM = HEADS * HEAD_DIM
PADDING = (0.1, 0.5, 0.9)
RECIPES = {"vanilla": {}, "local": {"window": 64}}
CASES = {
    "attend": ("sdpa", "padded", "packed", "new lengths"),
    "layer": ("padded", "packed", "new lengths"),
}

Lengths = list[int]


def draw_lengths(padding: float, batch: int, longest: int, seed: int) -> Lengths:
    """Random lengths, one of them `longest`, whose sum is (1 - padding) · batch · longest."""
    generator = random.Random(seed)
    total = round((1 - padding) * batch * longest)
    low, high = 1e-3, 1e3  # longest · u^power has a mean that falls with the power
    draws = [generator.random() for _ in range(batch - 1)]
    for _ in range(60):
        power = (low * high) ** 0.5
        lengths = [longest, *(max(1, round(longest * u**power)) for u in draws)]
        low, high = (power, high) if sum(lengths) > total else (low, power)
    return lengths


class Case:
    """One way to compute attention over sequences of these lengths."""

    def __init__(
        self, kind: str, case: str, recipe: str, train: bool, batches: list[Lengths]
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.case, self.train, self.round = kind, case, train, 0
        self.batches = batches if case == "new lengths" else batches[:1]
        self.packed = case in ("packed", "new lengths")
        self.mixer = regard.create(recipe, dim=DIM, heads=HEADS, **RECIPES[recipe])
        self.pattern = self.mixer.inner.pattern  # type: ignore[union-attr]
        lengths = batches[0]
        shape = (1, sum(max(batches, key=sum))) if self.packed else (len(lengths), max(lengths))
        self.x = torch.randn(*shape, DIM)
        self.qkv = [torch.randn(shape[0], HEADS, shape[1], HEAD_DIM) for _ in range(3)]

    def __call__(self) -> None:
        """One call, with the backward pass if it is for training."""
        lengths = self.batches[self.round % len(self.batches)]
        self.round += 1
        tokens = sum(lengths) if self.packed else max(lengths)
        masks: dict[str, Tensor] = {}
        if self.packed:
            masks["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        else:
            masks["mask"] = torch.arange(tokens) < torch.tensor(lengths)[:, None]
        function: Callable[..., Tensor]
        if self.kind == "layer":
            inputs, function = [self.x[:, :tokens]], partial(self.mixer, **masks)
        else:
            inputs = [x[:, :, :tokens] for x in self.qkv]
            function = partial(regard.attend, pattern=self.pattern, **masks)
        if self.case == "sdpa":
            keep = masks["mask"][:, None, None]
            if self.pattern != regard.Full():
                keep = keep & self.pattern.dense(tokens)
            function = partial(F.scaled_dot_product_attention, attn_mask=keep)
        with torch.set_grad_enabled(self.train):
            inputs = [x.detach().requires_grad_(self.train) for x in inputs]
            y = function(*inputs)
            if self.train:
                y.sum().backward()


def measure_row(
    kind: str, recipe: str, train: bool, batches: list[Lengths], rounds: int
) -> dict[str, float]:
    """Median seconds of each case; the cases take turns."""
    cases = [Case(kind, case, recipe, train, batches) for case in CASES[kind]]
    times: dict[str, list[float]] = {case.case: [] for case in cases}
    for case in cases:
        case()
    for round_ in range(rounds):
        turn = round_ % len(cases)
        for case in cases[turn:] + cases[:turn]:
            start = time.perf_counter()
            case()
            times[case.case].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_memory(kind: str, case: str, recipe: str, train: bool, batches: list[Lengths]) -> None:
    """Print the bytes by which the peak of this process grows in two calls."""
    Case(kind, case, recipe, train, [[70] * 2])()  # load kernels
    run = Case(kind, case, recipe, train, batches)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here (Linux)
    before = memory_of_process("VmRSS")
    run()
    run()
    print(json.dumps(memory_of_process("VmHWM") - before))


def memory_of_process(field: str) -> int:
    """Resident memory of this process in bytes: VmRSS is the present one, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_in_process(arguments: list[object]) -> int:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: int = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all rows, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        measure_memory(*json.loads(options.memory_of))
        return
    rows = []
    print(
        "kind    recipe   pass      padding   "
        + "".join(f"{c:>13}" for c in CASES["attend"])
        + "   ratio   memory ratio"
    )
    for kind, recipe, train, padding in product(CASES, RECIPES, (False, True), PADDING):
        batches = [
            draw_lengths(padding, options.batch, options.longest, seed)
            for seed in range(options.rounds + 1)
        ]
        seconds = measure_row(kind, recipe, train, batches, options.rounds)
        memory = {
            case: memory_in_process([kind, case, recipe, train, batches[:1]])
            for case in CASES[kind]
            if case != "new lengths"
        }
        row = {
            "kind": kind,
            "recipe": recipe,
            "pass": "training" if train else "forward",
            "padding": 1 - sum(batches[0]) / (options.batch * options.longest),
            "seconds": seconds,
            "bytes": memory,
            "ratio": seconds["padded"] / seconds["packed"],
            "memory_ratio": memory["padded"] / max(memory["packed"], 1),
        }
        rows.append(row)
        cells = "".join(
            f"{seconds[c] * 1e3:10.1f} ms" if c in seconds else " " * 13 for c in CASES["attend"]
        )
        print(
            f"{kind:<8}{recipe:<9}{row['pass']:<10}{row['padding']:7.0%}   {cells}"
            f"{row['ratio']:8.2f}{row['memory_ratio']:15.2f}",
            flush=True,
        )
    about = {
        "batch": options.batch,
        "longest": options.longest,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "load": load_average(),
        **environment(),
    }
    options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
