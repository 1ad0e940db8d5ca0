"""Where runs are run: real jobs of submitit, real tasks of Ray, and the folder that all of them speak through."""

import fcntl
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.compare import ComparisonPlan, Schedule, plan_runs
from regard.compare.executors import LocalExecutor, SlurmExecutor, create_executor
from regard.compare.ledger import DONE, FAILED, INTERRUPTED
from regard.models import ModuleSpec, module_spec
from regard.train.run import RESULT_FILE, run_training
from regard.train.settings import TrainSettings

TINY = TrainSettings(steps=3, batch=4, evaluate=3, examples=8, save=3)
ENDLESS = TrainSettings(steps=10**7, batch=4, evaluate=10**7, examples=8, save=10**7)
SUBMITIT = module_spec("slurm", cluster="local")


def planned(*mixers, settings=TINY):
    names = [module_spec(name) for name in mixers]
    return plan_runs(
        ComparisonPlan(
            tasks=[module_spec("parity")],
            mixers=names,
            lengths=(8,),
            dim=8,
            heads=2,
            layers=1,
            settings=settings,
        )
    )


@pytest.fixture(params=["slurm", pytest.param("ray", marks=pytest.mark.slow)])
def place(request, tmp_path):
    """Each place but this machine's processes, for real."""
    pytest.importorskip(
        {"slurm": "submitit", "ray": "ray"}[request.param],
        reason="the extra sweep is not installed",
    )
    made = create_executor(
        SUBMITIT if request.param == "slurm" else module_spec("ray"), tmp_path, 2
    )
    yield made
    made.close()


def test_elsewhere_is_as_here(tmp_path, place):
    """Fails if a run that is sent away has another result, a crash takes others with it, Ctrl-C loses what was done, or a
    result is read from anywhere but the folder of its run."""
    good, bad = planned("linear")
    broken = bad._replace(
        spec=bad.spec.model_copy(update={"task": module_spec("parity", length=8, seed=-1)})
    )
    away = Schedule(tmp_path, place=place, jobs=2)
    away.run([good, broken])
    first, second = away.ledger.entries()
    assert (first.status, second.status) == (DONE, FAILED) and "seed must be" in second.why
    here = run_training(good.spec, tmp_path / "here")
    assert (here["test"], here["loss"], here["steps"]) == (
        first.result["test"],
        first.result["loss"],
        3,
    )
    # asked to stop, a run keeps what it did, and goes on
    (cell,) = planned(settings=ENDLESS)
    folder = tmp_path / "runs" / cell.key

    def stop(_, fraction):
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 500:
            raise KeyboardInterrupt

    away.watch = stop
    with pytest.raises(KeyboardInterrupt):
        away.run([cell])
    assert list(folder.glob("checkpoints/step-*")) and not (folder / RESULT_FILE).exists()
    assert (folder / "log.txt").read_text().startswith(INTERRUPTED)


@pytest.mark.parametrize("package", ["submitit", "ray"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
    """Fails if somebody without the extra sees a traceback."""
    monkeypatch.setitem(sys.modules, package, None)
    name = {"submitit": "slurm", "ray": "ray"}[package]
    given = (
        "compare",
        "--mixers",
        "linear",
        "--tasks",
        "parity",
        "--lengths",
        "8",
        "--out",
        str(tmp_path / "x"),
        "--on",
        name,
    )
    done = CliRunner().invoke(app, given)
    assert (
        done.exit_code == 1
        and f"needs the package {package}: pip install 'regard[sweep]'" in done.stderr
    )
    assert not (tmp_path / "x" / "plan.json").exists()


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (module_spec("slrum"), "did you mean 'slurm'"),
        (module_spec("local", cores=2), "--on local takes no 'cores': it takes none"),
        (module_spec("slurm", partitoin="x"), "did you mean 'partition'"),
        (module_spec("slurm", cores=0), "cores must be an integer >= 1"),
        (module_spec("slurm", memory=-1), "memory must be a finite number above 0"),
    ],
)
def test_wrong_places_are_named(tmp_path, on, words):
    """Fails if a typing error is found out in a queue."""
    with pytest.raises(ValueError, match=words):
        create_executor(on, tmp_path, 1)


def test_no_cluster_is_an_answer(tmp_path, monkeypatch):
    """Fails if a machine without SLURM gets a traceback, or runs the jobs somewhere else."""
    pytest.importorskip("submitit", reason="the extra sweep is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--on local runs on this machine"):
        SlurmExecutor(tmp_path, 1)


def test_a_job_asks_for_what_it_needs(tmp_path):
    """Fails if options do not reach the job, or its limit is not that of its share of the budget."""
    pytest.importorskip("submitit", reason="the extra sweep is not installed")
    place = SlurmExecutor(tmp_path, 1, cores=2, memory=8, cluster="local")
    asked = {}
    place.executor = type(
        "Executor",
        (),
        {"update_parameters": lambda self, **p: asked.update(p), "submit": lambda *_: None},
    )()
    place.start(tmp_path, 600.0)
    assert asked == {"timeout_min": 13} and place.threads == 2
    place.start(tmp_path, None)
    assert asked == {"timeout_min": 60}


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    """Fails if a run that is still at work elsewhere is begun a second time in the same folder."""
    (cell,) = planned()
    folder = tmp_path / "runs" / cell.key
    folder.mkdir(parents=True)
    schedule = Schedule(tmp_path)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        schedule.run([cell])
    assert "another process is at work" in schedule.ledger.entries()[0].why
    schedule.run([cell])
    assert schedule.ledger.entries()[0].status == DONE
    assert (
        CliRunner().invoke(app, ["runs", "delete", str(folder), "--yes"]).exit_code == 0
        and not folder.exists()
    )


def test_what_kills_a_process_is_said(tmp_path):
    """Fails if a process that the system killed, as where memory runs out, leaves no reason."""
    (cell,) = planned(settings=ENDLESS)

    class Deadly(LocalExecutor):
        def start(self, folder, seconds):
            job = super().start(folder, seconds)
            threading.Thread(target=lambda: (time.sleep(0.5), job.process.kill())).start()
            return job

    schedule = Schedule(tmp_path, place=Deadly(tmp_path, 1))
    schedule.run([cell])
    assert "SIGKILL, as is done where memory runs out" in schedule.ledger.entries()[0].why


def test_the_command_line_reaches_the_place(tmp_path, monkeypatch):
    """Fails if --on is accepted and ignored."""
    seen = []
    monkeypatch.setattr(
        "regard.cli.comparing.create_executor",
        lambda *given: seen.append(given) or LocalExecutor(*given[1:]),
    )
    monkeypatch.setattr(Schedule, "run", lambda self, cells: None)
    given = (
        "--mixers",
        "linear",
        "--tasks",
        "parity",
        "--lengths",
        "8",
        "--jobs",
        "3",
        "--on",
        "slurm:partition=cpu:cores=4",
    )
    assert CliRunner().invoke(app, ("compare", *given, "--out", str(tmp_path))).exit_code == 0
    assert seen == [
        (ModuleSpec(name="slurm", arguments={"partition": "cpu", "cores": 4}), tmp_path, 3)
    ]
