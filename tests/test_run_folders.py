"""Folders that commands write to: what is not a run is refused, one process works in a run at a
time, and nothing is deleted or overwritten that Regard did not write."""

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.compare.ledger import Ledger
from regard.compare.plan import ComparisonPlan
from regard.compare.record import ComparisonRecord, write_record
from regard.folder_lock import lock_folder
from regard.json_files import write_json
from regard.models import ModuleSpec, save
from regard.models.build import build
from regard.train import checkpoint
from regard.train.run import build_task, model_config, run_training
from resume_cases import spec

TRAIN = ("train", "--task", "copy:length=9:symbols=4", "--dim", "8", "--heads", "2", "--layers")
TRAIN += ("1", "--batch-size", "4", "--set", "eval_examples=8", "--steps", "6")
SOURCE = str(Path(__file__).parent.parent / "src")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def content(folder):
    """Every file with its bytes, and every link with its target."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of six steps with a checkpoint every two."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run(*TRAIN, "--set", "save_every=2", "--out", folder)
    return folder


@pytest.fixture
def unfinished(finished, tmp_path):
    """The same run before its model and its result were written."""
    folder = Path(shutil.copytree(finished, tmp_path / "unfinished"))
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    return folder


def same_weights(folder, other):
    a, b = (load_file(each / "model" / "model.safetensors") for each in (folder, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ------------------------------------------------------------------------- files of somebody else
@pytest.mark.parametrize(
    "name",
    ["checkpoints/step-best/notes.txt", "model/.env", "model/model.safetensors", "spec.json"],
)
def test_train_refuses_a_folder_that_is_not_a_run(tmp_path, name):
    """Fails if training deletes or overwrites files of somebody else."""
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    before = content(tmp_path)
    said = run(*TRAIN, "--out", tmp_path / "mine", code=1).stderr
    assert "not a run" in said or "spec.json" in said
    assert content(tmp_path) == before


def test_resuming_keeps_foreign_files_in_the_folder_of_a_run(unfinished, tmp_path):
    """Fails if notes beside checkpoints, a dot file in model/ or the target of a link is lost."""
    other = tmp_path / "other"
    checkpoint.save(other, 1, {"model": {"w": torch.ones(2)}}, {})
    root = unfinished / "checkpoints"
    foreign = [root / "step-best" / "a.txt", root / ".partial-x" / "b.txt"]
    foreign += [unfinished / "model" / ".env", root / "step-00000004" / "notes.txt"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (root / "step-00000001").symlink_to(other / "step-00000001")
    (root / ".partial-3").symlink_to(other)
    before = content(other)
    run("train", "--resume", unfinished, "--steps", 12)
    assert all(path.read_text() == "mine" for path in foreign)
    assert content(other) == before
    steps = {name[-2:] for name in checkpoints(unfinished) if name.startswith("step-0")}
    assert steps == {"01", "04", "10", "12"}  # a link, one with notes, and the last two


def test_models_of_others_are_not_overwritten(finished, unfinished, tmp_path):
    """Fails if `save` or a resumed run replaces weights or a configuration that it did not write,
    or if the run finds out only after training."""
    config = model_config(spec(), build_task(spec()))
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(FileExistsError, match=f"{name} that Regard did not write"):
            save(build(config), tmp_path)
        (tmp_path / name).unlink()
    (unfinished / "model").mkdir()
    (unfinished / "model" / "model.safetensors").write_bytes(b"mine")
    before = content(unfinished)
    assert "did not write" in run("train", "--resume", unfinished, code=1).stderr
    assert content(unfinished) == before


def test_checkpoints_behind_a_link_are_refused(unfinished, tmp_path):
    """Fails if the checkpoints of another run are deleted."""
    (unfinished / "checkpoints").rename(tmp_path / "elsewhere")
    (unfinished / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    assert "is a symbolic link" in run("train", "--resume", unfinished, code=1).stderr
    assert content(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("name", ["plan.json", "notes.txt", "runs/a/b.txt", "report.html"])
def test_compare_refuses_a_folder_that_is_not_a_comparison(tmp_path, name):
    """Fails if a comparison overwrites a plan.json or a report.html of somebody else."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    words = ("compare", "--mixers", "linear", "--tasks", "parity", "--lengths", 8)
    run(*words, "--out", tmp_path, code=1)
    assert content(tmp_path) == {name: b"mine"}


