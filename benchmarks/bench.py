"""The measurements of docs/bench.md: each one call of `regard bench` of at most three minutes, on a quiet machine.

    python benchmarks/bench.py                  all of them, one after the other
    python benchmarks/bench.py aims decode      some of them
    python benchmarks/bench.py --tables         write the tables of docs/bench.md from the results that there are
    python benchmarks/bench.py aims --anyway    although the machine is busy; the results and the tables are flagged

Results go to benchmarks/results/bench-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "bench.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
CALLS = {
    "aims": "vanilla local:window=128 bigbird linear --lengths 4096,16384 --levels kernel --threads all --budget 140s",
    "one-head": "local:window=128 --lengths 4096,16384 --ways training --levels kernel --threads all --heads 1 --budget 60s",
    "longformer": "longformer bigbird --lengths 16384 --ways training --levels layer --threads all --budget 140s",
    "causal": "linear --causal --lengths 4096 --levels kernel --threads 1,all --budget 60s",
    "crossover": "vanilla local bigbird linear performer linformer:rank=64 nystrom --lengths 128,256,512,1024,2048,4096,8192 "
    "--levels kernel --threads all --budget 150s",
    "decode": "vanilla local:window=128 linear --ways decode --lengths 512,4096,16384,65536 --threads 1 --budget 60s",
    "peers-1024": "--peers --lengths 1024 --threads 1 --budget 150s",
    "peers-forward": "--peers --lengths 4096 --ways forward --threads 1 --budget 150s",
    "peers-training": "--peers --lengths 4096 --ways training --threads 1 --budget 150s",
    "peers-causal": "--peers linear performer local reformer sinkhorn memory_compressed gmlp --causal --lengths 4096 "
    "--ways training --threads 1 --budget 150s",
}
Row = dict
INTERRUPTED = 130


def measure(name: str, anyway: bool) -> None:
    """One call; what it has when it is interrupted is kept too."""
    words = ["bench", *shlex.split(CALLS[name]), "--json", *(["--anyway"] if anyway else [])]
    done = subprocess.run([sys.executable, "-m", "regard.cli", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, INTERRUPTED):
        sys.exit(done.returncode)
    (RESULTS / f"bench-{name}.json").write_text(done.stdout)


# ---------------------------------------------------------------------------------------------- tables
def tables() -> str:
    """All results that there are, as Markdown."""
    found = []
    for name, call in CALLS.items():
        path = RESULTS / f"bench-{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            found += [f"### {name}", "", f"`regard bench {call}`", "", about(result), "", *rows(result), *missing(result), ""]
    return "\n".join(found)


def about(result: dict) -> str:
    """The machine in a sentence, and what speaks against the numbers."""
    where = result["environment"]
    peaks = ", ".join(
        f"{p['gemm'] / 1e9:.0f} GFLOP/s and {p['exp'] / 1e9:.1f} G exp/s with {p['threads']} thread{'s' * (p['threads'] > 1)}"
        for p in result["peaks"]
    )
    flags = [flag for load in result["load"] for flag in load["flags"]]
    doubt = f" **Flagged: {'; '.join(flags)}.**" if flags else ""
    left = "" if result["ended"] == "done" else f" Not all was measured: {result['ended']}."
    return f"{where['machine']}, torch {where['torch']}: {peaks}.{doubt}{left}"


def rows(result: dict) -> list[str]:
    """A line for each row that was measured; of peers, those alone, and ours in one of their columns."""
    measured = [row for row in result["rows"] if row["seconds"] is not None]
    if any(row["of"] for row in measured):
        return beside(measured)
    heads = (
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
    )
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in measured:
        cells = [
            f"{row['length']:,}", row["way"], row["level"], row["threads"], f"`{row['name']}`", three(1e3 * row["seconds"]),
            interval(row["faster"]), percent(row["density"], 1), plain(row["efficiency"]), percent(row["reached"]),
            million(row["memory"]), million(row["formula"]),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def beside(measured: list[Row]) -> list[str]:
    """Peers, and how far ours is ahead."""
    lines = ["| tokens | way | peer | ours | theirs ms | ours ms | ours ahead | dense ms |", "| --- " * 8 + "|"]
    place = ("length", "way", "level", "threads")
    ahead = []
    at = 0
    for number, row in enumerate(measured):
        if row["name"] == "dense SDPA":
            at = number  # a group begins with it
        if not row["of"]:
            continue
        group = {each["name"]: each for each in measured[at:number] if all(each[key] == row[key] for key in place)}
        ours, dense = (three(1e3 * group[name]["seconds"]) if name in group else "" for name in (row["of"], "dense SDPA"))
        ahead += [row["ahead"]["median"]] if row["ahead"] else []
        cells = [
            f"{row['length']:,}", row["way"], row["name"], f"`{row['of']}`, {row['level']}", three(1e3 * row["seconds"]),
            ours, interval(row["ahead"]), dense,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    slower = sum(x < 1 for x in ahead)
    return (
        [*lines, "", f"Median of {len(ahead)}: ours {three(median(ahead))} times as fast; slower than {slower}."]
        if ahead
        else lines
    )


def missing(result: dict) -> Iterable[str]:
    """Reasons, once each."""
    reasons = dict.fromkeys((row["name"], row["why"]) for row in result["rows"] if row["why"] is not None)
    return ["", *(f"- {name}: {why}" for name, why in reasons)] if reasons else []


def interval(ratio: dict | None) -> str:
    return "" if ratio is None else f"{three(ratio['median'])} [{three(ratio['low'])}, {three(ratio['high'])}]"


def three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(share: float | None, figures: int = 0) -> str:
    return "" if share is None else f"{share:.{figures}%}"


def million(value: float | None) -> str:
    return "" if value is None else three(value / 1e6)


def write() -> None:
    """Put the tables between the marks of the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}")


def main() -> None:
    """Measure, and write the tables."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", help=f"of {', '.join(CALLS)}")
    asked.add_argument("--tables", action="store_true", help="measure nothing")
    asked.add_argument("--anyway", action="store_true", help="on a busy machine too")
    options = asked.parse_args()
    unknown = set(options.names) - set(CALLS)
    if unknown:
        asked.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CALLS)}")
    for name in [] if options.tables else options.names or CALLS:
        measure(name, options.anyway)
    write()


if __name__ == "__main__":
    main()
