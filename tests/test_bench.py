"""regard bench: statistics, budget, errors and output. No test depends on absolute times."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from regard.backends import calibration
from regard.bench import (
    BenchCell,
    BenchPlan,
    BenchResult,
    BenchRow,
    DenseContender,
    RecipeContender,
    machine as machines,
    run_bench,
    schedule as running,
    start_bench,
)
from regard.bench.cell import DENSE, MODES, SCOPES, BenchCall, Contender, prepare_call
from regard.bench.contenders import build_mixer, skip_attention
from regard.bench.flex import FlexContender
from regard.bench.formatting import crossover_lines, group_rows, missing_reasons
from regard.bench.machine import (
    MachineLoad,
    PeakThroughput,
    measure_load,
    measure_peaks,
    torch_threads,
)
from regard.bench.page import render_page
from regard.bench.probe import ProbeRefused, ProbeResult, probe
from regard.bench.stats import (
    MIN_ROUNDS,
    Ratio,
    crossover,
    paired_ratio,
    relative_spread,
    time_interleaved,
)
from regard.cli import app
from regard.cli.parsing import parse_spec
from regard.environment import cores
from regard.report import bundle
from regard.state import state_bytes

QUIET = MachineLoad(cores=2, average=0.1, others=0.0, spread=0.01)
BUSY = MachineLoad(cores=2, average=3.0, others=0.6, spread=0.5)
TOP = PeakThroughput(1, 1e11, 1e9)


@pytest.fixture
def quiet(monkeypatch):
    """An idle machine with known peaks; probes start no process and report small, short calls."""
    monkeypatch.setattr(running, "measure_load", lambda **_: QUIET)
    monkeypatch.setattr(running, "measure_peaks", lambda **_: TOP)
    monkeypatch.setattr(running, "preload", lambda modules: None)
    monkeypatch.setattr(running, "probe", lambda *_, **__: ProbeResult(1000, 1e-4))


def bench(*names, **more):
    return CliRunner().invoke(
        app,
        [
            "bench",
            *names,
            *[w for k, v in more.items() for w in (f"--{k.replace('_', '-')}", str(v))],
        ],
    )


SMALL = {"heads": 2, "head_dim": 8, "threads": 1, "budget": "20s"}


# ---------------------------------------------------------------------- statistics
def test_interval_covers_a_known_ratio():
    """Fails if the 95 % interval contains the true ratio much less or more often than that."""
    draw = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        slow_minute = draw.lognormal(0, 0.5, 40)  # hits both of a pair
        a, b = (slow_minute * draw.lognormal(0, 0.1, 40) for _ in range(2))
        found = paired_ratio(3.0 * a, b, seed=trial)
        assert found.low <= found.median <= found.high and found.pairs == 40
        held += found.low <= 3.0 <= found.high
    assert 0.88 <= held / 200 <= 0.995


def test_pairing_beats_a_machine_that_slows_down():
    """Fails if the ratio is not paired: halfway the machine gets ten times slower."""
    slower = np.repeat([1.0, 10.0], 20)
    assert paired_ratio(2 * slower, slower).median == pytest.approx(2)
    assert paired_ratio(2 * slower, slower).high == pytest.approx(2)


def test_calls_are_interleaved_after_a_warm_up():
    """Fails if calls are not interleaved, if the warm-up is timed, or if the rounds do not end."""
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = time_interleaved(calls, 0.0, min_rounds=3)
    assert order == ["a", "b"] * 4 and {len(t) for t in times.values()} == {3}
    order.clear()
    time_interleaved(calls, 1e9, max_rounds=7)
    assert len(order) == 2 * 8
    order.clear()
    time_interleaved({**calls, "c": lambda: order.append("c")}, 0.0, min_rounds=4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    order.clear()
    ticks = iter(range(1000))
    times = time_interleaved(calls, 0.0, min_rounds=2, repeat=4, clock=lambda: float(next(ticks)))
    assert order == list("ab" + 2 * "aaaabbbb") and times == {"a": [0.25] * 2, "b": [0.25] * 2}


def test_output_of_packages_goes_to_stderr(monkeypatch, quiet, capfd):
    """Fails if a package that prints, here or in a child process, breaks the JSON."""
    talk = "import os; os.write(1, b'hello from C'); print('hello from Python')"
    monkeypatch.setattr(
        running,
        "preload",
        lambda modules: (exec(talk), subprocess.run([sys.executable, "-c", talk], check=True)),
    )
    app(
        [
            "bench",
            "local",
            "--json",
            *["--lengths", "32", "--mode", "forward", "--scope", "kernel", "--threads", "1"],
        ],
        standalone_mode=False,
    )
    out, err = capfd.readouterr()
    assert json.loads(out)["rows"] and err.count("hello from") == 4


def test_crossover():
    """Fails if a length counts although a longer one is slower again."""
    assert crossover([(128, 0.5), (256, 1.2), (512, 0.9), (1024, 1.1), (2048, 3.0)]) == 1024
    assert crossover([(128, 2.0), (256, 3.0)]) == 128
    assert crossover([(128, 0.5), (256, 0.7)]) is None


def test_spread():
    """Fails if it is not the distance of the slow tenth from the fast tenth."""
    assert relative_spread([1.0] * 50) == 0
    assert relative_spread([1.0] * 40 + [2.0] * 10) == pytest.approx(1.0)


# ---------------------------------------------------------------------- the machine
def test_theoretical_time():
    """Fails if it is not 4 n² d / G + n² / E for dense attention, times the density."""
    cell = BenchCell("kernel", "forward", 256, heads=2, head_dim=32)
    dense = DenseContender().estimate(cell)
    assert TOP.seconds(dense.flops, dense.exps) == pytest.approx(
        2 * (4 * 256**2 * 32 / 1e11 + 256**2 / 1e9)
    )
    window = RecipeContender(parse_spec("local:window=16")).estimate(cell)
    assert window.density == pytest.approx((256 * 33 - 16 * 17) / 256**2)
    assert TOP.seconds(window.flops, window.exps) == pytest.approx(
        window.density * TOP.seconds(dense.flops, dense.exps)
    )
    trained = DenseContender().estimate(replace(cell, mode="training"))
    assert trained.flops == 3.5 * dense.flops and trained.exps == 2 * dense.exps


def test_peaks_are_measured():
    """Fails if a peak is not finite and positive, or not that of the current thread count."""
    found = measure_peaks(seconds=0.01)
    assert found.threads == torch.get_num_threads()
    assert 0 < found.gemm < math.inf and 0 < found.exp < math.inf


def test_load_is_measured():
    """Fails if the load is not plausible."""
    found = measure_load(seconds=0.05)
    assert found.cores == cores() and found.spread >= 0
    assert found.others is None or found.others >= 0


def test_signs_of_a_busy_machine():
    """Fails if one of three signs is missed, or a load average alone is a reason to refuse."""
    assert not QUIET.flags()
    assert len(BUSY.problems()) == 2 and len(BUSY.flags()) == 3
    past = replace(QUIET, average=3.0)
    assert past.flags() and not past.problems()


def test_calibration_depends_on_the_thread_count(monkeypatch, tmp_path):
    """Fails if costs measured with one thread count are used with another."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setattr(
        calibration,
        "measure_costs",
        lambda: (calibration.BackendCosts(*[1e-5 * torch.get_num_threads()] * 6), 1.0),
    )
    calibration._machine_costs.cache_clear()
    found = []
    for count in (1, 2):
        with torch_threads(count):
            found.append(calibration.machine_costs().dense_call)
    calibration._machine_costs.cache_clear()
    assert found == [1e-5, 2e-5]