def test_a_ledger_behind_a_link_is_refused(tmp_path):
    """Fails if the database, or the file, of somebody else gets the table of a comparison."""
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.execute("CREATE TABLE mine (a)")
    (tmp_path / "empty").write_bytes(b"")
    words = ("compare", "--mixers", "linear", "--tasks", "parity", "--lengths", 8)
    for target in ("other.sqlite", "empty", "missing"):
        folder = tmp_path / f"to-{target}"
        folder.mkdir()
        (folder / "ledger.sqlite").symlink_to(tmp_path / target)
        before = content(tmp_path)
        said = run(*words, "--out", folder, code=1).stderr
        assert "ledger.sqlite is a symbolic link" in said
        assert content(tmp_path) == before


def test_runs_delete_refuses_foreign_files_in_subfolders(finished, tmp_path):
    """Fails if deleting a run takes a file along that it did not write, or a run in progress."""
    for name in ("model/.env", "checkpoints/best/notes.txt", "checkpoints/step-00000006/notes"):
        folder = Path(shutil.copytree(finished, tmp_path / "copy"))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
        assert "not part of a run" in run("runs", "delete", folder, "--yes", code=1).stderr
        assert (folder / name).read_text() == "mine"
        shutil.rmtree(folder)
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    with lock_folder(folder):
        assert "working in" in run("runs", "delete", folder, "--yes", code=1).stderr
    run("runs", "delete", folder, "--yes")
    assert not folder.exists()


# --------------------------------------------------------------------------------- other versions
OTHER_VERSION = "was written by another version of Regard, or edited: "


def test_a_run_of_another_version_is_named_as_such(finished, tmp_path):
    """Fails if files with other fields are a traceback, or a list of validation errors."""
    folder = Path(shutil.copytree(finished, tmp_path / "runs" / "old"))

    def edit(name, change):
        before = (folder / name).read_text()
        values = json.loads(before)
        change(values)
        (folder / name).write_text(json.dumps(values))
        return before

    def expect(name, *words, code=1, fields=""):
        said = run(*words, code=code).stderr
        assert f"{folder / name} {OTHER_VERSION}{fields}" in said, said
        assert words[:2] == ("runs", "list") or said.count("\n") == 1

    before = edit("result.json", lambda values: [values.pop(name) for name in ("best", "curve")])
    expect("result.json", "runs", "show", folder, fields="no 'best'; no 'curve'")
    expect("result.json", "runs", "list", tmp_path, code=0)
    (folder / "result.json").write_text(before)
    before = edit("spec.json", lambda values: values["settings"].update(momentum=0.9))
    for words in (("runs", "show"), ("eval",), ("train", "--resume"), ("predict", "--text", "a")):
        expect("spec.json", *words, folder, fields="'settings.momentum' is unknown")
    with pytest.raises(ValueError, match=OTHER_VERSION):
        regard.load(folder)
    (folder / "spec.json").write_text(before)
    edit("task.json", lambda values: values.update(processor={"words": []}))
    with pytest.raises(ValueError, match=f"task.json {OTHER_VERSION}This task has no processor"):
        regard.load(folder)


def test_a_comparison_of_another_version_is_named_as_such(tmp_path):
    """Fails if a plan, a table or a result with other fields is a traceback."""
    plan = ComparisonPlan(tasks=[ModuleSpec(name="parity")], mixers=[ModuleSpec(name="linear")])
    record = ComparisonRecord(plan=plan, command="", keys=["a"])
    write_record(tmp_path, record)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    name = {"mixer": {"name": "linear"}, "task": {"name": "parity"}, "length": 8, "seed": 0}
    ledger.add("a", "a", name)
    ledger.finish("a", {"steps": 3, "test": 0.5})
    ledger.close()
    words = ("compare", "--mixers", "linear", "--tasks", "parity", "--out", tmp_path)
    said = run("report", tmp_path, code=1).stderr
    assert f"Run a in {tmp_path / 'ledger.sqlite'} {OTHER_VERSION}no 'seconds'" in said
    stored = record.model_dump(mode="json")
    del stored["plan"]["tasks"]
    stored["plan"]["budgets"] = 3
    write_json(tmp_path / "plan.json", stored)
    for command in (("report", tmp_path), words):
        said = run(*command, code=1).stderr
        assert f"{tmp_path / 'plan.json'} {OTHER_VERSION}ComparisonPlan has no 'budgets'" in said
    write_record(tmp_path, record)
    (tmp_path / "ledger.sqlite").unlink()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as file:
        file.execute("CREATE TABLE runs (key TEXT, name TEXT, state TEXT)")
    said = run("report", tmp_path, code=1).stderr
    assert "is not a ledger of this version of Regard: no such column: status" in said


