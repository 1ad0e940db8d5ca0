"""Grouped-query attention: every backend against an oracle that repeats the heads of keys and
values, in float64, with gradients."""

import pytest
import torch

import regard
from regard import native
from regard.backends import cpp_kernel
from regard.feature import EluFeatures, PositiveFeatures
from regard.pattern import (
    Band,
    Blocks2D,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    Keys,
    PerHead,
    RandomBlocks,
)
from regard.position.bias import ShawBias, T5Bias, TransformerXLBias

PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "window": Band(30, 9),
    "dilated": Band(20, 20, 9) | Keys(0, 5),
    "blocks": Chunks(32, 1, 1) | Global(4) | RandomBlocks(32, 2, 10),
    "grid": Blocks2D(20, 4, 4, 2, 3),
    # a group with one pattern, groups with two, and one that is split unevenly
    "per head": PerHead((Band(9, 9),) * 2 + (Causal(), Band(9, 9)) * 2),
    "per head, uneven": PerHead((Causal(), Band(9, 9), Causal(), Full(), Full(), Full())),
}
BACKENDS = ("reference", "sdpa", "cpp", "sparse", "auto")


def repeated_formula(q, k, v, keep, *, bias=0.0):
    """softmax(q kᵀ / √e + bias) v over the pairs to keep, with keys and values for every head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v


def assert_same(got, want, inputs, weight):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    for x, y in zip(
        torch.autograd.grad(got, inputs, weight),
        torch.autograd.grad(want, inputs, weight),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def make_inputs(rand, n, m, *, kv_heads=2, width=16, values=16, layer=False):
    """q, k, v of a layer with 6 heads, in the memory layout of a projection if `layer`."""
    shapes = ((6, n, width), (kv_heads, m, width), (kv_heads, m, values))
    if layer:
        return [rand(2, x, h, w).transpose(1, 2).requires_grad_() for h, x, w in shapes]
    return [rand(2, *shape).requires_grad_() for shape in shapes]


def available(backend):
    if backend == "cpp" and native.library() is None:
        pytest.skip(native.missing_reason())
    return backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_backends(backend, name, rand):
    """Fails if a query head reads another head's keys, or a gradient of one of them is lost."""
    n, pattern = 220, PATTERNS[name]
    q, k, v = inputs = make_inputs(rand, n, n, layer=True)
    keep = pattern.dense(n, n)
    mask = torch.arange(n) < torch.tensor([[n], [150]])
    for padding in (None, mask):
        seen = keep if padding is None else keep & padding[:, None, None]
        got = regard.attend(q, k, v, pattern=pattern, mask=padding, backend=available(backend))
        want = repeated_formula(q, k, v, seen)
        assert_same(got, want, inputs, rand(*want.shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_few_queries_and_other_widths(backend, kv_heads, rand):
    """Fails if a group is misplaced while decoding, or where keys and values differ in width."""
    for n, values in ((1, 16), (5, 16), (70, 24)):
        q, k, v = inputs = make_inputs(rand, n, 130, kv_heads=kv_heads, values=values)
        mask = torch.arange(130) < torch.tensor([[130], [40]])
        for start, padding in ((0, None), (129, mask)):
            pattern = Band(60, 200)
            keep = pattern.allows(torch.arange(start, start + n)[:, None], torch.arange(130)[None])
            keep = keep if padding is None else keep & padding[:, None, None]
            got = regard.attend(
                *inputs, pattern=pattern, mask=padding, q_start=start, backend=available(backend)
            )
            want = repeated_formula(q, k, v, keep)
            assert_same(got, want, inputs, rand(*want.shape))
        got = regard.attend(*inputs, backend=backend)
        want = repeated_formula(q, k, v, torch.tensor(True))
        assert_same(got, want, inputs, rand(*want.shape))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "sparse", "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: regard.ALiBi(6),
        lambda: T5Bias(6),
        lambda: ShawBias(16),
        lambda: TransformerXLBias(6, 16, 8),
    ],
    ids=["alibi", "t5", "shaw", "transformer-xl"],
)
def test_priors(backend, make, rand, seeded):
    """Fails if a prior of one head is added to another, or one that reads keys has too few."""
    n, prior, pattern = 200, make().double(), Band(40, 10)
    q, k, v = inputs = make_inputs(rand, n, n)
    at = torch.arange(n)
    bias = prior(at[:, None], at[None], q, k.repeat_interleave(3, 1))
    got = regard.attend(q, k, v, pattern=pattern, prior=prior, backend=backend)
    want = repeated_formula(q, k, v, pattern.dense(n, n), bias=bias)
    inputs = [*inputs, *(p for p in prior.parameters() if p.requires_grad)]
    assert_same(got, want, inputs, rand(*want.shape))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpp", "sparse"])
