"""Comparing: the plan, the ledger, the processes, and what is said in the end."""

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
from regard.compare.ledger import DONE, FAILED, REFUSED, Ledger, LedgerEntry
from regard.compare.plan import count_parameters
from regard.compare.verdict import scores_differ
from regard.json_files import write_json
from regard.models import ModuleSpec, module_spec
from regard.tasks import create_task
from regard.train.run import build_task
from regard.train.settings import TrainSettings

TINY = {
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "settings": TrainSettings(steps=3, batch=4, evaluate=3, examples=8, save=3),
}


def plan(*mixers, tasks=(module_spec("parity"),), **more):
    return ComparisonPlan(
        tasks=list(tasks),
        mixers=[module_spec(m) if isinstance(m, str) else m for m in mixers],
        **TINY | more,
    )


# ---------------------------------------------------------------------------------------------- the plan
def test_dense_softmax_is_always_among_the_rows():
    """Fails if a comparison leaves it out, or has it twice; seeds come first."""
    found = plan_runs(plan("linear", "vanilla", lengths=(8, 16), seeds=2))
    assert [(c.mixer.name, c.length, c.seed) for c in found] == [
        (name, n, seed) for seed in (0, 1) for n in (8, 16) for name in ("vanilla", "linear")
    ]
    assert len({cell.key for cell in found}) == 8


def test_what_does_not_fit_is_refused_before_training():
    """Fails if a mixer that cannot be causal is trained on a causal task, or the reason is lost."""
    found = {cell.mixer.name: cell for cell in plan_runs(plan("fnet", lengths=(8,)))}
    assert found["fnet"].spec is None and "cannot be causal" in found["fnet"].refusal
    assert found["vanilla"].spec is not None and not found["vanilla"].refusal


def test_a_mixer_that_takes_no_mask_is_refused_where_lengths_differ():
    """Fails if that is found out in the middle of a comparison."""
    for each, refused in (
        (module_spec("listops", length=32), True),
        (module_spec("copy", length=9, causal=False), False),
    ):
        fnet = next(
            c for c in plan_runs(plan("fnet", tasks=[each], seeds=2)) if c.mixer.name == "fnet"
        )
        assert (
            ("listops differ in length, and fnet takes no mask" in fnet.refusal)
            == refused
            == (fnet.spec is None)
        )


def test_all_have_the_parameters_of_dense_softmax():
    """Fails if equal parameters are not nearly equal, or unequal ones are made so."""
    mixers = ("linear", "retnet", "gated_linear", "delta_rule", "synthesizer_random")
    for equal in (True, False):
        found = plan_runs(plan(*mixers, lengths=(32,), dim=32, match_params=equal))
        counts = [count_parameters(cell.spec, build_task(cell.spec)) for cell in found]
        near = max(abs(n - counts[0]) / counts[0] for n in counts)
        assert (near < 0.01) == equal


def test_keys_tell_runs_apart_and_nothing_else():
    """Fails if another budget makes another run, or another argument the same."""
    one, two = (plan_runs(plan(module_spec("local", window=w), lengths=(8,)))[1] for w in (2, 3))
    again = plan_runs(plan(module_spec("local", window=2), lengths=(8,)))[1]
    assert one.key == again.key != two.key


def test_own_data_go_by_the_name_of_their_file(tmp_path):
    """Fails if a table is as wide as the path to the data, or two files of one name become one row."""
    tasks = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.csv").write_text(
            "text,label\n" + "".join(f"{'uv'[i % 2]}{i},{i % 2}\n" for i in range(60))
        )
        tasks.append(module_spec("classify", data=str(tmp_path / folder / "x.csv"), length=8))
    found = plan_runs(plan(tasks=tasks[:1]))
    assert found[0].name == "vanilla · classify(data=x.csv) · 8 · seed 0"
    with pytest.raises(ValueError, match=r"two tasks would both be called classify\(data=x.csv\)"):
        plan_runs(plan(tasks=tasks))


@pytest.mark.parametrize(
    ("mixer", "words"),
    [("linaer", "did you mean 'linear'"), (module_spec("local", windw=3), "did you mean 'window'")],
)
def test_wrong_names_stop_it(mixer, words):
    """Fails if a typing error becomes a row that is refused."""
    with pytest.raises((ValueError, TypeError), match=words):
        plan_runs(plan(mixer, lengths=(8,)))


