"""Comparisons: plan, ledger, processes, time budget, verdicts and their wording."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch

from regard.cli import startup
from regard.cli.comparing import training_budget
from regard.compare import (
    ComparisonPlan,
    ResultRow,
    Schedule,
    compute_verdicts,
    plan_runs,
    summarize_runs,
)
from regard.compare.baseline import constant_baseline_score
from regard.compare.executors import Executor, LocalExecutor, RunHandle
from regard.compare.formatting import describe_caveats, describe_verdict
from regard.compare.ledger import DONE, FAILED, REFUSED, Ledger, LedgerEntry
from regard.compare.plan import count_parameters
from regard.compare.results import scores_differ
from regard.json_files import write_json
from regard.models import module_spec
from regard.tasks import create_task
from regard.train.run import build_task
from regard.train.settings import TrainSettings

TINY = {
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "settings": TrainSettings(steps=3, batch_size=4, eval_every=3, eval_examples=8, save_every=3),
}


def plan(*mixers, tasks=(module_spec("parity"),), **more):
    return ComparisonPlan(
        tasks=list(tasks),
        mixers=[module_spec(m) if isinstance(m, str) else m for m in mixers],
        **TINY | more,
    )


# ---------------------------------------------------------------------- plan
def test_dense_softmax_is_part_of_every_plan():
    """Fails if dense softmax is missing or twice in the plan, or the seed does not vary slowest."""
    runs = plan_runs(plan("linear", "vanilla", lengths=(8, 16), seeds=2))
    assert [(run.mixer.name, run.length, run.seed) for run in runs] == [
        (name, n, seed) for seed in (0, 1) for n in (8, 16) for name in ("vanilla", "linear")
    ]
    assert len({run.key for run in runs}) == 8


def test_unsupported_mixers_are_refused_before_training():
    """Fails if a mixer that cannot be causal is trained on a causal task, or the reason is lost."""
    runs = {run.mixer.name: run for run in plan_runs(plan("fnet", lengths=(8,)))}
    assert runs["fnet"].spec is None and "does not support causal=True" in runs["fnet"].refusal
    assert runs["vanilla"].spec is not None and not runs["vanilla"].refusal


def test_mixer_without_mask_support_is_refused_on_padded_data():
    """Fails if that is found out during the comparison."""
    for task, refused in (
        (module_spec("listops", length=32), True),
        (module_spec("copy", length=9, causal=False), False),
    ):
        runs = plan_runs(plan("fnet", tasks=[task], seeds=2))
        fnet = next(run for run in runs if run.mixer.name == "fnet")
        message = "listops differ in length and fnet does not support a padding mask"
        assert (message in fnet.refusal) == refused == (fnet.spec is None)


def test_parameter_counts_match_dense_softmax():
    """Fails if matched counts differ by a percent, or unmatched ones are made equal."""
    mixers = ("linear", "retnet", "gated_linear", "delta_rule", "synthesizer_random")
    for match_params in (True, False):
        runs = plan_runs(plan(*mixers, lengths=(32,), dim=32, match_params=match_params))
        counts = [count_parameters(run.spec, build_task(run.spec)) for run in runs]
        difference = max(abs(n - counts[0]) / counts[0] for n in counts)
        assert (difference < 0.01) == match_params


def test_keys_depend_on_the_settings_only():
    """Fails if another argument gives the same key, or the same settings another one."""
    one, two = (plan_runs(plan(module_spec("local", window=w), lengths=(8,)))[1] for w in (2, 3))
    again = plan_runs(plan(module_spec("local", window=2), lengths=(8,)))[1]
    assert one.key == again.key != two.key


def test_data_is_labelled_by_its_file_name(tmp_path):
    """Fails if a label has the whole path, or two files of one name share a row."""
    tasks = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rows = "".join(f"{'uv'[i % 2]}{i},{i % 2}\n" for i in range(60))
        (tmp_path / folder / "x.csv").write_text("text,label\n" + rows)
        tasks.append(module_spec("classify", data=str(tmp_path / folder / "x.csv"), length=8))
    runs = plan_runs(plan(tasks=tasks[:1]))
    assert runs[0].name == "vanilla · classify(data=x.csv) · 8 · seed 0"
    with pytest.raises(ValueError, match=r"Two tasks have the same name classify\(data=x.csv\)"):
        plan_runs(plan(tasks=tasks))


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("linaer", "did you mean 'linear'"),
        (module_spec("local", windw=3), "did you mean 'window'"),
    ],
)
def test_misspelt_mixers_are_errors(mixer, message):
    """Fails if a typing error becomes a refused row."""
    with pytest.raises((ValueError, TypeError), match=message):
        plan_runs(plan(mixer, lengths=(8,)))


# ---------------------------------------------------------------------- runs
def test_runs_are_executed_once(tmp_path):
    """Fails if a run has no process of its own, a refusal has no row, or a done run is repeated."""
    runs = plan_runs(plan("linear", "fnet", lengths=(8,)))
    ended = []
    schedule = Schedule(
        tmp_path,
        jobs=2,
        on_progress=lambda run, fraction: ended.append(run.key) if fraction is None else None,
    )
    schedule.run(runs)
    entries = schedule.ledger.entries()
    assert [e.status for e in entries] == [DONE, DONE, REFUSED] and len(ended) == 2
    assert all(
        e.result["steps"] == 3 and e.result["environment"]["threads"] == 1 for e in entries[:2]
    )
    schedule.ledger.close()
    again = Schedule(tmp_path, on_progress=lambda run, fraction: pytest.fail("it ran again"))
    again.run(runs)
    rows = summarize_runs(again.ledger.entries())
    assert [row.mixer for row in rows] == ["vanilla", "linear", "fnet"]


def test_a_crash_fails_one_row(tmp_path):
    """Fails if a crashed run affects the others, or its reason is lost."""
    runs = plan_runs(plan("linear", lengths=(8,)))
    task = module_spec("parity", length=8, seed=-1)
    broken = runs[0]._replace(spec=runs[0].spec.model_copy(update={"task": task}))
    schedule = Schedule(tmp_path, jobs=2)
    schedule.run([broken, runs[1]])
    by_name = {e.settings["mixer"]["name"]: e for e in schedule.ledger.entries()}
    assert by_name["vanilla"].status == FAILED and "seed must be" in by_name["vanilla"].reason
    assert by_name["linear"].status == DONE
    rows = summarize_runs(schedule.ledger.entries())
    row = next(row for row in rows if row.mixer == "vanilla")
    assert math.isnan(row.score) and "seed must be" in row.reason


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_comparison_can_be_resumed(tmp_path, how, request):
    """Fails if a run survives the end of its comparison, or leaves no checkpoint."""
    code = (
        "from pathlib import Path; from regard.compare import *;"
        "from regard.models import module_spec; from regard.train.settings import TrainSettings;"
        "s = TrainSettings(steps=10**6, batch_size=4, eval_every=10**6, "
        "eval_examples=8, save_every=10**6);"
        "p = ComparisonPlan(tasks=[module_spec('parity')], mixers=[], lengths=(8,), dim=8,"
        " heads=2, layers=1, settings=s);"
        f"Schedule(Path({str(tmp_path)!r})).run(plan_runs(p))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True
    )
    request.addfinalizer(child.kill)
    metrics = wait_for(lambda: next(iter(tmp_path.glob("runs/*/metrics.jsonl")), None))
    wait_for(lambda: metrics.stat().st_size > 200)
    os.kill(child.pid, how)
    child.wait(60)
    step = wait_for(lambda: next(iter(metrics.parent.glob("checkpoints/step-*")), None))
    assert int(step.name.split("-")[1]) > 0
    last = metrics.read_text().splitlines()[-1]
    time.sleep(0.5)
    assert metrics.read_text().splitlines()[-1] == last, "the run continues without its parent"


def wait_for(condition, seconds=90):
    for _ in range(seconds * 10):
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail("timeout")


ENDLESS = TrainSettings(
    steps=10**7, batch_size=4, eval_every=10**7, eval_examples=8, save_every=10**7
)


def test_runs_keep_their_time_share(tmp_path):
    """Fails if a run does not know its share, or process start does not count to it."""
    runs = plan_runs(plan("linear", lengths=(8,), settings=ENDLESS))
    executor = LocalExecutor(tmp_path, 1)
    executor.has_queue = True  # a busy machine may start them late: do not kill them for it
    schedule = Schedule(tmp_path, executor=executor, budget=14)
    schedule.run(runs)
    results = [entry.result for entry in schedule.ledger.entries()]
    assert [r["stopped"] for r in results] == ["seconds", "seconds"]
    specs = [json.loads(p.read_text()) for p in tmp_path.glob("runs/*/spec.json")]
    assert [spec["settings"]["max_seconds"] for spec in specs] == [7, 7]
    assert all(r["seconds"] < 7 for r in results)


class FakeClock:
    """A clock that only `sleep` moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeExecutor(Executor):
    """Runs take their time share and `late` seconds more, and write a result."""

    has_queue, threads = False, 1

    def __init__(self, clock, late):
        self.clock, self.late, self.shares = clock, late, []

    def start(self, folder, seconds):
        self.shares.append(seconds)
        write_json(folder / "result.json", {"seconds": seconds})
        handle = type(
            "FakeHandle",
            (RunHandle,),
            {"is_done": lambda h: self.clock.now >= h.end, "kill": lambda h: h.stop()},
        )()
        handle.end = self.clock.now + seconds + self.late
        handle.stop = lambda: setattr(handle, "end", self.clock.now)
        return handle


