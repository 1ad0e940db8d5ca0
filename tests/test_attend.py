"""regard.attend: every backend gives the result of the textbook formula, or a reason why not."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import ALiBi, Prior, Unsupported, native
from regard.backends import calibration, flex, softmax_backends, token_groups
from regard.backends.call import make_call
from regard.pattern import (
    Axial,
    Band,
    Blocks2D,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    GlobalMaskKeys,
    GlobalMaskQueries,
    KeyPhase,
    Keys,
    Nothing,
    PerHead,
    RandomBlocks,
)
from regard.prior import Gaussian

TILES = [
    "sparse",
    *(["cpp"] if native.library() else []),
]  # backends that compute visible tiles only
PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "window": Band(9, 9),
    "dilated": Band(7, 7, 5),
    "global": Band(5, 5) | Global(3),
    "bigbird": Chunks(16, 1, 1) | Global(16) | RandomBlocks(16, 2, 24, seed=3),
    "axial": Axial(20),
    "image": Blocks2D(24, 4, 4, 2, 3, 3, 2),
    "fixed": (Chunks(30) | KeyPhase(30, 27)) & Causal(),
    "holes": ~Band(40, 40) & Keys(0, 100),
    "heads": PerHead((Band(4, 4), Causal(), Band(4, 4), Chunks(50) | Keys(0, 2))),
}
N = 310


def naive(q, k, v, keep, scale=None, addend=0.0):
    """softmax over the kept pairs, by exponentials; zero where there are none."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + addend
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp() * keep
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def qkv(rand, n=N, m=None, b=2, h=4, e=8, f=None, kv=None, dtype=torch.float64):
    m, f, kv = n if m is None else m, f or e, kv or h
    return (
        rand(b, h, n, e, dtype=dtype),
        rand(b, kv, m, e, dtype=dtype),
        rand(b, kv, m, f, dtype=dtype),
    )


def gradients(out, inputs):
    weight = torch.randn(
        out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    ).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs)


def same(got, want, atol=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# -------------------------------------------------------------------------------------- they agree
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("masked", [False, True])
def test_backends_agree(name, masked, rand):
    """Fails if a backend gives another output or gradient than the naive formula."""
    pattern, inputs = PATTERNS[name], [x.requires_grad_() for x in qkv(rand)]
    keep, mask = pattern.dense(N), None
    if masked:
        mask = torch.stack((torch.arange(N) < 200, torch.arange(N) % 5 != 2))
        keep = keep & mask[:, None, None]
    want = naive(*inputs, keep)
    want_grads = gradients(want, inputs)
    for backend in ("reference", "sdpa", *TILES, "auto"):
        got = regard.attend(*inputs, pattern=pattern, mask=mask, backend=backend)
        same([got, *gradients(got, inputs)], [want, *want_grads])
    with torch.no_grad():
        got = regard.attend(
            *(x.float() for x in inputs), pattern=pattern, mask=mask, backend="flex"
        )
    same([got], [want.float()], 1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "flex"])
