"""What was aimed at, and whether the results of benchmarks/bench.py meet it: a table of docs/bench.md is made from this.

Each aim is a function of one or more results; it says what was measured, and whether that is enough.  What has no result yet
is a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from regard.bench.cell import DENSE
from regard.bench.plan import DONE, SPENT

Result = dict[str, Any]
Row = dict[str, Any]
WINDOW, LINEAR = "local:window=128", "linear"
SAME, WORST = 0.05, 1 / 1.05  # of the time of dense SDPA
CONSTANT = 0.10  # that a step may differ from that of a short cache
GIB = 1 << 30


@dataclass(frozen=True)
class Found:
    """What was measured, in words, and whether it is enough; None: there is nothing to say yet."""

    words: str
    met: bool | None


@dataclass(frozen=True)
class Aim:
    """One line.  `estimate_call` are the names of the results that `judge` is given."""

    what: str
    aim: str
    needs: Sequence[str]
    judge: Callable[..., Found]


def table(found: dict[str, Result]) -> list[str]:
    """All aims as Markdown; those without results too.  Only whole results can meet an aim; any number can miss it."""
    lines = ["| what | aim | measured | |", "| --- | --- | --- | --- |"]
    for aim in AIMS:
        there = [found[name] for name in aim.needs if name in found]
        answer = aim.judge(*(found.get(name, NOTHING) for name in aim.needs))
        doubt = " (flagged)" if any(map(flags, there)) else ""
        left = [name for name in aim.needs if name not in found or not whole(found[name])]
        met = None if answer.met and left else answer.met
        verdict = (
            f"{VERDICTS[met]}; without all of {', '.join(left)}"
            if left and answer.words
            else VERDICTS[met]
        )
        lines.append(
            f"| {aim.what} | {aim.aim} | {answer.words or '-'}{doubt if answer.words else ''} | {verdict} |"
        )
    return lines


NOTHING: Result = {"rows": [], "load": [], "ended": "not begun"}


def whole(result: Result) -> bool:
    """Whether all was measured that was asked for; but for dense attention, where that would take hours."""
    left = [row for row in result["rows"] if row["seconds"] is None and row["name"] != DENSE]
    return result["ended"] == DONE or (
        result["ended"] == SPENT and bool(result["rows"]) and not left
    )


VERDICTS = {True: "met", False: "**missed**", None: "not measured"}


def flags(result: Result) -> list[str]:
    """What speaks against the numbers of a result."""
    return [flag for load in result["load"] for flag in load["flags"]]


def three(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------- rows of results
def picked(results: Iterable[Result], **wanted: object) -> Iterator[Row]:
    """Rows that were measured, and are as wanted."""
    for result in results:
        for row in result["rows"]:
            if row["seconds"] is not None and all(
                row[key] == value for key, value in wanted.items()
            ):
                yield row


def at_least(result: Result, key: str, least: dict[int, float], **wanted: object) -> Found:
    """The ratio at each length must be so large; `key` is that against dense SDPA, or against a peer."""
    ratios = {row["length"]: row[key]["median"] for row in picked([result], **wanted) if row[key]}
    return _each(ratios, least, " ×")


def _each(values: dict[int, float], least: dict[int, float], unit: str = "") -> Found:
    """The value at each length must be so large.  Sizes that were not measured leave the aim open."""
    words = ", ".join(f"{three(values[n])}{unit} at {n:,}" for n in sorted(values))
    short = any(values[n] < most for n, most in least.items() if n in values)
    return Found(
        words, False if short else True if values and least.keys() <= values.keys() else None
    )


def _all(*found: Found) -> Found:
    """Several that must all be met."""
    words = "; ".join(each.words for each in found if each.words)
    met = [each.met for each in found]
    return Found(words, False if False in met else None if None in met else True)


# ---------------------------------------------------------------------------------------------- judges
def same(*results: Result) -> Found:
    """Dense attention through Regard costs what it costs without, or less."""
    rows = [row for row in picked(results, name="vanilla") if row["faster"]]
    if not rows:
        return Found("", None)
    worst = min(rows, key=lambda row: row["faster"]["median"])
    return Found(f"{_span(rows)}; slowest {_place(worst)}", worst["faster"]["median"] >= 1 - SAME)


def never_slower(*results: Result) -> Found:
    """`auto` picks something that is not slower than dense SDPA."""
    rows = [row for row in picked(results) if row["faster"]]
    if not rows:
        return Found("", None)
    worst = min(rows, key=lambda row: row["faster"]["median"])
    late = [row for row in rows if row["faster"]["median"] < WORST]
    words = f"at least {three(worst['faster']['median'])} ×, {_place(worst)}; {len(late)} of {len(rows)} below {WORST:.2f}"
    return Found(words, not late)


def efficiency(result: Result) -> Found:
    """Density times speed-up: what a score costs, beside one of the dense kernel."""
    found = {
        row["length"]: row["efficiency"]
        for row in picked([result], name=WINDOW)
        if row["efficiency"] is not None
    }
    return _each(found, {4096: 0.7, 16384: 0.7})


def bigbird_and_longformer(bigbird: Result, longformer: Result, key: str, least: float) -> Found:
    """Of both, against dense SDPA or against Hugging Face."""
    found = []
    for name, result in (("bigbird", bigbird), ("longformer", longformer)):
        peer = [row for row in picked([result]) if row["of"] == name]
        rows = list(picked([result], name=name)) if key == "faster" else peer
        ratios = {row["length"]: row[key]["median"] for row in rows if row[key]}
        each = _each(ratios, {16384: least}, " ×")
        found.append(Found(f"{name} {each.words}" if each.words else "", each.met))
    return _all(*found)


def best_linear_peer(result: Result) -> Found:
    """The peer that comes closest, attention against attention, as `causal_linear` is judged; whole layers are told too."""
    words, ratios = [], {}
    for level in ("kernel", "layer"):
        rows = [row for row in picked([result], length=4096, level=level) if row["ahead"]]
        if rows:
            best = min(rows, key=lambda row: row["ahead"]["median"])
            ratios[level] = best["ahead"]["median"]
            words.append(f"{three(ratios[level])} × {best['name']}")
    return Found("; ".join(words), ratios["kernel"] >= 2 if "kernel" in ratios else None)


def causal_linear(result: Result) -> Found:
    """At the kernel, where dense SDPA is SDPA and nothing else."""
    return at_least(result, "faster", {4096: 6}, name=LINEAR, level="kernel")


def best_peers(*results: Result) -> dict[tuple[str, str, str, int, bool], Row]:
    """The fastest peer of each recipe, for each level, way and length."""
    best: dict[tuple[str, str, str, int, bool], Row] = {}
    for row in picked(results):
        if row["of"] and row["ahead"]:
            key = (row["of"], row["level"], row["way"], row["length"], row["causal"])
            best[key] = min(best.get(key, row), row, key=lambda row: row["ahead"]["median"])
    return best


def peers(*results: Result) -> Found:
    """Against the fastest peer of each recipe: the medians, and who is ahead of us by more than what counts as the same."""
    best = best_peers(*results)
    if not best:
        return Found("", None)
    ratios = {key: row["ahead"]["median"] for key, row in best.items()}
    middle, least = median(ratios.values()), min(ratios.values())
    words = [
        f"{len(best)} pairs of {len({key[0] for key in best})} mechanisms: median {three(middle)} ×"
    ]
    for level, name in (("kernel", "attention alone"), ("layer", "whole layers")):
        mine = [ratio for key, ratio in ratios.items() if key[1] == level]
        words += [f"{name} {three(median(mine))} × ({len(mine)})"] if mine else []
    slower = sorted(
        f"{key[0]} {key[2]} {key[3]:,}: {three(ratio)}"
        for key, ratio in ratios.items()
        if ratio < 1 - SAME
    )
    words += [f"slower: {', '.join(slower)}" if slower else f"least {three(least)} ×"]
    return Found("; ".join(words), not slower and middle >= 2)


def far_ahead(result: Result) -> Found:
    """A step behind 65,536 tokens."""
    found = []
    for level in ("kernel", "layer"):
        for name in (WINDOW, LINEAR):
            each = at_least(result, "faster", {65536: 50}, name=name, level=level, length=65536)
            found.append(Found(f"{name}, {level}: {each.words}" if each.words else "", each.met))
    return _all(*found)


def constant(result: Result) -> Found:
    """The step at 65,536 over that at 512: a ratio of medians, for they did not take turns."""
    found = []
    for name in (WINDOW, LINEAR):
        step = {row["length"]: row["seconds"] for row in picked([result], name=name, level="layer")}
        if {512, 65536} <= step.keys():
            ratio = step[65536] / step[512]
            found.append(Found(f"{name} {ratio:.2f}", ratio <= 1 + CONSTANT))
        else:
            found.append(Found("", None))
    return _all(*found)


def fits(result: Result) -> Found:
    """Bytes at the peak of a process of its own."""
    held = {row["name"]: row for row in picked([result], length=1_000_000) if row["memory"]}
    words = [
        f"{name} {held[name]['memory'] / GIB:.1f} GiB in {held[name]['seconds']:.0f} s"
        for name in held
        if name != DENSE
    ]
    fit = all(held[name]["memory"] < 24 * GIB for name in held)
    return Found(", ".join(words), (fit or False) if {WINDOW, LINEAR} <= held.keys() else None)


def _span(rows: Sequence[Row]) -> str:
    ratios = [row["faster"]["median"] for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} sizes"


def _place(row: Row) -> str:
    return f"{row['name']} at {row['length']:,}, {row['way']}, {row['level']}: {row['faster']['median']:.2f}"


# ---------------------------------------------------------------------------------------------- the aims
HUGGING = ("bigbird-training", "longformer-training")
PEERS = (
    "peers-1024",
    "peers-forward",
    "peers-training",
    "peers-sparse",
    "peers-causal",
    "peers-heads",
    "peers-heads-training",
)
AUTO = ("auto-forward", "auto-training", "auto-causal")
AIMS = (
    Aim("dense / SDPA, all n", "1.00 ± 0.05, or faster", ("dense-forward", "dense-training"), same),
    Aim(
        "window 128, forward, against dense SDPA",
        "≥ 8 × at 4,096, ≥ 30 × at 16,384",
        ("window-forward",),
        lambda r: at_least(r, "faster", {4096: 8, 16384: 30}, name=WINDOW),
    ),
    Aim(
        "the same, against compiled FlexAttention",
        "≥ 1.75 ×",
        ("window-forward",),
        lambda r: at_least(r, "ahead", {4096: 1.75, 16384: 1.75}, of=WINDOW),
    ),
    Aim("the same, efficiency", "≥ 0.7", ("window-forward",), efficiency),
    Aim(
        "window 128, forward + backward",
        "≥ 10 × at 4,096, ≥ 35 × at 16,384",
        ("window-training",),
        lambda r: at_least(r, "faster", {4096: 10, 16384: 35}, name=WINDOW),
    ),
    Aim(
        "the same, batch 1 × 1 head",
        "≥ 10 × at 4,096, ≥ 35 × at 16,384",
        ("window-one-head",),
        lambda r: at_least(r, "faster", {4096: 10, 16384: 35}, name=WINDOW),
    ),
    Aim(
        "BigBird, Longformer, forward + backward, 16,384, against dense SDPA",
        "≥ 8 ×",
        HUGGING,
        lambda a, b: bigbird_and_longformer(a, b, "faster", 8),
    ),
    Aim(
        "the same, against Hugging Face's layers",
        "≥ 3 ×",
        HUGGING,
        lambda a, b: bigbird_and_longformer(a, b, "ahead", 3),
    ),
    Aim(
        "causal linear, forward + backward, 4,096, against causal SDPA",
        "≥ 6 ×",
        ("causal-linear",),
        causal_linear,
    ),
    Aim("the same, against the best peer", "≥ 2 ×", ("causal-linear",), best_linear_peer),
    Aim(
        "every mechanism against its best running peer",
        f"never slower, by more than {SAME:.0%}; median ≥ 2 ×",
        PEERS,
        peers,
    ),
    Aim("`auto` against dense SDPA", "never > 5 % slower at any n", AUTO, never_slower),
    Aim(
        "decode step, window or linear, at 65,536",
        "≥ 50 × dense with cache",
        ("decode",),
        far_ahead,
    ),
    Aim(
        "the same, over the step at 512, whole layer",
        f"constant: ≤ {1 + CONSTANT:.2f}",
        ("decode",),
        constant,
    ),
    Aim(
        "1,000,000 tokens, forward + backward, causal, 4 heads × 32",
        "fits 24 GiB",
        ("million",),
        fits,
    ),
)