def test_refusal_of_load(monkeypatch, quiet):
    """Fails if a busy machine is measured without --force, or not flagged with it."""
    monkeypatch.setattr(running, "measure_load", lambda **_: BUSY)
    found = bench("local", lengths=128, **SMALL)
    assert found.exit_code == 1 and "--force" in found.stderr and "60%" in found.stderr
    found = bench("local", "--force", "--json", lengths=32, mode="forward", **SMALL)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["load"][0]["flags"]


# ---------------------------------------------------------------------- what is run
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("word", ["local:window=4", "linear", "vanilla:kv_heads=1"])
def test_recipes_run_in_every_scope_and_mode(scope, mode, word):
    """Fails if a mode or scope is not what it says: no gradients, gradients, or one token."""
    cell = BenchCell(scope, mode, 20, batch=2, heads=2, head_dim=4)
    assert (
        prepare_call(RecipeContender(parse_spec(word)), cell)() is None
        if mode == "training"
        else True
    )
    built = RecipeContender(parse_spec(word)).build(cell)
    shape = built.call().shape
    assert shape[1 if scope == "layer" else 2] == (1 if mode == "decode" else 20)
    if mode == "training":
        built.call().sum().backward()
        assert all(leaf.grad is not None for leaf in built.leaves)


def test_dense_is_sdpa():
    """Fails if the baseline is not SDPA: as a layer with projections, and with a KV cache."""
    cell = BenchCell("layer", "forward", 9, heads=2, head_dim=4, causal=True)
    torch.manual_seed(0)
    built = DenseContender().build(cell)
    layer, x = built.call.__closure__[0].cell_contents, built.leaves[0]
    q, k, v = (w(x).view(1, 9, 2, 4).transpose(1, 2) for w in (layer.q, layer.k, layer.v))
    want = layer.out(
        F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 9, 8)
    )
    torch.testing.assert_close(built.call(), want)
    torch.testing.assert_close(layer.step(x[:, -1:], k.clone(), v.clone()), want[:, -1:])


