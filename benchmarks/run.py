"""Speed and memory, always beside dense softmax in the same run.

    python benchmarks/run.py                     everything, about half an hour on two cores
    python benchmarks/run.py window auto         some of it
    python benchmarks/run.py --threads 1 window  with another number of threads
    python benchmarks/run.py crossover --families linear,priors   a part of the longest table, two minutes a family

Calls are interleaved (A, B, A, B, ...), and a ratio is the median of the ratios of neighbours, so that a slow minute of
the machine hits both.  Beside each table stand the thread count, the GEMM peak and the load of the machine.  Results go to
benchmarks/results/, one JSON file a table and thread count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import regard
from regard import registry
from regard.attentions import AdaptiveSpanAttention
from regard.backends import explain
from regard.backends.flex import block_mask
from regard.bench import stats
from regard.bench.machine import measure_peaks
from regard.bench.probe import process_memory
from regard.bench.stats import Times, time_interleaved
from regard.pattern import Band, Chunks, Global, Pattern, RandomBlocks
from regard.registry import get_recipe

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH = 8, 64
Row = dict[str, object]


def bigbird(n: int) -> Pattern:
    return Chunks(64, 1, 1) | Global(128) | RandomBlocks(64, 3, -(-n // 64))


# ---------------------------------------------------------------------------------------------- measuring
def interleaved(
    calls: dict[str, Callable[[], object]], seconds: float = 4.0, least: int = 5
) -> Times:
    """The times of each call, taken in turn, after a round to warm up."""
    return time_interleaved(calls, seconds, least=least, most=10**6)


def ratio(times: Times, slow: str, fast: str) -> float:
    """How many times faster: the median over neighbours in time."""
    return stats.paired_ratio(times[slow], times[fast]).median


def peak_megabytes() -> float:
    """The most memory that this process has held (Linux); `ru_maxrss` would count the parent's as well."""
    return (process_memory("VmHWM") or 0) / 2**20


def heads(n: int, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, HEADS, n, WIDTH, generator=make).requires_grad_(grad) for _ in range(3)
    )  # type: ignore[return-value]


def in_child(code: str) -> Row:
    """Run code that prints one JSON object in a fresh process, so that its peak memory is its own."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    head = (
        f"import json, time, torch; import run; torch.set_num_threads({torch.get_num_threads()})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------- the tables
def window() -> list[Row]:
    """A window of 128 to either side, forward: beside dense SDPA and beside compiled FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    flex, pattern, rows = torch.compile(flex_attention, dynamic=False), Band(128, 128), []
    for n in (2048, 8192):
        q, k, v = heads(n)
        blocks = block_mask(pattern, n, n)
        with torch.no_grad():
            times = interleaved(
                {
                    "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
                    "sparse": lambda q=q, k=k, v=v: regard.attend(
                        q, k, v, pattern=pattern, backend="sparse"
                    ),
                    "flex": lambda q=q, k=k, v=v, blocks=blocks: flex(q, k, v, block_mask=blocks),
                },
                seconds=8,
            )
        rows.append(
            {
                "n": n,
                "density": pattern.density(n),
                "ms": milliseconds(times),
                "times faster than SDPA": ratio(times, "sdpa", "sparse"),
                "times faster than Flex": ratio(times, "flex", "sparse"),
                "efficiency": pattern.density(n) * ratio(times, "sdpa", "sparse"),
                "efficiency of Flex": pattern.density(n) * ratio(times, "sdpa", "flex"),
            }
        )
    return rows


