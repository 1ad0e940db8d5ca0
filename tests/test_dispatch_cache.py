"""Repeated calls skip the checks and give the same results."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import native
from regard.backends import dispatch_cache

PATTERNS = [
    regard.Full(),
    regard.Causal(),
    regard.Band(3, 1),
    regard.GlobalMask() | regard.Band(2, 0),
]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(dispatch_cache, "_entries", {})


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_repeated_call_gives_the_same(pattern, rand):
    """Fails if what is remembered is not what was computed: outputs and gradients, also after
    inference mode."""
    with torch.inference_mode():
        q = rand(2, 4, 17, 8)
        regard.attend(q, q, q, pattern=pattern)
    assert len(dispatch_cache._entries) == 1
    for scale in (None, None, 0.5):
        q, k, v = (rand(2, 4, 17, 8).requires_grad_() for _ in range(3))
        grads = []
        for backend in ("auto", "reference"):
            y = regard.attend(q, k, v, pattern=pattern, scale=scale, backend=backend)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(dispatch_cache._entries) == 3  # the last two with gradients


def test_different_calls_are_not_confused(rand):
    """Fails if a remembered call answers for another position, length, type, mask or number of
    heads."""
    q, band = rand(1, 2, 9, 4), regard.Keys(0, 3)
    for _ in range(2):
        regard.attend(q, q, q, pattern=band)
    cases = [
        (q, {"q_start": 3, "k_positions": 5}),
        (q, {"k_positions": torch.arange(9) * 2}),
        (q[:, :, :7], {}),
        (q.float(), {}),
        (q, {"mask": torch.arange(9)[None] % 2 == 0}),
        (q, {"prior": regard.ALiBi(2)}),
    ]
    for x, more in cases:
        expected = regard.attend(x, x, x, pattern=band, backend="reference", **more)
        torch.testing.assert_close(regard.attend(x, x, x, pattern=band, **more), expected)
    shared = q[:, :1]
    expected = regard.attend(q, shared, shared, pattern=band, backend="reference")
    torch.testing.assert_close(regard.attend(q, shared, shared, pattern=band), expected)


@pytest.mark.skipif(native.library() is None, reason=native.missing_reason())
@pytest.mark.parametrize("pattern", [regard.Full(), regard.Causal(), regard.Band(8, 8)], ids=repr)
def test_choice_inside_transform_is_not_cached(pattern):
    """Fails if plain calls afterwards go the slow way that a transform, or who counts each
    operation, had to take."""
    q = torch.randn(1, 2, 500, 16)
    torch.func.vmap(lambda x: regard.attend(x, q, q, pattern=pattern))(q[None])
    with FlopCounterMode(display=False):
        regard.attend(q, q, q, pattern=pattern)
    assert not dispatch_cache._entries
    regard.attend(q, q, q, pattern=pattern)
    assert [found.traceable for found in dispatch_cache._entries.values()] == [False]


def test_errors_of_cached_calls(rand):
    """Fails if a wrong argument ends in a look-up instead of in a message."""
    q = rand(1, 2, 9, 4)
    regard.attend(q, q, q)
    with pytest.raises(ValueError, match="q must be a tensor"):
        regard.attend(None, q, q)
    with pytest.raises(TypeError, match="pattern must be"):
        regard.attend(q, q, q, pattern=["Full"])
    with pytest.raises(TypeError, match="scale must be"):
        regard.attend(q, q, q, scale=[1])


def test_cache_is_bounded(rand):
    """Fails if the memory of calls has no bound, or keeps a mask of many megabytes."""
    for n in range(1, 60):
        for m in range(1, 60):
            x, y = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, m, 1)
            regard.attend(x, y, y, pattern=regard.Full())
    assert len(dispatch_cache._entries) <= dispatch_cache.MAX_ENTRIES
    before = len(dispatch_cache._entries)
    long = torch.zeros(1, 1, 1 << 19, 1)
    regard.attend(long[:, :, :3], long, long, pattern=regard.Keys(0, 5))
    assert len(dispatch_cache._entries) == before
