"""The C++ kernels: edge cases, building, and fallbacks without a compiler."""

import copy
import importlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses import FakeTensorMode

import regard
from regard import query_prototypes
from regard.backends import cpp_kernel, linear_backends, linear_scan, softmax_backends
from regard.backends.cpp_kernel import CONTIGUOUS_KEY_READS
from regard.layout import lattice, tiles as tiling
from regard.layout.tiles import TILE, build_tiles
from regard.pattern import Band, Blocks2D, Causal, Chunks, Full, Global, Keys, RandomBlocks

native = importlib.import_module("regard.native")

needs_kernel = pytest.mark.skipif(native.library() is None, reason=native.missing_reason())
BIG = Chunks(64, 1, 1) | Global(64) | RandomBlocks(64, 3, 1024)


def set_library(monkeypatch, library):
    """Replace the function that loads the kernels, and forget the choices that it led to."""
    monkeypatch.setattr(native, "library", library)
    for dispatcher in (softmax_backends, linear_backends):
        monkeypatch.setattr(dispatcher, "_choices", {})


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -------------------------------------------------------------------------------- what it computes
@needs_kernel
@pytest.mark.parametrize("many", [2, 3, 4])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(
    "pattern", [Band(9, 30), Band(5, 5, 7) | Keys(0, 3), Global(2) | Band(3, 3)], ids=repr
)
def test_threads_change_nothing(pattern, heads, many, rand, threads):
    """Fails if heads that are fewer than the threads, or pieces of a sequence, lose or double a
    share of a gradient."""
    inputs = [rand(1, heads, 500, 16).requires_grad_() for _ in range(3)]
    weight = rand(1, heads, 500, 16)
    results = []
    for backend, count in (("reference", 1), ("cpp", 1), ("cpp", many)):
        threads(count)
        out = regard.attend(*inputs, pattern=pattern, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, weight)])
    for got in results[1:]:
        for x, want in zip(got, results[0], strict=True):
            torch.testing.assert_close(x, want, rtol=0, atol=1e-12)


@needs_kernel
def test_frequently_read_keys_are_made_contiguous(monkeypatch, rand):
    """Fails if a long dense call reads keys with gaps again and again, or a window copies what it
    reads a few times."""
    seen = []
    real = native.run
    monkeypatch.setattr(
        native, "run", lambda name, dtype, *made: seen.append(made[0]) or real(name, dtype, *made)
    )
    x = rand(1, 2048, 2, 16).transpose(1, 2)
    for pattern, gaps in ((Full(), False), (Band(50, 50), True)):
        regard.attend(x, x, x, pattern=pattern, backend="cpp")
        q, k, v = (cpp_kernel._CALL.unpack(seen[-1])[7:][4 * i : 4 * i + 4] for i in range(3))
        assert q[3] == 32 and {k[3], v[3]} == {32 if gaps else 16}


@needs_kernel
@pytest.mark.parametrize("seed", range(40))
def test_lloyd_cpp_equals_torch(seed, threads):
    """Fails if a tie goes elsewhere, a token without a vote has one, a word of bits is lost, or a
    piece of the tokens."""
    make = torch.Generator().manual_seed(seed)
    b, h, n, bits, clusters = (
        int(torch.randint(1, most, (), generator=make)) for most in (4, 4, 300, 140, 30)
    )
    sides = torch.randn(
        b, h, n, bits, generator=make, dtype=(torch.float32, torch.float64)[seed % 2]
    )
    sides = sides.round() if seed % 5 == 0 else sides
    sides[0, 0, 0] = torch.nan if seed % 7 == 0 else 0.0
    real = None if seed % 3 else torch.rand(b, n, generator=make) < 0.7
    first = torch.randint(n, (b, h, clusters), generator=make)
    threads(1 + seed % 3)
    got, want = (
        way(sides, real, first, seed % 6)
        for way in (query_prototypes._lloyd_cpp, query_prototypes._lloyd_torch)
    )
    assert torch.equal(got, want)


@needs_kernel
def test_results_are_deterministic(rand, threads):
    """Fails if the order of sums depends on which thread comes first."""
    threads(2)
    inputs = [rand(2, 3, 400, 32, dtype=torch.float32).requires_grad_() for _ in range(3)]

    def once():
        out = regard.attend(*inputs, pattern=Band(40, 40) | Keys(0, 9), backend="cpp")
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    first = once()
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(once(), first, strict=True))