def test_query_without_keys_gives_zero(backend, rand):
    """Fails if it gives NaN, or the mean of everything."""
    q, k, v = qkv(rand, dtype=torch.float32)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1] = False
    with torch.no_grad():
        assert not regard.attend(q, k, v, pattern=Nothing(), backend=backend).any()
        out = regard.attend(q, k, v, pattern=Band(3, 3), mask=mask, backend=backend)
        assert out[0].all() and not out[1].any()
        assert not regard.attend(q, k, v, pattern=Keys(5, 9) & Causal(), backend=backend)[
            :, :, :5
        ].any()


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES])
def test_query_without_keys_has_no_gradient(backend, rand):
    """Fails if NaN comes back from a row of nothing."""
    inputs = [x.requires_grad_() for x in qkv(rand)]
    out = regard.attend(*inputs, pattern=Keys(5, 9) & Causal(), backend=backend)
    dq, dk, dv = gradients(out, inputs)
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    assert not dq[:, :, :5].any() and not dk[:, :, 9:].any() and not dv[:, :, 9:].any()


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
def test_scale_and_widths(backend, rand):
    """Fails if the scale is not the one given, or values must be as wide as queries."""
    for e, f in ((8, 8), (8, 3), (3, 8)):
        inputs = [x.requires_grad_() for x in qkv(rand, e=e, f=f)]
        for scale in (None, 0.0, 2.5, -1.0):
            want = naive(*inputs, Band(9, 9).dense(N), scale)
            got = regard.attend(*inputs, pattern=Band(9, 9), scale=scale, backend=backend)
            assert got.shape == (2, 4, N, f)
            same([got, *gradients(got, inputs)], [want, *gradients(want, inputs)])


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
@pytest.mark.parametrize("kv", [1, 2])
def test_grouped_query_attention(backend, kv, rand):
    """Fails if neighbouring query heads do not share a key head, or its gradient is not their
    sum."""
    inputs = [x.requires_grad_() for x in qkv(rand, kv=kv)]
    q, k, v = inputs
    want = naive(
        q, k.repeat_interleave(4 // kv, 1), v.repeat_interleave(4 // kv, 1), Band(9, 9).dense(N)
    )
    got = regard.attend(*inputs, pattern=Band(9, 9), backend=backend)
    same([got, *gradients(got, inputs)], [want, *gradients(want, inputs)])


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
@pytest.mark.parametrize(
    ("q_start", "k_positions", "n", "m"),
    [(100, 0, 210, 310), (7, 30, 250, 200), (0, 50, 200, 300), (300, 290, 1, 11)],
)
def test_offsets(backend, q_start, k_positions, n, m, rand):
    """Fails if positions do not start where they are said to."""
    inputs = [x.requires_grad_() for x in qkv(rand, n, m)]
    for pattern in (Band(20, 5), Causal(), Band(9, 9, 4) | Keys(0, 60), Chunks(32, 1)):
        q, k = (
            torch.arange(q_start, q_start + n)[:, None],
            torch.arange(k_positions, k_positions + m),
        )
        want = naive(*inputs, pattern.allows(q, k))
        got = regard.attend(
            *inputs, pattern=pattern, q_start=q_start, k_positions=k_positions, backend=backend
        )
        same([got, *gradients(got, inputs)], [want, *gradients(want, inputs)])


def test_key_positions(rand):
    """Fails if keys with positions of their own are taken for keys in a row."""
    inputs = [x.requires_grad_() for x in qkv(rand, 40, 30)]
    at = torch.cat((torch.arange(4), torch.arange(100, 126)))
    pattern = Band(20, 0) | Keys(0, 4)
    want = naive(*inputs, pattern.allows(torch.arange(90, 130)[:, None], at))
    want = [want, *gradients(want, inputs)]
    for backend in ("reference", "sdpa", "auto"):
        got = regard.attend(*inputs, pattern=pattern, q_start=90, k_positions=at, backend=backend)
        same([got, *gradients(got, inputs)], want)
    with pytest.raises(Unsupported, match="consecutive key positions"):
        regard.attend(*inputs, pattern=pattern, q_start=90, k_positions=at, backend="sparse")


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
@pytest.mark.parametrize(
    "pattern",
    [
        Band(6, 6) | GlobalMask(),
        Band(6, 6) | GlobalMaskKeys(),
        GlobalMaskQueries(),
        Causal() & GlobalMask(),
    ],
    ids=repr,
)
def test_global_attention_mask(backend, pattern, rand):
    """Fails if marked tokens are not those that each example marked."""
    inputs = [x.requires_grad_() for x in qkv(rand)]
    global_attention_mask = torch.zeros(2, N, dtype=torch.bool)
    global_attention_mask[0, ::50] = global_attention_mask[1, 7] = True
    keep = torch.zeros(2, N, N, dtype=torch.bool)
    for a in (False, True):
        for b in (False, True):
            case = pattern.resolve_global_mask(a, b).dense(N)
            keep |= (
                case
                & (global_attention_mask == a)[:, :, None]
                & (global_attention_mask == b)[:, None, :]
            )
    for mask in (None, torch.arange(N).expand(2, N) % 7 != 3):
        kept = keep[:, None] if mask is None else keep[:, None] & mask[:, None, None]
        want = naive(*inputs, kept)
        got = regard.attend(
            *inputs,
            pattern=pattern,
            global_attention_mask=global_attention_mask,
            mask=mask,
            backend=backend,
        )
        same([got, *gradients(got, inputs)], [want, *gradients(want, inputs)])


def test_global_mask_is_optional(rand):
    """Fails if a pattern with marks needs them."""
    q, k, v = qkv(rand)
    for backend in ("reference", "sdpa", *TILES):
        same(
            [regard.attend(q, k, v, pattern=Band(6, 6) | GlobalMask(), backend=backend)],
            [naive(q, k, v, Band(6, 6).dense(N))],
        )


# ------------------------------------------------------------------------------------------ priors
class Learned(Prior):
    """A slope for each head and a weight on the query's first number: it has parameters, and sees
    tokens."""

    def __init__(self, heads):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.linspace(0.1, 1, heads, dtype=torch.float64))
        self.own = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, q_pos, k_pos, q, k):
        gap = (q_pos - k_pos).abs()
        return -gap * self.slope.view(-1, *[1] * gap.dim()) + self.own * q[..., :1] * (k_pos % 3)


