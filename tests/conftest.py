"""What all tests share: a cache of their own, one thread, and a way to force the executors that compute tiles only."""

import importlib
import os
import tempfile
from contextlib import contextmanager

import pytest
import torch

attend = importlib.import_module(
    "regard.backends"
)  # the module: `regard.backends` is the function of that name
native = importlib.import_module("regard.native")


def pytest_configure(config):
    os.environ["REGARD_CACHE"] = tempfile.mkdtemp(prefix="regard-test-cache-")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other


@contextmanager
def wherever_possible(backend):
    """Inside, "auto" picks it for every call that it does not refuse; yields the list of what was picked."""
    usual, picked = attend.choose, []

    def choose(call):
        able = attend.BACKENDS[backend].refuses(call) is None
        choice = attend.BackendChoice(backend, "forced by the test") if able else usual(call)
        picked.append(choice.backend)
        return choice

    attend.choose = choose
    known, attend.dispatch_cache._ready = (
        attend.dispatch_cache._ready,
        {},
    )  # calls that were settled before would not be asked about again
    try:
        yield picked
    finally:
        attend.choose, attend.dispatch_cache._ready = usual, known


@pytest.fixture
def forced():
    """The context manager `wherever_possible`."""
    return wherever_possible


@pytest.fixture(params=["auto", "sparse", "cpp"])
def executor(request):
    """The test runs three times: with the executor that `auto` picks, and on sparse and compiled wherever possible."""
    if request.param == "auto":
        yield None
    elif request.param == "cpp" and native.library() is None:
        pytest.skip(native.missing())
    else:
        with wherever_possible(request.param) as picked:
            yield picked


@pytest.fixture
def rand():
    """Normal numbers in float64 that depend on nothing but the test: rand(2, 3)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float64):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    return draw


@pytest.fixture
def seeded():
    """The same random numbers for each test, and as before for what comes after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
