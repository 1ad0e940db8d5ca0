"""regard bench: its statistics, its budget, what it refuses, and what it says; never an absolute time."""

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
from regard.bench.formatting import crossing, reasons, tables
from regard.bench.machine import (
    MachineLoad,
    PeakThroughput,
    measure_load,
    measure_peaks,
    torch_threads,
)
from regard.bench.page import page
from regard.bench.probe import ProbeRefused, ProbeResult, probe
from regard.bench.stats import (
    LEAST,
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
    """A machine that seems quiet, whose peaks are known, and no child processes: probes say that all is small and short."""
    monkeypatch.setattr(running, "measure_load", lambda **_: QUIET)
    monkeypatch.setattr(running, "measure_peaks", lambda **_: TOP)
    monkeypatch.setattr(running, "warm", lambda modules: None)
    monkeypatch.setattr(running, "probe", lambda *_, **__: ProbeResult(1000, 1e-4))


def bench(*names, **more):
    return CliRunner().invoke(
        app, ["bench", *names, *[w for k, v in more.items() for w in (f"--{k}", str(v))]]
    )


SMALL = {"heads": 2, "width": 8, "threads": 1, "budget": "20s"}


# ---------------------------------------------------------------------------------------------- statistics
def test_interval_covers_a_known_ratio():
    """Fails if the interval of 95 % holds the true ratio much less or much more often than that."""
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
    """Fails if the ratio is that of medians: here the machine gets ten times slower half way, and the ratio stays two."""
    slower = np.repeat([1.0, 10.0], 20)
    assert paired_ratio(2 * slower, slower).median == pytest.approx(2)
    assert paired_ratio(2 * slower, slower).high == pytest.approx(2)


def test_turns_are_taken_in_turn_after_a_warm_up():
    """Fails if calls are not interleaved, if the warm-up is timed, or if the rounds do not end."""
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = time_interleaved(calls, 0.0, least=3)
    assert order == ["a", "b"] * 4 and {len(t) for t in times.values()} == {3}
    order.clear()
    time_interleaved(calls, 1e9, most=7)
    assert len(order) == 2 * 8
    order.clear()
    time_interleaved({**calls, "c": lambda: order.append("c")}, 0.0, least=4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    order.clear()
    ticks = iter(range(1000))
    times = time_interleaved(calls, 0.0, least=2, at_once=4, clock=lambda: float(next(ticks)))
    assert order == list("ab" + 2 * "aaaabbbb") and times == {"a": [0.25] * 2, "b": [0.25] * 2}


def test_what_others_print_stays_out_of_json(monkeypatch, quiet, capfd):
    """Fails if a package that talks while it is imported, here or in a process of ours, breaks the JSON."""
    talk = "import os; os.write(1, b'hello from C'); print('hello from Python')"
    monkeypatch.setattr(
        running,
        "warm",
        lambda modules: (exec(talk), subprocess.run([sys.executable, "-c", talk], check=True)),
    )
    app(
        [
            "bench",
            "local",
            "--json",
            *["--lengths", "32", "--ways", "forward", "--levels", "kernel", "--threads", "1"],
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


# ---------------------------------------------------------------------------------------------- the machine
def test_peaks_and_model():
    """Fails if the model is not 4 n² d / G + n² / E for dense attention, times the share of pairs that are seen."""
    cell = BenchCell("kernel", "forward", 256, heads=2, width=32)
    needs = DenseContender().needs(cell)
    assert TOP.seconds(needs.flops, needs.exps) == pytest.approx(
        2 * (4 * 256**2 * 32 / 1e11 + 256**2 / 1e9)
    )
    window = RecipeContender(parse_spec("local:window=16")).needs(cell)
    assert window.density == pytest.approx((256 * 33 - 16 * 17) / 256**2)
    assert TOP.seconds(window.flops, window.exps) == pytest.approx(
        window.density * TOP.seconds(needs.flops, needs.exps)
    )
    trained = DenseContender().needs(replace(cell, way="training"))
    assert trained.flops == 3.5 * needs.flops and trained.exps == 2 * needs.exps


def test_peaks_are_measured():
    """Fails if a peak is not a finite number above 0, or not that of the threads that are set."""
    found = measure_peaks(seconds=0.01)
    assert found.threads == torch.get_num_threads()
    assert 0 < found.gemm < math.inf and 0 < found.exp < math.inf


def test_load_is_looked_at():
    """Fails if what is told of the machine makes no sense."""
    found = measure_load(seconds=0.05)
    assert found.cores == cores() and found.spread >= 0
    assert found.others is None or found.others >= 0


def test_a_busy_machine_is_told_by_each_sign():
    """Fails if one of the three signs is not noticed, or if an old load average alone is a reason to refuse."""
    assert not QUIET.flags()
    assert len(BUSY.against()) == 2 and len(BUSY.flags()) == 3
    past = replace(QUIET, average=3.0)
    assert past.flags() and not past.against()


def test_each_number_of_threads_has_its_own_costs(monkeypatch, tmp_path):
    """Fails if costs that were measured with one number of threads are used with another."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setattr(
        calibration,
        "measure_costs",
        lambda: calibration.BackendCosts(*[1e-5 * torch.get_num_threads()] * 6),
    )
    calibration._machine_costs.cache_clear()
    found = []
    for count in (1, 2):
        with torch_threads(count):
            found.append(calibration.machine_costs().dense_call)
    calibration._machine_costs.cache_clear()
    assert found == [1e-5, 2e-5]


def test_refusal_of_load(monkeypatch, quiet):
    """Fails if a busy machine is measured unasked, or not flagged when it is measured anyway."""
    monkeypatch.setattr(running, "measure_load", lambda **_: BUSY)
    found = bench("local", lengths=128, **SMALL)
    assert found.exit_code == 1 and "--anyway" in found.stderr and "60%" in found.stderr
    found = bench("local", "--anyway", "--json", lengths=32, ways="forward", **SMALL)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["load"][0]["flags"]


# ---------------------------------------------------------------------------------------------- what is run
@pytest.mark.parametrize("way", MODES)
@pytest.mark.parametrize("level", SCOPES)
@pytest.mark.parametrize("word", ["local:window=4", "linear", "grouped_query:group_size=2"])
def test_ours_runs(level, way, word):
    """Fails if a way or a level is not what it says: no gradients, gradients, or one token."""
    cell = BenchCell(level, way, 20, batch=2, heads=2, width=4)
    assert (
        prepare_call(RecipeContender(parse_spec(word)), cell)() is None
        if way == "training"
        else True
    )
    built = RecipeContender(parse_spec(word)).build(cell)
    shape = built.call().shape
    assert shape[1 if level == "layer" else 2] == (1 if way == "decode" else 20)
    if way == "training":
        built.call().sum().backward()
        assert all(leaf.grad is not None for leaf in built.leaves)


def test_dense_is_sdpa():
    """Fails if the thing to beat is another: at the kernel, as a layer with its projections, and with a cache."""
    cell = BenchCell("layer", "forward", 9, heads=2, width=4, causal=True)
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
def test_a_prompt_that_is_not_looked_at_leaves_the_same_cache(word):
    """Fails if the state of a stream depends on whether its prompt was attended to."""
    cell = BenchCell("layer", "decode", 50, heads=2, width=4)
    torch.manual_seed(0)
    mixer, x = build_mixer(parse_spec(word), cell), torch.randn(1, 50, 8)
    with torch.no_grad():
        looked = mixer.stream(x)[1]
        with skip_attention(mixer):
            y, passed = mixer.stream(x)
        token = torch.randn(1, 1, 8)
        assert state_bytes(looked) == state_bytes(passed) and not y.any()
        torch.testing.assert_close(mixer.stream(token, passed)[0], mixer.stream(token, looked)[0])


def test_decoding_is_told_by_what_one_token_more_costs():
    """Fails if a token of a window costs the more the later it comes, or one of dense attention does not."""
    windows, dense = (
        [c.needs(BenchCell("kernel", "decode", n)).flops for n in (512, 4096)]
        for c in (RecipeContender(parse_spec("local")), DenseContender())
    )
    assert windows[0] == pytest.approx(windows[1]) == pytest.approx(4 * 8 * 64 * 129)
    assert dense[1] / dense[0] == pytest.approx(8, rel=0.1)


# ---------------------------------------------------------------------------------------------- probes
def test_probe_measures_memory_and_keeps_limits():
    """Fails if the memory of a call is not about what it allocates, or a limit does not hold, or a crash is not a reason."""
    cell = BenchCell("kernel", "forward", 4096, heads=4, width=64)
    found = probe(DenseContender(), cell, threads=1, limit=10**9, seconds=60)
    assert found.seconds > 0
    assert found.bytes is None or 0.9 < found.bytes / DenseContender().needs(cell).bytes < 3
    with pytest.raises(ProbeRefused, match=r"more than the 0.1 GB"):
        probe(
            RecipeContender(parse_spec("talking_heads")), cell, threads=1, limit=10**8, seconds=60
        )
    with pytest.raises(ProbeRefused, match="built for at most 64 tokens"):
        probe(
            RecipeContender(parse_spec("linformer:length=64:rank=8")),
            cell,
            threads=1,
            limit=10**9,
            seconds=60,
        )


def test_flex_is_held_against_ours_and_says_what_it_cannot(quiet, monkeypatch):
    """Fails if FlexAttention runs where it cannot, is held against another recipe than its own, or says no reason."""
    monkeypatch.setattr("regard.bench.flex._compiled", lambda: lambda q, k, v, block_mask: q)
    names = ("local:window=8", "per_head", "linear", "fnet")
    found = bench(*names, "--flex", "--json", lengths="32", levels="kernel,layer", **SMALL)
    assert found.exit_code == 0, found.output
    rows = [
        row for row in json.loads(found.stdout)["rows"] if row["name"].startswith("FlexAttention")
    ]
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        assert row["name"] == f"FlexAttention {row['of']}"
        if (row["level"], row["way"]) == ("kernel", "forward") and row["of"] in names[:2]:
            assert row["seconds"] > 0 and row["ahead"]["pairs"] > 1
        else:
            word = {"layer": "see the level kernel", "kernel": "no backward pass"}[row["level"]]
            assert (
                word if row["level"] == "layer" or row["way"] == "training" else "block mask"
            ) in row["why"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_is_the_same_attention(monkeypatch):
    """Fails if its block mask, here not compiled, is that of another pattern than ours."""
    monkeypatch.setattr("regard.bench.flex._compiled", lambda: flex_attention)
    cell = BenchCell("kernel", "forward", 200, heads=2, width=8, causal=True)
    outs = []
    for contender in (
        RecipeContender(parse_spec("local:window=16")),
        FlexContender(parse_spec("local:window=16")),
    ):
        torch.manual_seed(0)
        outs.append(contender.build(cell).call())
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


def test_no_rounds_measure_memory_alone(quiet):
    """Fails if calls take turns although none were asked for, or a ratio is told of two that did not."""
    found = bench(
        "local", "--json", lengths="32", levels="kernel", ways="training", rounds=0, **SMALL
    )
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    assert [(row["seconds"], row["memory"], row["faster"]) for row in rows] == [
        (1e-4, 1000, None)
    ] * 2


# ---------------------------------------------------------------------------------------------- the budget
class Slow(Contender):
    """Takes as long as it says, on a clock of its own."""

    def __init__(self, label):
        self.label = label

    def build(self, cell):
        return BenchCall(lambda: torch.zeros(1))


def budgeted(monkeypatch, seconds, *, budget, lengths=(128, 256, 512, 1024)):
    """A run in which a call of n tokens takes seconds(n) on a clock that only calls move."""
    now = [0.0]

    def taken(contender, cell, **_):
        now[0] += seconds(cell.length)
        return ProbeResult(1000, seconds(cell.length))

    def turns(calls, *_, **__):
        now[0] += (LEAST + 1) * len(calls) * seconds(at[0])
        return {name: [seconds(at[0])] * LEAST for name in calls}

    at = [0]
    monkeypatch.setattr(running, "probe", taken)
    monkeypatch.setattr(running, "time_interleaved", turns)
    plan = BenchPlan(
        [[Slow("slow")]],
        lengths=lengths,
        levels=["kernel"],
        ways=["forward"],
        threads=[1],
        budget=budget,
    )
    found = start_bench(plan)
    cell = running._Todo.cell
    monkeypatch.setattr(
        running._Todo,
        "cell",
        lambda self, c, *a: (at.__setitem__(0, c.length), cell(self, c, *a))[1],
    )
    run_bench(found, clock=lambda: now[0])
    return found, now[0]


def test_decoding_takes_several_steps_a_turn(monkeypatch, quiet):
    """Fails if each token finds the cache as another mechanism left it, or if a stream grows without bound."""
    asked = []
    real = running.time_interleaved
    monkeypatch.setattr(
        running, "time_interleaved", lambda *a, **k: asked.append(k) or real(*a, **k)
    )
    for way, steps in (("decode", running.STEPS), ("forward", 1)):
        run_bench(
            start_bench(
                BenchPlan(
                    [[RecipeContender(parse_spec("linear"))]],
                    lengths=[32],
                    levels=["kernel"],
                    ways=[way],
                    threads=[1],
                    budget=60,
                )
            )
        )
        assert asked[-1]["at_once"] == steps and asked[-1]["most"] * steps <= running.MOST


@pytest.mark.parametrize(("way", "tensors"), [("forward", 4), ("training", 7)])
@pytest.mark.parametrize("n", [64, 128, 256, 1024])
def test_memory_of_short_calls(way, tensors, n):
    """Fails if a call takes from what a smaller one left, and so seems to take less than its inputs and results."""
    found = probe(DenseContender(), BenchCell("kernel", way, n), threads=1, limit=10**9, seconds=60)
    assert found.bytes is None or found.bytes >= 0.9 * tensors * 4 * 8 * 64 * n


def test_peers_at_a_level_that_they_do_not_have(quiet):
    """Fails if nothing is measured and nothing is said."""
    found = bench("--peers", "fnet", "--levels", "kernel", lengths=32)
    assert found.exit_code and "fnet has peers at the level layer, not at kernel" in found.stderr


def test_what_peers_cannot_do_is_in_the_json(quiet):
    """Fails if only the table says it."""
    pytest.importorskip("transformers")
    found = bench(
        "--peers", "fnet", "--json", lengths=32, levels="layer", ways="forward", threads=1
    )
    assert any("takes no padding mask" in note for note in json.loads(found.stdout)["notes"])


def test_budget_stops(monkeypatch, quiet):
    """Fails if more time is taken than was given, if what does not fit is tried, or if it is not said."""
    found, took = budgeted(monkeypatch, lambda n: (n / 128) ** 2 * 0.1, budget=10)
    assert took <= 10 and found.ended == running.SPENT
    measured = {row.cell.length for row in found.rows if row.seconds is not None}
    assert measured == {128, 256}
    assert all("budget" in row.why for row in found.rows if row.seconds is None)
    assert {row.cell.length for row in found.rows} == {128, 256, 512, 1024}


def test_enough_budget_measures_all(monkeypatch, quiet):
    """Fails if something is left out although there was time."""
    found, _ = budgeted(monkeypatch, lambda n: 0.01, budget=100)
    assert found.ended == running.DONE and all(row.why is None for row in found.rows)


def test_what_does_not_fit_is_not_tried(monkeypatch, quiet):
    """Fails if a call that is too large by formula is begun."""
    monkeypatch.setattr(running, "probe", lambda *_, **__: pytest.fail("it was tried"))
    plan = BenchPlan(
        [[RecipeContender(parse_spec("talking_heads"))]],
        lengths=[65536],
        levels=["kernel"],
        ways=["training"],
        threads=[1],
        memory=10**8,
    )
    found = start_bench(plan)
    run_bench(found)
    assert all("GB by formula, and 0.1 may be taken" in row.why for row in found.rows)


def test_an_interrupt_keeps_what_there_is(monkeypatch, quiet):
    """Fails if Ctrl-C loses rows, or ends as if all were well."""
    turns, seen = running.time_interleaved, []

    def stop(calls, seconds, **_):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return turns(calls, 0.0)

    monkeypatch.setattr(running, "time_interleaved", stop)
    found = bench("local", "--json", lengths="32,64", ways="forward", levels="kernel", **SMALL)
    assert found.exit_code == 130 and "so far" in found.stderr
    value = json.loads(found.stdout)
    assert value["ended"] == running.STOPPED and [row["length"] for row in value["rows"]] == [
        32,
        32,
    ]


# ---------------------------------------------------------------------------------------------- what is said
KEYS = {
    "name",
    "of",
    "level",
    "way",
    "length",
    "batch",
    "heads",
    "width",
    "causal",
    "threads",
    "seconds",
    "best",
    "faster",
    "ahead",
    "density",
    "model",
    "reached",
    "efficiency",
    "memory",
    "formula",
    "why",
}


def test_json(quiet):
    """Fails if a key goes missing, numbers do not follow from each other, or a refusal at one length is not a row."""
    found = bench(
        "local:window=8",
        "linformer:length=40:rank=4",
        "--json",
        lengths="32,64",
        ways="forward",
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
    assert value["schema"] == 1 and value["ended"] == running.DONE
    assert value["peaks"] == [{"threads": 1, "gemm": 1e11, "exp": 1e9}]
    assert all(set(row) == KEYS for row in value["rows"])
    assert len(value["rows"]) == 2 * 2 * 3
    for row in value["rows"]:
        if row["seconds"] is None:
            assert (
                row["name"].startswith("linformer")
                and row["length"] == 64
                and "at most 40 tokens" in row["why"]
            )
        elif row["name"] == "local:window=8":
            assert row["reached"] == pytest.approx(row["model"] / row["seconds"])
            assert row["efficiency"] == pytest.approx(row["density"] * row["faster"]["median"])
            assert row["faster"]["low"] <= row["faster"]["median"] <= row["faster"]["high"]
    assert {c["name"] for c in value["crossovers"]} == {
        "local:window=8",
        "linformer:length=40:rank=4",
    }


def test_table(quiet):
    """Fails if the peaks, a ratio, a refusal or the crossover does not stand there."""
    found = bench("local:window=8", "fnet", lengths="32,64", ways="forward", **SMALL)
    assert found.exit_code == 0, found.output
    for word in (
        "products 100 GFLOP/s, exponentials 1.00 G/s",
        "forward, kernel, 1 thread",
        DENSE,
        "at least as fast as",
        "fnet at 32, 64: fnet has no attention on given queries",
    ):
        assert word in found.output


def test_a_file_has_room_for_every_number(quiet, monkeypatch):
    """Fails if a long name cuts the numbers beside it."""
    monkeypatch.setattr("regard.bench.flex._compiled", lambda: lambda q, k, v, block_mask: q)
    found = bench(
        "sinks:window=1000:sinks=40",
        "--flex",
        lengths="32",
        ways="forward",
        levels="kernel",
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
        (["local", "--threads", "0"], "threads are at least 1"),
        (["local", "--memory", "0"], "memory must be a finite number above 0"),
        (["local", "--memory", "nan"], "memory must be a finite number above 0"),
        (["local", "--rounds", "-1"], "rounds must be an integer >= 0"),
        (["local", "--page", "/"], "is a folder"),
        (["local", "--peers", "--flex"], "one of them"),
        (["local", "--lengths", "0"], "at least 1"),
        (["local", "--lengths", "999999999"], "at most 16,777,216"),
        (["local", "--lengths", "many"], "whole numbers"),
        (["local", "--ways", "backward"], "choose from decode, forward, training"),
        (["local", "--levels", "kernels"], "did you mean 'kernel'"),
        (["local", "--threads", "9999"], "the cores of this machine"),
        (["local", "--budget", "soon"], "a span of time"),
        (["local", "--clock", "sun"], "'wall', 'processor'"),
        (["local", "--clock", "processor", "--threads", "1,2"], "threads must be 1"),
        (["local", "--heads", "0"], "heads must be"),
        (["local", "--page", "/nowhere/at/all.html"], "no folder"),
        (["--peers", "local:window=3"], "write local alone"),
        (["--peers", "talking_heads"], "no peer for 'talking_heads'"),
    ],
)
def test_wrong_words(arguments, words, quiet):
    """Fails if a wrong word is not named in one line, with what would be right."""
    found = CliRunner().invoke(app, ["bench", *arguments])
    assert found.exit_code == 1 and words in found.stderr and "Traceback" not in found.output
    assert len(found.stderr.strip().splitlines()) == 1


def made_up():
    """A measurement that nobody made."""
    plan = BenchPlan(
        [[RecipeContender(parse_spec("local"))]],
        lengths=(128, 256),
        levels=["kernel"],
        ways=["forward"],
        threads=[1],
    )
    found = BenchResult(plan, [TOP], [BUSY], ended=running.SPENT)
    for n in (128, 256):
        cell = BenchCell("kernel", "forward", n)
        faster = Ratio(n / 100, n / 110, n / 90, 9)
        found.rows += [
            BenchRow(
                DENSE,
                "",
                cell,
                1,
                seconds=n * 1e-5,
                best=n * 1e-5,
                density=1.0,
                model=n * 1e-6,
                memory=n * 1000,
            ),
            BenchRow(
                "<b>local</b>", "", cell, 1, seconds=1e-3, best=1e-3, faster=faster, memory=n * 500
            ),
            BenchRow("fnet", "", cell, 1, why="it has no <i>heads</i>"),
        ]
    return found


def test_page():
    """Fails if the page loads something, lets names be markup, or hides a flag or that it is not all."""
    text = page(made_up())
    for word in (
        "flagged before: other processes take 60%",
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


def test_a_page_of_nothing_says_so():
    """Fails if dense attention is drawn although it was not measured, or an empty table stands there."""
    found = made_up()
    found.rows = [
        replace(row, seconds=None, best=None, faster=None, why="the budget was used up")
        for row in found.rows
    ]
    text = page(found)
    assert "Nothing was measured." in text and "<tbody" not in text
    assert '<script type="application/json">' not in text and "No two lengths were measured" in text


@pytest.mark.skipif(
    not bundle.plots_available(), reason="plots need the extra plot (altair and vl-convert-python)"
)
def test_plots_are_logarithmic():
    """Fails if a plot lacks a line, or an axis is not logarithmic."""
    text = page(made_up())
    specs = [
        json.loads(piece.split("</script>")[0])
        for piece in text.split('<script type="application/json">')[1:]
    ]
    assert [spec["layer"][0]["encoding"]["y"]["title"] for spec in specs] == [
        "milliseconds",
        f"times faster than {DENSE}",
        "peak memory in MB",
    ]
    for spec in specs:
        assert {spec["layer"][0]["encoding"][axis]["scale"]["type"] for axis in "xy"} == {"log"}


def test_reasons_are_told_once():
    """Fails if the same reason is said again for each length."""
    found = made_up()
    assert reasons(found.rows) == [("fnet at 128, 256", "it has no <i>heads</i>")]
    assert [key for key, _ in tables(found.rows)] == [("forward", "kernel", 1)]
    assert crossing(found) == [
        f"at least as fast as {DENSE}: from 128 on with 1 thread  (<b>local</b>, forward, kernel, up to 256 tokens)"
    ]


def test_cores_are_those_of_this_process():
    """Fails if more threads are asked for than the process may use."""
    assert 1 <= cores() <= (machines.os.cpu_count() or 1)
