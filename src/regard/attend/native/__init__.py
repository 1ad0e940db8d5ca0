"""The compiled kernel: built once on this machine by its C++ compiler, kept in the cache, and loaded.

It is a plain shared library, without a line of PyTorch in it, so it is built in seconds and called through ctypes.  Where there
is no compiler, or `REGARD_COMPILED=0` is set, `library` gives None and everything runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from regard.cache import folder

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "product.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
SECONDS = 120  # a build that takes longer is given up


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The kernel, or None; `missing` says why."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


@lru_cache(1)
def missing() -> str:
    """Why there is no kernel; empty where there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@lru_cache(1)
def _load() -> ctypes.CDLL | str:
    if os.environ.get("REGARD_COMPILED") == "0":
        return "REGARD_COMPILED=0 is set"
    if sys.platform != "linux":
        return f"it is built on Linux only, not on {sys.platform}"
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found: install g++, or name one in CXX"
    try:
        path = _path(compiler)
        return _opened(path) or _build(compiler, path)
    except subprocess.CalledProcessError as error:
        return f"{compiler} could not build it: {error.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be built or loaded: {error}"


def _path(compiler: str) -> Path:
    """Where the library for this source, compiler and processor is kept."""
    made_of = [(HERE / name).read_bytes() for name in SOURCES]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    whole = b"\0".join([*made_of, version, _processor().encode(), " ".join(FLAGS).encode()])
    return folder() / f"kernel-{hashlib.sha256(whole).hexdigest()[:16]}.so"


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library, if it is there and whole: loading a part of one would end the process."""
    try:
        whole = _sum_of(path).read_text() == _digest(path)
        return ctypes.CDLL(str(path)) if whole else None
    except (OSError, UnicodeDecodeError):
        return None


def _build(compiler: str, path: Path) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        partial = Path(place) / path.name
        command = [compiler, *FLAGS, str(HERE / SOURCES[0]), "-o", str(partial), *_runtime()]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
        _sum_of(partial).write_text(_digest(partial))
        for file in (partial, _sum_of(partial)):
            file.replace(path.parent / file.name)  # at once: another process never loads half of it
    return ctypes.CDLL(str(path))


def _sum_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _processor() -> str:
    """What the build depends on: the kind of processor and what it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    lines = {line for line in text.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(lines))


def _runtime() -> list[str]:
    """The threads of PyTorch itself, where it brings its own: two pools would fight for the cores."""
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(found[0])] if found else []