# ------------------------------------------------------------------------------------------ locks
LOCKED = """
import sys
from pathlib import Path
from regard.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_train_in_one_folder(unfinished):
    """Fails if both work in it, if the message does not name the other, or if the lock of a process
    that was killed stays."""
    before = content(unfinished)
    other = subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(unfinished)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    try:
        assert other.stdout.readline() == "locked\n"
        said = run("train", "--resume", unfinished, code=1).stderr
        assert f"Another process ({other.pid}) is working in {unfinished}" in said
        assert {**content(unfinished), "lock": b""} == {**before, "lock": b""}
    finally:
        other.kill()
        other.wait(30)
    run("train", "--resume", unfinished)


def test_a_lock_is_exclusive_in_one_process_too(tmp_path):
    """Fails if a second lock releases the first, as POSIX does when a descriptor is closed."""
    with lock_folder(tmp_path):
        for _ in range(2):
            with pytest.raises(ValueError, match="already working"), lock_folder(tmp_path):
                pass
    with lock_folder(tmp_path):
        pass
    (tmp_path / "lock").write_text("a file of somebody else, longer than the header " * 20)
    with pytest.raises(ValueError, match="not a lock file"), lock_folder(tmp_path):
        pass


# ---------------------------------------------------------------------------- damaged checkpoints
def damage(folder, *steps):
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])


def test_a_damaged_checkpoint_is_named_and_kept(finished, unfinished):
    """Fails if a checkpoint is passed over without a word, or deleted."""
    damage(unfinished, 6)
    result = run("train", "--resume", unfinished)
    assert "step-00000006/model.safetensors does not match its checksum" in result.stderr
    assert "Resuming from" in result.stderr and "step-00000004" in result.stderr
    assert checkpoints(unfinished) == ["broken-step-00000006", "step-00000004", "step-00000006"]
    assert same_weights(unfinished, finished)


def test_without_a_readable_checkpoint_a_run_starts_again_only_if_told(finished, unfinished):
    """Fails if training starts at step 0 without a word, or not with --restart."""
    assert "is intact" in run("train", "--resume", unfinished, "--restart", code=1).stderr
    damage(unfinished, 4, 6)
    before = content(unfinished)
    said = run("train", "--resume", unfinished, code=1).stderr
    assert "step-00000004/model" in said and "step-00000006/model" in said and "--restart" in said
    assert {**content(unfinished), "lock": b""} == {**before, "lock": b""}
    result = run("train", "--resume", unfinished, "--restart")
    assert "Starting again at step 0" in result.stderr
    broken = ["broken-step-00000004", "broken-step-00000006"]
    assert checkpoints(unfinished) == [*broken, "step-00000004", "step-00000006"]
    assert same_weights(unfinished, finished)


def test_a_finished_run_with_damaged_checkpoints_keeps_its_result(finished, tmp_path):
    """Fails if --steps deletes the result of a run that cannot continue."""
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    damage(folder, 4, 6)
    before = content(folder)
    assert "--restart" in run("train", "--resume", folder, "--steps", 12, code=1).stderr
    assert content(folder) == before
    assert "is finished" in run("train", "--resume", folder, "--restart", code=1).stderr


@pytest.mark.parametrize("key", ["seconds", "curve", "tokens"])
def test_an_edited_manifest_is_damage(unfinished, key):
    """Fails if values of a manifest that were changed by hand are used."""
    path = unfinished / "checkpoints" / "step-00000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["metadata"][key] = "x"
    path.write_text(json.dumps(manifest))
    assert "it was modified" in run("train", "--resume", unfinished).stderr


def test_damaged_rows_are_dropped_and_counted(unfinished):
    """Fails if one damaged line costs the rows after it, or is dropped without a word."""
    path = unfinished / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "\0\0", "[1]", '{"step": NaN}', *lines[1:], '{"st']))
    assert "Left out 3 damaged lines" in run("train", "--resume", unfinished).stderr
    assert path.read_text().splitlines() == lines


# ------------------------------------------------------------------------------ results and disks
@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", "{}", "[" * 100_000, "\0", '{"steps": NaN}', f'{{"steps": 1{"0" * 400}}}'],
)
def test_an_edited_result_is_one_line(finished, tmp_path, text):
    """Fails if a command ends in a traceback, or `runs list` does not list the other runs."""
    folder = Path(shutil.copytree(finished, tmp_path / "edited"))
    shutil.copytree(finished, tmp_path / "fine")
    (folder / "result.json").write_text(text)
    listed = run("runs", "list", tmp_path)
    assert "fine" in listed.stdout and "skipped: " in listed.stderr
    for words in (("runs", "show"), ("train", "--resume")):
        said = run(*words, folder, code=1).stderr
        assert "result.json" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("values", [{"test": "x"}, {"curve": [{"step": 1}]}, {"tokens": 10**400}])
def test_a_result_with_wrong_values_is_named(finished, tmp_path, values):
    """Fails if a value of the wrong type is found when it is printed."""
    folder = Path(shutil.copytree(finished, tmp_path / "edited"))
    result = json.loads((folder / "result.json").read_text()) | values
    (folder / "result.json").write_text(json.dumps(result))
    assert next(iter(values)) in run("train", "--resume", folder, code=1).stderr


def test_a_full_disk_is_not_a_bad_ledger(tmp_path, monkeypatch):
    """Fails if the message for a full disk blames the file."""

    class FullDisk(sqlite3.Connection):
        def execute(self, *_):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    usual = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: usual(*a, **k, factory=FullDisk))
    with pytest.raises(OSError, match="No space left on device") as caught:
        Ledger(tmp_path / "ledger.sqlite")
    assert caught.value.errno == errno.ENOSPC and "ledger.sqlite" in str(caught.value)
    words = ("compare", "--mixers", "linear", "--tasks", "parity", "--lengths", 8)
    said = run(*words, "--out", tmp_path / "x", code=1).stderr
    assert "the disk is full" in said and str(tmp_path / "x" / "ledger.sqlite") in said


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    """Fails if the error of a write does not say which file."""

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: .*spec\.json"):
        write_json(tmp_path / "spec.json", {})
    said = run(*TRAIN, "--out", tmp_path / "x", code=1).stderr
    assert "No space left on device" in said and "spec.json" in said


# ----------------------------------------------------------------------------------------- Ctrl-C
@pytest.mark.parametrize("seconds", [0.15, 0.6, 1.5])
def test_ctrl_c_while_modules_are_imported(tmp_path, seconds):
    """Fails if Ctrl-C in the first seconds prints a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *TRAIN, "--steps", "100000", "--out", str(tmp_path / "x")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        # a process that was started in the background of a script ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("error: ")