# ---------------------------------------------------------------------------------------------- the runs
def test_a_comparison_runs_once(tmp_path):
    """Fails if a run is not in a process of its own, a refusal has no row, or what is done is done again."""
    planned = plan_runs(plan("linear", "fnet", lengths=(8,)))
    ended = []
    schedule = Schedule(
        tmp_path,
        jobs=2,
        watch=lambda cell, fraction: ended.append(cell.key) if fraction is None else None,
    )
    schedule.run(planned)
    entries = schedule.ledger.entries()
    assert [e.status for e in entries] == [DONE, DONE, REFUSED] and len(ended) == 2
    assert all(
        e.result["steps"] == 3 and e.result["environment"]["threads"] == 1 for e in entries[:2]
    )
    schedule.ledger.close()
    again = Schedule(tmp_path, watch=lambda cell, fraction: pytest.fail("it ran again"))
    again.run(planned)
    assert [row.mixer for row in summarize_runs(again.ledger.entries())] == [
        "vanilla",
        "linear",
        "fnet",
    ]


def test_a_crash_is_one_red_row(tmp_path, monkeypatch):
    """Fails if one run that ends badly takes the others with it, or its reason is lost."""
    planned = plan_runs(plan("linear", lengths=(8,)))
    broken = planned[0]._replace(
        spec=planned[0].spec.model_copy(update={"task": module_spec("parity", length=8, seed=-1)})
    )
    schedule = Schedule(tmp_path, jobs=2)
    schedule.run([broken, planned[1]])
    by_name = {e.words["mixer"]["name"]: e for e in schedule.ledger.entries()}
    assert by_name["vanilla"].status == FAILED and "seed must be" in by_name["vanilla"].why
    assert by_name["linear"].status == DONE
    row = next(row for row in summarize_runs(schedule.ledger.entries()) if row.mixer == "vanilla")
    assert math.isnan(row.score) and "seed must be" in row.why


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_comparison_goes_on(tmp_path, how, request):
    """Fails if whatever ends a comparison leaves a run at work, or what it did is lost."""
    code = (
        "from pathlib import Path; from regard.compare import *; from regard.models import part;"
        "from regard.train.settings import Settings;"
        "s = Settings(steps=10**6, batch=4, evaluate=10**6, examples=8, save=10**6);"
        "p = Plan(tasks=[part('parity')], mixers=[], lengths=(8,), dim=8, heads=2, layers=1, settings=s);"
        f"Schedule(Path({str(tmp_path)!r})).run(cells(p))"
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
    assert metrics.read_text().splitlines()[-1] == last, "the run goes on without its parent"


def wait_for(ready, seconds=90):
    for _ in range(seconds * 10):
        if found := ready():
            return found
        time.sleep(0.1)
    pytest.fail("it did not come")


ENDLESS = TrainSettings(steps=10**7, batch=4, evaluate=10**7, examples=8, save=10**7)


def test_a_budget_is_kept(tmp_path):
    """Fails if runs are not told their share of the time, or what a process takes to start is not part of it."""
    planned = plan_runs(plan("linear", lengths=(8,), settings=ENDLESS))
    place = LocalExecutor(tmp_path, 1)
    place.has_queue = True  # a busy machine may take longer to start them than they are given: here they are not ended for it
    schedule = Schedule(tmp_path, place=place, budget=14)
    schedule.run(planned)
    results = [entry.result for entry in schedule.ledger.entries()]
    assert [r["stopped"] for r in results] == ["seconds", "seconds"]
    shares = [
        json.loads(p.read_text())["settings"]["seconds"] for p in tmp_path.glob("runs/*/spec.json")
    ]
    assert shares == [7, 7] and all(r["seconds"] < 7 for r in results)


class Clock:
    """A clock that only what sleeps and works moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Pretend(Executor):
    """Runs that take what they were given and `late` seconds more, and leave a result."""

    has_queue, threads = False, 1

    def __init__(self, clock, late):
        self.clock, self.late, self.given = clock, late, []

    def start(self, folder, seconds):
        self.given.append(seconds)
        write_json(folder / "result.json", {"seconds": seconds})
        job = type(
            "Pretended",
            (RunHandle,),
            {"over": lambda job: self.clock.now >= job.end, "kill": lambda job: job.stop()},
        )()
        job.end = self.clock.now + seconds + self.late
        job.stop = lambda: setattr(job, "end", self.clock.now)
        return job


@pytest.mark.parametrize(("mixers", "jobs"), [(3, 1), (3, 2), (7, 2), (7, 3)])
@pytest.mark.parametrize("late", [0.0, 1.0, 1e9])
def test_all_have_the_same_time_and_together_no_more_than_the_budget(
    tmp_path, monkeypatch, mixers, jobs, late
):
    """Fails if runs that take longer than they should are not caught up with or ended, or the first have more than the last."""
    clock = Clock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    planned = plan_runs(
        plan(*(module_spec("local", window=w) for w in range(2, mixers + 1)), lengths=(8,))
    )
    place = Pretend(clock, late)
    Schedule(tmp_path, place=place, jobs=jobs, budget=180).run(planned)
    assert len(place.given) == mixers and clock.now <= 1.1 * 180
    if not late:
        assert max(place.given) - min(place.given) < 1 and clock.now > 0.9 * 180


def test_the_kernel_is_built_before_the_first_run(tmp_path, monkeypatch):
    """Fails if the first runs wait for a compiler in the time that they have for training."""
    clock = Clock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    monkeypatch.setattr("regard.compare.schedule.native.library", lambda: clock.sleep(100))
    planned, place = plan_runs(plan("linear", lengths=(8,))), Pretend(clock, 0)
    schedule = Schedule(tmp_path, place=place, budget=60)
    schedule.run(planned)
    assert place.given == pytest.approx([30, 30], abs=1) and clock.now >= 155
    schedule.run(planned)
    assert clock.now < 170  # nothing is left to run: nothing is built


def test_a_comparison_that_goes_on_gives_the_rest_the_same_time(tmp_path, monkeypatch):
    """Fails if those that are run later have all of the budget to themselves."""
    clock = Clock()
    monkeypatch.setattr("regard.compare.schedule.time", clock)
    planned = plan_runs(plan("linear", "retnet", lengths=(8,)))
    place = Pretend(clock, 0)
    schedule = Schedule(tmp_path, place=place, budget=180)
    schedule.ledger.add(planned[0].key, "", {})
    schedule.ledger.finish(planned[0].key, {})
    schedule.run(planned)
    assert place.given == pytest.approx([60, 60], abs=1)


def test_a_budget_begins_when_the_command_is_typed(monkeypatch):
    """Fails if what it takes to load torch comes on top, or a machine that is slow at it has no time left for the page."""
    assert startup.startup_seconds() == 0 and 0 < startup.process_age() < 1e5
    assert training_budget(180, 5) == 180 - 5 - 9
    monkeypatch.setattr(startup, "_before", 20.0)
    assert training_budget(180, 5) == 180 - 20 - 5 - 20


def test_a_budget_that_is_too_small_is_refused(tmp_path):
    """Fails if it is overrun instead."""
    planned, schedule = plan_runs(plan("linear", lengths=(8,))), Schedule(tmp_path, budget=9)
    with pytest.raises(
        ValueError, match="leaves 9 s for 2 runs, 1 at a time, and here each needs 5 s at least"
    ):
        schedule.run(planned)
    for cell in planned:  # but where all is done, there is nothing to give time to
        schedule.ledger.add(cell.key, cell.name, {})
        schedule.ledger.finish(cell.key, {})
    schedule.run(planned)


def test_a_file_that_is_no_ledger_is_named(tmp_path):
    """Fails if a foreign file is overwritten."""
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="is not a ledger"):
        Ledger(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_ledger_that_is_torn_inside_is_named(tmp_path):
    """Fails if only the first page is looked at, and the table ends in a traceback."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.add("a", "a", {})
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"x" * (len(whole) - 4096))
    with pytest.raises(ValueError, match="is not a ledger"):
        Ledger(path)