def test_global_tokens(backend, rand):
    """Fails if the calls that global tokens add read other keys."""
    n, pattern = 200, Band(9, 9) | GlobalMask()
    q, k, v = inputs = make_inputs(rand, n, n)
    chosen = torch.zeros(2, n, dtype=torch.bool)
    chosen[0, [3, 77]] = chosen[1, 5] = True
    keep = Band(9, 9).dense(n, n) | chosen[:, None, :, None] | chosen[:, None, None, :]
    got = regard.attend(
        q, k, v, pattern=pattern, global_attention_mask=chosen, backend=available(backend)
    )
    want = repeated_formula(q, k, v, keep)
    assert_same(got, want, inputs, rand(*want.shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pair_masks_and_sinks(backend, rand):
    """Fails if a pair mask or a sink of one query head is used for another of its group."""
    n, pattern = 200, Band(40, 10)
    q, k, v = inputs = make_inputs(rand, n, n)
    attn_mask = rand(2, 6, n, n) > -1
    attn_mask[0, 3, 7] = False
    keep = pattern.dense(n, n) & attn_mask
    available(backend)
    got = regard.attend(q, k, v, pattern=pattern, attn_mask=attn_mask, backend=backend)
    want = repeated_formula(q, k, v, keep)
    assert_same(got, want, inputs, rand(*want.shape))
    sinks = regard.prior.Sinks(6).double()
    (logits,) = sinks.parameters()
    torch.nn.init.normal_(logits, generator=torch.Generator().manual_seed(0))
    got = regard.attend(q, k, v, pattern=pattern, prior=sinks, backend=backend)
    scores = (q @ k.repeat_interleave(3, 1).mT / 4).masked_fill(~pattern.dense(n, n), -torch.inf)
    scores = torch.cat((scores, logits.view(1, 6, 1, 1).expand(2, 6, n, 1)), -1)
    want = torch.softmax(scores, -1)[..., :-1] @ v.repeat_interleave(3, 1)
    assert_same(got, want, [*inputs, logits], rand(*want.shape))


def test_scattered_keys_and_flex(rand):
    """Fails if keys at given positions, or FlexAttention, do not share heads."""
    q, k, v = inputs = make_inputs(rand, 40, 60)
    at = torch.arange(60) * 2
    keep = Band(30, 30).allows(torch.arange(40)[:, None], at[None])
    want = repeated_formula(q, k, v, keep)
    got = regard.attend(q, k, v, pattern=Band(30, 30), k_positions=at)
    assert_same(got, want, inputs, rand(*want.shape))
    q, k, v = (x.detach() for x in make_inputs(rand, 256, 256))
    for pattern in (Band(30, 30), PATTERNS["per head"]):
        got = regard.attend(q, k, v, pattern=pattern, backend="flex")
        want = repeated_formula(q, k, v, pattern.dense(256, 256))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("many", [1, 2, 3])
def test_threads_share_gradients_of_a_group(many, rand):
    """Fails if two threads add to one gradient of a key at once, or a piece is lost."""
    available("cpp")
    before = torch.get_num_threads()
    torch.set_num_threads(many)
    try:
        for kv_heads in (1, 2, 6):
            for pattern in (Band(9, 30), Band(5, 5, 7) | Keys(0, 3), Full()):
                q, k, v = inputs = make_inputs(rand, 500, 500, kv_heads=kv_heads)
                got = regard.attend(*inputs, pattern=pattern, backend="cpp")
                want = repeated_formula(q, k, v, pattern.dense(500, 500))
                assert_same(got, want, inputs, rand(*want.shape))
    finally:
        torch.set_num_threads(before)


def test_nothing_is_repeated(rand, monkeypatch):
    """Fails if keys and values reach a kernel with the heads of the queries."""
    q, k, v = make_inputs(rand, 300, 300)
    seen, pack, repeat = [], cpp_kernel._pack_call, torch.Tensor.repeat_interleave

    def record(q, k, v, *rest):
        seen.append((q.shape[1], k.shape[1], v.shape[1], k.data_ptr()))
        return pack(q, k, v, *rest)

    def repeat_interleave(x, *arguments):
        assert x.numel() < k.numel(), "keys or values are repeated"
        return repeat(x, *arguments)

    monkeypatch.setattr(cpp_kernel, "_pack_call", record)
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", repeat_interleave)
    for name in ("sdpa", "sparse", "reference", *(["cpp"] if native.library() else [])):
        regard.attend(q, k, v, pattern=Band(9, 9), backend=name).sum().backward()
    assert set(seen) <= {(6, 2, 2, k.data_ptr())}


def test_graphs(rand):
    """Fails if a compiled or exported graph with shared heads computes something else."""
    q, k, v = (x.detach() for x in make_inputs(rand, 256, 256))
    for pattern in (Full(), Causal(), Band(30, 30)):

        class Module(torch.nn.Module):
            def forward(self, q, k, v, pattern=pattern):
                return regard.attend(q, k, v, pattern=pattern)

        want = repeated_formula(q, k, v, pattern.dense(256, 256))
        compiled = torch.compile(Module(), backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), want, rtol=0, atol=1e-11)
        exported = torch.export.export(Module(), (q, k, v)).module()
        torch.testing.assert_close(exported(q, k, v), want, rtol=0, atol=1e-11)


def test_stream_keeps_the_heads_of_keys(rand):
    """Fails if a cache holds a key for every query head, or decoding differs from a whole pass."""
    mixer = regard.MultiHead(
        48, 6, regard.SoftmaxAttention(Band(20, 0) | Keys(0, 2)), kv_heads=2, causal=True
    ).double()
    x = rand(2, 90, 48)
    want, state, parts = mixer(x), None, []
    with torch.no_grad():
        for chunk in x.split([30, 1, 1, 40, 1, 17], 1):
            y, state = mixer.stream(chunk, state)
            parts.append(y)
            assert state.k.shape[1] == state.v.shape[1] == 2
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "feature", [EluFeatures(), PositiveFeatures(8, 16)], ids=["elu", "positive"]
)
def test_linear_attention(causal, feature, rand):
    """Fails if sums over the keys of one head serve the queries of another, or are repeated."""
    attention = regard.LinearAttention(feature).double()
    q, k, v = inputs = make_inputs(rand, 150, 150, width=8, values=5)
    mask = torch.arange(150) < torch.tensor([[150], [90]])
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    for padding in (None, mask):
        got = attention(q, k, v, causal=causal, mask=padding)[0]
        want = attention(q, *repeated, causal=causal, mask=padding)[0]
        assert_same(got, want, inputs, rand(*want.shape))
        inputs = [x.detach().requires_grad_() for x in inputs]
        q, k, v = inputs
        repeated = [x.repeat_interleave(3, 1) for x in (k, v)]


def test_linear_stream(rand):
    """Fails if a stream keeps sums for every query head, or decoding differs."""
    mixer = regard.MultiHead(48, 6, regard.LinearAttention(), kv_heads=2, causal=True).double()
    assert mixer.can.gqa
    x = rand(2, 90, 48)
    state, parts = None, []
    with torch.no_grad():
        for chunk in x.split([30, 1, 1, 40, 1, 17], 1):
            y, state = mixer.stream(chunk, state)
            parts.append(y)
            assert state.kv.shape[1] == 2
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x), rtol=0, atol=1e-11)
    weights = mixer.attention_map(x)
    assert weights.shape == (2, 6, 90, 90) and weights.triu(1).abs().max() == 0