@needs_kernel
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
def test_scores_of_any_size(size, dtype, atol, rand):
    """Fails if the exponential is rough, or large scores overflow, above all where they grow from
    tile to tile."""
    q, k, v = rand(1, 2, 300, 16), rand(1, 2, 300, 16), rand(1, 2, 300, 16)
    k = k * torch.linspace(0, size, 300, dtype=torch.float64)[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    want = regard.attend(q.double(), k.double(), v.double(), backend="reference")
    got = regard.attend(q, k, v, pattern=Full(), backend="cpp")
    rough = (
        1 if dtype == torch.float64 else max(1.0, size)
    )  # the scores themselves have seven figures
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol * rough)


@needs_kernel
def test_nan_propagates_to_visible_queries(rand):
    """Fails if NaN is swallowed where it is seen, or goes further than the tiles that hold it."""
    q, k, v = (rand(1, 1, 400, 16) for _ in range(3))
    k[0, 0, 100] = v[0, 0, 100] = torch.nan
    out = regard.attend(q, k, v, pattern=Band(10, 10), backend="cpp")[0, 0]
    assert out[90:111].isnan().all() and out[192:].isfinite().all() and out[:32].isfinite().all()


@needs_kernel
def test_unsupported_calls(rand):
    """Fails if it pretends to do what it cannot."""
    q = rand(1, 2, 50, 8)
    with pytest.raises(regard.Unsupported, match="float32 and float64, not"):
        regard.attend(q.bfloat16(), q.bfloat16(), q.bfloat16(), backend="cpp")
    with pytest.raises(regard.Unsupported, match="does not support priors"):
        regard.attend(q, q, q, prior=regard.ALiBi(2).double(), backend="cpp")
    with pytest.raises(regard.Unsupported, match="consecutive key positions"):
        regard.attend(q, q, q, k_positions=torch.arange(50), backend="cpp")


@needs_kernel
@pytest.mark.parametrize("width", [16, 40])
def test_heads_as_last_axis(width, rand):
    """Fails if rows are read as dense where they are not: filling them up keeps the order of the
    axes."""
    x = rand(2, 100, width, 4).permute(0, 3, 1, 2).requires_grad_()
    results = [
        regard.attend(x, x, x, pattern=Band(9, 9), backend=name) for name in ("reference", "cpp")
    ]
    results += [torch.autograd.grad(y.square().sum(), x)[0] for y in results]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(results[3], results[2], rtol=0, atol=1e-11)
    whole, linear = x.detach().contiguous(), regard.LinearAttention()
    torch.testing.assert_close(
        linear(x, x, x, causal=True)[0], linear(whole, whole, whole, causal=True)[0]
    )


@needs_kernel
@pytest.mark.parametrize(
    "n",
    [TILE * CONTIGUOUS_KEY_READS - 3, TILE * (CONTIGUOUS_KEY_READS + 4) - 3],
    ids=["where they stand", "copied"],
)
@pytest.mark.parametrize(
    "pattern",
    [Band(100, 90) | Keys(0, 70), Band(9, 9, 7), BIG, Full()],
    ids=["near", "spaced", "big", "full"],
)
def test_strided_rows(pattern, n, rand):
    """Fails if rows of keys that were copied together serve another tile, head or example: there
    are more tiles than places."""
    inputs = [rand(2, n, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    results = [
        regard.attend(*inputs, pattern=pattern, backend=name) for name in ("reference", "cpp")
    ]
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in results]
    with torch.no_grad():  # without a sum to be kept for a backward pass
        results.append(regard.attend(*inputs, pattern=pattern, backend="cpp"))
    for y in results[1:]:
        torch.testing.assert_close(y, results[0], rtol=0, atol=1e-12)
    for got, want in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@needs_kernel
def test_huge_pages_change_nothing(rand, monkeypatch):
    """Fails if what is asked of the system for a large result reaches past it, or loses what stands
    there."""
    inputs = [rand(1, 2, 9000, 64).requires_grad_() for _ in range(3)]
    wishes = []
    for least in (1 << 60, 1 << 20):
        monkeypatch.setattr(native, "HUGE_PAGE_BYTES", least)
        out = regard.attend(*inputs, pattern=Band(9, 9), backend="cpp")
        wishes.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(x, y) for x, y in zip(*wishes, strict=True))


