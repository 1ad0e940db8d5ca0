"""Performance targets, and whether the results of benchmarks/bench.py meet them (docs/bench.md).

Each target is a function of one or more results. It returns what was measured and whether that is
enough; a target without a result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from regard.bench.cell import DENSE
from regard.bench.formatting import three_digits
from regard.bench.plan import DONE, SPENT

Result = dict[str, Any]
Row = dict[str, Any]
WINDOW, LINEAR = "local:window=128", "linear"
TOLERANCE = 0.05  # relative difference that counts as equal
CONSTANT_TOLERANCE = 0.10  # relative difference of a decoding step from one with a short cache
GIB = 1 << 30
NO_RESULT: Result = {"rows": [], "load": [], "ended": "not started"}
STATUS = {True: "met", False: "**missed**", None: "not measured"}


@dataclass(frozen=True)
class Outcome:
    """What was measured, as text, and whether the target is met; None: not known yet."""

    text: str
    met: bool | None


@dataclass(frozen=True)
class Aim:
    """A target; `judge` is called with the results named in `needs`."""

    what: str
    target: str
    needs: Sequence[str]
    judge: Callable[..., Outcome]


def format_table(results: dict[str, Result]) -> list[str]:
    """Return all targets as Markdown. Only complete results can meet one; any can miss it."""
    lines = ["| what | target | measured | |", "| --- | --- | --- | --- |"]
    for aim in AIMS:
        outcome = aim.judge(*(results.get(name, NO_RESULT) for name in aim.needs))
        missing = [n for n in aim.needs if n not in results or not is_complete(results[n])]
        status = STATUS[None if outcome.met and missing else outcome.met]
        measured = outcome.text or "-"
        if outcome.text and missing:
            status += f"; incomplete: {', '.join(missing)}"
        if outcome.text and any(flags(results[name]) for name in aim.needs if name in results):
            measured += " (flagged)"
        lines.append(f"| {aim.what} | {aim.target} | {measured} | {status} |")
    return lines


def is_complete(result: Result) -> bool:
    """Whether everything was measured, except dense attention where that would take hours."""
    if result["ended"] == SPENT:
        ours = [row for row in result["rows"] if row["name"] != DENSE]
        return bool(result["rows"]) and all(row["seconds"] is not None for row in ours)
    return bool(result["ended"] == DONE)


def flags(result: Result) -> list[str]:
    """Return what speaks against the numbers of a result."""
    return [flag for load in result["load"] for flag in load["flags"]]


def select_rows(results: Iterable[Result], **wanted: object) -> Iterator[Row]:
    """Yield the rows that were measured and have the wanted values."""
    for result in results:
        for row in result["rows"]:
            if row["seconds"] is not None and all(row[key] == v for key, v in wanted.items()):
                yield row


def compare_by_length(values: dict[int, float], least: dict[int, float], unit: str = "") -> Outcome:
    """Require a least value at each length; missing lengths leave the target open."""
    text = ", ".join(f"{three_digits(values[n])}{unit} at {n:,}" for n in sorted(values))
    if any(values[n] < target for n, target in least.items() if n in values):
        return Outcome(text, False)
    return Outcome(text, True if values and least.keys() <= values.keys() else None)


def compare_ratio(result: Result, key: str, least: dict[int, float], **wanted: object) -> Outcome:
    """Require a least ratio at each length: "speedup" over dense SDPA or "lead" over a peer."""
    rows = select_rows([result], **wanted)
    ratios = {row["length"]: row[key]["median"] for row in rows if row[key]}
    return compare_by_length(ratios, least, " ×")


def require_all(outcomes: Iterable[tuple[str, Outcome]]) -> Outcome:
    """Combine named outcomes that must all be met."""
    outcomes = list(outcomes)
    text = "; ".join(f"{name}{each.text}" for name, each in outcomes if each.text)
    met = [each.met for _, each in outcomes]
    return Outcome(text, False if False in met else None if None in met else True)


# ---------------------------------------------------------------------- judges
def dense_overhead(*results: Result) -> Outcome:
    """Dense attention through Regard costs no more than without."""
    rows = [row for row in select_rows(results, name="vanilla") if row["speedup"]]
    if not rows:
        return Outcome("", None)
    ratios = [row["speedup"]["median"] for row in rows]
    slowest = min(rows, key=lambda row: row["speedup"]["median"])
    text = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} sizes"
    return Outcome(f"{text}; slowest {describe_row(slowest)}", min(ratios) >= 1 - TOLERANCE)


def never_slower(*results: Result) -> Outcome:
    """`auto` chooses a backend that is not slower than dense SDPA."""
    rows = [row for row in select_rows(results) if row["speedup"]]
    if not rows:
        return Outcome("", None)
    least = 1 / (1 + TOLERANCE)
    slowest = min(rows, key=lambda row: row["speedup"]["median"])
    slower = [row for row in rows if row["speedup"]["median"] < least]
    text = f"at least {three_digits(slowest['speedup']['median'])} ×, {describe_row(slowest)}"
    return Outcome(f"{text}; {len(slower)} of {len(rows)} below {least:.2f}", not slower)


def window_efficiency(result: Result) -> Outcome:
    """Density × speedup: the cost of a visible pair relative to the dense kernel."""
    rows = select_rows([result], name=WINDOW)
    values = {row["length"]: row["efficiency"] for row in rows if row["efficiency"] is not None}
    return compare_by_length(values, {4096: 0.7, 16384: 0.7})


def bigbird_and_longformer(bigbird: Result, longformer: Result, key: str, least: float) -> Outcome:
    """Both, against dense SDPA ("speedup") or Hugging Face ("lead")."""
    outcomes = []
    for name, result in (("bigbird", bigbird), ("longformer", longformer)):
        column = "name" if key == "speedup" else "reference"
        outcomes.append((f"{name} ", compare_ratio(result, key, {16384: least}, **{column: name})))
    return require_all(outcomes)


def causal_linear(result: Result) -> Outcome:
    """The kernel, where dense SDPA is nothing but SDPA."""
    return compare_ratio(result, "speedup", {4096: 6}, name=LINEAR, scope="kernel")


def best_linear_peer(result: Result) -> Outcome:
    """The closest peer, kernel against kernel; whole layers are reported too."""
    text, leads = [], {}
    for scope in ("kernel", "layer"):
        rows = [row for row in select_rows([result], length=4096, scope=scope) if row["lead"]]
        if rows:
            best = min(rows, key=lambda row: row["lead"]["median"])
            leads[scope] = best["lead"]["median"]
            text.append(f"{three_digits(leads[scope])} × {best['name']}")
    return Outcome("; ".join(text), leads["kernel"] >= 2 if "kernel" in leads else None)


def best_peers(*results: Result) -> dict[tuple[str, str, str, int, bool], Row]:
    """Return the fastest peer of each recipe, scope, mode, length and causality."""
    best: dict[tuple[str, str, str, int, bool], Row] = {}
    for row in select_rows(results):
        if row["reference"] and row["lead"]:
            key = (row["reference"], row["scope"], row["mode"], row["length"], row["causal"])
            best[key] = min(best.get(key, row), row, key=lambda row: row["lead"]["median"])
    return best


def fastest_peers(*results: Result) -> Outcome:
    """Against the fastest peer of each recipe: the medians, and the peers that are faster."""
    leads = {key: row["lead"]["median"] for key, row in best_peers(*results).items()}
    if not leads:
        return Outcome("", None)
    recipes, middle = len({key[0] for key in leads}), median(leads.values())
    text = [f"{len(leads)} pairs of {recipes} recipes: median {three_digits(middle)} ×"]
    for scope, name in (("kernel", "kernels"), ("layer", "whole layers")):
        values = [lead for key, lead in leads.items() if key[1] == scope]
        if values:
            text.append(f"{name} {three_digits(median(values))} × ({len(values)})")
    slower = sorted(
        f"{recipe} {mode} {length:,}: {three_digits(lead)}"
        for (recipe, _, mode, length, _), lead in leads.items()
        if lead < 1 - TOLERANCE
    )
    if slower:
        text.append(f"slower: {', '.join(slower)}")
    else:
        text.append(f"least {three_digits(min(leads.values()))} ×")
    return Outcome("; ".join(text), not slower and middle >= 2)


def decode_speedup(result: Result) -> Outcome:
    """A decoding step after 65,536 tokens."""
    return require_all(
        (
            f"{name}, {scope}: ",
            compare_ratio(result, "speedup", {65536: 50}, name=name, scope=scope, length=65536),
        )
        for scope in ("kernel", "layer")
        for name in (WINDOW, LINEAR)
    )


def constant_step(result: Result) -> Outcome:
    """The step at 65,536 over that at 512: a ratio of medians, they were not interleaved."""
    outcomes = []
    for name in (WINDOW, LINEAR):
        rows = select_rows([result], name=name, scope="layer")
        step = {row["length"]: row["seconds"] for row in rows}
        outcome = Outcome("", None)
        if {512, 65536} <= step.keys():
            ratio = step[65536] / step[512]
            outcome = Outcome(f"{ratio:.2f}", ratio <= 1 + CONSTANT_TOLERANCE)
        outcomes.append((f"{name} ", outcome))
    return require_all(outcomes)


def fits_memory(result: Result) -> Outcome:
    """Peak memory in a separate process."""
    rows = select_rows([result], length=1_000_000)
    measured = {row["name"]: row for row in rows if row["peak_bytes"]}
    text = ", ".join(
        f"{name} {row['peak_bytes'] / GIB:.1f} GiB in {row['seconds']:.0f} s"
        for name, row in measured.items()
        if name != DENSE
    )
    fits = all(row["peak_bytes"] < 24 * GIB for row in measured.values())
    return Outcome(text, fits if {WINDOW, LINEAR} <= measured.keys() else None)


def describe_row(row: Row) -> str:
    """Return a row as text: what, where and how fast."""
    speedup = row["speedup"]["median"]
    return f"{row['name']} at {row['length']:,}, {row['mode']}, {row['scope']}: {speedup:.2f}"


# ---------------------------------------------------------------------- targets
HUGGING_FACE = ("bigbird-training", "longformer-training")
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
    Aim(
        "dense through Regard / SDPA, all n",
        "1.00 ± 0.05, or faster",
        ("dense-forward", "dense-training"),
        dense_overhead,
    ),
    Aim(
        "window 128, forward, against dense SDPA",
        "≥ 8 × at 4,096, ≥ 30 × at 16,384",
        ("window-forward",),
        lambda r: compare_ratio(r, "speedup", {4096: 8, 16384: 30}, name=WINDOW),
    ),
    Aim(
        "the same, against compiled FlexAttention",
        "≥ 1.75 ×",
        ("window-forward",),
        lambda r: compare_ratio(r, "lead", {4096: 1.75, 16384: 1.75}, reference=WINDOW),
    ),
    Aim("the same, efficiency", "≥ 0.7", ("window-forward",), window_efficiency),
    Aim(
        "window 128, forward + backward",
        "≥ 10 × at 4,096, ≥ 35 × at 16,384",
        ("window-training",),
        lambda r: compare_ratio(r, "speedup", {4096: 10, 16384: 35}, name=WINDOW),
    ),
    Aim(
        "the same, batch 1 × 1 head",
        "≥ 10 × at 4,096, ≥ 35 × at 16,384",
        ("window-one-head",),
        lambda r: compare_ratio(r, "speedup", {4096: 10, 16384: 35}, name=WINDOW),
    ),
    Aim(
        "BigBird, Longformer, forward + backward, 16,384, against dense SDPA",
        "≥ 8 ×",
        HUGGING_FACE,
        lambda a, b: bigbird_and_longformer(a, b, "speedup", 8),
    ),
    Aim(
        "the same, against Hugging Face's layers",
        "≥ 3 ×",
        HUGGING_FACE,
        lambda a, b: bigbird_and_longformer(a, b, "lead", 3),
    ),
    Aim(
        "causal linear, forward + backward, 4,096, against causal SDPA",
        "≥ 6 ×",
        ("causal-linear",),
        causal_linear,
    ),
    Aim("the same, against the best peer", "≥ 2 ×", ("causal-linear",), best_linear_peer),
    Aim(
        "every recipe against its fastest peer",
        f"never slower by more than {TOLERANCE:.0%}; median ≥ 2 ×",
        PEERS,
        fastest_peers,
    ),
    Aim("`auto` against dense SDPA", "never > 5 % slower at any n", AUTO, never_slower),
    Aim(
        "decoding step, window or linear, at 65,536",
        "≥ 50 × dense with KV cache",
        ("decode",),
        decode_speedup,
    ),
    Aim(
        "the same, relative to the step at 512, whole layer",
        f"constant: ≤ {1 + CONSTANT_TOLERANCE:.2f}",
        ("decode",),
        constant_step,
    ),
    Aim(
        "1,000,000 tokens, forward + backward, causal, 4 heads × 32",
        "fits 24 GiB",
        ("million",),
        fits_memory,
    ),
)