@pytest.mark.parametrize(("mixers", "jobs"), [(3, 1), (3, 2), (7, 2), (7, 3)])
@pytest.mark.parametrize("late", [0.0, 1.0, 1e9])
def test_runs_share_the_budget_equally(tmp_path, monkeypatch, mixers, jobs, late):
    """Fails if late runs exceed the budget, or the first runs get more than the last."""
    clock = FakeClock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    local = (module_spec("local", window=w) for w in range(2, mixers + 1))
    runs = plan_runs(plan(*local, lengths=(8,)))
    executor = FakeExecutor(clock, late)
    Schedule(tmp_path, executor=executor, jobs=jobs, budget=180).run(runs)
    assert len(executor.shares) == mixers and clock.now <= 1.1 * 180
    if not late:
        assert max(executor.shares) - min(executor.shares) < 1 and clock.now > 0.9 * 180


def test_the_kernels_are_compiled_before_the_first_run(tmp_path, monkeypatch):
    """Fails if compilation takes from the training time of the first runs."""
    clock = FakeClock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    monkeypatch.setattr("regard.compare.schedule.native.library", lambda: clock.sleep(100))
    runs, executor = plan_runs(plan("linear", lengths=(8,))), FakeExecutor(clock, 0)
    schedule = Schedule(tmp_path, executor=executor, budget=60)
    schedule.run(runs)
    assert executor.shares == pytest.approx([30, 30], abs=1) and clock.now >= 155
    schedule.run(runs)
    assert clock.now < 170  # nothing to run, nothing to compile