@needs_kernel
def test_gradient_of_overlapping_rows(rand):
    """Fails if room for a gradient is laid out as its tensor is, whose rows have gaps."""
    line = rand(64 + 96)
    leaf = line.as_strided((1, 1, 64, 96), (0, 0, 1, 1)).requires_grad_()
    q = rand(1, 1, 64, 96)
    one, other = (
        regard.attend(q, leaf, q, pattern=Band(9, 9), backend=name) for name in ("reference", "cpp")
    )
    want, got = (torch.autograd.grad(y.square().sum(), leaf)[0] for y in (one, other))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@needs_kernel
def test_cached_call_inside_transforms(rand):
    """Fails if a call that was remembered reads numbers that are not there: that ends the
    process."""
    x = rand(1, 2, 300, 16)
    regard.attend(x, x, x, pattern=Band(9, 9))
    want = regard.attend(x, x, x, pattern=Band(9, 9), backend="reference")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert regard.attend(fake, fake, fake, pattern=Band(9, 9)).shape == x.shape
    mapped = torch.func.vmap(lambda y: regard.attend(y, y, y, pattern=Band(9, 9)))(x[None])
    torch.testing.assert_close(mapped[0], want)
    for backend in ("auto", "cpp", "sdpa", "reference"):
        with pytest.raises(ValueError, match="on the same device, not on cpu, meta and meta"):
            regard.attend(x, x.to("meta"), x.to("meta"), pattern=Band(9, 9), backend=backend)


@needs_kernel
def test_forward_mode_gradient(rand):
    """Fails if forward-mode differentiation comes out of the kernel as if nothing depended on
    anything."""
    x, step = rand(1, 1, 100, 16), rand(1, 1, 100, 16)
    for run in (
        lambda y: regard.attend(y, y, y, pattern=Full()),
        lambda y: regard.LinearAttention()(y, y, y, causal=True)[0],
    ):
        try:
            _, slope = torch.func.jvp(run, (x,), (step,))
        except (RuntimeError, NotImplementedError):  # said, and not silent
            continue
        near = (run(x + 1e-6 * step) - run(x - 1e-6 * step)) / 2e-6
        torch.testing.assert_close(slope, near, rtol=1e-4, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        assert not native.are_plain_tensors(x)


@needs_kernel
def test_nan_with_payload():
    """Fails if a NaN with a payload becomes a small number."""
    x = torch.ones(1, 1, 64, 16)
    k = x.clone()
    k.view(torch.int32)[0, 0, 3] = 0x7FC00001
    assert regard.attend(x, k, x, backend="cpp").isnan().all()


@needs_kernel
def test_tile_set_can_be_copied(rand):
    """Fails if a copy of a list of tiles keeps the addresses of the first."""
    work = build_tiles(Band(5, 6), 150, 150)
    q = rand(1, 1, 150, 16)
    want = cpp_kernel.attend_tiles(q, q, q, work, 0.25)
    again = copy.deepcopy(work)
    assert again.kernel_struct is None
    torch.testing.assert_close(cpp_kernel.attend_tiles(q, q, q, again, 0.25), want, rtol=0, atol=0)


# ------------------------------------------------------------------------- causal linear attention
@needs_kernel
@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize(
    ("b", "h", "n", "r", "f"),
    [
        (1, 1, 64, 16, 16),
        (2, 3, 200, 16, 32),
        (1, 1, 333, 20, 24),
        (1, 2, 130, 64, 64),
        (1, 5, 65, 3, 7),
        (1, 1, 1000, 130, 8),
    ],
)
def test_causal_scan(b, h, n, r, f, many, rand, threads):
    """Fails if a chunk, a piece of the sequence or the state before it is lost or doubled, forward
    or backward."""
    threads(many)
    q, k, v, state = inputs = [
        rand(b, h, *shape).requires_grad_() for shape in ((n, r), (n, r), (n, f), (r, f + 1))
    ]
    values = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    sums = (q @ k.mT).tril() @ values + q @ state
    want = sums[..., :-1], sums[..., -1:], state + k.mT @ values
    got = linear_scan.causal_linear_scan(*inputs, 64)
    weights = [rand(*x.shape) for x in want]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-9)
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs)
        for out in (got, want)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-8)