@pytest.mark.parametrize("word", ["vanilla", "local:window=8", "bigbird:block=4"])
def test_skipping_attention_leaves_the_same_cache(word):
    """Fails if the state of a stream depends on whether its prompt was attended to."""
    cell = BenchCell("layer", "decode", 50, heads=2, head_dim=4)
    torch.manual_seed(0)
    mixer, x = build_mixer(parse_spec(word), cell), torch.randn(1, 50, 8)
    with torch.no_grad():
        attended = mixer.stream(x)[1]
        with skip_attention(mixer):
            y, skipped = mixer.stream(x)
        token = torch.randn(1, 1, 8)
        assert state_bytes(attended) == state_bytes(skipped) and not y.any()
        torch.testing.assert_close(
            mixer.stream(token, skipped)[0], mixer.stream(token, attended)[0]
        )


def test_estimate_of_decoding():
    """Fails if the cost of a token grows with its position in a window, or not in dense
    attention."""
    windows, dense = (
        [c.estimate(BenchCell("kernel", "decode", n)).flops for n in (512, 4096)]
        for c in (RecipeContender(parse_spec("local")), DenseContender())
    )
    assert windows[0] == pytest.approx(windows[1]) == pytest.approx(4 * 8 * 64 * 129)
    assert dense[1] / dense[0] == pytest.approx(8, rel=0.1)


# ---------------------------------------------------------------------- probes
def test_probe_measures_memory_and_enforces_limits():
    """Fails if the memory is not about what a call allocates, or a failure has no reason."""
    cell = BenchCell("kernel", "forward", 4096, heads=4, head_dim=64)
    found = probe(DenseContender(), cell, threads=1, limit=10**9, seconds=60)
    assert found.seconds > 0
    assert found.bytes is None or 0.9 < found.bytes / DenseContender().estimate(cell).bytes < 3
    with pytest.raises(ProbeRefused, match=r"more than the memory limit of 0.1 GB"):
        probe(
            RecipeContender(parse_spec("talking_heads")), cell, threads=1, limit=10**8, seconds=60
        )
    with pytest.raises(ProbeRefused, match="built with length=64"):
        probe(
            RecipeContender(parse_spec("linformer:length=64:rank=8")),
            cell,
            threads=1,
            limit=10**9,
            seconds=60,
        )