def test_a_resumed_comparison_keeps_the_time_share(tmp_path, monkeypatch):
    """Fails if the remaining runs get the whole budget."""
    clock = FakeClock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    runs = plan_runs(plan("linear", "retnet", lengths=(8,)))
    executor = FakeExecutor(clock, 0)
    schedule = Schedule(tmp_path, executor=executor, budget=180)
    schedule.ledger.add(runs[0].key, "", {})
    schedule.ledger.finish(runs[0].key, {})
    schedule.run(runs)
    assert executor.shares == pytest.approx([60, 60], abs=1)


def test_a_budget_includes_process_start(monkeypatch):
    """Fails if importing torch comes on top, or a slow machine has no time left for the report."""
    assert startup.startup_seconds() == 0 and 0 < startup.process_age() < 1e5
    assert training_budget(180, 5) == 180 - 5 - 9
    monkeypatch.setattr(startup, "_seconds", 20.0)
    assert training_budget(180, 5) == 180 - 20 - 5 - 20


def test_a_budget_that_is_too_small_is_refused(tmp_path):
    """Fails if the budget is exceeded instead."""
    runs, schedule = plan_runs(plan("linear", lengths=(8,))), Schedule(tmp_path, budget=9)
    message = "leaves 9 s for 2 runs, 1 at a time, but on this machine each needs at least 5 s"
    with pytest.raises(ValueError, match=message):
        schedule.run(runs)
    for run in runs:  # a finished comparison needs no time
        schedule.ledger.add(run.key, run.name, {})
        schedule.ledger.finish(run.key, {})
    schedule.run(runs)


# ---------------------------------------------------------------------- ledger
def test_a_file_that_is_not_a_ledger_is_an_error(tmp_path):
    """Fails if a foreign file is overwritten."""
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="is not a ledger"):
        Ledger(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_corrupt_ledger_is_an_error(tmp_path):
    """Fails if only the first page is checked."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.add("a", "a", {})
    ledger.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"x" * (len(content) - 4096))
    with pytest.raises(ValueError, match="is not a ledger"):
        Ledger(path)


def test_a_database_of_another_program_is_an_error(tmp_path):
    """Fails if a table of the same name gives a traceback."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE runs (a TEXT)")
    with pytest.raises(ValueError, match="is not a ledger: no such column: key"):
        Ledger(path)


# ---------------------------------------------------------------------- verdicts
def row(name, scores, *, speed=100.0, memory=1e6, metric="accuracy"):
    return ResultRow(
        name,
        "recall",
        64,
        metric,
        scores,
        tokens_per_second=speed,
        peak_bytes=memory,
        parameters=10,
    )


