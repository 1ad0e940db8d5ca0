"""The aims of benchmarks/bench.py: each is judged by its numbers, and what was not measured is
never met."""

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard.cli import app

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """benchmarks/bench.py, which imports its neighbour."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("bench_of_aims", FOLDER / "bench.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def row(name, length, *, speedup=None, lead=None, reference="", **more):
    told = {
        "scope": "kernel",
        "mode": "training",
        "causal": False,
        "threads": 2,
        "seconds": 1.0,
        "peak_bytes": 10**9,
        "density": 0.1,
    }
    told |= {
        "efficiency": None,
        "utilization": None,
        "estimated_bytes": None,
        "reason": None,
        **more,
    }
    ratios = {
        k: None if v is None else {"median": v, "low": v, "high": v, "pairs": 5}
        for k, v in (("speedup", speedup), ("lead", lead))
    }
    return {"name": name, "length": length, "reference": reference, **told, **ratios}


def result(*rows, flags=()):
    peaks = [{"threads": 2, "gemm": 1e11, "exp": 1e9}]
    return {
        "rows": rows,
        "load": [{"flags": list(flags)}],
        "environment": {"machine": "m", "torch": "t"},
        "peaks": peaks,
        "ended": "done",
    }


def verdicts(bench, **found):
    lines = bench.aims.format_table({name.replace("_", "-"): each for name, each in found.items()})[
        2:
    ]
    return {line.split(" | ")[0].strip("| "): line for line in lines}


WINDOW, LINEAR = "local:window=128", "linear"


def test_nothing_measured_is_nothing_met(bench):
    """Fails if an aim is met, or missed, without a number."""
    assert all("not measured" in line for line in verdicts(bench).values())
    empty = {name: result() for name in bench.CALLS}
    assert all("not measured" in line for line in bench.aims.format_table(empty)[2:])


def test_what_is_not_whole_is_never_met(bench):
    """Fails if an aim is met by the part of a result that there was time for, or if one of two
    results breaks the table."""
    good = {
        "dense_forward": result(row("vanilla", 64, speedup=1.0)),
        "dense_training": result(row("vanilla", 64, speedup=1.0)),
        "auto_forward": result(row("vanilla", 64, speedup=1.0)),
        "auto_training": result(),
        "auto_causal": result(),
        "causal_linear": result(row("p", 4096, reference=LINEAR, lead=3.0)),
        "longformer_training": result(),
    }
    what = (
        "dense through Regard / SDPA, all n",
        "`auto` against dense SDPA",
        "the same, against the best peer",
    )
    assert all("| met |" in verdicts(bench, **good)[each] for each in what)
    for each in good.values():
        each["ended"] = "interrupted"
    assert all("| not measured; incomplete:" in verdicts(bench, **good)[each] for each in what)
    rest = [row(WINDOW, 10**6), row(LINEAR, 10**6), row("dense SDPA", 10**6, seconds=None)]
    million = result(*rest) | {"ended": "budget exhausted"}
    line = "1,000,000 tokens, forward + backward, causal, 4 heads × 32"
    assert "| met |" in verdicts(bench, million=million)[line]
    assert "not measured" in verdicts(bench, million=million | {"rows": rest[::2]})[line]
    bad = result(row("vanilla", 64, speedup=0.5))
    assert "**missed**" in verdicts(bench, dense_forward=bad)["dense through Regard / SDPA, all n"]
    one = result(row(WINDOW, 512, scope="layer"), row(WINDOW, 65536, scope="layer"))
    assert (
        "not measured"
        in verdicts(bench, decode=one)["the same, relative to the step at 512, whole layer"]
    )
    assert (
        "not measured"
        in verdicts(bench, window_forward=result(row(WINDOW, 4096)))["the same, efficiency"]
    )


def test_a_result_that_cannot_be_read_is_none(bench, tmp_path, monkeypatch):
    """Fails if a torn file ends all tables, if half a result takes the place of a whole one, or
    counts as one."""
    (tmp_path / "bench-decode.json").write_text("hello {")
    assert bench.read_results(tmp_path) == {}
    whole, half = json.dumps(result()), json.dumps(result() | {"ended": "interrupted"})
    path, real, told = tmp_path / "bench-decode.json", subprocess.Popen, []
    monkeypatch.setattr(
        bench.subprocess,
        "Popen",
        lambda _, stdout: real([sys.executable, "-c", told[-1]], stdout=stdout),
    )
    runs = [
        ("", half, 130, half),
        (whole, half, 130, whole),
        (half, whole, 0, whole),
        (whole, "", 1, whole),
    ]
    for before, printed, code, after in runs:
        path.write_text(before)
        told.append(f"import sys; sys.stdout.write({printed!r}); sys.exit({code})")
        with pytest.raises(SystemExit) if code else nullcontext():
            bench.run_call("decode", tmp_path, force=True, small=True)
        assert path.read_text() == after and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("long", "word"), [(40.0, "| met |"), (34.0, "**missed**"), (None, "not measured")]
)
def test_a_window_is_judged_at_both_lengths(bench, long, word):
    """Fails if one length is enough, or a ratio below the aim is."""
    rows = [
        row(WINDOW, 4096, speedup=12.0),
        *([] if long is None else [row(WINDOW, 16384, speedup=long)]),
    ]
    line = verdicts(bench, window_training=result(*rows))["window 128, forward + backward"]
    assert word in line and "12 × at 4,096" in line


@pytest.mark.parametrize(
    ("ratio", "word"), [(0.96, "| met |"), (0.94, "**missed**"), (1.6, "| met |")]
)
def test_dense_is_judged_by_what_is_slowest(bench, ratio, word):
    """Fails if a mean hides one length, or if to be faster is a fault."""
    found = {
        "dense_forward": result(
            row("vanilla", 64, speedup=1.0), row("vanilla", 128, speedup=ratio)
        ),
        "dense_training": result(),
    }
    assert word in verdicts(bench, **found)["dense through Regard / SDPA, all n"]


def test_peers_are_judged_by_the_best_of_each(bench):
    """Fails if a slow peer stands for a fast one of the same recipe, or one that is ahead of us is
    not named."""
    rows = [
        row("a", 4096, reference="local", lead=9.0),
        row("b", 4096, reference="local", lead=3.0),
        row("c", 4096, reference="fnet", lead=2.5),
    ]
    empty = {
        name.replace("-", "_"): result() for name in bench.aims.PEERS if name != "peers-training"
    }
    what = "every recipe against its fastest peer"
    assert (
        "median 2.75" in (line := verdicts(bench, **empty, peers_training=result(*rows))[what])
        and "| met |" in line
    )
    assert "kernels 2.75 × (2)" in line and "whole layers" not in line and "least 2.5 ×" in line
    rows.append(row("d", 4096, reference="fnet", lead=0.8))
    line = verdicts(bench, **empty, peers_training=result(*rows))[what]
    assert "**missed**" in line and "fnet training 4,096: 0.8" in line


def test_decoding_and_a_million(bench):
    """Fails if a step that grows is called constant, if one level is enough, or if 24 GiB are not
    the limit."""
    steps = [
        row(name, n, scope=level, mode="decode", speedup=n / 1000, seconds=s)
        for name in (WINDOW, LINEAR)
        for level in ("kernel", "layer")
        for n, s in ((512, 1.0), (65536, 1.05))
    ]
    found = verdicts(
        bench,
        decode=result(*steps),
        million=result(row(WINDOW, 10**6), row(LINEAR, 10**6, peak_bytes=25 << 30)),
    )
    assert "| met |" in found["decoding step, window or linear, at 65,536"]
    assert "| met |" in found["the same, relative to the step at 512, whole layer"]
    assert "**missed**" in found["1,000,000 tokens, forward + backward, causal, 4 heads × 32"]
    steps[-1]["seconds"] = 2.0
    assert (
        "**missed**"
        in verdicts(bench, decode=result(*steps))[
            "the same, relative to the step at 512, whole layer"
        ]
    )


def test_a_busy_machine_shows(bench):
    """Fails if a number of a busy machine stands in a table without a word."""
    found = {"window-one-head": result(row(WINDOW, 4096, speedup=12.0), flags=["others take 50%"])}
    text = bench.format_tables(found)
    assert "12 × at 4,096 (flagged)" in text and "**Flagged: others take 50%.**" in text


@pytest.mark.parametrize("small", [False, True])
def test_every_call_is_understood(bench, small, monkeypatch):
    """Fails if a call has a word that `regard bench` does not know, or takes more than three
    minutes."""
    plans = []

    def begin(plan, **_):
        plans.append(plan)
        raise ValueError("enough")

    monkeypatch.setattr("regard.bench.schedule.start_bench", begin)
    for name, call in bench.CALLS.items():
        found = CliRunner().invoke(app, ["bench", *(bench.shrink(call) if small else call).split()])
        assert "enough" in found.stderr, (name, found.stderr)
    assert len(plans) == len(bench.CALLS) and all(plan.budget <= 180 for plan in plans)
    assert {need for aim in bench.aims.AIMS for need in aim.needs} <= bench.CALLS.keys()