def test_flex_is_compared_with_its_recipe(quiet, monkeypatch):
    """Fails if FlexAttention is compared with another recipe, or gives no reason where it fails."""
    monkeypatch.setattr(
        "regard.bench.flex.compiled_flex_attention", lambda: lambda q, k, v, block_mask: q
    )
    names = ("local:window=8", "per_head", "linear", "fnet")
    found = bench(*names, "--flex", "--json", lengths="32", scope="kernel,layer", **SMALL)
    assert found.exit_code == 0, found.output
    rows = [
        row for row in json.loads(found.stdout)["rows"] if row["name"].startswith("FlexAttention")
    ]
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        assert row["name"] == f"FlexAttention {row['reference']}"
        if (row["scope"], row["mode"]) == ("kernel", "forward") and row["reference"] in names[:2]:
            assert row["seconds"] > 0 and row["lead"]["pairs"] > 1
        else:
            word = {"layer": "use --scope kernel", "kernel": "no backward pass"}[row["scope"]]
            assert (
                word if row["scope"] == "layer" or row["mode"] == "training" else "block mask"
            ) in row["reason"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_is_the_same_attention(monkeypatch):
    """Fails if its block mask, here not compiled, has another pattern."""
    monkeypatch.setattr("regard.bench.flex.compiled_flex_attention", lambda: flex_attention)
    cell = BenchCell("kernel", "forward", 200, heads=2, head_dim=8, causal=True)
    outs = []
    for contender in (
        RecipeContender(parse_spec("local:window=16")),
        FlexContender(parse_spec("local:window=16")),
    ):
        torch.manual_seed(0)
        outs.append(contender.build(cell).call())
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


def test_zero_rounds_measure_memory_only(quiet):
    """Fails if calls are timed in rounds, or a ratio is given without them."""
    found = bench(
        "local", "--json", lengths="32", scope="kernel", mode="training", rounds=0, **SMALL
    )
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    assert [(row["seconds"], row["peak_bytes"], row["speedup"]) for row in rows] == [
        (1e-4, 1000, None)
    ] * 2


# ---------------------------------------------------------------------- the budget
class FakeContender(Contender):
    """A contender whose calls take no real time."""

    def __init__(self, label):
        self.label = label

    def build(self, cell):
        return BenchCall(lambda: torch.zeros(1))


def run_on_fake_clock(monkeypatch, seconds, *, budget, lengths=(128, 256, 512, 1024)):
    """Run a benchmark whose calls of n tokens take seconds(n) on a fake clock."""
    now = [0.0]

    def fake_probe(contender, cell, **_):
        now[0] += seconds(cell.length)
        return ProbeResult(1000, seconds(cell.length))

    def fake_times(calls, *_, **__):
        now[0] += (MIN_ROUNDS + 1) * len(calls) * seconds(at[0])
        return {name: [seconds(at[0])] * MIN_ROUNDS for name in calls}

    at = [0]
    monkeypatch.setattr(running, "probe", fake_probe)
    monkeypatch.setattr(running, "time_interleaved", fake_times)
    plan = BenchPlan(
        [[FakeContender("slow")]],
        lengths=lengths,
        scopes=["kernel"],
        modes=["forward"],
        threads=[1],
        budget=budget,
    )
    found = start_bench(plan)
    cell = running.BenchRunner.measure_cell
    monkeypatch.setattr(
        running.BenchRunner,
        "measure_cell",
        lambda self, c, *a: (at.__setitem__(0, c.length), cell(self, c, *a))[1],
    )
    run_bench(found, clock=lambda: now[0])
    return found, now[0]


def test_decoding_takes_several_steps_a_turn(monkeypatch, quiet):
    """Fails if turns of one token find the CPU cache cold, or a stream grows without bound."""
    asked = []
    real = running.time_interleaved
    monkeypatch.setattr(
        running, "time_interleaved", lambda *a, **k: asked.append(k) or real(*a, **k)
    )
    for mode, steps in (("decode", running.DECODE_STEPS), ("forward", 1)):
        run_bench(
            start_bench(
                BenchPlan(
                    [[RecipeContender(parse_spec("linear"))]],
                    lengths=[32],
                    scopes=["kernel"],
                    modes=[mode],
                    threads=[1],
                    budget=60,
                )
            )
        )
        assert (
            asked[-1]["repeat"] == steps and asked[-1]["max_rounds"] * steps <= running.MAX_ROUNDS
        )


@pytest.mark.parametrize(("mode", "tensors"), [("forward", 4), ("training", 7)])
@pytest.mark.parametrize("n", [64, 128, 256, 1024])
def test_memory_of_short_calls(mode, tensors, n):
    """Fails if a call reuses freed memory and seems to need less than its inputs and outputs."""
    found = probe(
        DenseContender(), BenchCell("kernel", mode, n), threads=1, limit=10**9, seconds=60
    )
    assert found.bytes is None or found.bytes >= 0.9 * tensors * 4 * 8 * 64 * n


def test_peers_without_the_scope_are_an_error(quiet):
    """Fails if nothing is measured and no reason is given."""
    found = bench("--peers", "fnet", "--scope", "kernel", lengths=32)
    assert (
        found.exit_code
        and "The peers of fnet are measured with --scope layer, not kernel" in found.stderr
    )


def test_limitations_of_peers_are_in_the_json(quiet):
    """Fails if only the table has them."""
    pytest.importorskip("transformers")
    found = bench("--peers", "fnet", "--json", lengths=32, scope="layer", mode="forward", threads=1)
    assert any("takes no padding mask" in note for note in json.loads(found.stdout)["notes"])


def test_budget_stops(monkeypatch, quiet):
    """Fails if the budget is exceeded, a call that does not fit is tried, or no reason is given."""
    found, took = run_on_fake_clock(monkeypatch, lambda n: (n / 128) ** 2 * 0.1, budget=10)
    assert took <= 10 and found.ended == running.SPENT
    measured = {row.cell.length for row in found.rows if row.seconds is not None}
    assert measured == {128, 256}
    assert all("budget" in row.reason for row in found.rows if row.seconds is None)
    assert {row.cell.length for row in found.rows} == {128, 256, 512, 1024}


def test_enough_budget_measures_all(monkeypatch, quiet):
    """Fails if something is skipped although there was time."""
    found, _ = run_on_fake_clock(monkeypatch, lambda n: 0.01, budget=100)
    assert found.ended == running.DONE and all(row.reason is None for row in found.rows)


def test_calls_above_the_memory_limit_are_not_tried(monkeypatch, quiet):
    """Fails if a call that is too large in theory is started."""
    monkeypatch.setattr(running, "probe", lambda *_, **__: pytest.fail("it was tried"))
    plan = BenchPlan(
        [[RecipeContender(parse_spec("talking_heads"))]],
        lengths=[65536],
        scopes=["kernel"],
        modes=["training"],
        threads=[1],
        memory_limit=10**8,
    )
    found = start_bench(plan)
    run_bench(found)
    assert all("GB in theory, above the memory limit of 0.1 GB" in row.reason for row in found.rows)


def test_an_interrupt_keeps_the_rows(monkeypatch, quiet):
    """Fails if Ctrl-C loses rows, or the exit code is 0."""
    turns, seen = running.time_interleaved, []

    def stop(calls, seconds, **_):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return turns(calls, 0.0)

    monkeypatch.setattr(running, "time_interleaved", stop)
    found = bench("local", "--json", lengths="32,64", mode="forward", scope="kernel", **SMALL)
    assert found.exit_code == 130 and "so far" in found.stderr
    value = json.loads(found.stdout)
    assert value["ended"] == running.INTERRUPTED and [row["length"] for row in value["rows"]] == [
        32,
        32,
    ]


# ---------------------------------------------------------------------- what is said
KEYS = {
    "name",
    "reference",
    "scope",
    "mode",
    "length",
    "batch",
    "heads",
    "head_dim",
    "causal",
    "device",
    "dtype",
    "threads",
    "seconds",
    "best_seconds",
    "speedup",
    "lead",
    "density",
    "bound_seconds",
    "utilization",
    "efficiency",
    "peak_bytes",
    "estimated_bytes",
    "reason",
}


def test_json(quiet):
    """Fails if a key is missing, numbers are inconsistent, or a refusal has no row."""
    found = bench(
        "local:window=8",
        "linformer:length=40:rank=4",
        "--json",
        lengths="32,64",
        mode="forward",
        **SMALL,
    )
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    assert set(value) == {
        "schema",
        "environment",
        "ended",
        "plan",
        "peaks",
        "load",
        "rows",
        "crossovers",
        "notes",
    }
    assert value["schema"] == 2 and value["ended"] == running.DONE
    assert value["peaks"] == [{"threads": 1, "gemm": 1e11, "exp": 1e9}]
    assert all(set(row) == KEYS for row in value["rows"])
    assert len(value["rows"]) == 2 * 2 * 3
    for row in value["rows"]:
        if row["seconds"] is None:
            assert (
                row["name"].startswith("linformer")
                and row["length"] == 64
                and "built with length=40" in row["reason"]
            )
        elif row["name"] == "local:window=8":
            assert row["utilization"] == pytest.approx(row["bound_seconds"] / row["seconds"])
            assert row["efficiency"] == pytest.approx(row["density"] * row["speedup"]["median"])
            assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
    assert {c["name"] for c in value["crossovers"]} == {
        "local:window=8",
        "linformer:length=40:rank=4",
    }


def test_table(quiet):
    """Fails if the peaks, a ratio, a refusal or the crossover is missing."""
    found = bench("local:window=8", "fnet", lengths="32,64", mode="forward", **SMALL)
    assert found.exit_code == 0, found.output
    for word in (
        "products 100 GFLOP/s, exponentials 1.00 G/s",
        "forward, kernel, 1 thread",
        DENSE,
        "at least as fast as",
        "fnet at 32, 64: fnet has no attention on given queries",
    ):
        assert word in found.output


def test_numbers_are_not_cut_in_a_file(quiet, monkeypatch):
    """Fails if a long name cuts the numbers of its row."""
    monkeypatch.setattr(
        "regard.bench.flex.compiled_flex_attention", lambda: lambda q, k, v, block_mask: q
    )
    found = bench(
        "sinks:window=1000:sinks=40",
        "--flex",
        lengths="32",
        mode="forward",
        scope="kernel",
        **SMALL,
    )
    assert (
        found.exit_code == 0
        and "FlexAttention sinks:window=1000:sinks=40" in found.output
        and "…" not in found.output
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["locl"], "did you mean 'local'"),
        (["local:windw=3"], "did you mean 'window'"),
        (["local:heads=3"], "--heads"),
        (["local:window=-3"], "left must be an integer"),
        (["linformer:rank=many", "--lengths", "64,128"], "rank"),
        (["local", "--threads", "0"], "threads must be at least 1"),
        (["local", "--memory-limit", "0"], "memory_limit must be a finite number above 0"),
        (["local", "--memory-limit", "nan"], "memory_limit must be a finite number above 0"),
        (["local", "--rounds", "-1"], "rounds must be an integer >= 0"),
        (["local", "--html", "/"], "is a folder"),
        (["local", "--peers", "--flex"], "one of them"),
        (["local", "--lengths", "0"], "at least 1"),
        (["local", "--lengths", "999999999"], "at most 16,777,216"),
        (["local", "--lengths", "many"], "Expected integers separated by commas"),
        (["local", "--mode", "backward"], "choose from decode, forward, training"),
        (["local", "--scope", "kernels"], "did you mean 'kernel'"),
        (["local", "--threads", "9999"], "the number of cores"),
        (["local", "--budget", "soon"], "Expected a duration"),
        (["local", "--clock", "sun"], "'wall', 'cpu'"),
        (["local", "--clock", "cpu", "--threads", "1,2"], "threads must be 1"),
        (["local", "--heads", "0"], "heads must be"),
        (["local", "--html", "/nowhere/at/all.html"], "There is no folder"),
        (["--peers", "local:window=3"], "write local alone"),
        (["--peers", "talking_heads"], "no peer for 'talking_heads'"),
    ],
)
def test_wrong_arguments(arguments, words, quiet):
    """Fails if a wrong argument is not reported in one line with a valid one."""
    found = CliRunner().invoke(app, ["bench", *arguments])
    assert found.exit_code == 1 and words in found.stderr and "Traceback" not in found.output
    assert len(found.stderr.strip().splitlines()) == 1


