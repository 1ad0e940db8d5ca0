"""Everything runs where the POSIX parts of Python are missing, as on Windows."""

import json
import math
import os
import subprocess
import sys

import pytest

from regard import environment, json_files
from regard.compare.formatting import describe_verdict
from regard.compare.results import Caveats, ResultRow, Verdict

# Executed by every Python process of a test before anything else.
BLOCK = """
import multiprocessing, os, sys
multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("fcntl", "resource", "termios", "pwd", "grp", "psutil"):
    sys.modules[name] = None
for name in ("getloadavg", "sched_getaffinity", "sched_setaffinity", "fork", "getuid", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
"""

USE = """
import os, sys
assert sys.modules["fcntl"] is None and not hasattr(os, "getloadavg")
import torch, regard
from regard import environment

x = torch.randn(2, 100, 32, requires_grad=True)
for name in ("vanilla", "local", "linear", "clustered"):
    regard.create(name, dim=32, heads=4)(x).sum().backward()
q = torch.randn(1, 2, 300, 16)
want = regard.attend(q, q, q, pattern=regard.Band(9, 9), backend="reference")
torch.testing.assert_close(regard.attend(q, q, q, pattern=regard.Band(9, 9)), want)
assert environment.load_average() is None and environment.peak_bytes() is None
"""


@pytest.fixture
def run(tmp_path):
    """run(*arguments): a Python process, and its children, without the POSIX parts."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": path, "REGARD_CPP": "0", "OMP_NUM_THREADS": "1"}
    variables["REGARD_CACHE"] = str(tmp_path / "cache")

    def start(*arguments):
        result = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return start


def test_library_without_posix(run):
    """Fails if importing, creating, a backward pass or the choice of a backend needs a POSIX
    module."""
    run("-c", USE)


@pytest.mark.slow
def test_commands_without_posix(run, tmp_path):
    """Fails if training, comparing (processes, locks, the log) or measuring needs a POSIX module
    or a shell."""
    shared = ("--lengths", "8", "--dim", "8", "--heads", "2", "--layers", "1", "--steps", "3")
    cli = ("-m", "regard.cli")
    compare = ("compare", "--mixers", "linear", "--tasks", "parity", *shared, "--out", "c")
    result = json.loads(run(*cli, *compare, "--json"))
    rows = {row["mixer"]: row for row in result["rows"]}
    assert rows["linear"]["score"] is not None and rows["linear"]["peak_bytes"] is None
    (folder, *_) = (tmp_path / "c" / "runs").iterdir()
    assert (folder / "log.txt").exists() and (folder / "result.json").exists()
    bench = ("bench", "local", "--lengths", "128", "--mode", "forward", "--scope", "kernel")
    limits = ("--threads", "1", "--rounds", "1", "--budget", "20s", "--force", "--json")
    (row, *_) = [
        row for row in json.loads(run(*cli, *bench, *limits))["rows"] if row["name"] == "local"
    ]
    assert row["seconds"] > 0


# --------------------------------------------------------------------------------- what is unknown
def test_unknown_peak_memory_is_said(monkeypatch):
    """Fails if a system that does not tell the peak memory gives a ratio of nothing."""
    monkeypatch.setattr(environment, "resource", None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert environment.peak_bytes() is None
    dense, row = (
        ResultRow(name, "parity", 8, "accuracy", True, [score], 1e3)
        for name, score in (("vanilla", 0.7), ("local", 0.9))
    )
    assert math.isnan(dense.peak_bytes)
    verdict = Verdict(
        "parity",
        8,
        row,
        row,
        dense=dense,
        ties=[],
        baseline=None,
        better_baseline=None,
        caveats=Caveats(),
    )
    assert "this system does not tell the peak memory" in describe_verdict(verdict)


def test_total_memory_needs_psutil(monkeypatch):
    """Fails if a system without sysconf and psutil gets a traceback instead of advice."""
    total = environment.total_memory()
    assert 0 < environment.available_memory() <= total
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match="pip install psutil"):
        environment.total_memory()


def test_flush_to_disk_on_windows(tmp_path, monkeypatch):
    """Fails if a folder is opened, which Windows refuses, or a file for reading, which it does not
    flush."""
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(flags) or real(path, flags))
    monkeypatch.setattr(json_files.os, "name", "nt")
    (tmp_path / "x").write_text("x")
    json_files.flush_to_disk(tmp_path)
    json_files.flush_to_disk(tmp_path / "x")
    assert opened == [os.O_RDWR]