@needs_kernel
def test_causal_scan_without_cpp(rand, monkeypatch):
    """Fails if what runs without the kernel, or under torch.func, is something else."""
    q, k, v, state = rand(2, 2, 150, 5), rand(2, 2, 150, 5), rand(2, 2, 150, 9), rand(2, 2, 5, 10)
    got = linear_scan.causal_linear_scan(q, k, v, state, 32)
    mapped = torch.func.vmap(lambda *x: linear_scan.causal_linear_scan(*(t[None] for t in x), 32))(
        q, k, v, state
    )
    set_library(monkeypatch, lambda: None)
    for x, y, z in zip(
        got, linear_scan.causal_linear_scan(q, k, v, state, 32), mapped, strict=True
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        torch.testing.assert_close(z[:, 0], y, rtol=0, atol=1e-10)


@needs_kernel
def test_causal_scan_with_wrong_shapes(rand):
    """Fails if other heads, tokens or types are read past their end; what broadcasts does so with
    the kernel too."""
    q = rand(2, 2, 128, 16)
    for k, v in ((q, q[:, :, :100]), (q[:, :, :100], q), (q, q.float()), (q[..., :8], q)):
        with pytest.raises((RuntimeError, ValueError)):
            linear_scan.causal_linear_scan(q, k, v, None, 64)
    state = rand(1, 2, 16, 17)
    out, *_ = linear_scan.causal_linear_scan(q, q, q, state, 64)
    torch.testing.assert_close(
        out, linear_scan.causal_linear_scan(q, q, q, state.expand(2, -1, -1, -1), 64)[0]
    )


@needs_kernel
def test_create_graph_with_shared_inputs(rand):
    """Fails if create_graph=True gives another gradient where keys are values, or are made of
    them."""
    x = rand(1, 1, 80, 16).requires_grad_()
    for given in ((x, x, x), (x, 2 * x, x)):
        grads = [
            torch.autograd.grad(
                linear_scan.causal_linear_scan(*given, None, 64)[0].square().sum(),
                x,
                create_graph=c,
                retain_graph=True,
            )
            for c in (False, True)
        ]
        torch.testing.assert_close(grads[1][0], grads[0][0])


@needs_kernel
def test_causal_scan_second_derivative(rand):
    """Fails if a gradient penalty on causal linear attention vanishes, or is refused."""
    inputs = [rand(1, 1, 66, 2).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: linear_scan.causal_linear_scan(q, k, v, None, 64)[:2], inputs
    )


# ------------------------------------------------------------------ linear attention over all keys
@needs_kernel
@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize(
    ("b", "h", "n", "m", "r", "f"),
    [
        (1, 1, 64, 64, 16, 16),
        (2, 3, 130, 70, 20, 24),
        (1, 2, 300, 1000, 64, 64),
        (1, 8, 65, 64, 3, 7),
        (1, 1, 200, 90, 130, 8),
    ],
)
def test_linear_sums(b, h, n, m, r, f, many, rand, threads):
    """Fails if a chunk or a piece is lost or doubled, forward or backward, in the layout of a head
    or of a layer."""
    threads(many)
    for turned in (False, True):
        sizes = [(n, r), (m, r), (m, f)]
        q, k, v = inputs = [
            (rand(b, t, h, w).transpose(1, 2) if turned else rand(b, h, t, w)).requires_grad_()
            for t, w in sizes
        ]
        got, scores = linear_scan.linear_attention_sums(q, k, v), q @ k.mT
        want = scores @ v, scores.sum(-1, keepdim=True)
        weights = [rand(*x.shape) for x in want]
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-9)
        grads = [
            torch.autograd.grad(
                sum((x * w).sum() for x, w in zip(out, weights, strict=True)), inputs
            )
            for out in (got, want)
        ]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-9)