def invented_result():
    """A result that was not measured."""
    plan = BenchPlan(
        [[RecipeContender(parse_spec("local"))]],
        lengths=(128, 256),
        scopes=["kernel"],
        modes=["forward"],
        threads=[1],
    )
    found = BenchResult(plan, [TOP], [BUSY], ended=running.SPENT)
    for n in (128, 256):
        cell = BenchCell("kernel", "forward", n)
        speedup = Ratio(n / 100, n / 110, n / 90, 9)
        found.rows += [
            BenchRow(
                DENSE,
                "",
                cell,
                1,
                seconds=n * 1e-5,
                best_seconds=n * 1e-5,
                density=1.0,
                bound_seconds=n * 1e-6,
                peak_bytes=n * 1000,
            ),
            BenchRow(
                "<b>local</b>",
                "",
                cell,
                1,
                seconds=1e-3,
                best_seconds=1e-3,
                speedup=speedup,
                peak_bytes=n * 500,
            ),
            BenchRow("fnet", "", cell, 1, reason="it has no <i>heads</i>"),
        ]
    return found


def test_page():
    """Fails if the page loads something, does not escape names, or hides a flag or missing rows."""
    text = render_page(invented_result())
    for word in (
        "flagged before: other processes use 60%",
        running.SPENT,
        "&lt;b&gt;local&lt;/b&gt;",
        "1.28",
        "[1.16, 1.42]",
    ):
        assert word in text
    assert "<b>local" not in text and "<i>heads" not in text
    assert (
        "default-src &#x27;none&#x27;" in text
        and "<script src" not in text
        and "<link" not in text.split("<script")[0]
    )


