"""Property tests on random patterns: sound blocks, tiles equal to dense softmax, laws of the
algebra."""

import sys

import pytest
import torch
from hypothesis import example, given, strategies as st

import regard.pattern
from regard import native
from regard.backends import cpp_kernel
from regard.backends.tiled_flash import attend_layout as fused
from regard.layout import build_layout
from regard.layout.tiles import build_tiles as tiles_of
from regard.pattern import (
    MAX_POSITION,
    And,
    Band,
    Blocks,
    Blocks2D,
    Causal,
    Chunks,
    Full,
    KeyPhase,
    Keys,
    Neighbourhood,
    Nothing,
    Or,
    PerHead,
    RandomBlocks,
)
from strategies import any_patterns, coverage, examples, headed, patterns, truth

lengths = (
    st.integers(1, 8) | st.integers(9, 64) | st.integers(65, 150) | st.sampled_from([128, 256, 260])
)
starts = st.just(0) | st.integers(0, 100)
tiles = st.sampled_from([None, 3, 8, 8, 16, 32, 64, 128])
short_tile = Band(0, 0) & ~KeyPhase(
    8, 4
)  # at 44 tokens the last tile has the others' mask, but fewer queries


# ----------------------------------------------------------------------------------------- meaning
@examples(300)
@given(any_patterns, lengths, lengths)
def test_dense_equals_numpy_rules(pattern, n, m):
    """Fails if a leaf or an operator means something else than its rule, written again in numpy."""
    assert torch.equal(pattern.dense(n, m), truth(pattern, n, m))


@examples(600)
@given(any_patterns, lengths, lengths, st.integers(1, 40), st.integers(1, 40), starts, starts)
def test_blocks_are_sound(pattern, n, m, rows, cols, q_start, k_start):
    """Fails if a block that is called empty holds a seen pair, or one that is called full an unseen
    one."""
    q0, k0 = torch.arange(0, n, rows), torch.arange(0, m, cols)
    q1, k1 = (q0 + rows).clamp(max=n) - 1, (k0 + cols).clamp(max=m) - 1
    some, every = pattern.block(
        q_start + q0[:, None], q_start + q1[:, None], k_start + k0, k_start + k1
    )
    seen = truth(pattern, n, m, q_start, k_start)
    assert some.shape == every.shape == (*seen.shape[:-2], len(q0), len(k0))
    some, every = (
        x[..., torch.arange(n) // rows, :][..., torch.arange(m) // cols] for x in (some, every)
    )
    assert not (seen & ~some).any() and not (every & ~seen).any()


@examples(150)
@given(any_patterns, lengths, lengths)
def test_counts_equal_the_dense_ones(pattern, n, m):
    """Fails if counting by tiles loses or doubles a key, at a ragged edge above all."""
    seen = truth(pattern, n, m)
    assert torch.equal(pattern.keys_per_query(n, m), seen.sum(-1))
    assert pattern.density(n, m) == pytest.approx(seen.double().mean().item(), abs=1e-12)


# ----------------------------------------------------------------------------------------- layouts
@examples(300)
@given(patterns, lengths, lengths, starts, starts, tiles, st.booleans())
@example(short_tile, 44, 44, 0, 0, 8, False)
def test_every_seen_pair_is_computed_once(pattern, n, m, q_start, k_start, size, backward):
    """Fails if a layout drops a pair, computes it twice, adds one that is not seen, or leaves the
    sequence."""
    work = build_layout(
        pattern, n, m, q_start=q_start, k_start=k_start, size=size, backward=backward
    )
    seen = truth(pattern, n, m, q_start, k_start)
    assert torch.equal(coverage(work, n, m), seen.long())
    assert work.scores() >= seen.sum()


# ------------------------------------------------------------------------------ the fused executor
def naive(q, k, v, keep, scale):
    """Softmax attention (x n e) over the pairs kept (n m); a query that sees nothing gives zero."""
    scores = (q @ k.mT * scale).masked_fill(~keep, -torch.inf)
    top = scores.amax(-1, keepdim=True).detach().clamp(min=-1e9)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total > 0, total, 1.0)