@needs_kernel
def test_linear_sums_without_cpp(rand, monkeypatch):
    """Fails if what does not fit is read past its end, or what runs without the kernel, or mapped,
    is another thing."""
    q, k, v = rand(2, 2, 100, 16), rand(2, 2, 80, 16), rand(2, 2, 80, 8)
    for other in (v[:, :, :70], v.float(), v[:, :1].expand(-1, 3, -1, -1)):
        with pytest.raises((RuntimeError, ValueError)):
            linear_scan.linear_attention_sums(q, k, other)
    got = linear_scan.linear_attention_sums(q, k, v)
    mapped = torch.func.vmap(lambda *x: linear_scan.linear_attention_sums(*(t[None] for t in x)))(
        q, k, v
    )
    set_library(monkeypatch, lambda: None)
    for x, y, z in zip(got, linear_scan.linear_attention_sums(q, k, v), mapped, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        torch.testing.assert_close(z[:, 0], y, rtol=0, atol=1e-10)


@needs_kernel
def test_linear_sums_second_derivative(rand):
    """Fails if a gradient penalty on linear attention vanishes, or is refused."""
    inputs = [rand(1, 1, 64, 2).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradgradcheck(linear_scan.linear_attention_sums, inputs)


@needs_kernel
@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("size", [0.1, 3.0, 300.0])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_elu_in_one_pass(query, size, dtype, rtol, rand, monkeypatch):
    """Fails if the kernel and PyTorch compute another elu(x) + 1: past whole vectors, far below
    zero, or backward."""
    x = (rand(2, 300, 4, 37) * size - size / 2).to(dtype).transpose(1, 2).requires_grad_()
    weight, found = rand(2, 4, 300, 37).to(dtype), []
    for library in (native.library, lambda: None):
        set_library(monkeypatch, library)
        y, _ = regard.feature.EluFeatures()(x, 0, query)
        found.append((y, torch.autograd.grad(y, x, weight)[0]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-36)


# ------------------------------------------------------------------------------------------- tiles
def covered(work, n, m):
    """How often each pair (n m) is computed."""
    counts = torch.zeros(n, m, dtype=torch.long)
    for part in work:
        bits = (
            part.masks[part.mask_ids.long()][:, :, None] >> torch.arange(64)
        ) & 1  # tiles, keys, queries
        rows = torch.repeat_interleave(
            torch.arange(len(part.row_starts) - 1), part.row_starts.diff()
        )
        for row, column, mask, number in zip(
            rows.tolist(), part.columns.tolist(), bits.mT, part.mask_ids.tolist(), strict=True
        ):
            q, k = (
                torch.arange(row * 64, min(row * 64 + 64, part.n)),
                torch.arange(column * 64, min(column * 64 + 64, part.m)),
            )
            assert number == 1 or not (mask[len(q) :].any() or mask[:, len(k) :].any())
            q, k = (
                x if order is None else order[x]
                for x, order in ((q, part.q_order), (k, part.k_order))
            )
            counts[q[:, None], k] += mask[: len(q), : len(k)]
    return counts


@pytest.mark.parametrize(
    ("pattern", "n", "m"),
    [
        (Full(), 130, 70),
        (Causal(), 200, 200),
        (Band(9, 2), 1, 1),
        (Band(70, 3), 1100, 1030),
        (Band(3, 3, 5) | Keys(0, 9), 300, 310),
        (Blocks2D(24, 4, 4, 2, 3, 3, 2), 500, 500),
        (Chunks(64, 1, 1) | RandomBlocks(64, 2, 20), 1200, 1200),
        (Keys(5, 9) & ~Causal(), 99, 99),
    ],
    ids=repr,
)
def test_every_visible_pair_is_in_one_tile(pattern, n, m):
    """Fails if a tile is missing, doubled, or masked wrongly, at the end of the sequence above
    all."""
    assert torch.equal(covered(build_tiles(pattern, n, m), n, m), pattern.dense(n, m).long())


def test_no_table_of_all_tiles(monkeypatch):
    """Fails if a million tokens would ask for (n / 64) x (n / 64) entries; a window looks at tiles
    in proportion to n."""
    asked = []
    usual = lattice.classify_on_lattice

    def classify(*args):
        asked.append(args[2].shape[0] * args[3].shape[0])
        return usual(*args)

    for module in (lattice, tiling):
        monkeypatch.setattr(module, "classify_on_lattice", classify)
    for n in (1 << 15, 1 << 16):
        asked.append(0)
        tiling._build_term(Band(128, 128), None, n, n, 0, 0)
    half, whole = sum(asked[: asked[1:].index(0) + 1]), sum(asked[asked[1:].index(0) + 1 :])
    assert whole < 2.5 * half + (1 << 12) and max(asked) <= (1 << 16) // 64 * 64


def test_tiles_of_many_tokens_are_small():
    """Fails if the list of tiles grows faster than what is seen."""
    for pattern, most in ((Band(128, 128), 1 << 20), (BIG, 4 << 20), (Band(64, 64, 128), 8 << 20)):
        assert sum(part.nbytes() for part in tiling._build(pattern, 1 << 16, 1 << 16, 0, 0)) < most


# ---------------------------------------------------------------------------------------- building
@pytest.fixture
def load(tmp_path, monkeypatch):
    """load(NAME=value): the kernel as a process with an empty cache and these variables would find
    it, or why it would not."""

    def again(**environment):
        for name, value in {"REGARD_CACHE": str(tmp_path / "cache"), **environment}.items():
            monkeypatch.setenv(name, value)
        return native._load_or_build.__wrapped__()

    return again


@needs_kernel
def test_concurrent_threads_build_once(monkeypatch):
    """Fails if each thread of a process runs a compiler of its own."""
    built = []
    monkeypatch.setattr(native, "_build", lambda *_: built.append(1) or time.sleep(0.2) or "built")
    monkeypatch.setattr(native, "_open", lambda path: None)
    native._load_or_build.cache_clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda _: native._load(), range(4))] == ["built"] * 4 and built == [1]
    finally:
        native._load_or_build.cache_clear()


def test_compiler_variable_without_a_command(load, monkeypatch):
    """Fails if CXX is blank or has an open quote, and that ends in a traceback."""
    monkeypatch.setattr(native.sys, "platform", "linux")
    for value in ("  ", "\t", '"', "'g++", '""', "\\"):
        assert load(CXX=value) == f"the compiler of CXX, {value!r}, was not found"


def test_compiler_options_are_part_of_the_key(load):
    """Fails if the options of CXX do not count."""
    assert native._library_path(["g++"]) != native._library_path(["g++", "-O0"])


def test_disable_by_environment_variable(load):
    """Fails if somebody who wants no compiler is given one."""
    assert load(REGARD_CPP="0") == "REGARD_CPP=0 is set"


def test_missing_compiler(load, tmp_path):
    """Fails if a machine without a compiler stops the library, or hears nothing."""
    assert (
        load(PATH=str(tmp_path)) == "no C++ compiler was found: install g++ or clang++, or set CXX"
    )
    assert load(CXX="/nonexistent -O3") == (
        "the compiler of CXX, '/nonexistent -O3', was not found"
    )
    assert load(CXX=" ") == "the compiler of CXX, ' ', was not found"


def test_everything_works_without_cpp(monkeypatch, rand):
    """Fails if the library needs it."""
    set_library(monkeypatch, lambda: None)
    monkeypatch.setattr(native, "missing_reason", lambda: "there is none")
    q, pattern = rand(1, 2, 300, 16), Band(9, 11)
    want = regard.attend(q, q, q, pattern=pattern, backend="reference")
    torch.testing.assert_close(regard.attend(q, q, q, pattern=pattern), want)
    assert regard.explain(Band(9, 12), 4096).backend == "sparse"
    with pytest.raises(regard.Unsupported, match="there is none"):
        regard.attend(q, q, q, pattern=pattern, backend="cpp")


def test_failing_compiler(load, tmp_path):
    """Fails if an error of the compiler becomes ours, or leaves something behind."""
    fake = tmp_path / "fake++"
    fake.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'cannot do that' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    assert load(CXX=str(fake)) == f"{fake} failed to build the C++ kernels: cannot do that"
    assert not list((tmp_path / "cache").iterdir())
    fake.write_text("#!/bin/sh\nexit 3\n")
    reason = f"{fake} --version, which tells the compiler's version, failed: exit status 3"
    assert load(CXX=str(fake)) == reason


@needs_kernel
def test_corrupt_library_is_rebuilt(load, tmp_path):
    """Fails if a file that was cut short in the cache ends the process, which loading it would
    do."""
    assert load().attention_forward_float
    (built,) = (tmp_path / "cache").glob("kernel-*.so")
    whole = built.read_bytes()
    built.unlink()  # this process has it in use
    built.write_bytes(whole[:1000])
    assert native._open(built) is None and load().attention_forward_float
    assert built.stat().st_size > 1000


@needs_kernel
def test_cache_dir_is_a_file(load, tmp_path):
    """Fails if a file where the folder should be stops the library."""
    (tmp_path / "cache").write_text("I am a file")
    assert "could not be built or loaded" in load()


def test_sources_are_packaged():
    """Fails if somebody who installs the package has no kernel to build."""
    assert all((native.SOURCE_DIR / name).exists() for name in native.SOURCES)
