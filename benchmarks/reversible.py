"""What one training step holds in memory, by depth: plain, with checkpoints, and reversible.

    python benchmarks/reversible.py      prints two tables, two minutes on one thread

Each case runs in a process of its own. Its memory is the most that the process held during a step
(VmHWM, so Linux), less what it held before, parameters and inputs, and less the gradients of the
parameters. Seconds are of one step, of the processor and not of the clock. Checkpoints are
PyTorch's, around each block: the usual way to save activations, and the one to compare with.

The second table is the price of reversing: what was added in the forward pass is subtracted in the
backward pass, and was rounded. The error is that of all gradients of parameters against the same
stack in float64, |found − exact| / |exact|, beside the error of the same stack in the same
precision with a plain graph.

Results go to benchmarks/results/reversible.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.block import Block, LayerInputs
from regard.ffn import MLP
from regard.stack import ReversibleStack, SequentialStack, build_sublayers

RESULTS = Path(__file__).parent / "results"
WIDTH, HEADS, TOKENS, EXAMPLES = 128, 4, 512, 4
DEPTHS = (4, 16, 64)
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536"
}  # glibc: give back what is freed, or its holes are counted
Row = dict[str, object]
Run = Callable[[Tensor], Tensor]


def mixer() -> regard.Mixer:
    return regard.create("vanilla", dim=WIDTH, heads=HEADS, causal=True)


def plain(depth: int) -> tuple[nn.Module, Run]:
    stack = SequentialStack([Block(mixer(), MLP(WIDTH)) for _ in range(depth)])
    return stack, stack


def checkpointed(depth: int) -> tuple[nn.Module, Run]:
    stack, _ = plain(depth)

    def run(x: Tensor) -> Tensor:
        for layer in stack.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return stack, run


def reversible(depth: int) -> tuple[nn.Module, Run]:
    stack = ReversibleStack(
        [half for _ in range(depth) for half in build_sublayers(mixer(), MLP(WIDTH))]
    )
    return stack, stack


CASES = {"plain": plain, "checkpointed": checkpointed, "reversible": reversible}


def held(what: str) -> float:
    """VmRSS, what this process holds, or VmHWM, the most that it has held, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def measure(case: str, depth: int) -> Row:
    """One step, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stack, run = CASES[case](depth)
    x = torch.randn(EXAMPLES, TOKENS, WIDTH)
    run(x[:1, :8]).sum().backward()  # so that libraries are loaded
    stack.zero_grad()
    parameters = sum(p.nbytes for p in stack.parameters()) / 2**20
    before, start = held("VmRSS"), time.process_time()
    run(x).square().mean().backward()
    seconds, most = time.process_time() - start, held("VmHWM") - before - parameters
    return {
        "case": case,
        "layers": depth,
        "MB": most,
        "seconds": seconds,
        "parameters MB": parameters,
    }


def errors(depth: int, dtype: torch.dtype) -> Row:
    """How far the gradients are from those in float64, reversible and with a plain graph."""
    torch.manual_seed(0)
    stack, _ = reversible(depth)
    x = torch.randn(2, 64, WIDTH, dtype=torch.float64)

    def gradients(dtype: torch.dtype, run: Callable[[ReversibleStack, Tensor], Tensor]) -> Tensor:
        own = copy.deepcopy(stack).to(dtype)
        run(own, x.to(dtype)).square().mean().backward()
        return torch.cat([p.grad.flatten().double() for p in own.parameters()])

    def graph(own: ReversibleStack, x: Tensor) -> Tensor:
        a, b, _ = own._plainly(x, LayerInputs(), None)
        return (a + b) / 2

    exact = gradients(torch.float64, graph)
    found = {
        name: gradients(dtype, run)
        for name, run in (("reversible", lambda s, x: s(x)), ("plain graph", graph))
    }
    off = {name: ((g - exact).norm() / exact.norm()).item() for name, g in found.items()}
    return {"layers": depth, "precision": str(dtype).removeprefix("torch."), **off}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        nargs=2,
        metavar=("NAME", "LAYERS"),
        help="measure one, in this process, and print it",
    )
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]))))
        return
    memory: list[Row] = []
    for depth in DEPTHS:
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, str(depth)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | MALLOC
            )
            memory.append(json.loads(done.stdout.splitlines()[-1]))
            print(
                {
                    key: float(f"{v:.3g}") if isinstance(v, float) else v
                    for key, v in memory[-1].items()
                },
                flush=True,
            )
    exactness = [
        errors(depth, dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for depth in DEPTHS
    ]
    print(*exactness, sep="\n")
    about = {"width": WIDTH, "heads": HEADS, "tokens": TOKENS, "examples": EXAMPLES, "threads": 1}
    about |= {"load": os.getloadavg()[0], "torch": torch.__version__}
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"about": about, "memory": memory, "exactness": exactness}, indent=1)
    (RESULTS / "reversible.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