def test_ctrl_c_in_any_command_is_one_line(finished, monkeypatch):
    """Fails if a command without a message of its own prints a traceback or nothing."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.training.load_run", interrupted)
    assert run("eval", finished, code=130).stderr == "error: interrupted.\n"


def test_training_from_python_refuses_too(tmp_path):
    """Fails if only the command checks the folder."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"contains 'notes\.txt' and is not a run"):
        run_training(spec(), tmp_path)
    assert content(tmp_path) == {"notes.txt": b"mine"}


# ------------------------------------------------------------------------- found by a second attack
def test_a_refused_extension_keeps_the_result(finished, tmp_path):
    """Fails if `--resume --steps` deletes the result of a run that it then cannot continue."""
    (tmp_path / "texts.txt").write_text("some words and others " * 60)
    folder = tmp_path / "run"
    small = ("--length", 8, "--dim", 8, "--heads", 2, "--layers", 1, "--set", "eval_examples=2")
    data = ("--task", "lm", "--data", tmp_path / "texts.txt")
    run("train", *data, *small, "--steps", 2, "--out", folder)
    before = (folder / "result.json").read_bytes()
    (tmp_path / "texts.txt").rename(tmp_path / "away.txt")
    refused = run("train", "--resume", folder, "--steps", 4, code=1)
    assert "does not exist" in refused.stderr
    (tmp_path / "away.txt").rename(tmp_path / "texts.txt")
    with lock_folder(folder):
        run("train", "--resume", folder, "--steps", 4, code=1)
    assert (folder / "result.json").read_bytes() == before
    run("train", "--resume", folder, "--steps", 4)
    assert json.loads((folder / "result.json").read_text())["steps"] == 4


COMPARE = ("compare", "--mixers", "fnet", "--tasks", "parity", "--lengths", 8, "--steps", 1)
COMPARE += ("--dim", 8, "--heads", 2, "--layers", 1, "--csv")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "comparison"
    run(*COMPARE, "--out", folder)
    return folder