def milliseconds(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def training() -> list[Row]:
    """BigBird, forward and backward: beside dense SDPA, with the peak memory of each in a process of its own."""
    rows = []
    for n in (4096, 16384):
        pattern = bigbird(n)
        q, k, v = heads(n, grad=True)

        def dense(q=q, k=k, v=v) -> None:  # type: ignore[no-untyped-def]
            F.scaled_dot_product_attention(q, k, v).sum().backward()

        def sparse(q=q, k=k, v=v, pattern=pattern) -> None:  # type: ignore[no-untyped-def]
            regard.attend(q, k, v, pattern=pattern, backend="sparse").sum().backward()

        times = interleaved({"sdpa": dense, "sparse": sparse}, seconds=10, least=3)
        memory = {}
        for name, call in (
            ("sdpa", "torch.nn.functional.scaled_dot_product_attention(q, k, v)"),
            ("sparse", f"run.regard.attend(q, k, v, pattern=run.bigbird({n}), backend='sparse')"),
        ):
            code = f"""
q, k, v = run.heads({n}, grad=True)
before = run.peak_megabytes()
{call}.sum().backward()
print(json.dumps({{"megabytes": run.peak_megabytes() - before}}))
"""
            memory[name] = in_child(code)["megabytes"]
        rows.append(
            {
                "n": n,
                "ms": milliseconds(times),
                "times faster": ratio(times, "sdpa", "sparse"),
                "peak MB": memory,
            }
        )
    return rows


def auto() -> list[Row]:
    """`auto` beside dense SDPA without a mask, from 64 to 16,384 tokens: what it picked, and whether it was slower."""
    rows = []
    for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for name, pattern in (
            ("window", Band(128, 128)),
            ("bigbird", bigbird(n)),
            ("causal", regard.Causal()),
        ):
            q, k, v = heads(n)
            causal = name == "causal"
            with torch.no_grad():
                times = interleaved(
                    {
                        "sdpa": lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(
                            q, k, v, is_causal=c
                        ),
                        "auto": lambda q=q, k=k, v=v, p=pattern: regard.attend(q, k, v, pattern=p),
                    },
                    seconds=1,
                    least=3,
                )
            picked = explain(pattern, n, heads=HEADS, width=WIDTH).backend
            rows.append(
                {
                    "n": n,
                    "pattern": name,
                    "picked": picked,
                    "times faster": ratio(times, "sdpa", "auto"),
                }
            )
    return rows


def blocks() -> list[Row]:
    """A FlexAttention BlockMask for 16,384 tokens: asked of the pattern, and made by torch."""
    ours = """
n = 16384; p = run.bigbird(n); run.block_mask(run.Band(1, 1), 256, 256)
before, start = run.peak_megabytes(), time.perf_counter()
run.block_mask(p, n, n)
print(json.dumps({"seconds": time.perf_counter() - start, "megabytes": run.peak_megabytes() - before}))
"""
    theirs = """
from torch.nn.attention.flex_attention import create_block_mask
n = 16384; p = run.bigbird(n); rule = lambda b, h, q, k: p.allows(q, k)
create_block_mask(rule, 1, 1, 256, 256, device="cpu")
before, start = run.peak_megabytes(), time.perf_counter()
made = create_block_mask(rule, 1, 1, n, n, device="cpu")
seconds, megabytes = time.perf_counter() - start, run.peak_megabytes() - before
mine = run.block_mask(p, n, n)
same = torch.equal(made.to_dense(), mine.to_dense())
for counts in ("kv_num_blocks", "full_kv_num_blocks"):
    same = same and torch.equal(getattr(made, counts), getattr(mine, counts))
print(json.dumps({"seconds": seconds, "megabytes": megabytes, "same blocks": same}))
"""
    return [{"who": "regard", **in_child(ours)}, {"who": "create_block_mask", **in_child(theirs)}]


def layouts() -> list[Row]:
    """The layout of 65,536 tokens, for every sparse recipe: seconds, memory, scores for each query."""
    rows = []
    given = {"length": 65536, "width": 256, "stride": 256, "window": 128}
    for name in regard.list_recipes(family="sparse"):
        arguments = {
            key: value
            for key, value in given.items()
            if key in get_recipe(name).parameters and (name, key) != ("bigbird", "window")
        }
        code = f"""
from regard.layout import build_layout
mixer = run.regard.create({name!r}, dim=64, heads=4, **{arguments!r})
attention = getattr(mixer, "inner", None) or mixer.local.inner
pattern = attention.pattern.resolve_global_mask(False, False)
build_layout(run.Band(1, 1), 256, 256)
before, start = run.peak_megabytes(), time.perf_counter()
made = [build_layout(p, 65536, 65536) for p in (set(pattern.parts) if pattern.heads else [pattern])]
print(json.dumps({{
    "seconds": time.perf_counter() - start, "megabytes": run.peak_megabytes() - before,
    "scores a query": sum(x.scores() for x in made) / len(made) / 65536, "calls": sum(x.calls() for x in made),
}}))
"""
        rows.append({"recipe": name, **in_child(code)})
    return rows


def linear() -> list[Row]:
    """Linear attention beside dense SDPA and, where it is installed, pytorch-fast-transformers: plain and causal, forward
    alone and with backward."""
    rows, attention = [], regard.LinearAttention()
    for causal in (False, True):
        for n in (128, 256, 512, 1024, 4096):
            q, k, v = heads(n, grad=True)
            calls = {
                "sdpa": lambda q=q, k=k, v=v, causal=causal: F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal
                ),
                "linear": lambda q=q, k=k, v=v, causal=causal: attention(q, k, v, causal=causal)[0],
                **fast_transformers(n, causal),
            }
            with torch.no_grad():
                forward = interleaved(calls, seconds=2)
            both = interleaved(
                {name: lambda call=call: call().sum().backward() for name, call in calls.items()},
                seconds=2,
            )
            rivals = [name for name in calls if name != "linear"]
            rows.append(
                {
                    "causal": causal,
                    "n": n,
                    "forward ms": milliseconds(forward),
                    "training ms": milliseconds(both),
                    "times faster forward": {
                        name: ratio(forward, name, "linear") for name in rivals
                    },
                    "times faster in training": {
                        name: ratio(both, name, "linear") for name in rivals
                    },
                }
            )
    return rows