def test_the_fastest_of_tied_mixers_is_recommended():
    """Fails if noise decides, or the tie is not mentioned."""
    rows = [
        row("vanilla", [0.90, 0.94, 0.92]),
        row("linear", [0.91, 0.93, 0.90], speed=300.0),
        row("local", [0.2, 0.21, 0.2], speed=900.0),
        ResultRow("constant", "recall", 64, "accuracy", [0.1]),
        ResultRow("fnet", "recall", 64, reason="cannot be causal"),
    ]
    (verdict,) = compute_verdicts(rows)
    assert verdict.recommended.mixer == "linear" and verdict.best.mixer == "vanilla"
    assert verdict.ties == [rows[0]] and verdict.dense is rows[0] and verdict.baseline is rows[3]
    text = describe_verdict(verdict)
    assert "Use linear for recall at 64 tokens on this machine: 0.913 ± 0.015 accuracy" in text
    assert "0.015 accuracy, 3 × the training speed and 1 × the peak memory of dense softmax" in text
    assert "Not significantly different: vanilla (0.92 ± 0.02 accuracy, the best score)" in text
    assert "local" not in text and describe_caveats(verdict.caveats) == []


def test_nothing_is_recommended_if_nothing_was_learned():
    """Fails if luck on a few examples counts as learning, or learning is not recognized."""
    baseline = ResultRow("constant", "recall", 64, "accuracy", [0.5])
    for score, examples, recommended in (
        (0.52, 512, None),
        (0.52, 100_000, "vanilla"),
        (0.6, 512, "vanilla"),
        (0.4, 0, None),
    ):
        trained = ResultRow(
            "vanilla",
            "recall",
            64,
            "accuracy",
            [score],
            tokens_per_second=9.0,
            peak_bytes=1e6,
            test_examples=examples,
        )
        (verdict,) = compute_verdicts([trained, baseline])
        assert (verdict.recommended and verdict.recommended.mixer) == recommended
        text = describe_verdict(verdict)
        learned = "nothing was learned. The best mixer, vanilla, has" not in text
        assert learned == (recommended is not None)
    (verdict,) = compute_verdicts(
        [
            row("vanilla", [2.0], metric="bits_per_byte"),
            ResultRow("constant", "recall", 64, "bits_per_byte", [1.9]),
        ]
    )
    assert verdict.recommended is None


def test_fewer_bits_are_better():
    """Fails if the largest number of bits wins."""
    (verdict,) = compute_verdicts(
        [
            row("vanilla", [2.0, 2.01], metric="bits_per_byte"),
            row("linear", [3.0, 3.01], speed=500.0, metric="bits_per_byte"),
        ]
    )
    assert verdict.recommended.mixer == "vanilla" and not verdict.ties
    assert "No other mixer is close" in describe_verdict(verdict)


def test_one_seed_is_a_caveat():
    """Fails if a small gap between single runs counts as a difference."""
    (verdict,) = compute_verdicts(
        [
            row("vanilla", [0.95]),
            row("linear", [0.90], speed=200.0),
            row("local", [0.1], speed=999.0),
        ]
    )
    assert verdict.recommended.mixer == "linear" and verdict.caveats.seeds == 1
    text = describe_verdict(verdict)
    assert "Not clearly different: vanilla (0.95 accuracy, the best score)" in text
    assert "significantly" not in text and "One seed only" in describe_caveats(verdict.caveats)[0]
    assert scores_differ(row("a", [0.95]), row("b", [0.1]))
    assert not scores_differ(row("a", [0.95]), row("b", [0.9]))


def test_constant_baseline():
    """Fails if the baseline uses the input, or counts positions without a target."""
    parity = constant_baseline_score(create_task("parity", length=64))
    assert parity == pytest.approx(0.5, abs=0.03)
    task = create_task("recall", length=64)
    assert constant_baseline_score(task) < 3 / task.values
    task.metric = "bits_per_token"
    assert constant_baseline_score(task) == pytest.approx(math.log2(task.values), abs=0.2)
    assert torch.is_tensor(task.example("test", 0).target)


def test_labels_have_their_arguments():
    """Fails if two variants of one mixer have the same label."""
    rows = summarize_runs(failed_entry(module_spec("local", window=width)) for width in (2, 3))
    assert [row.mixer for row in rows] == ["local(window=2)", "local(window=3)"]


def failed_entry(mixer):
    task = module_spec("copy").model_dump()
    settings = {"mixer": mixer.model_dump(), "task": task, "length": 8, "seed": 0}
    return LedgerEntry(repr(mixer), mixer.name, FAILED, settings, None, "gone")
