"""Comparisons with a budget: costs, the plan of rungs, decisions, resumption and the command."""

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import regard.compare.comparison as comparing
from compare_cases import PLAN, compare
from regard.cli import app
from regard.cli.comparing import parse_candidates, parse_rates
from regard.compare import Comparison, ComparisonPlan, Schedule, load_result
from regard.compare.comparison import format_duration
from regard.compare.costs import COSTS_FILE, SAVES, CandidateTimes, MeasuredCosts
from regard.compare.halving import (
    EVAL_SHARE,
    MIN_STEPS,
    BudgetTooSmall,
    Standing,
    StepCost,
    choose_survivors,
    plan_rungs,
    rank_candidates,
    round_down,
    rung_sizes,
)
from regard.compare.ledger import Ledger
from regard.compare.load import Load, merge_loads, own_seconds
from regard.compare.plan import PARTS, SHORTLIST, fit_tasks
from regard.compare.record import baseline_statistics, read_record
from regard.json_files import write_json
from regard.models import module_spec
from regard.tasks.probes import ParityTask
from regard.train.settings import UNLIMITED_STEPS, TrainSettings

UNLIMITED = PLAN.model_copy(
    update={"settings": TrainSettings(steps=UNLIMITED_STEPS), "rates": (1e-3, 3e-3, 1e-2)}
)
COSTS = {
    "vanilla": StepCost(0.04, 0.001, 2.0),
    "linear": StepCost(0.01, 0.0005, 2.0),
    **{f"m{i}": StepCost(0.02, 0.001, 2.0) for i in range(6)},
}


# ---------------------------------------------------------------------- plan
@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("equal", ["time", "steps"])
def test_a_plan_fills_its_budget(jobs, equal):
    """Fails if a plan takes longer than the budget, wastes it, or evaluates too much."""
    plan = UNLIMITED.model_copy(update={"jobs": jobs, "equal": equal})
    rungs = plan_rungs(plan, COSTS, 1800)
    assert [rung.keep for rung in rungs] == [8, 4, 2]
    estimate = sum(rung.estimate(jobs) for rung in rungs)
    assert (0.8 if equal == "time" else 0.5) * 1800 < estimate <= 1800
    for rung in rungs:
        steps = rung.steps
        if equal == "time":
            assert steps["linear"] / steps["vanilla"] == pytest.approx(4, rel=0.15)
        else:
            assert len(set(steps.values())) == 1
        for label, cost in COSTS.items():
            evaluation = (rung.evaluations + 1) * rung.eval_examples * cost.example
            assert equal == "steps" or evaluation <= 1.01 * EVAL_SHARE * rung.seconds[label]
    assert len(rungs[0].rates) == 3 and rungs[1].rates == rungs[2].rates == []
    assert rungs[0].seeds == [0] and rungs[2].seeds == [1, 2]  # not those that chose the finalists


def test_a_budget_that_is_too_small_names_one_that_could():
    """Fails if a hopeless plan starts, or the time that is named does not suffice either."""
    with pytest.raises(BudgetTooSmall, match=r"vanilla \d+ steps per run in rung 1") as refusal:
        plan_rungs(UNLIMITED, COSTS, 60)
    needed = refusal.value.needed
    rungs = plan_rungs(UNLIMITED, COSTS, needed)
    assert 60 < needed < 600 and min(rungs[0].steps.values()) >= MIN_STEPS
    with pytest.raises(BudgetTooSmall):
        plan_rungs(UNLIMITED, COSTS, 0.9 * needed)


