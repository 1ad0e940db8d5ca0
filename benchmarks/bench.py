"""The measurements of docs/bench.md: calls of `regard bench`, at most three minutes each.

    python benchmarks/bench.py                          run all, about forty minutes
    python benchmarks/bench.py window-training decode   run some
    python benchmarks/bench.py --list                   list them, and which have results
    python benchmarks/bench.py --missing                run those without a complete result
    python benchmarks/bench.py --tables                 write the tables of docs/bench.md
    python benchmarks/bench.py decode --force           run on a busy machine; results are flagged
    python benchmarks/bench.py decode --try             run with tiny sizes, in a temporary folder

Results go to benchmarks/results/bench-NAME.json. The targets are in benchmarks/aims.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aims
from aims import Result

from regard.bench.formatting import pluralize, three_digits
from regard.bench.machine import MAX_LOAD
from regard.environment import cores

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "bench.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
INTERRUPTED = 130  # exit code

DOUBLING = "64,128,256,512,1024,2048,4096,8192"
PATTERNS = "vanilla local:window=128 bigbird dilated:window=64 sinks:window=128 block_local"
KERNEL = "--scope kernel --threads all"
LAYER = "--scope layer --threads all"
ONE = "--scope layer --threads 1"
HEADS = (
    "linear performer efficient clustered clustered_improved local reformer routing "
    "bigbird --scope kernel --threads 1"
)
CALLS = {
    "dense-forward": (
        f"vanilla --mode forward --threads all --lengths {DOUBLING},16384 --budget 150s"
    ),
    "dense-training": (
        f"vanilla --mode training --threads all --lengths {DOUBLING} --rounds 3 --budget 170s"
    ),
    "window-forward": (
        f"local:window=128 --flex --mode forward {KERNEL} --lengths 4096,16384 --budget 120s"
    ),
    "window-training": (
        f"local:window=128 --mode training {KERNEL} --lengths 4096,16384 --rounds 3 --budget 170s"
    ),
    "window-one-head": (
        f"local:window=128 --heads 1 --mode training {KERNEL} --lengths 4096,16384 --budget 120s"
    ),
    "bigbird-training": (
        f"--peers bigbird --mode training {LAYER} --lengths 16384 --rounds 3 --budget 170s"
    ),
    "longformer-training": (
        f"--peers longformer --mode training {LAYER} --lengths 16384 --rounds 3 --budget 170s"
    ),
    "causal-linear": (
        "--peers linear --causal --mode training --threads all --lengths 4096 --budget 90s"
    ),
    "auto-forward": f"{PATTERNS} --mode forward {KERNEL} --lengths {DOUBLING},16384 --budget 170s",
    "auto-training": (
        f"{PATTERNS} --mode training {KERNEL} --lengths {DOUBLING} --rounds 3 --budget 170s"
    ),
    "auto-causal": (
        f"{PATTERNS} --causal --mode forward {KERNEL} --lengths {DOUBLING},16384 --budget 170s"
    ),
    "decode": (
        "vanilla local:window=128 linear --mode decode --threads 1 --lengths "
        "512,4096,16384,65536 --budget 120s"
    ),
    "million": (
        "local:window=128 linear --mode training --scope layer --threads all --causal --heads "
        "4 --head-dim 32 --lengths 1000000 --rounds 0 --budget 175s"
    ),
    "peers-1024": f"--peers {ONE} --lengths 1024 --mode forward --rounds 3 --budget 175s",
    "peers-forward": f"--peers {ONE} --lengths 4096 --mode forward --rounds 3 --budget 175s",
    "peers-training": (
        "--peers linear performer efficient clustered clustered_improved linformer nystrom "
        f"memory_compressed prob_sparse fnet mlp_mixer gmlp {ONE} --lengths 2048 --mode "
        "training --rounds 3 --budget 175s"
    ),
    "peers-sparse": (
        "--peers product_keys local longformer bigbird axial_passes reformer routing sinkhorn "
        f"vanilla {ONE} --lengths 2048 --mode training --rounds 3 --budget 175s"
    ),
    "peers-heads": f"--peers {HEADS} --lengths 1024,4096 --mode forward --rounds 3 --budget 175s",
    "peers-heads-training": (
        f"--peers {HEADS} --lengths 4096 --mode training --rounds 3 --budget 175s"
    ),
    "peers-causal": (
        f"--peers linear local memory_compressed gmlp vanilla sinkhorn --causal {ONE} "
        "--lengths 4096 --mode training --rounds 3 --budget 175s"
    ),
    "crossover": (
        f"vanilla local bigbird linear performer linformer:rank=64 nystrom {KERNEL} --lengths "
        f"{DOUBLING} --budget 170s"
    ),
}


# ---------------------------------------------------------------------- measuring
def run_call(name: str, folder: Path, *, force: bool, small: bool) -> None:
    """Run one call and store its result; exit if it fails.

    An interrupted call stores what it has, unless there is a result already.
    """
    arguments = shlex.split(shrink(CALLS[name]) if small else CALLS[name])
    print(f"{name}: regard bench {shlex.join(arguments)}", file=sys.stderr)
    command = [sys.executable, "-m", "regard.cli", "bench", *arguments, "--json"]
    command += ["--force"] if force or small else []
    path = folder / f"bench-{name}.json"
    partial = path.with_suffix(".json.partial")
    with partial.open("w") as file, subprocess.Popen(command, stdout=file) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the child was interrupted too, and writes what it has
            code = child.wait() or INTERRUPTED
    result, before = read_result(partial), read_result(path)
    if result is None or (not aims.is_complete(result) and before is not None):
        partial.unlink()
    else:
        partial.replace(path)  # atomic
    if code:
        sys.exit(code)


def wait_for_idle(seconds: int = 60) -> None:
    """Wait until the load average of the previous call has decayed."""
    for _ in range(seconds):
        if os.getloadavg()[0] <= MAX_LOAD * cores():
            return
        time.sleep(1)


def read_result(path: Path) -> Result | None:
    """Return a result, or None if there is none or it cannot be read."""
    try:
        result: Result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return result


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results that there are, by name."""
    results = {name: read_result(folder / f"bench-{name}.json") for name in CALLS}
    return {name: result for name, result in results.items() if result is not None}


