"""The C++ kernels built by each compiler that is installed, and for ARM under an emulator."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import regard
from regard.pattern import Band, Blocks2D, Causal, Full, Keys

native = importlib.import_module("regard.native")

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
DRIVER = Path(__file__).with_name("kernels_check.cpp")


@pytest.fixture(params=["g++", "clang++"])
def compiled(request, tmp_path, monkeypatch):
    """Replace the library by one that this compiler built without a warning."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if native.sys.platform not in native.SYSTEMS:
        pytest.skip(native.missing_reason())
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", " ".join([request.param, *WARNINGS]))
    built = native._load_or_build.__wrapped__()
    assert not isinstance(built, str), built
    assert native.find_compiler() == [request.param, *WARNINGS]
    monkeypatch.setattr(native, "library", lambda: built)
    return built


def test_kernels_of_each_compiler(compiled, rand):
    """Fails if a compiler refuses the sources, warns, or builds kernels that compute something
    else: softmax and linear attention with gradients, the feature map and the clusters."""
    q, k, v = inputs = [rand(2, 3, 150, 20).requires_grad_() for _ in range(3)]
    weight = rand(2, 3, 150, 20)
    linear = regard.LinearAttention()

    def reference_linear(causal):
        phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        scores = phi_q @ phi_k.mT
        scores = scores.tril() if causal else scores
        return scores @ v / scores.sum(-1, keepdim=True)

    pairs = [
        (
            regard.attend(q, k, v, pattern=pattern, backend="cpp"),
            regard.attend(q, k, v, pattern=pattern, backend="reference"),
        )
        for pattern in (Full(), Causal(), Band(9, 5, 3) | Keys(0, 4), Blocks2D(15, 4, 4, 2, 3))
    ]
    pairs += [(linear(q, k, v, causal=c)[0], reference_linear(c)) for c in (False, True)]
    for pair in pairs:
        torch.testing.assert_close(*pair, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad(out, inputs, weight) for out in pair]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    first = torch.arange(9).expand(2, 3, 9)
    clusters = [
        way(q.detach(), None, first, 3)
        for way in (regard.query_prototypes._lloyd_cpp, regard.query_prototypes._lloyd_torch)
    ]
    assert torch.equal(*clusters)


def test_kernels_start_threads_without_openmp(rand, monkeypatch):
    """Fails if the kernels need the OpenMP library of PyTorch, or its threads lose a share."""
    if native.library() is None:
        pytest.skip(native.missing_reason())
    inputs = [rand(1, 3, 300, 16).requires_grad_() for _ in range(3)]
    want = regard.attend(*inputs, pattern=Band(20, 9), backend="reference")
    wanted = torch.autograd.grad(want.square().sum(), inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    native.library().set_thread_team(None)
    try:
        out = regard.attend(*inputs, pattern=Band(20, 9), backend="cpp")
        grads = torch.autograd.grad(out.square().sum(), inputs)
    finally:
        native.library().set_thread_team(native._openmp_thread_team())
        torch.set_num_threads(before)
    for got, expected in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_kernels_on_arm(tmp_path):
    """Fails if the kernels do not compile for ARM, or compute something else with its vectors."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip(
            "no ARM cross-compiler and emulator: apt install g++-aarch64-linux-gnu qemu-user"
        )
    program = tmp_path / "kernels_check"
    sources = [str(native.SOURCE_DIR / name) for name in native.SOURCES]
    flags = [*WARNINGS, "-O3", "-std=c++17", "-static", "-pthread", f"-I{native.SOURCE_DIR}"]
    subprocess.run([compiler, *flags, str(DRIVER), *sources, "-o", str(program)], check=True)
    result = subprocess.run([emulator, str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.endswith("\n0 failures\n"), result.stdout
