"""C++ kernels: compiled once on this machine, stored in the cache directory, and loaded.

They are a plain shared library that does not depend on PyTorch's headers, is built in seconds and
called through ctypes. g++ and clang++ build them, on Linux and macOS. If there is no compiler, or
`REGARD_CPP=0` is set, `library` returns None and everything runs without it, slower.
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
from torch._C import _get_tracing_state as _jit_tracing_state
from torch._C._functorch import peek_interpreter_stack as _functorch_transform
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode as _dispatch_mode

from regard.disk_cache import cache_dir

SOURCE_DIR = Path(__file__).parent
SOURCES = ("attention.cpp", "linear.cpp", "elu.cpp", "lloyd.cpp", "huge_pages.cpp", "parallel.cpp")
HEADERS = ("kernels.h", "parallel.h", "simd.h", "tiles.h")
COMPILERS = ("g++", "clang++", "c++")  # the first that exists, unless CXX is set
SYSTEMS = ("linux", "darwin")
# clang spells the flag for this machine's processor -mcpu on ARM; g++ accepts both there
NATIVE_FLAG = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# -ffp-contract=fast: fused multiply-add, which is the default of g++ only
FLAGS = ("-O3", NATIVE_FLAG, "-std=c++17", "-ffp-contract=fast", "-fPIC", "-pthread", "-shared")
BUILD_TIMEOUT = 120  # seconds
DTYPE_NAMES = {torch.float32: "float", torch.float64: "double"}
TENSOR_TYPES = (Tensor, Parameter)
# widths are padded to this multiple: a whole number of SIMD vectors on every machine
WIDTH_MULTIPLE = 16
# from this size on, the allocator gets fresh memory from the system every time
HUGE_PAGE_BYTES = 32 << 20

_build_lock = Lock()


@lru_cache(1)
def library() -> ctypes.CDLL | None:
    """The loaded library, or None; then `missing_reason` says why."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


@lru_cache(1)
def missing_reason() -> str:
    """Why there is no library; empty if there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


def supports(*tensors: Tensor) -> bool:
    """Whether the kernels can process these tensors."""
    dtype = tensors[0].dtype
    same_dtype = dtype in DTYPE_NAMES and all(x.dtype == dtype for x in tensors)
    return same_dtype and are_plain_tensors(*tensors) and library() is not None


def are_plain_tensors(*tensors: Tensor) -> bool:
    """Whether these are ordinary CPU tensors, and nothing (compiler, transform, mode) must see each
    operation.
    """
    if (
        torch.compiler.is_compiling()
        or inside_transform()
        or _dispatch_mode() is not None
        or _jit_tracing_state() is not None
    ):
        return False
    for x in tensors:  # noqa: SIM110 (`all` takes a microsecond longer, of the fifty of a small call)
        if type(x) not in TENSOR_TYPES or not x.is_cpu or x.is_neg():
            return False
    return True


def inside_transform() -> bool:
    """Whether the call is inside a torch.func transform or forward-mode differentiation."""
    return _functorch_transform() is not None or forward_ad._current_level >= 0


def run(name: str, dtype: torch.dtype, *structs: bytes) -> None:
    """Call a kernel for this dtype. The structs hold addresses, so their tensors must be alive."""
    getattr(library(), f"{name}_{DTYPE_NAMES[dtype]}")(*structs)


def pointers_and_strides(*tensors: Tensor) -> list[int]:
    """The address and the first three strides of each tensor (b h n e): the kernels' struct
    `TensorRef`.
    """
    found: list[int] = []
    for x in tensors:
        batch, head, row, last = x.stride()
        assert last == 1 or x.shape[3] == 1
        found += (x.data_ptr(), batch, head, row)
    return found


def padded_width(width: int) -> int:
    """The width rounded up to what the kernels accept."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def pad_width(x: Tensor, width: int) -> Tensor:
    """x (b h n e) padded with zeros to this width, with a contiguous last axis."""
    x = F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x
    return x if x.stride(3) == 1 else x.contiguous()  # padding keeps the order of the axes


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor of the shape of x with a contiguous last axis, and the memory format
    of x if it has one.
    """
    room = torch.empty_like(x)
    if room.stride(3) != 1:
        room = torch.empty_like(x, memory_format=torch.contiguous_format)
    return advise_huge_pages(room)


def advise_huge_pages(x: Tensor) -> Tensor:
    """x itself, a newly allocated tensor, backed by huge pages if it is large."""
    if x.nbytes >= HUGE_PAGE_BYTES:
        lib = library()
        assert lib is not None
        lib.advise_huge_pages(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.nbytes))
    return x


# ---------------------------------------------------------------------- building
def _load() -> ctypes.CDLL | str:
    with _build_lock:  # other threads wait until it is built
        return _load_or_build()


@lru_cache(1)
def _load_or_build() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    if os.environ.get("REGARD_CPP") == "0":
        return "REGARD_CPP=0 is set"
    if sys.platform not in SYSTEMS:
        return f"the C++ kernels are built on Linux and macOS only, not on {sys.platform}"
    compiler = find_compiler()
    if compiler is None and os.environ.get("CXX"):
        return f"the compiler of CXX, {os.environ['CXX']!r}, was not found"
    if compiler is None:
        return "no C++ compiler was found: install g++ or clang++, or set CXX"
    try:
        path = _library_path(compiler)
        return _open(path) or _build(compiler, path)
    except subprocess.CalledProcessError as error:
        output = error.stderr.strip()[-500:] or f"exit status {error.returncode}"
        if error.cmd == [*compiler, "--version"]:
            return f"{' '.join(error.cmd)}, which tells the compiler's version, failed: {output}"
        return f"{' '.join(compiler)} failed to build the C++ kernels: {output}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C++ kernels could not be built or loaded: {error}"


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, which may have options, or the first of `COMPILERS`
    that is installed; None if there is none.
    """
    if os.environ.get("CXX"):
        try:
            command = shlex.split(os.environ["CXX"])
        except ValueError:  # a quote that is not closed
            return None
        return command if command and shutil.which(command[0]) else None
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    return None if found is None else [found]