def test_databases_of_others_are_not_changed(tmp_path):
    """Fails if somebody's ledger.sqlite or lock counts as ours."""
    for name, command in (("ledger.sqlite", COMPARE), ("lock", TRAIN)):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        with closing(sqlite3.connect(folder / name)) as connection:
            connection.execute("CREATE TABLE taxes (year INTEGER)")
        before = content(folder)
        run(*command, "--out", folder, code=1)
        assert content(folder) == before


def test_two_comparisons_do_not_share_a_folder(compared):
    """Fails if a second command reports the runs of the first as failed."""
    with lock_folder(compared):
        assert "is already working in" in run(*COMPARE, "--out", compared, code=1).stderr


@pytest.mark.parametrize(
    ("column", "value"),
    [("result", "{}"), ("result", '"x"'), ("settings", "{}"), ("settings", "[]"), ("name", b"x")],
)
def test_an_edited_ledger_is_one_line(compared, tmp_path, column, value):
    """Fails if a row that was edited ends in a traceback."""
    folder = Path(shutil.copytree(compared, tmp_path / "comparison"))
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        connection.execute(f"UPDATE runs SET {column} = ?", (value,))
        connection.commit()
    for command in (("report", folder), ("report", folder, "--json")):
        said = run(*command, code=1).stderr
        assert "ledger.sqlite is" in said or f"ledger.sqlite {OTHER_VERSION}" in said


def test_a_page_is_not_written_through_a_link(compared, tmp_path):
    """Fails if `regard report` overwrites what a link in the folder points to."""
    folder = Path(shutil.copytree(compared, tmp_path / "comparison"))
    (tmp_path / "victim").write_text("mine")
    (folder / "report.html").unlink(missing_ok=True)
    (folder / "report.html").symlink_to("../victim")
    assert "is a symbolic link" in run("report", folder, code=1).stderr
    assert (tmp_path / "victim").read_text() == "mine"


def test_files_of_others_in_checkpoints_and_model(finished, unfinished, tmp_path):
    """Fails if names that only resemble ours are deleted or overwritten."""
    photos = unfinished / "checkpoints" / "photos-2024"
    photos.mkdir()
    (photos / "index.json").write_text("mine")
    assert "photos-2024" in run("runs", "delete", unfinished, "--yes", code=1).stderr
    partial = unfinished / "checkpoints" / ".partial-99"
    partial.mkdir()
    (partial / "mine.json").write_text("mine")
    run("train", "--resume", unfinished)
    assert (photos / "index.json").exists() and (partial / "mine.json").exists()
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    (other / "result.json").unlink()
    (other / "model" / "config.json").write_text('{"mine": 1}')
    assert "did not write" in run("train", "--resume", other, code=1).stderr
    assert (other / "model" / "config.json").read_text() == '{"mine": 1}'


def test_one_bad_run_does_not_hide_the_others(finished, unfinished):
    """Fails if metrics that cannot be read end `runs list`."""
    (unfinished / "metrics.jsonl").unlink()
    (unfinished / "metrics.jsonl").mkdir()
    shutil.copytree(finished, unfinished.parent / "good")
    listed = run("runs", "list", unfinished.parent)
    assert "good" in listed.stdout and "skipped: Cannot read" in listed.stderr


def test_messages_of_odd_values(finished, tmp_path):
    """Fails if a value that is out of range ends in words of another library."""
    diverged = run(*TRAIN, "--lr", 1e30, "--out", tmp_path / "a", code=1).stderr
    assert "Try a smaller --lr." in diverged
    too_wide = run(*TRAIN, "--dim", 1 << 40, "--out", tmp_path / "d", code=1).stderr
    assert "dim: Input should be less than or equal to 1048576" in too_wide
    assert "pydantic" not in too_wide
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for out, words in (("file/x", "file is a file"), ("link", "which does not exist")):
        refused = run(*TRAIN, "--out", tmp_path / out, code=1).stderr
        assert words in refused and "resume" not in refused
    too_large = run(*TRAIN, "--seed", 1 << 64, "--out", tmp_path / "b", code=1).stderr
    assert "seed" in too_large and "less than" in too_large
    name = os.fsdecode(b"d\xff.txt")
    not_utf8 = run("train", "--task", "lm", "--data", name, "--out", tmp_path / "c", code=1)
    assert "is not UTF-8: rename" in not_utf8.stderr