@pytest.mark.parametrize(
    "pattern",
    [Full(), Causal(), Band(9, 9) | Global(3), Band(7, 7, 5), Chunks(30) | KeyPhase(30, 27)],
    ids=repr,
)
def test_priors(pattern, rand):
    """Fails if an addend to the scores is misplaced, or its parameters get no gradient, on any
    backend."""
    inputs, mask = [x.requires_grad_() for x in qkv(rand)], torch.arange(N).expand(2, N) % 9 != 4
    at = torch.arange(N, dtype=torch.float64)
    learned = Learned(4).double()
    gap = (at[:, None] - at).abs()
    slopes = torch.tensor([2.0 ** (-8 * i / 4) for i in range(1, 5)], dtype=torch.float64)
    own = learned.own * inputs[0][..., :1] * (at % 3)
    cases = (
        (ALiBi(4).double(), -gap * slopes[:, None, None]),
        (learned, -gap * learned.slope[:, None, None] + own),
    )
    for prior, addend in cases:
        leaves = [*inputs, *prior.parameters()]
        want = naive(*inputs, pattern.dense(N) & mask[:, None, None], addend=addend)
        want = [want, *gradients(want, leaves)]
        for backend in ("reference", "sdpa", "sparse", "auto"):
            got = regard.attend(*inputs, pattern=pattern, prior=prior, mask=mask, backend=backend)
            same([got, *gradients(got, leaves)], want)


def test_gradient_of_prior_only(rand):
    """Fails if a prior gets no gradient where tokens need none."""
    q, k, v = qkv(rand)
    prior, grads = Learned(4).double(), []
    for backend in ("reference", "sdpa", "sparse", "auto"):
        out = regard.attend(q, k, v, pattern=Band(20, 20), prior=prior, backend=backend)
        grads.append(gradients(out, [*prior.parameters()]))
    for other in grads[1:]:
        same(other, grads[0])


def test_priors_follow_positions(rand):
    """Fails if a prior counts from zero where the sequence goes on."""
    q, k, v = qkv(rand, 200, 260)
    prior = ALiBi(4).double()
    want = regard.attend(q, k, v, pattern=Band(40, 0), prior=prior, q_start=60, backend="reference")
    for backend in ("sdpa", "sparse"):
        same(
            [regard.attend(q, k, v, pattern=Band(40, 0), prior=prior, q_start=60, backend=backend)],
            [want],
        )
        same(
            [
                regard.attend(
                    q,
                    k,
                    v,
                    pattern=Band(40, 0),
                    prior=prior,
                    q_start=160,
                    k_positions=100,
                    backend=backend,
                )
            ],
            [want],
        )


# ------------------------------------------------------------------------------- types and layouts
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
)
@pytest.mark.parametrize("backend", ["sdpa", "sparse", "auto"])
def test_dtypes(dtype, atol, backend, rand):
    """Fails if a type is widened, refused, or far from float64, forward or backward."""
    exact = [x.requires_grad_() for x in qkv(rand, 320)]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    for pattern in (Band(16, 16) | Global(2), RandomBlocks(16, 3, 20), Band(5, 5, 7)):
        want = regard.attend(*exact, pattern=pattern, backend="reference")
        got = regard.attend(*low, pattern=pattern, backend=backend)
        grads = gradients(got, low)
        assert got.dtype == dtype and all(g.dtype == dtype for g in grads)
        same(
            [got.double(), *(g.double() for g in grads)], [want, *gradients(want, exact)], atol * 4
        )


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
def test_requires_grad_on_some(backend, rand):
    """Fails if a gradient is lost, or made up, where only some inputs want one."""
    for wanted in (0, 1, 2):
        inputs = qkv(rand)
        inputs[wanted].requires_grad_()
        out = regard.attend(*inputs, pattern=Band(9, 9), backend=backend)
        want = gradients(naive(*inputs, Band(9, 9).dense(N)), [inputs[wanted]])
        same(gradients(out, [inputs[wanted]]), want)
        out = regard.attend(*inputs, pattern=Band(9, 9), backend=backend)
        out.sum().backward()
        assert [x.grad is not None for x in inputs] == [i == wanted for i in range(3)]


