"""The measurements of docs/bench.md: each one call of `regard bench` of at most three minutes, on a quiet machine.

    python benchmarks/bench.py                          all of them, one after the other: some forty minutes
    python benchmarks/bench.py window-training decode   some of them
    python benchmarks/bench.py --list                   what there is, and what is measured already
    python benchmarks/bench.py --missing                those that have no whole result yet
    python benchmarks/bench.py --tables                 write the tables of docs/bench.md from the results that there are
    python benchmarks/bench.py decode --anyway          although the machine is busy; the results and the tables are flagged
    python benchmarks/bench.py decode --try             tiny sizes, to see that it runs; written to a folder that is named

Results go to benchmarks/results/bench-NAME.json.  What was aimed at stands in benchmarks/aims.py.
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
from collections.abc import Iterable, Sequence
from pathlib import Path

import aims
from aims import Result, three

from regard.bench.machine import MOST_LOAD
from regard.environment import cores

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "bench.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
INTERRUPTED = 130

DOUBLING = "64,128,256,512,1024,2048,4096,8192"
PATTERNS = "vanilla local:window=128 bigbird dilated:window=64 sinks:window=128 block_local"
KERNEL = "--levels kernel --threads all"
LAYER = "--levels layer --threads all"
ONE = "--levels layer --threads 1"
HEADS = "linear performer efficient clustered clustered_improved local reformer routing bigbird --levels kernel --threads 1"
CALLS = {
    "dense-forward": f"vanilla --ways forward --threads all --lengths {DOUBLING},16384 --budget 150s",
    "dense-training": f"vanilla --ways training --threads all --lengths {DOUBLING} --rounds 3 --budget 170s",
    "window-forward": f"local:window=128 --flex --ways forward {KERNEL} --lengths 4096,16384 --budget 120s",
    "window-training": f"local:window=128 --ways training {KERNEL} --lengths 4096,16384 --rounds 3 --budget 170s",
    "window-one-head": f"local:window=128 --heads 1 --ways training {KERNEL} --lengths 4096,16384 --budget 120s",
    "bigbird-training": f"--peers bigbird --ways training {LAYER} --lengths 16384 --rounds 3 --budget 170s",
    "longformer-training": f"--peers longformer --ways training {LAYER} --lengths 16384 --rounds 3 --budget 170s",
    "causal-linear": "--peers linear --causal --ways training --threads all --lengths 4096 --budget 90s",
    "auto-forward": f"{PATTERNS} --ways forward {KERNEL} --lengths {DOUBLING},16384 --budget 170s",
    "auto-training": f"{PATTERNS} --ways training {KERNEL} --lengths {DOUBLING} --rounds 3 --budget 170s",
    "auto-causal": f"{PATTERNS} --causal --ways forward {KERNEL} --lengths {DOUBLING},16384 --budget 170s",
    "decode": "vanilla local:window=128 linear --ways decode --threads 1 --lengths 512,4096,16384,65536 --budget 120s",
    "million": "local:window=128 linear --ways training --levels layer --threads all --causal --heads 4 --width 32 "
    "--lengths 1000000 --rounds 0 --budget 175s",
    "peers-1024": f"--peers {ONE} --lengths 1024 --ways forward --rounds 3 --budget 175s",
    "peers-forward": f"--peers {ONE} --lengths 4096 --ways forward --rounds 3 --budget 175s",
    "peers-training": f"--peers linear performer efficient clustered clustered_improved linformer nystrom memory_compressed "
    f"prob_sparse fnet mlp_mixer gmlp {ONE} --lengths 2048 --ways training --rounds 3 --budget 175s",
    "peers-sparse": f"--peers product_keys local longformer bigbird axial reformer routing sinkhorn vanilla {ONE} "
    "--lengths 2048 --ways training --rounds 3 --budget 175s",
    "peers-heads": f"--peers {HEADS} --lengths 1024,4096 --ways forward --rounds 3 --budget 175s",
    "peers-heads-training": f"--peers {HEADS} --lengths 4096 --ways training --rounds 3 --budget 175s",
    "peers-causal": f"--peers linear local memory_compressed gmlp vanilla sinkhorn --causal {ONE} "
    "--lengths 4096 --ways training --rounds 3 --budget 175s",
    "crossover": f"vanilla local bigbird linear performer linformer:rank=64 nystrom {KERNEL} --lengths {DOUBLING} "
    "--budget 170s",
}


# ---------------------------------------------------------------------------------------------- measuring
def measure(name: str, folder: Path, *, anyway: bool, small: bool) -> None:
    """One call.  What it has when it is interrupted is kept where there is no whole result yet, and ends the others."""
    words = shlex.split(shrunk(CALLS[name]) if small else CALLS[name])
    command = [
        sys.executable,
        "-m",
        "regard.cli",
        "bench",
        *words,
        "--json",
        *(["--anyway"] if anyway or small else []),
    ]
    print(f"{name}: regard bench {shlex.join(words)}", file=sys.stderr)
    path = folder / f"bench-{name}.json"
    half = path.with_suffix(".json.half")
    with half.open("w") as file, subprocess.Popen(command, stdout=file) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the child was told too, and writes what it has
            code = child.wait() or INTERRUPTED
    found, before = read(half), read(path)
    if found is None or (not aims.whole(found) and before is not None):
        half.unlink()
    else:
        half.replace(path)  # at once: a result that is there can be read
    if code:
        sys.exit(code)


def rest(seconds: int = 60) -> None:
    """Wait until the load average of the last call is over, so that it is not taken for somebody else's."""
    for _ in range(seconds):
        if os.getloadavg()[0] <= MOST_LOAD * cores():
            return
        time.sleep(1)