def fast_transformers(n: int, causal: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Their linear attention, on heads that stand as it wants them; nothing where it is not installed."""
    try:
        from fast_transformers.attention import CausalLinearAttention, LinearAttention
        from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
    except ImportError:
        return {}
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in heads(n))
    attention, length = (
        (CausalLinearAttention if causal else LinearAttention)(WIDTH),
        LengthMask(torch.tensor([n])),
    )
    seen = TriangularCausalMask(n) if causal else FullMask(n)
    return {"fast-transformers": lambda: attention(q, k, v, seen, length, length)}


def spans() -> list[Row]:
    """Adaptive span at 4,096 tokens, causal: time beside dense causal SDPA as the spans of all heads shrink."""
    rows, n = [], 4096
    q, k, v = heads(n)
    for share in (1.0, 0.5, 0.25, 0.1, 0.02):
        attention = AdaptiveSpanAttention(HEADS, longest=1024, ramp=32, start=share, penalty=0.0)
        with torch.no_grad():
            times = interleaved(
                {
                    "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                    "span": lambda a=attention: a(q, k, v, causal=True),
                },
                seconds=3,
            )
        rows.append(
            {
                "span": 1024 * share,
                "keys computed": attention.windows()[0] + 1,
                "ms": milliseconds(times),
                "times faster": ratio(times, "sdpa", "span"),
            }
        )
    return rows


LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


FAMILIES = [name for name in registry.FAMILIES if name != "dense"]


def crossover(families: Sequence[str] = FAMILIES) -> list[Row]:
    """From which length on a mechanism is faster than softmax attention, with 8 heads x 64, forward, for all up to 8,192.

    An attention inside `MultiHead` runs on heads, beside SDPA; any other mixer runs whole, beside the whole of `vanilla`.
    The plain form of each, where there is one; the linearised and the window causal too.
    """
    both = {*regard.list_recipes(family="linear"), "local"}
    names = [name for name in regard.list_recipes() if get_recipe(name).family in families]
    forms = [
        (name, causal) for name in names for causal in (False, True) if buildable(name, causal)
    ]
    return [
        crossing(name, causal)
        for name, causal in forms
        if not causal or name in both or (name, False) not in forms
    ]


def buildable(name: str, causal: bool) -> bool:
    try:
        return built(name, 256, causal) is not None
    except regard.Unsupported:
        return False


def aims() -> list[Row]:
    """The crossover lengths that were aimed at, with the sizes they were aimed at: linear 256, causal 512, Linformer 400,
    Performer with 256 features 1,000, Nyström with 64 landmarks 1,500."""
    return [
        crossing("linear", False),
        crossing("linear", True),
        crossing("linformer", False, rank=64),
        crossing("linformer", False, rank=256),
        crossing("performer", False, features=256),
        crossing("nystrom", False, landmarks=64),
    ]


def built(name: str, n: int, causal: bool, **given: int) -> regard.Mixer:
    parameters = get_recipe(name).parameters
    fitting = {"length": n, "width": max(1, round(n**0.5)), "heads": HEADS}
    default = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
    given |= {
        key: value for key, value in fitting.items() if key in parameters and key not in default
    }
    return regard.create(name, dim=HEADS * WIDTH, causal=causal, **given).eval()


def crossing(name: str, causal: bool, **given: int) -> Row:
    """One row: the ratio of each length, and the first from which on all are above one.

    Twice the tokens cost softmax attention four times as much, and nothing less than twice.  So a ratio at most doubles, and
    lengths are left out where it can no longer come to one.
    """
    ratios: dict[int, float] = {}
    for n in (n for n in LENGTHS if n >= given.get("rank", 0)):  # no rank above the length
        calls = dict(
            zip(
                ("softmax", "this"), rivals(built(name, n, causal, **given), n, causal), strict=True
            )
        )
        ratios[n] = ratio(interleaved(calls, seconds=0.15, least=2), "softmax", "this")
        if n >= 1024 and ratios[n] * LENGTHS[-1] / n < 0.9:
            break
    left_out = [(n, 0.0) for n in LENGTHS if n not in ratios]
    first = stats.crossover([*ratios.items(), *left_out])
    print(
        f"  {name}{' causal' if causal else ''} {given or ''}: faster from {first}", file=sys.stderr
    )
    return {"recipe": name, "causal": causal, **given, "faster from": first, "times faster": ratios}


def rivals(
    mixer: regard.Mixer, n: int, causal: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Softmax attention and this one, on the same inputs."""
    if isinstance(mixer, regard.MultiHead):
        inner = mixer.inner
        with torch.no_grad():
            q, k, v = mixer.project(torch.randn(1, n, mixer.dim), None)
        plain = heads(n)
        return (
            torch.no_grad()(lambda: F.scaled_dot_product_attention(*plain, is_causal=causal)),
            torch.no_grad()(lambda: inner(q, k, v, causal=causal)),
        )
    x, vanilla = (
        torch.randn(1, n, mixer.dim),
        regard.create("vanilla", dim=HEADS * WIDTH, heads=HEADS, causal=causal),
    )
    return torch.no_grad()(lambda: vanilla(x)), torch.no_grad()(lambda: mixer(x))


def streaming() -> list[Row]:
    """The next token of a stream after 100 tokens and after 100,000, 4 heads x 32, for all whose state does not grow."""
    rows = []
    for name in regard.list_recipes(can=["stream"]):
        parameters = get_recipe(name).parameters
        if (
            "length" in parameters
            and parameters["length"].default is parameters["length"].empty
            and name != "aft"
        ):
            continue  # it ends before that
        start, mixer = time.perf_counter(), small(name)
        with torch.no_grad():
            half, whole = (numbers(streamed(mixer, length)) for length in (3000, 6000))
            if 1.5 * half < whole:
                continue  # its state grows with the stream
            early, late, token = (
                streamed(mixer, 100),
                streamed(mixer, 100_000),
                torch.randn(1, 1, mixer.dim),
            )
            times = interleaved(
                {
                    "after 100": lambda m=mixer, s=early, t=token: m.stream(t, s),
                    "after 100,000": lambda m=mixer, s=late, t=token: m.stream(t, s),
                },
                seconds=0.5,
            )
        micro = {key: 1e6 * statistics.median(t) for key, t in times.items()}
        print(
            f"  {name}: {rounded(micro)}, in {time.perf_counter() - start:.0f} s", file=sys.stderr
        )
        rows.append(
            {
                "recipe": name,
                "numbers kept": [numbers(early), numbers(late)],
                "microseconds": micro,
                "ratio": ratio(times, "after 100,000", "after 100"),
            }
        )
    return rows


def small(name: str) -> regard.Mixer:
    """Causal, of 4 heads x 32; where there is a form without a longest sequence, that one."""
    parameters = get_recipe(name).parameters
    given = {
        key: value
        for key, value in {"width": 64, "heads": 4, "length": None}.items()
        if key in parameters and parameters[key].default is parameters[key].empty
    }
    return regard.create(name, dim=128, causal=True, **given).eval()


def streamed(mixer: regard.Mixer, length: int) -> object:
    """The state after so many tokens, given some thousand at a time."""
    state = None
    for start in range(0, length, 4000):
        _, state = mixer.stream(torch.randn(1, min(4000, length - start), mixer.dim), state)
    return state


def numbers(state: object) -> int:
    """How many numbers a state holds."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(numbers(part) for part in state) if isinstance(state, tuple | list) else 0


def million() -> list[Row]:
    """1,000,000 tokens, 4 heads x 32, forward and backward, each in a process of its own: seconds and peak memory."""
    rows = []
    for name, arguments in (("linear", {}), ("performer", {}), ("local", {"window": 128})):
        code = f"""
mixer = run.regard.create({name!r}, dim=128, heads=4, causal=True, **{arguments!r})
x = torch.randn(1, 1_000_000, 128, requires_grad=True)
start = time.perf_counter()
mixer(x).sum().backward()
assert x.grad.isfinite().all()
print(json.dumps({{"seconds": time.perf_counter() - start, "peak MB": run.peak_megabytes()}}))
"""
        rows.append({"recipe": name, **in_child(code)})
    return rows


TABLES = {
    "window": window,
    "training": training,
    "auto": auto,
    "blocks": blocks,
    "layouts": layouts,
    "spans": spans,
    "linear": linear,
    "aims": aims,
    "crossover": crossover,
    "streaming": streaming,
    "million": million,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--families",
        type=lambda text: text.split(","),
        default=FAMILIES,
        help="crossover: of these alone; the others in its file stay as they are",
    )
    options = parser.parse_args()
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
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
        rows = crossover(options.families) if name == "crossover" else TABLES[name]()
        kept = others(file, options.families) if name == "crossover" else []
        file.write_text(json.dumps({"about": about, "rows": kept + rows}, indent=1) + "\n")
        print(f"\n{name}: {(TABLES[name].__doc__ or '').strip()}\n  {rounded(about)}")
        for row in rows:
            print("  ", rounded(row))


def others(file: Path, families: Sequence[str]) -> list[Row]:
    """The rows of other families that were measured before."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return [
        row
        for row in rows
        if row["recipe"] in regard.list_recipes()
        and get_recipe(row["recipe"]).family not in families
    ]


def rounded(x: object) -> object:
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return float(f"{x:.3g}") if isinstance(x, float) else x


if __name__ == "__main__":
    main()
