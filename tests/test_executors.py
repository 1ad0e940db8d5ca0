"""Executors: real submitit jobs, real Ray tasks, and the folder they communicate through."""

import os
import signal
import sys

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.compare import ComparisonPlan, Schedule, plan_runs
from regard.compare.executors import LocalExecutor, SlurmExecutor, create_executor
from regard.compare.ledger import DONE, FAILED, INTERRUPTED
from regard.folder_lock import lock_folder
from regard.models import module_spec
from regard.train.run import RESULT_FILE, read_result, run_training
from regard.train.settings import TrainSettings

TINY = TrainSettings(steps=3, batch_size=4, eval_every=3, eval_examples=8, save_every=3)
ENDLESS = TrainSettings(
    steps=10**7, batch_size=4, eval_every=10**7, eval_examples=8, save_every=10**7
)
SUBMITIT = module_spec("slurm", cluster="local")
NO_EXTRA = "the extra sweep is not installed"


def planned(*mixers, settings=TINY):
    plan = ComparisonPlan(
        tasks=[module_spec("parity")],
        mixers=[module_spec(name) for name in mixers],
        lengths=(8,),
        dim=8,
        heads=2,
        layers=1,
        settings=settings,
    )
    return plan_runs(plan)


@pytest.fixture(params=["slurm", pytest.param("ray", marks=pytest.mark.slow)])
def executor(request, tmp_path):
    """A real submitit or Ray executor."""
    package = {"slurm": "submitit", "ray": "ray"}[request.param]
    pytest.importorskip(package, reason=NO_EXTRA)
    spec = SUBMITIT if request.param == "slurm" else module_spec("ray")
    created = create_executor(spec, tmp_path, 2)
    yield created
    created.close()


def test_remote_runs_equal_local_runs(tmp_path, executor):
    """Fails if a remote run differs, a crash affects other runs, or Ctrl-C loses work."""
    good, bad = planned("linear")
    task = module_spec("parity", length=8, seed=-1)
    broken = bad._replace(spec=bad.spec.model_copy(update={"task": task}))
    schedule = Schedule(tmp_path, executor=executor, jobs=2)
    schedule.run([good, broken])
    first, second = schedule.ledger.entries()
    assert (first.status, second.status) == (DONE, FAILED) and "seed must be" in second.reason
    local = run_training(good.spec, tmp_path / "local")
    remote = first.result
    assert (local["test"], local["loss"], local["steps"]) == (remote["test"], remote["loss"], 3)
    # a run that is asked to stop saves a checkpoint
    (run,) = planned(settings=ENDLESS)
    folder = tmp_path / "runs" / run.key

    def stop(_, fraction):
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size > 500:
            raise KeyboardInterrupt

    schedule.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        schedule.run([run])
    assert list(folder.glob("checkpoints/step-*")) and not (folder / RESULT_FILE).exists()
    assert (folder / "log.txt").read_text().startswith(INTERRUPTED)


def compare(*arguments):
    common = ("--mixers", "linear", "--tasks", "parity", "--lengths", "8")
    return CliRunner().invoke(app, ("compare", *common, *map(str, arguments)))


@pytest.mark.parametrize("package", ["submitit", "ray"])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, package):
    """Fails if a user without the extra sees a traceback."""
    monkeypatch.setitem(sys.modules, package, None)
    name = {"submitit": "slurm", "ray": "ray"}[package]
    result = compare("--out", tmp_path / "x", "--executor", name)
    assert result.exit_code == 1
    assert f"needs the package {package}: pip install 'regard[sweep]'" in result.stderr
    assert not (tmp_path / "x" / "plan.json").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (module_spec("slrum"), "did you mean 'slurm'"),
        (module_spec("local", cores=2), "--executor local has no option 'cores': it has no opt"),
        (module_spec("slurm", partitoin="x"), "did you mean 'partition'"),
        (module_spec("slurm", cores=0), "cores must be an integer >= 1"),
        (module_spec("slurm", memory=-1), "memory must be a finite number above 0"),
    ],
)
def test_wrong_executors_are_errors(tmp_path, spec, message):
    """Fails if a typing error is found out in a queue."""
    with pytest.raises(ValueError, match=message):
        create_executor(spec, tmp_path, 1)