def read(path: Path) -> Result | None:
    """A result; None where there is none that can be read."""
    try:
        found: Result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def shrunk(call: str) -> str:
    """The same call with lengths a sixteenth as long (a few thousand of a million), one thread, and 40 seconds for it."""
    lengths = re.search(r"--lengths (\S+)", call)
    assert lengths is not None
    short = sorted({min(4096, max(64, int(n) // 16)) for n in lengths[1].split(",")})
    short = (
        [max(n, 1024) for n in short] if "16384" in lengths[1] and "--peers" in call else short
    )  # peers have a least length
    call = call.replace(lengths[0], f"--lengths {','.join(map(str, sorted(set(short))))}")
    return re.sub(r"--budget \S+", "--budget 40s", call.replace("--threads all", "--threads 1"))


def results(folder: Path) -> dict[str, Result]:
    """Those that there are, by name."""
    found = {name: read(folder / f"bench-{name}.json") for name in CALLS}
    return {name: result for name, result in found.items() if result is not None}


# ---------------------------------------------------------------------------------------------- tables
def tables(found: dict[str, Result], *, small: bool = False) -> str:
    """What was aimed at and what came of it, then all results, as Markdown."""
    lines = ["### Aims", "", *aims.table(found), ""]
    for name, result in found.items():
        call = shrunk(CALLS[name]) if small else CALLS[name]
        lines += [f"### {name}", "", f"`regard bench {call}`", "", about(result), ""]
        lines += [*rows(result), *missing(result), ""]
    return "\n".join(lines)


def about(result: Result) -> str:
    """The machine in a sentence, and what speaks against the numbers."""
    where = result["environment"]
    peaks = ", ".join(
        f"{p['gemm'] / 1e9:.0f} GFLOP/s and {p['exp'] / 1e9:.1f} G exp/s with {p['threads']} thread{'s' * (p['threads'] > 1)}"
        for p in result["peaks"]
    )
    doubt = f" **Flagged: {'; '.join(aims.flags(result))}.**" if aims.flags(result) else ""
    left = "" if result["ended"] == "done" else f" Not all was measured: {result['ended']}."
    return f"{where['machine']}, torch {where['torch']}: {peaks}.{doubt}{left}"


HEADINGS = (
    "tokens",
    "way",
    "level",
    "threads",
    "name",
    "ms",
    "times faster",
    "seen",
    "efficiency",
    "of model",
    "MB",
    "formula",
    "ours ahead",
)


def rows(result: Result) -> list[str]:
    """A line for each row that was measured."""
    measured = [row for row in result["rows"] if row["seconds"] is not None]
    if not measured:
        return ["Nothing was measured."]
    width = len(HEADINGS) - (not any(row["of"] for row in measured))
    lines = [f"| {' | '.join(HEADINGS[:width])} |", "| --- " * width + "|"]
    for row in measured:
        cells = [
            f"{row['length']:,}",
            row["way"],
            row["level"],
            str(row["threads"]),
            f"`{row['name']}`",
            three(1e3 * row["seconds"]),
            interval(row["faster"]),
            percent(row["density"], 1),
            plain(row["efficiency"]),
            percent(row["reached"]),
            million(row["memory"]),
            million(row["formula"]),
            interval(row["ahead"]),
        ]
        lines.append(f"| {' | '.join(cells[:width])} |")
    return lines


def missing(result: Result) -> Iterable[str]:
    """Reasons, once each."""
    reasons = dict.fromkeys(
        (row["name"], row["why"]) for row in result["rows"] if row["why"] is not None
    )
    return ["", *(f"- {name}: {why}" for name, why in reasons)] if reasons else []


def interval(ratio: dict | None) -> str:
    return (
        ""
        if ratio is None
        else f"{three(ratio['median'])} [{three(ratio['low'])}, {three(ratio['high'])}]"
    )


def plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(share: float | None, figures: int = 0) -> str:
    return "" if share is None else f"{share:.{figures}%}"


def million(value: float | None) -> str:
    return "" if value is None else three(value / 1e6)


def write(found: dict[str, Result]) -> None:
    """Put the tables between the marks of the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n{END}{rest.split(END)[1]}")


# ---------------------------------------------------------------------------------------------- the command
def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the tables."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("names", nargs="*", help=f"of {', '.join(CALLS)}")
    asked.add_argument("--list", action="store_true", help="measure nothing, and say what there is")
    asked.add_argument("--missing", action="store_true", help="those that have no whole result yet")
    asked.add_argument(
        "--tables", action="store_true", help="measure nothing, and write the tables"
    )
    asked.add_argument("--anyway", action="store_true", help="on a busy machine too")
    asked.add_argument(
        "--try",
        dest="small",
        action="store_true",
        help="tiny sizes; no result and no table is changed",
    )
    options = asked.parse_args(words)
    unknown = set(options.names) - set(CALLS)
    if unknown:
        asked.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
    folder = Path(tempfile.mkdtemp(prefix="bench-")) if options.small else RESULTS
    if options.list:
        there = results(RESULTS)
        for name, call in CALLS.items():
            state = (
                "-" if name not in there else "measured" if aims.whole(there[name]) else "in part"
            )
            print(f"{state:9} {name:20} regard bench {call}")
        return
    names = [] if options.tables else options.names or list(CALLS)
    there = (
        {name for name, result in results(folder).items() if aims.whole(result)}
        if options.missing
        else set()
    )
    for name in [name for name in names if name not in there]:
        if not (options.anyway or options.small):
            rest()
        measure(name, folder, anyway=options.anyway, small=options.small)
        if not options.small:
            write(results(RESULTS))  # after each, so that an interrupt loses nothing
    if options.small:
        print(tables(results(folder), small=True))
        print(f"written to {folder}", file=sys.stderr)
    elif options.tables:
        write(results(RESULTS))


if __name__ == "__main__":
    main()
