"""Damaged run folders: each file in turn, with each kind of damage, under each command that reads
it. A command succeeds or ends with one message; it never raises, and never touches other files."""

import json
import os
import random
import shutil
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fuzzing import examples
from regard.cli import app

SEED = 17
TRAIN = ("train", "--task", "lm", "--length", "12", "--dim", "8", "--heads", "2", "--layers", "1")
TRAIN += ("--batch-size", "2", "--set", "eval_examples=2", "--set", "save_every=1", "--steps", "3")
COMPARE = ("compare", "--mixers", "fnet", "--tasks", "parity", "--lengths", "8", "--steps", "1")


def call(*arguments):
    """Exit code and output of a command; an exception of any other kind fails the test."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    assert result.exit_code == 0 or "error: " in result.stderr, result.output
    return result


# ---------------------------------------------------------------------------------------- damages
def edit(change):
    """Damage the first value of a JSON file, at the top and one level down."""

    def damage(path, draw):
        try:
            value = json.loads(
                path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text()
            )
        except ValueError:  # not JSON: damage it as text
            path.write_text(json.dumps(change))
            return
        inner = [v for v in value.values() if isinstance(v, dict) and v]
        target = draw.choice([value, *inner])
        target[draw.choice(list(target))] = change
        path.write_text(json.dumps(value))

    return damage


def nest(path, draw):
    path.write_text("[" * 100_000)


def replace(content):
    return lambda path, draw: path.write_bytes(content)


def truncate(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])


def flip(path, draw):
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def become_folder(path, draw):
    path.unlink()
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def become_link(path, draw):
    """A link to a file of somebody else."""
    path.unlink()
    path.symlink_to(path.parents[len(path.parts) - 1 - path.parts.index("run")] / ".." / "other")


def become_unreadable(path, draw):
    path.chmod(0)


DAMAGES = {
    "missing": lambda path, draw: path.unlink(),
    "empty": replace(b""),
    "truncated": truncate,
    "one bit": flip,
    "noise": lambda path, draw: path.write_bytes(draw.randbytes(300)),
    "not UTF-8": replace(b'{"steps": "\xff\xfe"}'),
    "list": replace(b"[1, 2]"),
    "number": replace(b"5"),
    "null": replace(b"null"),
    "no keys": replace(b"{}"),
    "extra key": lambda path, draw: (
        path.write_text(path.read_text().replace("{", '{"extra": 1, ', 1))
        if path.suffix.startswith(".json")
        else path.write_bytes(path.read_bytes() + b"extra")
    ),
    "text": edit("x"),
    "NaN": edit(float("nan")),
    "infinity": edit(float("-inf")),
    "huge integer": edit(10**400),
    "negative": edit(-(2**63)),
    "nested list": edit([[]]),
    "object": edit({"x": 1}),
    "None": edit(None),
    "deep nesting": nest,
    "folder": become_folder,
    "link": become_link,
    "unreadable": become_unreadable,
}


# ------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    call(*TRAIN, "--out", folder)
    assert (folder / "result.json").exists()
    return folder


FILES = ("spec.json", "task.json", "result.json", "metrics.jsonl", "lock", "model/config.json")
FILES += ("model/model.safetensors",)
FILES += tuple(
    f"checkpoints/step-{step:08d}/{name}"
    for step in (2, 3)
    for name in ("manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors")
)
COMMANDS = {
    "list": ("runs", "list"),
    "show": ("runs", "show"),
    "show as JSON": ("runs", "show", "--json"),
    "eval": ("eval", "--max-examples", "2"),
    "predict": ("predict", "--text", "abc"),
    "generate": ("generate", "--prompt", "ab", "--max-new-tokens", "3"),
    "resume": ("train", "--resume"),
    "longer": ("train", "--steps", "4", "--resume"),
    "delete": ("runs", "delete", "--yes"),
}


def others(folder):
    """Files that are not part of the run, with their content; damaged checkpoints are renamed."""
    found = {}
    for path in sorted(folder.parent.rglob("*")):
        if path.name in ("other", ".env", "mine.txt") and path.is_file():
            found[str(path).replace("/broken-step-", "/step-")] = path.read_bytes()
    return found


CASES = list(product(FILES, DAMAGES, COMMANDS, ("finished", "unfinished")))


@pytest.mark.parametrize("part", range(4))
def test_a_damaged_run_is_read_or_refused(part, finished, tmp_path):
    """Fails if a command ends in a traceback, or changes files that are not of the run."""
    count = examples(40, len(CASES) // 4)
    drawn = random.Random(SEED + part).sample(CASES[part::4], count)
    for number, (name, damage, command, stage) in enumerate(drawn):
        draw = random.Random(f"{SEED} {name} {damage}")
        folder = Path(shutil.copytree(finished, tmp_path / str(number) / "run"))
        (folder.parent / "other").write_bytes(b"")
        (folder / "model" / ".env").write_text("mine")
        (folder / "checkpoints" / "step-best").mkdir()
        (folder / "checkpoints" / "step-best" / "mine.txt").write_text("mine")
        if stage == "unfinished" and name != "result.json":
            (folder / "result.json").unlink()
        try:
            DAMAGES[damage](folder / name, draw)
        except (UnicodeDecodeError, AttributeError):  # this damage is for JSON files
            continue
        before = others(folder)
        try:
            call(*COMMANDS[command], folder)
        except Exception as error:
            raise AssertionError(f"{name}, {damage}: {command}, {stage}") from error
        after = others(folder)
        assert before == after, (name, damage, command, stage)
        if damage == "unreadable" and (folder / name).exists():
            (folder / name).chmod(0o600)
        shutil.rmtree(folder.parent)


# ------------------------------------------------------------------------------------ comparisons
@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    call(*COMPARE, "--dim", "8", "--heads", "2", "--layers", "1", "--out", folder, "--csv")
    return folder


def test_a_damaged_comparison_is_read_or_refused(compared, tmp_path):
    """Fails if `regard report` ends in a traceback for a damaged file of a comparison."""
    runs = sorted(str(p.relative_to(compared)) for p in compared.glob("runs/*/*") if p.is_file())
    models = sorted(str(p.relative_to(compared)) for p in compared.glob("runs/*/model/*"))
    cases = list(product(("plan.json", "ledger.sqlite", *runs, *models), DAMAGES))
    for number, (name, damage) in enumerate(
        random.Random(SEED).sample(cases, examples(20, len(cases)))
    ):
        folder = Path(shutil.copytree(compared, tmp_path / str(number) / "run"))
        (folder.parent / "other").write_bytes(b"")
        try:
            DAMAGES[damage](folder / name, random.Random(f"{SEED} {name} {damage}"))
        except (UnicodeDecodeError, AttributeError):
            continue
        try:
            call("report", folder, "--json")
        except Exception as error:
            raise AssertionError(f"{name}, {damage}") from error
        assert (folder.parent / "other").read_bytes() == b""
        if not (folder / name).is_symlink() and (folder / name).exists():
            os.chmod(folder / name, 0o700)
        shutil.rmtree(folder.parent)
