"""Measurements of the docs that `regard bench` does not cover, with `regard.bench`'s timing.

    python benchmarks/run.py                     all tables, about twenty minutes on two cores
    python benchmarks/run.py spans streaming     some of them
    python benchmarks/run.py --threads 1 spans   with another number of threads
    python benchmarks/run.py crossover --families linear,priors   two minutes per family

Calls are interleaved and ratios are paired (see docs/bench.md). Results go to benchmarks/results/,
one JSON file per table and thread count, with the GEMM peak and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import regard
from regard import registry
from regard.attentions import AdaptiveSpanAttention
from regard.bench import BenchCell, DenseContender, RecipeContender
from regard.bench.cell import prepare_call
from regard.bench.machine import measure_peaks
from regard.bench.probe import process_memory
from regard.bench.stats import Times, crossover as crossover_length, paired_ratio, time_interleaved
from regard.models import module_spec
from regard.pattern import Chunks, Global, Pattern, RandomBlocks
from regard.registry import get_recipe

RESULTS = Path(__file__).parent / "results"
HEADS, HEAD_DIM = 8, 64
FAMILIES = [name for name in registry.FAMILIES if name != "dense"]
LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
Row = dict[str, object]


def interleave(
    calls: dict[str, Callable[[], object]], seconds: float, min_rounds: int = 5
) -> Times:
    """Time calls interleaved, without a limit on the number of rounds."""
    return time_interleaved(calls, seconds, min_rounds=min_rounds, max_rounds=10**6)


def speedup(times: Times, slow: str, fast: str) -> float:
    """Return how many times faster `fast` is."""
    return paired_ratio(times[slow], times[fast]).median


def milliseconds(times: Times) -> dict[str, float]:
    """Return the median of each call."""
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def peak_megabytes() -> float:
    """Return the peak memory of this process (`ru_maxrss` would include the parent's)."""
    return (process_memory("VmHWM") or 0) / 2**20


def random_heads(n: int, grad: bool = False) -> list[torch.Tensor]:
    """Return q, k and v of shape (1, h, n, e)."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, n, HEAD_DIM)
    return [torch.randn(*shape, generator=generator).requires_grad_(grad) for _ in range(3)]


def run_in_process(code: str) -> Row:
    """Run code that prints a JSON object in a new process, which has its own peak memory."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    setup = f"import json, time, torch, run; torch.set_num_threads({torch.get_num_threads()})\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", setup + code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def bigbird(n: int) -> Pattern:
    """Return BigBird's pattern with blocks of 64."""
    return Chunks(64, 1, 1) | Global(128) | RandomBlocks(64, 3, -(-n // 64))


# ---------------------------------------------------------------------- tables
def blocks() -> list[Row]:
    """A FlexAttention BlockMask for 16,384 tokens: from the pattern, and by create_block_mask."""
    ours = """
n = 16384; p = run.bigbird(n); run.block_mask(run.Band(1, 1), 256, 256)
before, start = run.peak_megabytes(), time.perf_counter()
run.block_mask(p, n, n)
seconds, megabytes = time.perf_counter() - start, run.peak_megabytes() - before
print(json.dumps({"seconds": seconds, "megabytes": megabytes}))
"""
    torchs = """
from torch.nn.attention.flex_attention import create_block_mask
n = 16384; p = run.bigbird(n); mask_mod = lambda b, h, q, k: p.allows(q, k)
create_block_mask(mask_mod, 1, 1, 256, 256, device="cpu")
before, start = run.peak_megabytes(), time.perf_counter()
expected = create_block_mask(mask_mod, 1, 1, n, n, device="cpu")
seconds, megabytes = time.perf_counter() - start, run.peak_megabytes() - before
ours = run.block_mask(p, n, n)
same = torch.equal(expected.to_dense(), ours.to_dense())
for counts in ("kv_num_blocks", "full_kv_num_blocks"):
    same = same and torch.equal(getattr(expected, counts), getattr(ours, counts))
print(json.dumps({"seconds": seconds, "megabytes": megabytes, "same blocks": same}))
"""
    return [
        {"who": "regard", **run_in_process(ours)},
        {"who": "create_block_mask", **run_in_process(torchs)},
    ]


def layouts() -> list[Row]:
    """The layout of 65,536 tokens for every sparse recipe: seconds, memory, scores per query."""
    rows = []
    sizes = {"length": 65536, "width": 256, "stride": 256, "window": 128}
    for name in regard.list_recipes(family="sparse"):
        arguments = {
            key: value
            for key, value in sizes.items()
            if key in get_recipe(name).parameters and (name, key) != ("bigbird", "window")
        }
        code = f"""
from regard.layout import build_layout
mixer = run.regard.create({name!r}, dim=64, heads=4, **{arguments!r})
attention = getattr(mixer, "inner", None) or mixer.local.inner
pattern = attention.pattern.resolve_global_mask(False, False)
build_layout(run.Band(1, 1), 256, 256)
before, start = run.peak_megabytes(), time.perf_counter()
patterns = set(pattern.parts) if pattern.heads else [pattern]
built = [build_layout(p, 65536, 65536) for p in patterns]
print(json.dumps({{
    "seconds": time.perf_counter() - start, "megabytes": run.peak_megabytes() - before,
    "scores a query": sum(each.scores() for each in built) / len(built) / 65536,
    "calls": sum(each.calls() for each in built),
}}))
"""
        rows.append({"recipe": name, **run_in_process(code)})
    return rows


def spans() -> list[Row]:
    """Adaptive span at 4,096 tokens, causal: time as the spans of all heads shrink."""
    rows = []
    q, k, v = random_heads(4096)
    for fraction in (1.0, 0.5, 0.25, 0.1, 0.02):
        attention = AdaptiveSpanAttention(HEADS, longest=1024, ramp=32, start=fraction, penalty=0.0)
        with torch.no_grad():
            calls = {
                "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                "span": lambda a=attention: a(q, k, v, causal=True),
            }
            times = interleave(calls, 3)
        rows.append(
            {
                "span": 1024 * fraction,
                "keys computed": attention.windows()[0] + 1,
                "ms": milliseconds(times),
                "times faster": speedup(times, "sdpa", "span"),
            }
        )
    return rows


def linear() -> list[Row]:
    """Linear attention, dense SDPA and, if installed, pytorch-fast-transformers."""
    rows, attention = [], regard.LinearAttention()
    for causal in (False, True):
        for n in (128, 256, 512, 1024, 4096):
            q, k, v = random_heads(n, grad=True)
            calls = {
                "sdpa": lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(
                    q, k, v, is_causal=c
                ),
                "linear": lambda q=q, k=k, v=v, c=causal: attention(q, k, v, causal=c)[0],
                **fast_transformers(n, causal),
            }
            steps = {name: lambda c=call: c().sum().backward() for name, call in calls.items()}
            with torch.no_grad():
                forward = interleave(calls, 2)
            training = interleave(steps, 2)
            others = [name for name in calls if name != "linear"]
            rows.append(
                {
                    "causal": causal,
                    "n": n,
                    "forward ms": milliseconds(forward),
                    "training ms": milliseconds(training),
                    "times faster forward": {o: speedup(forward, o, "linear") for o in others},
                    "times faster in training": {o: speedup(training, o, "linear") for o in others},
                }
            )
    return rows


def fast_transformers(n: int, causal: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the call of pytorch-fast-transformers on tensors (b, n, h, e), if it is installed."""
    try:
        from fast_transformers.attention import CausalLinearAttention, LinearAttention
        from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
    except ImportError:
        return {}
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in random_heads(n))
    attention = (CausalLinearAttention if causal else LinearAttention)(HEAD_DIM)
    mask, length = (TriangularCausalMask if causal else FullMask)(n), LengthMask(torch.tensor([n]))
    return {"fast-transformers": lambda: attention(q, k, v, mask, length, length)}


def crossover(families: Sequence[str] = FAMILIES) -> list[Row]:
    """The length from which on a recipe is faster than dense attention, forward, up to 8,192.

    Attention recipes are measured as kernels, other mixers as whole layers. The causal form is
    measured for linear attention, the window, and recipes that have no other form.
    """
    also_causal = {*regard.list_recipes(family="linear"), "local"}
    rows = []
    for name in regard.list_recipes():
        if get_recipe(name).family in families:
            forms = get_recipe(name).causal_options()
            for causal in forms if name in also_causal else forms[:1]:
                rows.append(measure_crossover(name, causal))
    return rows


def measure_crossover(name: str, causal: bool) -> Row:
    """Measure a recipe at increasing lengths, while it can still become faster than dense.

    Dense attention costs four times as much for twice the tokens, other mixers at least twice: the
    ratio at most doubles.
    """
    contender, ratios = RecipeContender(module_spec(name)), {}
    is_attention = get_recipe(name).is_attention
    for n in LENGTHS:
        scope = "kernel" if is_attention else "layer"
        cell = BenchCell(scope, "forward", n, heads=HEADS, head_dim=HEAD_DIM, causal=causal)
        calls = {
            "dense": prepare_call(DenseContender(), cell),
            "this": prepare_call(contender, cell),
        }
        ratios[n] = speedup(interleave(calls, 0.15, min_rounds=2), "dense", "this")
        if n >= 1024 and ratios[n] * LENGTHS[-1] / n < 0.9:
            break
    skipped = [(n, 0.0) for n in LENGTHS if n not in ratios]
    first = crossover_length([*ratios.items(), *skipped])
    print(f"  {name}{' causal' if causal else ''}: faster from {first}", file=sys.stderr)
    return {"recipe": name, "causal": causal, "faster from": first, "times faster": ratios}


def streaming() -> list[Row]:
    """The next token after 100 and after 100,000 tokens, for states of constant size."""
    rows = []
    for name in regard.list_recipes(can=["stream"]):
        required = {
            key: value
            for key, value in {"width": 64, "heads": 4, "length": None}.items()
            if (parameter := get_recipe(name).parameters.get(key)) is not None
            and parameter.default is parameter.empty
        }
        if "length" in required and name != "aft":
            continue  # built for a maximum length
        mixer = regard.create(name, dim=128, causal=True, **required).eval()
        with torch.no_grad():
            half, whole = (count_numbers(stream_state(mixer, n)) for n in (3000, 6000))
            if 1.5 * half < whole:
                continue  # the state grows with the stream
            states = {"after 100": 100, "after 100,000": 100_000}
            states = {key: stream_state(mixer, length) for key, length in states.items()}
            token = torch.randn(1, 1, mixer.dim)
            times = interleave(
                {
                    key: lambda m=mixer, t=token, s=state: m.stream(t, s)
                    for key, state in states.items()
                },
                0.5,
            )
        microseconds = {key: 1e6 * statistics.median(t) for key, t in times.items()}
        print(f"  {name}: {round_numbers(microseconds)}", file=sys.stderr)
        rows.append(
            {
                "recipe": name,
                "numbers kept": [count_numbers(state) for state in states.values()],
                "microseconds": microseconds,
                "ratio": speedup(times, "after 100,000", "after 100"),
            }
        )
    return rows


def stream_state(mixer: regard.Mixer, length: int) -> object:
    """Return the state after `length` tokens."""
    state = None
    for start in range(0, length, 4000):
        _, state = mixer.stream(torch.randn(1, min(4000, length - start), mixer.dim), state)
    return state


def count_numbers(state: object) -> int:
    """Return how many numbers a state holds."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(map(count_numbers, state)) if isinstance(state, tuple | list) else 0


# ---------------------------------------------------------------------- command line
TABLES = {
    "blocks": blocks,
    "layouts": layouts,
    "spans": spans,
    "linear": linear,
    "crossover": crossover,
    "streaming": streaming,
}


def main() -> None:
    """Measure the tables and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--families",
        type=lambda text: text.split(","),
        default=FAMILIES,
        help="crossover: measure only these; the rows of other families are kept",
    )
    options = parser.parse_args()
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(TABLES)}")
    torch.set_num_threads(options.threads)
    RESULTS.mkdir(exist_ok=True)
    for name in options.tables:
        file = RESULTS / f"{name}-{options.threads}.json"
        about = {
            "threads": options.threads,
            "gemm GFLOP/s": measure_peaks().gemm / 1e9,
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
        }
        kept = []
        if name == "crossover":
            rows = crossover(options.families)
            kept = other_families(file, options.families)
        else:
            rows = TABLES[name]()
        file.write_text(json.dumps({"about": about, "rows": kept + rows}, indent=1) + "\n")
        print(f"\n{name}: {(TABLES[name].__doc__ or '').strip()}\n  {round_numbers(about)}")
        for row in rows:
            print("  ", round_numbers(row))


def other_families(file: Path, families: Sequence[str]) -> list[Row]:
    """Return the stored rows of other families."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    known = regard.list_recipes()
    return [
        row
        for row in rows
        if row["recipe"] in known and get_recipe(row["recipe"]).family not in families
    ]


def round_numbers(value: object) -> object:
    """Round floats to three digits."""
    if isinstance(value, dict):
        return {key: round_numbers(each) for key, each in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