def test_slurm_without_a_cluster_is_an_error(tmp_path, monkeypatch):
    """Fails if a machine without SLURM gets a traceback, or runs the jobs elsewhere."""
    pytest.importorskip("submitit", reason=NO_EXTRA)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="Use --executor local to run on this machine"):
        SlurmExecutor(tmp_path, 1)


def test_slurm_jobs_request_their_resources(tmp_path):
    """Fails if options do not reach the job, or its limit is ignored."""
    pytest.importorskip("submitit", reason=NO_EXTRA)
    executor = SlurmExecutor(tmp_path, 1, cores=2, memory=8, cluster="local")
    requested = {}
    methods = {
        "update_parameters": lambda self, **parameters: requested.update(parameters),
        "submit": lambda *_: None,
    }
    executor.submitit = type("FakeSubmitit", (), methods)()
    executor.start(tmp_path, 600.0)
    assert requested == {"timeout_min": 13} and executor.threads == 2
    executor.start(tmp_path, None)
    assert requested == {"timeout_min": 60}


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    """Fails if a run that is in progress elsewhere is started again in the same folder."""
    (run,) = planned()
    schedule = Schedule(tmp_path)
    folder = tmp_path / "runs" / run.key
    folder.mkdir(parents=True)
    with lock_folder(folder):
        schedule.run([run])
    assert "is working in" in schedule.ledger.entries()[0].reason
    schedule.run([run])
    assert schedule.ledger.entries()[0].status == DONE
    result = CliRunner().invoke(app, ["runs", "delete", str(folder), "--yes"])
    assert result.exit_code == 0 and not folder.exists()


@pytest.mark.parametrize("victim", ["process", "fork", "server"])
def test_a_killed_process_has_a_reason(tmp_path, victim):
    """Fails if a process killed by the system, for example out of memory, leaves no reason, or if
    no further run can be started."""
    (run,) = planned(settings=ENDLESS)
    (other,) = planned()
    executor = LocalExecutor(tmp_path, 1)
    if victim == "process":
        executor.forks = False
    elif not executor.forks:
        pytest.skip("runs are forked on Linux without an accelerator only")

    def kill(_, fraction):
        if not fraction:  # before its first step
            return
        (active,) = executor.server.pids.values() if executor.forks else [handles[0].process.pid]
        os.kill(executor.server.process.pid if victim == "server" else active, signal.SIGKILL)

    handles = []
    start = executor.start
    executor.start = lambda *arguments: handles.append(start(*arguments)) or handles[-1]
    schedule = Schedule(tmp_path, executor=executor, on_progress=kill)
    schedule.run([run])
    reason = schedule.ledger.entries()[0].reason
    expected = "ended" if victim == "server" else "SIGKILL (possibly out of memory)"
    assert expected in reason, reason
    schedule.on_progress = lambda *_: None
    schedule.run([other])
    assert schedule.ledger.entries()[1].status == DONE
    schedule.close()


def test_jobs_share_the_cores_of_the_process(tmp_path, monkeypatch):
    """Fails if runs in a container, which may use a part of the machine, get threads for all of
    it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert [LocalExecutor(tmp_path, jobs).threads for jobs in (1, 2, 4, 8)] == [6, 3, 1, 1]


def test_a_fork_learns_what_a_process_learns(tmp_path):
    """Fails if a run depends on how its process was started, or reads the data of another."""
    runs = planned("linear")
    curves = []
    for forks in (True, False):
        executor = LocalExecutor(tmp_path, 2)
        executor.forks = forks and executor.forks
        schedule = Schedule(tmp_path / str(forks), executor=executor, jobs=2)
        schedule.run(runs)
        schedule.close()
        results = [read_result(tmp_path / str(forks) / "runs" / run.key) for run in runs]
        curves.append(
            [(each["curve"][-1]["loss"], each["test"], each["steps"]) for each in results]
        )
    assert curves[0] == curves[1]


def test_the_executor_option_is_used(tmp_path, monkeypatch):
    """Fails if --executor is accepted and ignored."""
    calls = []
    monkeypatch.setattr(
        "regard.compare.executors.create_executor",
        lambda *arguments: calls.append(arguments) or LocalExecutor(*arguments[1:]),
    )
    monkeypatch.setattr(Schedule, "run", lambda self, runs: None)
    spec = "slurm:partition=cpu:cores=4"
    assert compare("--jobs", 3, "--executor", spec, "--out", tmp_path).exit_code == 0
    assert calls == [(module_spec("slurm", partition="cpu", cores=4), tmp_path, 3)]