@examples(250)
@given(patterns, lengths, lengths, starts, starts, tiles, tiles, st.booleans(), st.integers(0, 99))
@example(short_tile, 44, 44, 0, 0, 8, 8, False, 0)
def test_tiled_backends_equal_dense(pattern, n, m, q_start, k_start, size, size_back, padded, seed):
    """Fails if outputs or gradients differ by 1e-10, or if a query that sees nothing gives or gets
    anything."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(2, x, 4, dtype=torch.float64, generator=rng) for x in (n, m, m, n))
    if seed % 2:  # as projections leave them: views, with the heads of a token side by side
        q, k, v = (
            torch.randn(x + 2, 2, 9, dtype=torch.float64, generator=rng)[1:-1, :, 3:7].transpose(
                0, 1
            )
            for x in (n, m, m)
        )
    real = torch.rand(m, generator=rng) < 0.7 if padded else torch.ones(m, dtype=torch.bool)
    bias = torch.zeros(m, dtype=torch.float64).masked_fill(~real, -torch.inf) if padded else None
    keep, at = (
        truth(pattern, n, m, q_start, k_start) & real,
        {"q_start": q_start, "k_start": k_start},
    )
    forward, backward = (
        build_layout(pattern, n, m, size=size, **at),
        build_layout(pattern, n, m, size=size_back, backward=True, **at),
    )

    inputs = [x.requires_grad_() for x in (q, k, v)]
    want = naive(*inputs, keep, 0.5)
    want_grads = torch.autograd.grad(want, inputs, grad)
    blind, unseen = ~keep.any(1), ~keep.any(0)
    mask = real[None] if padded else None
    ways = [fused(*inputs, forward, backward, scale=0.5, bias=bias)]
    if native.library():
        ways.append(
            cpp_kernel.attend_tiles(
                *(x[None] for x in inputs),
                tiles_of(pattern, n, m, **at),
                0.5,
                cpp_kernel.KernelMasks(mask),
            )[0]
        )
    for got in ways:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        got_grads = torch.autograd.grad(got, inputs, grad)
        for mine, theirs in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        assert not got[:, blind].any() and not got_grads[0][:, blind].any()
        assert not got_grads[1][:, unseen].any() and not got_grads[2][:, unseen].any()


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize(
    "pattern",
    [
        Band(9, 9) | Keys(0, 3),
        Band(None, 2, 3),
        RandomBlocks(8, 2, 20),
        Blocks2D(20, 4, 4, 1, 1, 1, 1),
    ],
    ids=repr,
)
def test_split_calls_equal_whole_calls(pattern, at_once, monkeypatch):
    """Fails if calls that are split to stay in the cache compute something else."""
    monkeypatch.setattr(sys.modules[fused.__module__], "MAX_TEMPORARY", at_once)
    n, rng = 150, torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, n, 4, dtype=torch.float64, generator=rng).requires_grad_() for _ in range(3)
    ]
    real = torch.arange(n) % 7 > 0
    bias = torch.zeros(n, dtype=torch.float64).masked_fill(~real, -torch.inf)
    for mask, keep in ((None, truth(pattern, n, n)), (bias, truth(pattern, n, n) & real)):
        want = naive(*inputs, keep, 0.5)
        got = fused(
            *inputs,
            build_layout(pattern, n, n, size=8),
            build_layout(pattern, n, n, size=16),
            scale=0.5,
            bias=mask,
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        got_grads, want_grads = (
            torch.autograd.grad(x.sum(), inputs) for x in (got, want)
        )  # a gradient without strides
        for mine, theirs in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------------------------- eviction
def kept(pattern, now):
    """Which of the keys 0..now-1 some query from `now` on may still see."""
    at = torch.arange(now)
    return pattern.block(torch.tensor(now), torch.tensor(MAX_POSITION), at, at)[0]


@examples(300)
@given(patterns, st.integers(1, 100))
def test_evicted_keys_are_never_visible(pattern, now):
    """Fails if a key is let go that a later query sees."""
    pattern = pattern & Causal()
    wanted = truth(pattern, 200, now, q_start=now).any(0)
    assert not (wanted & ~kept(pattern, now)).any()


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (Band(16, 0), 16),
        (Band(16, 0) | Keys(0, 4), 20),
        (Band(4, 0, 3), 12),
        (Chunks(8, back=1) & Causal(), 12),  # now = 100 stands in chunk 12, which looks back to 88
        (Blocks(8, 5) & Causal(), 9),  # block 12 begins at 96, and looks back to 91
        (Neighbourhood(1, 200, 1, 8, causal=True) & Causal(), 7),
        (
            Neighbourhood(20, 10, 3, 3, causal=True) & Causal(),
            20,
        ),  # now stands at the start of row 10, which looks up to row 8
        (
            Blocks2D(10, 2, 5, up=1, by_block=True) & Causal(),
            10,
        ),  # the first of a band of blocks: one row of the band above
        (Causal(), 100),
        (Nothing(), 0),
    ],
    ids=repr,
)
def test_number_of_cached_keys(pattern, count):
    """Fails if the cache keeps more than the pattern can still reach (or less)."""
    assert kept(pattern, 100).sum() == count


# -------------------------------------------------------------------------------------------- laws
def alike(a, b):
    return torch.equal(truth(a, 40, 50), truth(b, 40, 50)) and torch.equal(
        a.dense(40, 50), b.dense(40, 50)
    )


@examples(120)
@given(patterns | headed, patterns, patterns)
def test_laws(a, b, c):
    """Fails if an operator, or what it simplifies, changes which pairs are seen."""
    assert alike(~(a | b), ~a & ~b) and alike(~(a & b), ~a | ~b)
    assert alike(a | b, b | a) and alike(a & b, b & a)
    assert alike(a & (b | c), (a & b) | (a & c)) and alike(a | (b & c), (a | b) & (a | c))
    assert not (a & ~a).dense(40, 50).any() and (a | ~a).dense(40, 50).all()


@examples(200)
@given(patterns, patterns, patterns)
def test_expressions_are_flattened(a, b, c):
    """Fails if the same expression, written in another way, is another value: caches would miss."""
    assert ~~a == a and a | a == a and a & a == a
    assert a | (b | c) == (a | b) | c and a & (b & c) == (a & b) & c
    assert a | Nothing() == a == a & Full()
    assert a | Full() == Full() and a & Nothing() == Nothing()
    for whole, kind in ((a | b | c, Or), (a & b & c, And)):
        if isinstance(whole, kind):
            assert not any(isinstance(p, kind) or p in (Full(), Nothing()) for p in whole.parts)
            assert len(set(whole.parts)) == len(whole.parts) > 1


@examples(100)
@given(headed, patterns)
def test_heads_stay_outermost(a, b):
    """Fails if an operator buries the head axis, or mixes the heads."""
    for joined, each in ((a | b, lambda p: p | b), (b & a, lambda p: b & p), (~a, lambda p: ~p)):
        assert isinstance(joined, PerHead) and joined == PerHead(tuple(each(p) for p in a.parts))


@examples(300)
@given(any_patterns)
def test_repr_builds_it_again(pattern):
    """Fails if the printed form is ambiguous, not Python, or another expression."""
    again = eval(repr(pattern), dict(vars(regard.pattern)))
    assert again == pattern and hash(again) == hash(pattern) and repr(again) == repr(pattern)