def test_page_without_measurements():
    """Fails if unmeasured dense attention is drawn, or a table is empty."""
    found = invented_result()
    found.rows = [
        replace(row, seconds=None, best_seconds=None, speedup=None, reason=running.SPENT)
        for row in found.rows
    ]
    text = render_page(found)
    assert "Nothing was measured." in text and "<tbody" not in text
    assert (
        '<script type="application/json">' not in text
        and "Fewer than two lengths were measured" in text
    )


@pytest.mark.skipif(
    not bundle.plots_available(), reason="plots need the extra plot (altair and vl-convert-python)"
)
def test_plots_are_logarithmic():
    """Fails if a plot lacks a line, or an axis is not logarithmic."""
    text = render_page(invented_result())
    specs = [
        json.loads(piece.split("</script>")[0])
        for piece in text.split('<script type="application/json">')[1:]
    ]
    assert [spec["layer"][0]["encoding"]["y"]["title"] for spec in specs] == [
        "milliseconds",
        f"speedup over {DENSE}",
        "peak memory in MB",
    ]
    for spec in specs:
        assert {spec["layer"][0]["encoding"][axis]["scale"]["type"] for axis in "xy"} == {"log"}


def test_reasons_are_given_once():
    """Fails if the same reason is repeated for each length."""
    found = invented_result()
    assert missing_reasons(found.rows) == [("fnet at 128, 256", "it has no <i>heads</i>")]
    assert [key for key, _ in group_rows(found.rows)] == [("forward", "kernel", 1)]
    assert crossover_lines(found) == [
        f"at least as fast as {DENSE} from 128 with 1 thread (<b>local</b>, forward, kernel, "
        "measured up to 256 tokens)"
    ]


def test_cores_are_those_of_this_process():
    """Fails if more threads are asked for than the process may use."""
    assert 1 <= cores() <= (machines.os.cpu_count() or 1)