def shrink(call: str) -> str:
    """Return the call with a sixteenth of the lengths (at most 4,096), one thread and 40 s."""
    option, text = re.search(r"--lengths (\S+)", call).group(0, 1)  # type: ignore[union-attr]
    least = 1024 if "16384" in text and "--peers" in call else 64  # some peers have a least length
    lengths = {min(4096, max(least, int(n) // 16)) for n in text.split(",")}
    call = call.replace(option, f"--lengths {','.join(map(str, sorted(lengths)))}")
    return re.sub(r"--budget \S+", "--budget 40s", call.replace("--threads all", "--threads 1"))


# ---------------------------------------------------------------------- tables
def format_tables(results: dict[str, Result], *, small: bool = False) -> str:
    """Return the targets and all results as Markdown."""
    lines = ["### Targets", "", *aims.format_table(results), ""]
    for name, result in results.items():
        call = shrink(CALLS[name]) if small else CALLS[name]
        lines += [f"### {name}", "", f"`regard bench {call}`", "", describe_machine(result), ""]
        lines += [*format_rows(result), *format_reasons(result), ""]
    return "\n".join(lines)


def describe_machine(result: Result) -> str:
    """Return the machine, its peaks, and what speaks against the numbers."""
    environment = result["environment"]
    peaks = ", ".join(
        f"{p['gemm'] / 1e9:.0f} GFLOP/s and {p['exp'] / 1e9:.1f} G exp/s with "
        f"{pluralize(p['threads'], 'thread')}"
        for p in result["peaks"]
    )
    text = f"{environment['machine']}, torch {environment['torch']}: {peaks}."
    if aims.flags(result):
        text += f" **Flagged: {'; '.join(aims.flags(result))}.**"
    if result["ended"] != "done":
        text += f" Incomplete: {result['ended']}."
    return text


HEADER = (
    "tokens",
    "mode",
    "scope",
    "threads",
    "name",
    "ms",
    "speedup",
    "density",
    "efficiency",
    "of peak",
    "peak MB",
    "theory MB",
    "lead of ours",
)


def format_rows(result: Result) -> list[str]:
    """Return a line for each row that was measured."""

    def percent(fraction: float | None, digits: int = 0) -> str:
        return "" if fraction is None else f"{fraction:.{digits}%}"

    def megabytes(count: float | None) -> str:
        return "" if count is None else three_digits(count / 1e6)

    def interval(ratio: dict[str, float] | None) -> str:
        if ratio is None:
            return ""
        median, low, high = (three_digits(ratio[name]) for name in ("median", "low", "high"))
        return f"{median} [{low}, {high}]"

    rows = [row for row in result["rows"] if row["seconds"] is not None]
    if not rows:
        return ["Nothing was measured."]
    columns = len(HEADER) - (not any(row["reference"] for row in rows))
    lines = [f"| {' | '.join(HEADER[:columns])} |", "| --- " * columns + "|"]
    for row in rows:
        cells = [
            f"{row['length']:,}",
            row["mode"],
            row["scope"],
            str(row["threads"]),
            f"`{row['name']}`",
            three_digits(1e3 * row["seconds"]),
            interval(row["speedup"]),
            percent(row["density"], 1),
            "" if row["efficiency"] is None else f"{row['efficiency']:.2f}",
            percent(row["utilization"]),
            megabytes(row["peak_bytes"]),
            megabytes(row["estimated_bytes"]),
            interval(row["lead"]),
        ]
        lines.append(f"| {' | '.join(cells[:columns])} |")
    return lines


def format_reasons(result: Result) -> list[str]:
    """Return why rows were not measured, each reason once."""
    missing = (row for row in result["rows"] if row["reason"] is not None)
    reasons = dict.fromkeys((row["name"], row["reason"]) for row in missing)
    return ["", *(f"- {name}: {reason}" for name, reason in reasons)] if reasons else []


def write_tables(results: dict[str, Result]) -> None:
    """Write the tables between the markers of the document."""
    before, rest = DOCUMENT.read_text().split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{format_tables(results)}\n{END}{after}")


# ---------------------------------------------------------------------- command line
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CALLS)}")
    parser.add_argument("--list", action="store_true", help="list the calls; measure nothing")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--tables", action="store_true", help="write the tables; measure nothing")
    parser.add_argument("--force", action="store_true", help="measure even on a busy machine")
    parser.add_argument(
        "--try", dest="small", action="store_true", help="tiny sizes; change no result and no table"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(CALLS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(CALLS)}")
    if options.list:
        results = read_results(RESULTS)
        for name, call in CALLS.items():
            state = "-"
            if name in results:
                state = "measured" if aims.is_complete(results[name]) else "partial"
            print(f"{state:9} {name:20} regard bench {call}")
        return
    if options.tables:
        write_tables(read_results(RESULTS))
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-")) if options.small else RESULTS
    complete: set[str] = set()
    if options.missing:
        complete = {name for name, r in read_results(folder).items() if aims.is_complete(r)}
    for name in options.names or CALLS:
        if name in complete:
            continue
        if not (options.force or options.small):
            wait_for_idle()
        run_call(name, folder, force=options.force, small=options.small)
        if not options.small:
            write_tables(read_results(RESULTS))  # after each, so that an interrupt loses nothing
    if options.small:
        print(format_tables(read_results(folder), small=True))
        print(f"written to {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
