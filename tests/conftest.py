"""Shared fixtures: a temporary cache directory, one thread, and a way to force the backends that
compute tiles only."""

import os
import tempfile
from contextlib import contextmanager

import pytest
import torch

from regard import native
from regard.backends import softmax_backends


def pytest_configure(config):
    os.environ["REGARD_CACHE"] = tempfile.mkdtemp(prefix="regard-test-cache-")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other


@contextmanager
def wherever_possible(backend):
    """Inside, "auto" selects `backend` for every call that it supports; yields the list of selected
    backends."""
    picked, preferred = [], softmax_backends.get(backend)
    usual = softmax_backends.prepare

    def prepare(call, name="auto"):
        found = usual(call, name)
        if name == "auto":
            picked.append(found[0].name)
        return found

    with softmax_backends.override(preferred):
        softmax_backends.prepare = prepare
        try:
            yield picked
        finally:
            del softmax_backends.prepare


@pytest.fixture
def forced():
    """The context manager `wherever_possible`."""
    return wherever_possible


@pytest.fixture(params=["auto", "sparse", "cpp"])
def executor(request):
    """Runs the test three times: with the backend that `auto` selects, and with sparse and cpp
    wherever possible."""
    if request.param == "auto":
        yield None
    elif request.param == "cpp" and native.library() is None:
        pytest.skip(native.missing_reason())
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