def test_a_plan_counts_all_that_takes_time(tmp_path, monkeypatch):
    """Fails if a plan leaves out the baselines, the start and the checkpoints of each run, or that
    runs side by side slow each other down."""
    clock = [0.0]
    monkeypatch.setattr(comparing, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def compute_baselines(folder, task, examples):
        clock[0] += 300

    monkeypatch.setattr(comparing, "baseline_statistics", compute_baselines)

    def costs(step):
        names = list(fit_tasks(plan)[0].specs)
        own = CandidateTimes(step=[step, 3 * step], example=[1e-4], latency=[0.01], setup=0.5)
        return MeasuredCosts(
            times=dict.fromkeys(names, own), start_seconds=1.0, save_seconds=0.25, load=None
        )

    class Measured(Schedule):
        def measure_costs(self, specs, seconds):
            folder = self.costs_folder("alone")
            folder.mkdir(parents=True)
            write_json(folder / COSTS_FILE, costs(0.01).model_dump(mode="json"))
            return folder

        def measure_side_by_side(self, specs, seconds):
            assert len(specs) == 4 and 0 < seconds <= 10
            return [costs(0.04), costs(0.02)]

    for jobs, step in ((1, 0.02), (2, 0.06)):
        clock[0] = 0.0
        plan = UNLIMITED.model_copy(update={"jobs": jobs})
        comparison = Comparison(Measured(tmp_path / str(jobs), jobs=jobs), plan, "", reserve=30)
        comparison.prepare(0.0)
        comparison.schedule.close()
        assert 0.8 * (900 - 330) < comparison.estimate() <= 900 - 330
        (group,) = comparison.record.schedule
        for rung in group.rungs:
            examples = (rung.evaluations + 1) * rung.eval_examples
            start = 1.0 + 0.5 + SAVES * 0.25
            for label, steps in rung.steps.items():
                want = start + steps * step + examples * 1e-4
                assert rung.seconds[label] == pytest.approx(want)


def test_baselines_of_more_examples_are_used_again(tmp_path, monkeypatch):
    """Fails if they are computed twice, are those of other examples, or stay without a score when
    the missing package has been installed."""
    task = module_spec("parity", length=8)
    larger = baseline_statistics(tmp_path, task, 64)["constant"]
    monkeypatch.setattr("regard.tasks.base.constant", lambda *_: pytest.fail("computed again"))
    assert torch.equal(baseline_statistics(tmp_path, task, 40)["constant"], larger[:40])
    with pytest.raises(pytest.fail.Exception):
        baseline_statistics(tmp_path, task, 65)
    scores = iter([ImportError("needs a package"), larger])

    def fetch(*_):
        found = next(scores)
        if isinstance(found, ImportError):
            raise found
        return found

    monkeypatch.setattr(ParityTask, "baselines", lambda self: {"constant": fetch, "other": fetch})
    assert baseline_statistics(tmp_path, task, 30)["other"] == "needs a package"
    assert torch.equal(baseline_statistics(tmp_path, task, 30)["other"], larger[:30])
    assert torch.equal(baseline_statistics(tmp_path, task, 30)["other"], larger[:30])


def test_rungs_halve_and_keep_the_reference():
    """Fails if dense softmax is eliminated, or a diverged rate is chosen."""
    assert rung_sizes(7, search=True) == [7, 4, 2] and rung_sizes(3, search=True) == [3, 3]
    assert rung_sizes(3, search=False) == [3] and rung_sizes(80, search=True)[-1] <= 3
    scores = {
        "vanilla": {1e-3: [0.1], 1e-2: [0.2]},
        "linear": {1e-3: [0.5], 1e-2: [math.inf]},
        "local": {1e-3: [0.4, 0.5], 1e-2: []},
        "retnet": {},
    }
    ranking = rank_candidates(scores, higher_is_better=True)
    assert ranking == [
        Standing("linear", 1e-3, 0.5),
        Standing("local", 1e-3, 0.45),
        Standing("vanilla", 1e-2, 0.2),
    ]
    kept = choose_survivors(ranking, 2, "vanilla")
    assert [each.label for each in kept] == ["linear", "vanilla"]
    lowest = rank_candidates(scores, higher_is_better=False)[0]
    assert lowest == Standing("vanilla", 1e-3, 0.1)


SERVER = """
import os, sys, time
if not os.fork():
    while time.process_time() < 0.3:
        pass
    os._exit(0)
os.wait()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_time_of_forks_of_a_living_server_is_our_own():
    """Fails if the runs of a comparison count as other processes that keep the machine busy."""
    before = own_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout.readline() == b"done\n"
        alive = own_seconds() - before
    assert alive > 0.29
    assert own_seconds() - before == pytest.approx(alive, abs=0.2)  # counted once after its end


def test_small_numbers():
    """Fails if a rounded number is larger, or a duration cannot be given to --budget."""
    assert [round_down(x) for x in (7.9, 99.9, 1234, 98765)] == [7, 99, 1200, 98000]
    assert [format_duration(x) for x in (42.1, 125, 3595, 7300)] == ["43s", "2m10s", "60m", "2h2m"]
    load = merge_loads([Load(2.0, 2, 10.0), Load(0.0, 2, 30.0)])
    assert load.others == 0.5 and load.is_busy and not Load(0.1, 2, 1.0).is_busy
    assert "while other processes used 0.5 of 2 cores" in load.describe("measured")


# ---------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of four candidates that fit and one that does not, killed in two rungs."""
    folder = tmp_path_factory.mktemp("killed")
    for number in (3, 9):
        script = Path(__file__).parent / "compare_cases.py"
        ended = subprocess.run([sys.executable, script, folder, str(number)], check=False)
        assert ended.returncode == -signal.SIGKILL
    compare(folder)
    return folder


def test_a_killed_comparison_continues_to_the_same_result(finished, tmp_path):
    """Fails if kill -9 in the middle of a rung changes the plan, a decision or a score."""
    shutil.copytree(finished / "costs", tmp_path / "costs")
    shutil.copy(finished / "plan.json", tmp_path)
    Ledger(tmp_path / "ledger.sqlite").close()
    compare(tmp_path)
    one, two = load_result(finished), load_result(tmp_path)
    assert one.record == two.record and len(one.record.keys) == 13
    assert [row.scores for row in one.rows] == [row.scores for row in two.rows]
    assert [(p.mixer, p.lr, p.valid) for p in one.search] == [
        (p.mixer, p.lr, p.valid) for p in two.search
    ]
    assert one.rungs == two.rungs and one.unique_successes == two.unique_successes
    for key in one.record.keys:
        logs = [folder / "runs" / key / "metrics.jsonl" for folder in (finished, tmp_path)]
        if logs[0].exists():
            curves = [
                [
                    (row["step"], row.get("loss"), row.get("valid"))
                    for row in map(json.loads, log.read_text().splitlines())
                ]
                for log in logs
            ]
            assert curves[0] == curves[1]


def test_the_plan_of_another_comparison_gives_its_curves(finished, tmp_path, monkeypatch):
    """Fails if a busier machine, on which a step seems to take longer, changes what is learned."""
    slow = "regard.compare.costs.MeasuredCosts.step_costs"
    monkeypatch.setattr(slow, lambda *_: pytest.fail("the given plan is not used"))
    again = tmp_path / "again"
    compare(again, plan_folder=finished)
    assert read_record(again).schedule[0].rungs == read_record(finished).schedule[0].rungs
    curves = [
        {
            entry.name: [(row["step"], row["valid"]) for row in entry.result["curve"]]
            for entry in each
            if entry.result is not None
        }
        for each in (load_result(again).entries, load_result(finished).entries)
    ]
    assert curves[0] == curves[1] and len(curves[0]) > 5
    with pytest.raises(ValueError, match=r"has other settings \(seeds\): give the same"):
        compare(tmp_path / "x", plan=PLAN.model_copy(update={"seeds": 3}), plan_folder=finished)


def test_the_result_has_what_the_page_needs(finished):
    """Fails if the search, costs, rungs or paired differences are missing."""
    result = load_result(finished)
    rows = {row.mixer: row for row in result.rows}
    assert rows["fnet"].reason and not rows["fnet"].scores
    first, last = result.rungs
    assert first.rates == [1e-3, 1e-2] and len(first.entered) == 4 and len(first.survived) == 2
    assert last.entered == first.survived
    assert "vanilla" in last.entered and last.seeds == [1, 2]
    for label in first.entered:
        row = rows[label]
        assert row.eliminated == (label not in last.entered) and row.lr in (1e-3, 1e-2)
        assert len(row.scores) == (1 if row.eliminated else 2) and row.latency > 0
        own = [p for p in result.search if p.mixer == label and p.rung == 0]
        assert len(own) == 2 and sum(p.chosen for p in own) == 1
        assert max(own, key=lambda p: p.valid).valid == next(p.valid for p in own if p.chosen)
        if label != "vanilla":
            difference = row.difference
            assert difference.estimate == pytest.approx(
                row.score - rows["vanilla"].score, abs=0.5 if row.eliminated else 1e-9
            )
            assert math.isnan(difference.low) == row.eliminated
    assert {cost.mixer for cost in result.costs} == set(first.entered)
    assert all(cost.step_seconds > 0 and cost.eval_seconds > 0 for cost in result.costs)
    assert rows["constant"].difference is not None


def test_a_test_example_that_one_alone_gets_right(tmp_path):
    """Fails if examples of several mixers, or wrong ones, are listed."""
    plan = ComparisonPlan(
        tasks=[module_spec("listops", length=16)],
        mixers=[module_spec("linear"), module_spec("local", window=2)],
        **{"dim": 8, "heads": 2, "layers": 1},
        settings=TrainSettings(steps=5, batch_size=4, eval_every=5, eval_examples=64),
    )
    compare(tmp_path, plan=plan)
    result = load_result(tmp_path)
    assert [len(rung.entered) for rung in result.rungs] == [3]
    alone = result.unique_successes[("listops", 16)]
    assert set(alone) == {"vanilla", "linear", "local(window=2)"}
    listed = [index for indices in alone.values() for index in indices]
    assert len(listed) == len(set(listed)) <= 64
    assert all(row.difference is None or not row.difference.significant for row in result.rows[:3])


# ---------------------------------------------------------------------- command
def invoke(*arguments):
    return CliRunner().invoke(app, ("compare", *map(str, arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vary", "positoin=rope"), "did you mean 'position'"),
        (("--vary", "rope"), "Write --vary part=value"),
        (("--vary", "norm=rms", "--vary", "position=rope"), "one part at a time"),
        (("--vary", "mixer=linear", "--mixers", "local"), "are the same"),
        (("--lr", "fast"), "--lr must be auto, or positive numbers"),
        (("--lr", "-1e-3"), "--lr must be auto, or positive numbers"),
        (("--prefer", "sped"), "did you mean 'speed'"),
        (("--equal", "tme"), "did you mean 'time'"),
    ],
)
def test_wrong_options_are_errors(tmp_path, arguments, message):
    """Fails if a typing error starts a comparison."""
    result = invoke("--tasks", "parity", "--out", tmp_path / "x", *arguments)
    assert result.exit_code == 1 and message in result.stderr
    assert not (tmp_path / "x").exists()


def test_options_become_candidates_and_rates():
    """Fails if all, the shortlist or --vary mixer mean something else."""
    assert len(parse_candidates("all", [], PARTS)[1]) > 70
    assert parse_candidates("", [], PARTS)[1] == parse_candidates("", [], PARTS)[1] != []
    assert parse_candidates("", ["mixer=linear"], PARTS) == ("mixer", [module_spec("linear")])
    assert parse_candidates("", ["norm=rms:eps=1e-5,layer"], PARTS) == (
        "norm",
        [module_spec("rms", eps=1e-5), module_spec("layer")],
    )
    assert len(parse_rates(None, search=True)) == 4 and len(parse_rates(None, search=False)) == 1
    assert parse_rates("1e-3, 3e-3", search=False) == [1e-3, 3e-3]


def test_the_shortlist_fits_the_task():
    """Fails if a window of the shortlist sees the whole sequence, or one that a user names is
    changed."""
    plan = ComparisonPlan(
        tasks=[module_spec("parity")], mixers=list(SHORTLIST), is_shortlist=True, lengths=(64, 2048)
    )
    short, long = fit_tasks(plan)
    assert "local(window=8)" in short.specs and "local" in long.specs
    assert not short.refused and len(short.specs) < len(SHORTLIST) + 1
    (named,) = fit_tasks(plan.model_copy(update={"is_shortlist": False, "lengths": (64,)}))
    assert "local" in named.specs and named.refused


def test_a_config_gives_the_rest_of_the_model(tmp_path):
    """Fails if a field is ignored, misspelt without an error, or given twice."""
    path = tmp_path / "model.json"
    common = ("--tasks", "parity", "--lengths", 8, "--steps", 2, "--seeds", 1, "--batch-size", 4)
    common += ("--out", tmp_path / "out", "--config", path)
    path.write_text('{"dimm": 8}')
    assert "did you mean 'dim'" in invoke(*common).stderr
    model = {"dim": 8, "heads": 2, "layers": 1, "norm": "rms", "dropout": 0.1, "mixer": "linear"}
    path.write_text(json.dumps(model))
    assert "--dim is also in" in invoke(*common, "--dim", 16).stderr
    result = invoke(*common, "--vary", "position=rope", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["mixer"] for row in found["rows"]][:2] == ["learned", "rope"]
    specs = [json.loads(p.read_text()) for p in (tmp_path / "out").glob("runs/*/spec.json")]
    assert len(specs) == 2
    for spec in specs:
        assert (spec["dim"], spec["norm"]["name"], spec["dropout"]) == (8, "rms", 0.1)
        assert spec["mixer"]["name"] == "linear" and spec["settings"]["max_seconds"] is None
    assert {"search", "costs", "rungs", "differences", "load", "schedule"} <= set(found)
    assert found["costs"][0]["step_seconds"] > 0


def test_a_small_budget_is_refused_before_training(tmp_path):
    """Fails if runs start, or no budget is named that could."""
    result = invoke(
        *("--tasks", "parity", "--lengths", 8, "--mixers", "linear", "--budget", "8s"),
        *("--dim", 8, "--heads", 2, "--layers", 1, "--out", tmp_path),
    )
    assert result.exit_code == 1 and "The budget is too small for parity at 8" in result.stderr
    assert "--budget" in result.stderr and not (tmp_path / "runs").exists()