def _library_path(compiler: list[str]) -> Path:
    """The path of the library; it depends on the sources, the compiler and the processor."""
    sources = [(SOURCE_DIR / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT
    ).stdout
    command = " ".join([*compiler, *FLAGS]).encode()
    key = b"\0".join([*sources, version.encode(), _processor().encode(), command])
    return cache_dir() / f"kernel-{hashlib.sha256(key).hexdigest()[:16]}.so"


def _open(path: Path) -> ctypes.CDLL | None:
    """The library, if it exists, is complete and belongs to us: loading a truncated file would
    crash the process.
    """
    try:
        complete = _checksum_path(path).read_text() == _checksum(path)
        ours = path.stat().st_uid in (0, os.getuid())
        return _load_file(path) if complete and ours else None
    except (OSError, UnicodeDecodeError):
        return None


def _build(compiler: list[str], path: Path) -> ctypes.CDLL:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        partial = Path(directory) / path.name
        sources = [str(SOURCE_DIR / name) for name in SOURCES]
        command = [*compiler, *FLAGS, *sources, "-o", str(partial)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT)
        _checksum_path(partial).write_text(_checksum(partial))
        for file in (partial, _checksum_path(partial)):
            file.replace(path.parent / file.name)  # atomic: no other process loads a partial file
    return _load_file(path)


def _load_file(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.set_thread_team(_openmp_thread_team())
    return lib


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _processor() -> str:
    """The processor model and its features, on which a build with -march=native depends."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(keys)}))


def _openmp_thread_team() -> ctypes.c_void_p | None:
    """The function of PyTorch's OpenMP library that runs a function on several threads: a second
    pool of threads would compete for the cores. None if there is none; then the kernels start
    threads of their own.
    """
    root = Path(torch.__file__).parent
    shipped = [*root.glob("lib/lib*omp*"), *root.parent.glob("torch.libs/lib*omp*")]
    for name in (*map(str, shipped), "libgomp.so.1"):  # libgomp, libiomp5 or libomp
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None