def test_a_database_of_another_program_is_named(tmp_path):
    """Fails if a table of the same name ends in a traceback."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE runs (a TEXT)")
    with pytest.raises(ValueError, match="is not a ledger: no such column: key"):
        Ledger(path)


# ---------------------------------------------------------------------------------------------- the verdict
def row(name, scores, *, speed=100.0, memory=1e6, metric="accuracy"):
    return ResultRow(name, "recall", 64, metric, scores, speed=speed, memory=memory, parameters=10)


def test_the_fastest_of_those_that_are_not_told_apart_is_recommended():
    """Fails if noise decides, or the doubt is not said."""
    rows = [
        row("vanilla", [0.90, 0.94, 0.92]),
        row("linear", [0.91, 0.93, 0.90], speed=300.0),
        row("local", [0.2, 0.21, 0.2], speed=900.0),
        ResultRow("constant", "recall", 64, "accuracy", [0.1]),
        ResultRow("fnet", "recall", 64, why="cannot be causal"),
    ]
    (found,) = compute_verdicts(rows)
    assert found.take.mixer == "linear" and found.best.mixer == "vanilla"
    assert "take linear: 0.913 ± 0.015 accuracy, 3 × the training speed" in found.words
    assert "within noise of vanilla" in found.words and "local" not in found.words


def test_nothing_is_recommended_where_nothing_was_learned():
    """Fails if luck with a few examples passes for learning, or a task that was learned is thrown away."""
    chance = ResultRow("constant", "recall", 64, "accuracy", [0.5])
    for score, examples, taken in (
        (0.52, 512, None),
        (0.52, 100_000, "vanilla"),
        (0.6, 512, "vanilla"),
        (0.4, 0, None),
    ):
        judged = ResultRow(
            "vanilla", "recall", 64, "accuracy", [score], speed=9.0, memory=1e6, examples=examples
        )
        (found,) = compute_verdicts([judged, chance])
        assert (found.take and found.take.mixer) == taken
        assert ("nothing was learned: vanilla, the best, has" in found.words) == (taken is None)
    (found,) = compute_verdicts(
        [row("vanilla", [2.0], metric="bits"), ResultRow("constant", "recall", 64, "bits", [1.9])]
    )
    assert found.take is None


def test_bits_are_better_when_fewer():
    """Fails if the largest number of bits wins."""
    (found,) = compute_verdicts(
        [
            row("vanilla", [2.0, 2.01], metric="bits"),
            row("linear", [3.0, 3.01], speed=500.0, metric="bits"),
        ]
    )
    assert found.take.mixer == "vanilla" and "no other came near" in found.words


def test_one_seed_is_not_trusted():
    """Fails if a small gap between single runs is taken for a difference."""
    (found,) = compute_verdicts(
        [
            row("vanilla", [0.95]),
            row("linear", [0.90], speed=200.0),
            row("local", [0.1], speed=999.0),
        ]
    )
    assert (
        found.take.mixer == "linear"
        and "One seed only" in found.words
        and "within noise" not in found.words
    )
    assert "perhaps no worse than vanilla (0.95 accuracy, the best score)" in found.words
    assert scores_differ(row("a", [0.95]), row("b", [0.1])) and not scores_differ(
        row("a", [0.95]), row("b", [0.9])
    )


def test_the_constant_answer():
    """Fails if the baseline looks at the input, or counts what has no target."""
    assert constant_baseline_score(create_task("parity", length=64)) == pytest.approx(0.5, abs=0.03)
    made = create_task("recall", length=64)
    assert constant_baseline_score(made) < 3 / made.values
    made.metric = "bits"
    assert constant_baseline_score(made) == pytest.approx(math.log2(made.values), abs=0.2)
    assert torch.is_tensor(made.example("test", 0).target)


def test_labels_have_their_arguments():
    """Fails if two forms of one mixer have the same name in a table."""
    found = summarize_runs(failed(module_spec("local", window=width)) for width in (2, 3))
    assert [r.mixer for r in found] == ["local(window=2)", "local(window=3)"]


def failed(mixer):
    words = {
        "mixer": mixer.model_dump(),
        "task": ModuleSpec(name="copy").model_dump(),
        "length": 8,
        "seed": 0,
    }
    return LedgerEntry(repr(mixer), mixer.name, FAILED, words, None, "gone")