@pytest.mark.parametrize("backend", ["reference", "sdpa", *TILES, "auto"])
def test_any_strides(backend, rand):
    """Fails if memory must lie in one piece."""
    base = rand(N, 3, 2, 8, 4)  # n, three of them, b, e, h: nothing lies as the kernels like it
    views = [base[:, i].permute(1, 3, 0, 2) for i in range(3)]
    wide = rand(2, 4, N, 24)
    others = {
        "permuted": views,
        "slices": [wide[..., i : i + 8] for i in (0, 8, 16)],
        "steps": [wide[..., i::3] for i in range(3)],
        "flipped batch": [x.flip(0) for x in views],
        "heads last": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views],
        "expanded": [x[:1, :1].expand(2, 4, -1, -1) for x in views],
        "every other token": [rand(2, 4, 2 * N, 8)[:, :, ::2] for _ in range(3)],
    }
    for name, inputs in others.items():
        leaves = [x.detach().requires_grad_() for x in inputs]
        want = naive(*leaves, Band(9, 9).dense(N))
        got = regard.attend(*leaves, pattern=Band(9, 9), backend=backend)
        torch.testing.assert_close(
            got, want, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
        same(gradients(got, leaves), gradients(want, leaves))


def test_inputs_are_left_alone(rand):
    """Fails if a call writes into what it was given."""
    q, k, v = qkv(rand)
    copies, mask = [x.clone() for x in (q, k, v)], torch.arange(N).expand(2, N) < 100
    for backend in ("reference", "sdpa", *TILES, "auto"):
        regard.attend(q, k, v, pattern=Band(9, 9), mask=mask, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


# ---------------------------------------------------------------------------------------- refusals
def test_a_named_backend_never_falls_back(rand):
    """Fails if something else runs than what was named."""
    q, k, v = qkv(rand)
    global_attention_mask = torch.zeros(2, N, dtype=torch.bool)
    with pytest.raises(Unsupported, match=r"'flex'.*no backward pass on the CPU"):
        regard.attend(q.requires_grad_(), k, v, backend="flex")
    q = q.detach()
    with pytest.raises(Unsupported, match=r"'flex'.*priors"):
        regard.attend(q, k, v, prior=ALiBi(4).double(), backend="flex")
    with pytest.raises(Unsupported, match=r"'sparse'.*prior with global_attention_mask"):
        regard.attend(
            q,
            k,
            v,
            pattern=Band(1, 1) | GlobalMask(),
            prior=ALiBi(4).double(),
            global_attention_mask=global_attention_mask,
            backend="sparse",
        )
    for backend in TILES:
        with pytest.raises(Unsupported, match=rf"'{backend}'.*GlobalMask under ~"):
            regard.attend(
                q,
                k,
                v,
                pattern=Band(1, 1) | ~GlobalMaskKeys(),
                global_attention_mask=global_attention_mask,
                backend=backend,
            )


def test_auto_falls_back(rand):
    """Fails if a call that one backend cannot do is done by nobody."""
    q, k, v = qkv(rand)
    global_attention_mask = torch.arange(N).expand(2, N) % 50 == 0
    want = regard.attend(
        q,
        k,
        v,
        pattern=Band(1, 1) | ~GlobalMaskKeys(),
        global_attention_mask=global_attention_mask,
        backend="reference",
    )
    same(
        [
            regard.attend(
                q,
                k,
                v,
                pattern=Band(1, 1) | ~GlobalMaskKeys(),
                global_attention_mask=global_attention_mask,
            )
        ],
        [want],
    )


def test_unknown_backend(rand):
    """Fails if a misspelt backend is not named with what exists."""
    q, k, v = qkv(rand, 4)
    with pytest.raises(ValueError, match=r"'sparce'.*did you mean 'sparse'"):
        regard.attend(q, k, v, backend="sparce")
    with pytest.raises(ValueError, match=r"choose from auto, cpp, flex, reference, sdpa, sparse"):
        regard.attend(q, k, v, backend="cuda!")


# -------------------------------------------------------------------------------------- the choice
def test_explain_gives_a_reason():
    """`auto` says why, with what every backend answered."""
    for pattern in (Full(), Causal()):  # the list of all tiles would be too long
        dense = regard.explain(pattern, 1 << 17)
        assert dense.backend == "sdpa" and dense.seconds() is None
    small = regard.explain(Band(4, 4), 40)
    assert small.backend == "sdpa" and "few queries" in small.reason
    far = regard.explain(Band(64, 64), 16384)
    assert far.backend == TILES[-1] and f"ms {TILES[-1]}" in far.reason
    assert far.seconds() < far.seconds("sdpa")
    answers = {c.backend: c for c in far.candidates}
    assert set(answers) == {"sdpa", "cpp", "sparse", "flex", "reference"}
    assert all((c.seconds is None) == bool(c.reason) for c in far.candidates)
    assert [line.split()[0] for line in str(far).splitlines()[1:]] == list(answers)
    assert "only candidate" in str(small).splitlines()[1]
    training = regard.explain(Band(64, 64), 16384, grad=True)
    assert training.seconds("sdpa") > far.seconds("sdpa")


def test_dense_patterns_use_measured_costs(monkeypatch):
    """What was measured of dense calls, PyTorch's and ours, decides between them."""
    with_kernel = len(TILES) > 1
    for ours, want in ((0.9e-9, "cpp"), (1.1e-9, "sdpa")):
        costs = calibration.BackendCosts(1e-5, 1e-9, 1e-9, 1e-9, 1e-4, 1e-9, 1e-5, ours)
        monkeypatch.setattr(calibration, "machine_costs", lambda costs=costs: costs)
        monkeypatch.setattr(softmax_backends, "_choices", {})
        assert regard.explain(Full(), 4096).backend == (want if with_kernel else "sdpa")
        assert regard.explain(Causal(), 512).backend == (
            "cpp" if with_kernel else "sdpa"
        )  # PyTorch leaves nothing out


def test_nearly_dense_patterns_without_cpp(monkeypatch):
    """No runs of blocks are made of a pattern that sees nearly all."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(softmax_backends, "_choices", {})
    for pattern, n in ((Band(1023, 1022), 1024), (Full(), 4096), (Causal(), 4096)):
        choice = regard.explain(pattern, n)
        assert choice.backend == "sdpa"
        (sparse,) = [c for c in choice.candidates if c.backend == "sparse"]
        assert sparse.seconds is None and "only by name" in sparse.reason


def test_choose_agrees_with_explain(rand):
    """What runs is what is explained, and a refusal is passed on."""
    q, k, v = (x.float() for x in qkv(rand, 400))
    call = make_call(q, k, v, pattern=Band(4, 4))
    choice = softmax_backends.choose(call)
    heads, width = q.shape[0] * q.shape[1], q.shape[3]
    assert choice == regard.explain(Band(4, 4), 400, heads=heads, width=width)
    assert softmax_backends.prepare(call)[0].name == choice.backend
    scattered = make_call(q, k, v, pattern=Band(4, 4), k_positions=torch.arange(400))
    refused = softmax_backends.choose(scattered)
    assert refused.backend == "sdpa"
    assert "sparse: it requires consecutive key positions" in refused.reason


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory; what was measured before is forgotten, and measuring takes no
    time."""
    costs = calibration.BackendCosts(
        1e-5, 2e-9, 1.5e-9, 1e-9, 2e-5, 1.5e-9, *([3e-5, 1.2e-9] if native.library() else [])
    )
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measure_costs", lambda: (costs, 1.0))
    calibration._machine_costs.cache_clear()
    yield calibration.costs_path(), costs
    calibration._machine_costs.cache_clear()


def test_costs_are_stored(cache, monkeypatch):
    """Fails if every process measures again."""
    path, costs = cache
    assert calibration.machine_costs() == costs and path.exists()
    monkeypatch.setattr(calibration, "measure_costs", lambda: pytest.fail("measured again"))
    calibration._machine_costs.cache_clear()
    assert calibration.machine_costs() == costs


GOOD = {
    "dense_call": 1e-5,
    "dense_short": 1e-9,
    "dense_middle": 1e-9,
    "dense_score": 1e-9,
    "sparse_call": 1e-5,
    "sparse_score": 1e-9,
}
GOOD |= {"cpp_call": 1e-5, "cpp_score": 1e-9} if native.library() else {}
HOSTILE = {
    "empty": "",
    "cut short": json.dumps(GOOD)[:-20],
    "a list": "[1, 2, 3, 4]",
    "null": "null",
    "a number": "7",
    "unknown names": json.dumps({**GOOD, "run_this": "rm"}),
    "missing names": '{"dense_call": 1e-5}',
    "strings": json.dumps({**GOOD, "dense_call": "1e-5"}),
    "booleans": json.dumps({**GOOD, "dense_call": True}),
    "not a number": json.dumps(GOOD).replace("1e-09", "NaN"),
    "infinite": json.dumps(GOOD).replace("1e-09", "Infinity"),
    "negative": json.dumps({**GOOD, "sparse_score": -1.0}),
    "huge": json.dumps({**GOOD, "sparse_score": 1e30}),
    "deep": "[" * 100_000,
    "nested": json.dumps({**GOOD, "dense_call": {"a": 1}}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_corrupt_costs_file(cache, content):
    """Fails if a file that makes no sense stops the library, or is believed."""
    path, costs = cache
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert calibration.machine_costs() == costs


def test_costs_file_is_not_text(cache):
    """Fails if a cache of random bytes stops the library."""
    path, costs = cache
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert calibration.machine_costs() == costs


def test_read_only_cache_dir(cache, tmp_path, monkeypatch):
    """Fails if a read-only home, or a file where the directory should be, stops the library."""
    _, costs = cache
    (tmp_path / "cache").write_text("I am a file")
    assert calibration.machine_costs() == costs
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("REGARD_CACHE", str(locked / "deep"))
    calibration._machine_costs.cache_clear()
    assert calibration.machine_costs() == costs


def test_costs_of_busy_machine_are_not_stored(cache, monkeypatch):
    """Fails if what was measured under load is kept for ever."""
    path, costs = cache
    shares = iter([0.6, 0.7, 0.8])
    monkeypatch.setattr(calibration, "measure_costs", lambda: (costs, next(shares)))
    assert calibration.machine_costs() == costs and not path.exists()
    assert next(shares, None) is None, "a disturbed measurement is repeated"
    shares = iter([0.6, 0.99])
    calibration._machine_costs.cache_clear()
    assert calibration.machine_costs() == costs and path.exists()


def test_measure_costs():
    """Fails if the calibration itself is broken."""
    costs, cpu_share = calibration.measure_costs()
    assert all(0 < x < 1 for x in vars(costs).values() if x is not None)
    assert 0 < cpu_share < 1.5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot share a core on purpose")
def test_cpu_share_of_a_busy_machine():
    """Fails if another process that takes the same core for half of the time goes unnoticed."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        x = torch.randn(1 << 22)
        _, shares = calibration._time_calls([(lambda _: x.exp(), 1)], 1, rounds=20)
        assert max(shares.values()) < calibration.MIN_CPU_SHARE
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, before)


# ------------------------------------------------------------------------------------- block masks
MASKS = {
    "window": Band(100, 30),
    "causal": Causal(),
    "bigbird": Chunks(64, 1, 1) | Global(128) | RandomBlocks(64, 2, 16, seed=1),
    "dilated": Band(20, 20, 9),
    "axial": Axial(32),
    "fixed": (Chunks(128) | KeyPhase(128, 120)) & Causal(),
    "nothing": Nothing(),
    "full": Full(),
    "not": ~Band(200, 200),
    "heads": PerHead((Band(100, 100), Causal())),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("n", "m"), [(1024, 1024), (1000, 1000), (900, 777)])
def test_block_mask_equals_torch(name, n, m):
    """Fails if a block is missing, superfluous, or wrongly taken as full or partial."""
    pattern = MASKS[name]
    table = pattern.dense(n, m)

    def looked_up(b, h, q, k):
        return table[h, q, k] if pattern.heads else table[q, k]

    want = create_block_mask(looked_up, None, pattern.heads, n, m, device="cpu")
    got = flex.block_mask(pattern, n, m)
    assert (
        got.shape == want.shape
        and got.seq_lengths == want.seq_lengths
        and got.BLOCK_SIZE == want.BLOCK_SIZE
    )
    assert torch.equal(got.to_dense().bool(), want.to_dense().bool())
    assert torch.equal(got.kv_num_blocks, want.kv_num_blocks)
    assert torch.equal(got.full_kv_num_blocks, want.full_kv_num_blocks)
    for count, mine, theirs in (
        (want.kv_num_blocks, got.kv_indices, want.kv_indices),
        (want.full_kv_num_blocks, got.full_kv_indices, want.full_kv_indices),
    ):
        used = torch.arange(mine.shape[-1]) < count[..., None]
        assert torch.equal(mine[used], theirs[used])


def test_block_mask_with_padding_and_offsets(rand):
    """Fails if FlexAttention sees padding, or counts positions from elsewhere."""
    q, k, v = qkv(rand, 300, 420, dtype=torch.float32)
    mask = torch.stack((torch.arange(420) < 350, torch.arange(420) % 4 != 0))
    keep = (
        Band(60, 0).allows(torch.arange(120, 420)[:, None], torch.arange(420)) & mask[:, None, None]
    )
    got = regard.attend(q, k, v, pattern=Band(60, 0), mask=mask, q_start=120, backend="flex")
    same([got], [naive(q.double(), k.double(), v.double(), keep).float()], 1e-5)


# ------------------------------------------------------------------------------------------ memory
def kept_bytes(n, **more):
    """What autograd keeps for the backward pass of one call."""
    q, k, v = (torch.zeros(1, 2, n, 16, requires_grad=True) for _ in range(3))
    seen, total = set(), 0

    def pack(x):
        nonlocal total
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = regard.attend(q, k, v, **more)
    assert out.grad_fn is not None
    return total


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", TILES)
def test_nothing_quadratic_is_saved(backend, masked):
    """Fails if the backward pass needs something of the size of the scores."""
    sizes = []
    for n in (2048, 4096):
        mask = {"mask": torch.arange(n)[None] < n - 100} if masked else {}
        sizes.append(kept_bytes(n, pattern=Band(64, 64), backend=backend, **mask))
    assert sizes[0] < sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] < 4096 * 4096 * 2 * 4 / 40  # the weights of both heads
    assert (
        sizes[1] <= 4096 * 2 * 4 * (16 * 4 + 1) + 8 * 4096
    )  # q, k, v, out, a number a query, and the mask


@pytest.mark.parametrize("backend", ["auto", "sdpa", *TILES])
def test_training_after_inference_mode(backend, rand):
    """Fails if what is kept from a call in inference mode cannot be used where gradients are
    needed."""
    pattern = regard.Band(7, 9) | regard.RandomBlocks(10, 1, 31, seed=77)
    q = rand(1, 2, 301, 8)
    with torch.inference_mode():
        regard.attend(q, q, q, pattern=pattern, backend=backend)
    leaf = q.clone().requires_grad_()
    regard.attend(leaf, leaf, leaf, pattern=pattern, backend=backend).sum().backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("backend", TILES)
def test_second_derivatives_are_refused(backend, rand):
    """Fails if a gradient penalty vanishes without a word."""
    leaf = rand(1, 2, 40, 8).requires_grad_()
    q = leaf * 1.0
    y = regard.attend(q, q, q, pattern=regard.Band(3, 3), backend=backend)
    with pytest.raises(Unsupported, match="second derivative"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)


@pytest.mark.parametrize("backend", TILES)
def test_batches_of_gradients_are_refused(backend, rand):
    """Fails if what a kernel cannot take is a message about storage."""
    q = rand(1, 2, 40, 8).requires_grad_()
    y = regard.attend(q, q, q, pattern=regard.Band(3, 3), backend=backend)
    with pytest.raises(Unsupported, match="one gradient at a time"):
        torch.autograd.grad(y, q, rand(3, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("backend", ["auto", "sdpa", *TILES])
@pytest.mark.parametrize("scale", [0, -1.0])
@pytest.mark.parametrize("n", [5, 300])
def test_scales_that_are_not_positive(backend, scale, n, rand):
    """Fails if what is hidden before it is scaled comes back as zero times infinity."""
    q, k, v = (rand(1, 2, n, 4) for _ in range(3))
    want = regard.attend(q, k, v, pattern=regard.Causal(), scale=scale, backend="reference")
    got = regard.attend(q, k, v, pattern=regard.Causal(), scale=scale, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1"])
def test_invalid_scales(scale, rand):
    """Fails if a scale that is no number gives numbers."""
    with pytest.raises(TypeError, match="finite number"):
        regard.attend(*[rand(1, 1, 3, 4)] * 3, scale=scale)


@pytest.mark.parametrize("backend", ["sdpa", "reference", *TILES])
def test_nan_query_propagates(backend, rand):
    """Fails if a backend, above all the one that others are held to, makes zeros of NaN; or if it
    reaches other queries."""
    q, k, v = (rand(1, 1, 200, 8) for _ in range(3))
    q[:, :, 7] = torch.nan
    y = regard.attend(q, k, v, pattern=Band(3, 3), backend=backend)
    assert y[:, :, 7].isnan().all() and y[:, :, [*range(7), *range(8, 200)]].isfinite().all()


@pytest.mark.parametrize("n", [20, 100])
def test_mask_with_cached_pattern(n, rand):
    """Fails if what is remembered of a pattern brings the mask of another call with it."""
    q = rand(2, 2, n, 8)
    for seed in range(3):
        mask = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.6
        for pattern in (Band(3, 3), Full(), regard.Causal()):
            got, want = (
                regard.attend(q, q, q, pattern=pattern, mask=mask, backend=name)
                for name in ("sdpa", "reference")
            )
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [20, 300])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "sparse", "reference"])
def test_autocast_dtype(backend, n, rand):
    """Fails if it depends on the backend, or on how many tokens there are."""
    q = rand(1, 2, n, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            regard.attend(q, q, q, pattern=regard.Band(3, 3), backend=backend).dtype
            == torch.bfloat16
        )
        assert (
            regard.attend(*[q.double()] * 3, pattern=regard.Band(3, 3), backend=backend).dtype
            == torch.float64
        )
        assert (
            regard.attend(q, q.half(), q, pattern=regard.Band(3, 3), backend=backend).dtype
            == torch.bfloat16
        )
    assert (
        regard.attend(*[q.half()] * 3, pattern=regard.Band(3, 3), backend=backend).dtype
        == torch.float16
    )


@pytest.mark.parametrize(
    "pattern",
    [Band(5, 5), Band(40, 0), Band(9, 9) | Global(3), Chunks(16, 1, 1) | RandomBlocks(16, 2, 13)],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("at", [0, 17])
def test_relative_prior_with_gradient(pattern, masked, at, rand):
    """Fails if the addend of a run is another than the prior, or the gradient of the prior is lost
    or wrong."""
    n = 200
    q, k, v = (rand(2, 4, n, 8).requires_grad_() for _ in range(3))
    prior = Gaussian(4, 7.0).double()
    mask = (
        (torch.arange(n) < torch.tensor([[n], [150]])) & (torch.arange(n) % 11 != 4)
        if masked
        else None
    )
    at = 0 if pattern.length else at
    results = []
    for backend in ("reference", "sparse"):
        y = regard.attend(
            q,
            k,
            v,
            pattern=pattern,
            prior=prior,
            mask=mask,
            backend=backend,
            q_start=at,
            k_positions=at,
        )
        results.append(
            (y, *torch.autograd.grad((y * torch.sin(y)).sum(), (q, k, v, prior.log_sigma)))
        )
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_relative_prior_uses_runs(monkeypatch, rand):
    """Fails if a relative prior over a band takes the slow way; one that reads tokens, or a stepped
    band, must take it."""
    taken = []
    real = token_groups.attend
    monkeypatch.setattr(token_groups, "attend", lambda *a, **k: taken.append(1) or real(*a, **k))
    x = rand(1, 4, 100, 8)
    regard.attend(x, x, x, pattern=Band(5, 5), prior=ALiBi(4).double(), backend="sparse")
    assert not taken
    regard.attend(x, x, x, pattern=Band(5, 5, 3), prior=ALiBi(4).double(), backend="sparse")
    assert taken
