"""Compiled kernels: built once on this machine by its C++ compiler, kept in the cache, and loaded.

They are a plain shared library, without a line of PyTorch in it, built in seconds and called through ctypes.  Where there
is no compiler, or `REGARD_CPP=0` is set, `library` gives None and everything runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _get_tracing_state as _tracing  # of torch.jit
from torch._C._functorch import peek_interpreter_stack as _transforms  # of torch.func
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode as _mode

from regard.disk_cache import cache_dir

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "elu.cpp", "lloyd.cpp", "pages.cpp")
HEADERS = ("product.h", "rows.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
DTYPE_NAMES = {torch.float32: "float", torch.float64: "double"}
TENSOR_TYPES = (Tensor, Parameter)
WHOLE = 16  # widths are filled up to a multiple: a whole number of vectors on every machine
SECONDS = 120  # a build that takes longer is given up
LARGE = (
    32 << 20
)  # bytes: as much as this comes from the system anew each time, and is never used again

_one_at_a_time = Lock()


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The kernel, or None; `missing_reason` says why."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


@lru_cache(1)
def missing_reason() -> str:
    """Why there is no kernel; empty where there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


def supports(*tensors: Tensor) -> bool:
    """Whether the kernel can be used for them."""
    kind = tensors[0].dtype
    return (
        kind in DTYPE_NAMES
        and all(x.dtype == kind for x in tensors)
        and are_plain_tensors(*tensors)
        and library() is not None
    )


def are_plain_tensors(*tensors: Tensor) -> bool:
    """Numbers that are there, on a CPU, with nobody who wants to see each operation."""
    if (
        torch.compiler.is_compiling()
        or inside_transform()
        or _mode() is not None
        or _tracing() is not None
    ):
        return False
    for x in tensors:  # noqa: SIM110 (`all` takes a microsecond more, of the fifty of a small call)
        if type(x) not in TENSOR_TYPES or not x.is_cpu or x.is_neg():
            return False
    return True


def inside_transform() -> bool:
    """Inside of torch.func, or of forward-mode differentiation."""
    return _transforms() is not None or forward_ad._current_level >= 0


def run(name: str, dtype: torch.dtype, *structures: bytes) -> None:
    """Call a function of the kernel for this type; the structures hold addresses, so their tensors must be alive."""
    getattr(library(), f"{name}_{DTYPE_NAMES[dtype]}")(*structures)


def pointers_and_strides(*tensors: Tensor) -> list[int]:
    """Of each tensor (b h n e), where it is and its strides but the last, which is 1, as the kernel's `Rows`."""
    found: list[int] = []
    for x in tensors:
        batch, head, row, last = x.stride()
        assert last == 1 or x.shape[3] == 1
        found += (x.data_ptr(), batch, head, row)
    return found


def padded_width(width: int) -> int:
    """The width that the kernel takes instead."""
    return -(-width // WHOLE) * WHOLE


def pad_width(x: Tensor, width: int) -> Tensor:
    """x (b h n e) with rows without gaps, filled up with zeros to this width."""
    x = F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x
    return (
        x if x.stride(3) == 1 else x.contiguous()
    )  # padding keeps the order of the axes, whichever it is


def empty_like(x: Tensor) -> Tensor:
    """Room for as much as x, in the same order of axes where the last is dense there."""
    room = torch.empty_like(x)
    return advise_huge_pages(
        room if room.stride(3) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
    )


def advise_huge_pages(x: Tensor) -> Tensor:
    """x itself, new and not yet written, with large pages behind it where it is large."""
    if x.nbytes >= LARGE:
        lib = library()
        assert lib is not None
        lib.large_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.nbytes))
    return x


def _load() -> ctypes.CDLL | str:
    with _one_at_a_time:  # the other threads wait, and find it built
        return _found()


@lru_cache(1)
def _found() -> ctypes.CDLL | str:
    if os.environ.get("REGARD_CPP") == "0":
        return "REGARD_CPP=0 is set"
    if sys.platform != "linux":
        return f"it is built on Linux only, not on {sys.platform}"
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        return "no C++ compiler was found: install g++, or name one in CXX"
    try:
        path = _path(compiler)
        return _opened(path) or _build(compiler, path)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(compiler)} could not build it: {error.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be built or loaded: {error}"


def _path(compiler: list[str]) -> Path:
    """Where the library for this source, compiler and processor is kept."""
    made_of = [(HERE / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS
    ).stdout
    whole = b"\0".join(
        [
            *made_of,
            version,
            _processor().encode(),
            " ".join([*compiler, *FLAGS, *_runtime()]).encode(),
        ]
    )
    return cache_dir() / f"kernel-{hashlib.sha256(whole).hexdigest()[:16]}.so"


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library, if it is there, whole and ours: loading a part of one would end the process."""
    try:
        whole = _sum_of(path).read_text() == _digest(path) and path.stat().st_uid in (
            0,
            os.getuid(),
        )
        return ctypes.CDLL(str(path)) if whole else None
    except (OSError, UnicodeDecodeError):
        return None


def _build(compiler: list[str], path: Path) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        partial = Path(place) / path.name
        command = [
            *compiler,
            *FLAGS,
            *(str(HERE / name) for name in SOURCES),
            "-o",
            str(partial),
            *_runtime(),
        ]
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
    lines = {
        line
        for line in text.splitlines()
        if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return "\n".join(sorted(lines))


def _runtime() -> list[str]:
    """The threads of PyTorch itself, where it brings its own: two pools would fight for the cores."""
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(found[0])] if found else []
