"""Comparisons: plan, ledger, processes, verdicts and their wording."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from regard.bench.stats import Ratio
from regard.compare import (
    ComparisonPlan,
    Difference,
    ResultRow,
    Schedule,
    compute_verdicts,
    plan_runs,
    summarize_runs,
)
from regard.compare.formatting import describe_caveats, describe_verdict
from regard.compare.ledger import DONE, FAILED, REFUSED, Ledger, LedgerEntry
from regard.compare.plan import count_parameters
from regard.models import module_spec
from regard.tasks import create_task
from regard.tasks.baselines import constant
from regard.train.run import build_task
from regard.train.settings import TrainSettings

TINY = {
    "dim": 8,
    "heads": 2,
    "layers": 1,
    "settings": TrainSettings(steps=3, batch_size=4, eval_every=3, eval_examples=8, save_every=3),
}


def constant_score(task):
    return task.metric.compute(constant(task, task.sample("test", 512).tolist()))


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


@pytest.mark.parametrize(
    ("part", "value", "reference"),
    [
        ("position", "rope", "learned"),
        ("norm", "rms", "layer"),
        ("residual", "post", "pre"),
        ("ffn", "glu", "mlp"),
        ("ffn", "none", "mlp"),
        ("stack", "shared", "sequential"),
    ],
)
def test_other_parts_are_compared_as_mixers_are(part, value, reference):
    """Fails if the value does not reach the model, or the default is missing."""
    runs = plan_runs(plan(value, lengths=(8,), vary=part, mixer=module_spec("linear")))
    assert [run.label for run in runs] == [reference, value]
    assert [run.spec.mixer.name for run in runs] == ["linear", "linear"]
    chosen = getattr(runs[1].spec, part)
    assert chosen is None if value == "none" else chosen.name == value
    if value != "none":
        counts = [count_parameters(run.spec, build_task(run.spec)) for run in runs]
        assert abs(counts[1] - counts[0]) / counts[0] < 0.03


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
    with pytest.raises(ValueError, match=r"not a ledger of this version .*: no such column: key"):
        Ledger(path)


# ---------------------------------------------------------------------- verdicts
SHARED = {"task": "recall", "length": 64, "metric": "accuracy"}


def row(name, score, *, difference=None, half=0.004, speed=1.0, memory=1e6, std=0.01, **more):
    """A row of three seeds; `difference` to dense softmax with half the width of its interval."""
    found = None
    if difference is not None:
        low, high = difference - half, difference + half
        p = 0.001 if low > 0 or high < 0 else 0.5
        found = Difference(
            name, "recall", 64, "vanilla", difference, low, high, p, p, p < 0.05, 0.001, 3, 500
        )
    return ResultRow(
        name,
        scores=[score - std, score, score + std],
        difference=found,
        is_reference=name == "vanilla",
        speedup=None if name == "vanilla" else Ratio(speed, 0.95 * speed, 1.05 * speed, 9),
        latency_speedup=None if name == "vanilla" else Ratio(speed, speed, speed, 9),
        peak_bytes=memory,
        parameters=10,
        **{"margin": 0.01} | SHARED | more,
    )


def constant_row(score=0.1, **more):
    return ResultRow("constant", scores=[score], is_baseline=True, **SHARED | more)


def verdict_of(*rows, **more):
    (verdict,) = compute_verdicts(rows, **more)
    return verdict


DENSE = row("vanilla", 0.90)


@pytest.mark.parametrize(
    ("other", "prefer", "chosen", "basis"),
    [
        # better by a material and significant margin
        (row("linear", 0.92, difference=0.02), "score", "linear", "score"),
        # significant, but too small to matter
        (row("linear", 0.906, difference=0.006), "score", "vanilla", "default"),
        # large, but not significant
        (row("linear", 0.95, difference=0.05, half=0.06), "score", "vanilla", "default"),
        # faster at an equal score
        (row("linear", 0.90, difference=-0.001, speed=1.5), "score", "linear", "speed"),
        # 9 per cent faster
        (row("linear", 0.90, difference=0.0, speed=1.09), "score", "vanilla", "default"),
        # faster, but a material loss is not excluded
        (row("linear", 0.89, difference=-0.008, speed=9.0), "speed", "vanilla", "default"),
        (row("linear", 0.90, difference=0.0, memory=0.7e6), "memory", "linear", "memory"),
        (row("linear", 0.90, difference=0.0, memory=0.9e6), "memory", "vanilla", "default"),
        (row("linear", 0.90, difference=0.0, speed=2.0), "latency", "linear", "latency"),
        # memory is not what a user who prefers the score asked for
        (row("linear", 0.90, difference=0.0, memory=0.1e6), "score", "vanilla", "default"),
    ],
)
def test_dense_softmax_unless_another_is_materially_and_significantly_better(
    other, prefer, chosen, basis
):
    """Fails if noise, 9 per cent, or an unproven loss decides."""
    verdict = verdict_of(DENSE, other, constant_row(), prefer=prefer)
    assert (verdict.recommended.mixer, verdict.basis) == (chosen, basis)
    text = describe_verdict(verdict)
    assert text.startswith(f"Use {chosen} for recall at 64 tokens on this machine: 0.9")
    assert "0.01" in text  # the margin is printed


def test_a_fast_mixer_with_an_unproven_loss_is_a_caveat():
    """Fails if it is not mentioned, or the sentence hides the interval."""
    fast = row("linear", 0.89, difference=-0.008, half=0.006, speed=3.0)
    verdict = verdict_of(DENSE, fast, prefer="speed")
    assert verdict.unproven == [fast]
    assert (
        "linear has 3 × the training speed, and its score differs by -0.008 [-0.014, -0.002]: a "
        "loss of 0.01 or more is not excluded."
    ) in describe_caveats(verdict.caveats, verdict)[0]


def test_one_seed_is_a_caveat_and_proves_nothing():
    """Fails if a gap between single runs decides."""
    single = Difference("linear", "recall", 64, "vanilla", 0.3, seeds=1)
    rows = [
        ResultRow("vanilla", scores=[0.5], is_reference=True, margin=0.01, **SHARED),
        ResultRow("linear", scores=[0.8], difference=single, margin=0.01, **SHARED),
    ]
    verdict = verdict_of(*rows)
    assert verdict.recommended.mixer == "vanilla" and verdict.best.mixer == "linear"
    assert "no difference is significant" in describe_caveats(verdict.caveats)[0]


def test_fewer_bits_are_better():
    """Fails if the largest number of bits wins, or 2 per cent of a small number is material."""
    bits = {"metric": "bits_per_byte", "higher_is_better": False, "margin": math.nan}
    dense = row("vanilla", 2.0, **bits)
    better = row("linear", 1.9, difference=-0.1, **bits)
    assert verdict_of(dense, better).recommended is better
    assert verdict_of(dense, row("linear", 2.1, difference=0.1, **bits)).recommended is dense
    slightly = row("linear", 1.97, difference=-0.03, half=0.001, **bits)
    assert verdict_of(dense, slightly).recommended is dense


def test_nothing_is_recommended_if_nothing_was_learned():
    """Fails if luck on a few examples counts as learning, or learning is not recognized."""
    for gain, error, learned in ((0.02, 0.022, False), (0.02, 0.002, True), (-0.1, 0.01, False)):
        over = Difference(
            "vanilla", "recall", 64, "constant", gain, example_error=error, examples=500
        )
        verdict = verdict_of(row("vanilla", 0.5 + gain, over_constant=over), constant_row(0.5))
        assert (verdict.recommended is not None) == learned
        text = describe_verdict(verdict)
        assert ("nothing was learned. The best mixer, vanilla, has" in text) != learned


def test_a_baseline_that_beats_every_mixer_is_the_first_sentence():
    """Fails if a user trains a network where words counts do better."""
    words = ResultRow("TF-IDF + linear", scores=[0.95], is_baseline=True, **SHARED)
    verdict = verdict_of(DENSE, words, constant_row())
    assert verdict.better_baseline is words
    assert describe_verdict(verdict).startswith(
        "TF-IDF + linear, which needs no network, has 0.95 accuracy, and no mixer has"
    )


def test_eliminated_mixers_are_not_recommended():
    """Fails if a short run on the validation data competes with the finalists."""
    early = row("linear", 0.99, difference=0.09, speed=9.0, eliminated=True)
    verdict = verdict_of(DENSE, early)
    assert verdict.recommended is DENSE and verdict.best is DENSE and not verdict.ties


def test_without_dense_softmax_the_best_is_recommended_without_a_claim():
    """Fails if a reference that crashed ends in a traceback or a made-up comparison."""
    failed = ResultRow("vanilla", "recall", 64, reason="gone", is_reference=True)
    verdict = verdict_of(failed, row("linear", 0.9), constant_row(), statuses=[FAILED])
    assert verdict.recommended.mixer == "linear" and verdict.basis == "no reference"
    assert "without a comparison" in describe_verdict(verdict)
    assert "Some runs failed" in describe_caveats(verdict.caveats)[-1]


def test_what_is_recommended_beats_the_constant_baseline():
    """Fails if dense softmax is recommended by default where only an uncertain other learned."""
    other = row("linear", 0.9, difference=0.5, half=0.6)
    verdict = verdict_of(row("vanilla", 0.4), other, constant_row(0.5))
    assert verdict.best is other and verdict.recommended is None


def test_what_the_task_says_of_its_data_is_a_caveat():
    """Fails if copies of test rows in the training split are hidden."""
    note = "9 of 30 texts of the test split are also in the train split: its score is too good."
    verdict = compute_verdicts([DENSE], notes={(DENSE.task, DENSE.length): [note]})[0]
    assert note in describe_caveats(verdict.caveats, verdict)


def test_a_busy_machine_is_said():
    """Fails if the load is measured and kept secret."""
    verdict = verdict_of(
        DENSE, load="Costs were measured while other processes used 1.3 of 2 cores."
    )
    assert "1.3 of 2 cores" in describe_caveats(verdict.caveats)[0]


def test_constant_baseline():
    """Fails if the baseline uses the input, or counts positions without a target."""
    parity = constant_score(create_task("parity", length=64))
    assert parity == pytest.approx(0.5, abs=0.03)
    task = create_task("recall", length=64)
    assert constant_score(task) < 3 / task.values


def test_labels_have_their_arguments():
    """Fails if two variants of one mixer have the same label."""
    rows = summarize_runs(failed_entry(module_spec("local", window=width)) for width in (2, 3))
    assert [row.mixer for row in rows] == ["local(window=2)", "local(window=3)"]


def failed_entry(mixer):
    task = module_spec("copy").model_dump()
    settings = {"mixer": mixer.model_dump(), "task": task, "length": 8, "seed": 0}
    return LedgerEntry(repr(mixer), mixer.name, FAILED, settings, None, "gone")
