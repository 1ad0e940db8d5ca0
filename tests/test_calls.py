"""Pair masks, packed sequences, soft caps and sinks: every backend against formulas written out
here, and every mixer against running each sequence alone."""

import importlib
import math

import pytest
import torch

import regard
from regard import (
    ALiBi,
    Axial,
    Band,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    MultiHead,
    PerHead,
    RandomBlocks,
    Segments,
    Sinks,
    SoftCap,
    SoftmaxAttention,
    Unsupported,
    native,
)
from regard.backends import softmax_backends
from regard.layout import build_layout
from regard.position import Rope
from regard.prior import Gaussian, PriorSum

BACKENDS = ["reference", "sdpa", "sparse", "cpp"]


def naive(q, k, v, keep, *, cap=None, bias=None, sinks=None, scale=None):
    """Softmax attention over the pairs kept, each pair by itself: keep broadcasts to (b h n m).
    A sink has a weight and no value."""
    heads = q.shape[1] // k.shape[1]
    k, v = (torch.stack([x[:, i // heads] for i in range(q.shape[1])], 1) for x in (k, v))
    scores = torch.einsum("bhne,bhme->bhnm", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    weights = torch.where(keep, (scores - scores.detach().amax()).exp(), 0.0)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks[:, None] - scores.detach().amax()).exp()
    weights = weights / torch.where(total > 0, total, 1.0)[..., None]
    return torch.einsum("bhnm,bhmf->bhnf", weights, v)


def seen_by(pattern, n, m):
    q, k = torch.arange(n)[:, None], torch.arange(m)
    keep = pattern.allows(q, k)
    return keep[None] if keep.dim() == 3 else keep[None, None]


def check(call, oracle, *inputs):
    """Outputs and gradients of both, to 1e-10."""
    results = []
    for f in (call, oracle):
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        out = f(*copies)
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
        results.append([out, *torch.autograd.grad((out * weight).sum(), copies)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def pair_mask(*shape):
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
    keep[..., 4, :] = False  # a query that sees nothing
    keep[..., 9] = False  # a key that nobody sees
    keep[..., 64:128, 64:128] = True  # a whole tile
    keep[..., 128:, :64] = False
    return keep


PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "window": Band(20, 7) | Global(2),
    "dilated": Band(3, 3, 5),
    "heads": PerHead((Band(9, 9), Causal(), Band(9, 9))),
}


# -------------------------------------------------------------------------------------- pair masks
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_pair_masks_on_every_backend(rand, backend, pattern):
    """Fails if a backend loses the pair mask, or combines it wrongly with pattern and padding."""
    n, m = 150, 140
    q, k, v = rand(2, 3, n, 8), rand(2, 3, m, 8), rand(2, 3, m, 8)
    padding = torch.arange(m) < torch.tensor([[m], [m - 33]])
    for mask, attn_mask in (
        (None, pair_mask(n, m)),
        (padding, pair_mask(2, n, m)),
        (None, pair_mask(2, 3, n, m)),
        (padding, pair_mask(1, 3, m, n).transpose(2, 3)),  # columns first in memory
    ):
        pairs = attn_mask if attn_mask.dim() == 4 else attn_mask.view(-1, 1, n, m)
        keep = seen_by(pattern, n, m) & pairs
        keep = keep if mask is None else keep & mask[:, None, None]

        def call(q, k, v, mask=mask, attn_mask=attn_mask):
            return regard.attend(
                q, k, v, pattern=pattern, mask=mask, attn_mask=attn_mask, backend=backend
            )

        check(call, lambda q, k, v, keep=keep: naive(q, k, v, keep), q, k, v)


def test_pair_masks_on_flex(rand):
    """Fails if FlexAttention's blocks lose the pair mask."""
    q, k, v = (rand(2, 3, 150, 16).float() for _ in range(3))
    mask = torch.arange(150) < torch.tensor([[150], [99]])
    for attn_mask in (pair_mask(150, 150), pair_mask(2, 1, 150, 150), pair_mask(1, 3, 150, 150)):
        for pattern in (Full(), Band(20, 7), PATTERNS["heads"]):
            arguments = {"pattern": pattern, "attn_mask": attn_mask, "mask": mask}
            got = regard.attend(q, k, v, backend="flex", **arguments)
            want = regard.attend(q, k, v, backend="reference", **arguments)
            torch.testing.assert_close(got, want)
    with torch.no_grad(), pytest.raises(Unsupported, match="does not support sinks"):
        regard.attend(q, k, v, prior=Sinks(3), backend="flex")


@pytest.mark.parametrize("backend", ["reference", "sdpa", "cpp", "auto"])
def test_pair_masks_with_global_tokens(rand, backend):
    """Fails if the pairs that global tokens add escape the pair mask."""
    q, k, v = (rand(2, 2, 100, 8) for _ in range(3))
    is_global = torch.zeros(2, 100, dtype=torch.bool)
    is_global[0, [3, 70]] = True
    pattern, attn_mask = Band(5, 5) | GlobalMask(), pair_mask(2, 100, 100)
    near = (torch.arange(100)[:, None] - torch.arange(100)).abs() <= 5
    keep = (near | is_global[:, :, None] | is_global[:, None]) & attn_mask

    def call(q, k, v):
        return regard.attend(
            q,
            k,
            v,
            pattern=pattern,
            attn_mask=attn_mask,
            global_attention_mask=is_global,
            backend=backend,
        )

    check(call, lambda q, k, v: naive(q, k, v, keep[:, None]), q, k, v)


def test_sparse_says_what_it_refuses(rand):
    x, mask = rand(1, 1, 8, 4), torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(Unsupported, match="attn_mask with global_attention_mask"):
        regard.attend(
            x,
            x,
            x,
            pattern=GlobalMask(),
            global_attention_mask=mask,
            attn_mask=torch.ones(8, 8, dtype=torch.bool),
            backend="sparse",
        )


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_nan_of_keys_that_nobody_sees_does_not_leak(rand, backend):
    """Fails if NaN reaches the output from a key that the pair mask hides from all queries."""
    q, k, v = (rand(1, 2, 70, 8) for _ in range(3))
    attn_mask = pair_mask(70, 70)
    want = regard.attend(q, k, v, attn_mask=attn_mask, backend=backend)
    k[:, :, 9] = v[:, :, 9] = torch.nan
    got = regard.attend(q, k, v, attn_mask=attn_mask, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_pair_mask_is_not_copied(rand):
    """Fails if broadcasting a mask (n m) to examples and heads takes memory of its own."""
    from regard.backends.call import make_call

    x, attn_mask = rand(2, 4, 12, 8), torch.ones(12, 12, dtype=torch.bool)
    call = make_call(x, x, x, pattern=Full(), attn_mask=attn_mask)
    assert call.attn_mask.shape == (1, 1, 12, 12)
    assert call.attn_mask.data_ptr() == attn_mask.data_ptr()


def test_pair_masks_choose_sparse_backends():
    """Fails if a pair mask makes a window of a long sequence dense."""
    from regard.backends.call import make_call

    x = torch.zeros(1, 1, 1, 1).expand(1, 4, 4096, 16)
    for pattern in (Band(64, 64), PerHead((Band(64, 64),) * 4)):
        attn_mask = torch.ones(4096, 4096, dtype=torch.bool)
        call = make_call(x, x, x, pattern=pattern, attn_mask=attn_mask)
        assert softmax_backends.choose(call).backend in ("cpp", "sparse")


@pytest.mark.parametrize(
    ("attn_mask", "error", "says"),
    [
        (torch.zeros(8, 8), TypeError, "bool tensor, True = keep, not torch.float32"),
        (torch.ones(8, 8, dtype=torch.long), TypeError, "True = keep, not torch.int64"),
        ([[True]], TypeError, "not list"),
        (torch.ones(8, 7, dtype=torch.bool), ValueError, r"\(n m\) = \(8, 8\).*not \(8, 7\)"),
        (torch.ones(3, 8, 8, dtype=torch.bool), ValueError, r"\(b n m\) = \(2, 8, 8\)"),
        (torch.ones(2, 3, 8, 8, dtype=torch.bool), ValueError, r"\(b h n m\) = \(2, 4, 8, 8\)"),
        (torch.ones(8, dtype=torch.bool), ValueError, r"not \(8,\)"),
        (torch.ones(1, 2, 4, 8, 8, dtype=torch.bool), ValueError, "must have shape"),
    ],
)
def test_bad_pair_masks(rand, attn_mask, error, says):
    x, tokens = rand(2, 4, 8, 4), rand(2, 8, 16)
    mixer = regard.create("vanilla", dim=16, heads=4).double()
    with pytest.raises(error, match=says):
        regard.attend(x, x, x, attn_mask=attn_mask)
    with pytest.raises(error, match="attn_mask must"):
        mixer(tokens, attn_mask=attn_mask)
    with pytest.raises(error, match="attn_mask must"):
        mixer.attention_map(tokens, attn_mask=attn_mask)


def test_linear_attention_says_why_it_takes_no_pair_mask(rand):
    mixer = regard.create("linear", dim=16, heads=4).double()
    with pytest.raises(Unsupported, match=r"sums over keys before it sees the queries.*vanilla"):
        mixer(rand(1, 8, 16), attn_mask=torch.ones(8, 8, dtype=torch.bool))


def test_branches_take_a_pair_mask_for_all_heads_alike(rand):
    from regard.mixers import Branches

    mixer = Branches([MultiHead(8, 2, SoftmaxAttention()) for _ in range(2)]).double()
    with pytest.raises(Unsupported, match="pair mask for each head"):
        mixer(rand(1, 6, 16), attn_mask=torch.ones(1, 4, 6, 6, dtype=torch.bool))


# -------------------------------------------------------------------------------- packed sequences
LENGTHS = (5, 70, 1, 33, 70, 130)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
RESTARTING = {
    "full": Full(),
    "causal": Causal(),
    "window": Band(6, 3),
    "dilated": Band(2, 2, 3),
    "bigbird": Band(4, 4) | Global(2) | RandomBlocks(8, 2, 20, seed=1),
    "chunks": Chunks(16, 1) & Causal(),
    "grid": Axial(7),
    "heads": PerHead((Chunks(9), Band(5, 5))),
}


def by_sequence(f, *tensors, dim=2):
    """f on each sequence alone, concatenated."""
    pieces = [f(*xs) for xs in zip(*(x.split(LENGTHS, dim) for x in tensors), strict=True)]
    return torch.cat(pieces, dim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", RESTARTING.values(), ids=RESTARTING)
def test_packed_sequences_on_every_backend(rand, backend, pattern):
    """Fails if positions do not restart, a sequence sees another, or a gradient crosses."""
    q, k, v = (rand(1, 2, sum(LENGTHS), 4) for _ in range(3))

    def alone(q, k, v):
        return naive(q, k, v, seen_by(pattern, q.shape[2], q.shape[2]))

    def packed(q, k, v):
        return regard.attend(q, k, v, pattern=pattern, cu_seqlens=OFFSETS, backend=backend)

    check(packed, lambda *x: by_sequence(alone, *x), q, k, v)


class AbsoluteBias(regard.Prior):
    """A prior that depends on absolute positions."""

    def forward(self, q_pos, k_pos, q, k):
        return (torch.sin(q_pos.double()) * torch.cos(3.0 * k_pos))[None]


@pytest.mark.parametrize("backend", ["reference", "sdpa", "sparse"])
@pytest.mark.parametrize("prior", ["relative", "absolute"])
def test_priors_of_packed_sequences_restart(rand, backend, prior):
    """Fails if a prior sees positions in the row instead of positions in the sequence."""
    q, k, v = (rand(1, 2, sum(LENGTHS), 4) for _ in range(3))
    module = Gaussian(2, 1.0).double() if prior == "relative" else AbsoluteBias()

    def alone(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
        if prior == "relative":
            bias = -((i - j).double() ** 2) / 2
        else:
            bias = torch.sin(i.double()) * torch.cos(3.0 * j)
        return naive(q, k, v, (i - j).abs() <= 40, bias=bias)

    def packed(q, k, v):
        return regard.attend(
            q,
            k,
            v,
            pattern=Band(40, 40),
            prior=module,
            cu_seqlens=OFFSETS.int(),
            backend=backend,
        )

    check(packed, lambda *x: by_sequence(alone, *x), q, k, v)


def test_packed_sequences_take_masks(rand):
    """Fails if padding or pair masks (of the whole row) are lost in packed sequences."""
    n = sum(LENGTHS)
    q, k, v = (rand(1, 2, n, 4) for _ in range(3))
    mask = torch.rand(1, n, generator=torch.Generator().manual_seed(1)) < 0.8
    attn_mask = pair_mask(n, n)
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    keep = (number[:, None] == number) & mask[:, None] & attn_mask

    def packed(q, k, v):
        return regard.attend(q, k, v, mask=mask, attn_mask=attn_mask, cu_seqlens=OFFSETS)

    check(packed, lambda q, k, v: naive(q, k, v, keep[:, None]), q, k, v)


def test_global_tokens_of_packed_sequences_are_global_in_their_own(rand):
    n = sum(LENGTHS)
    q, k, v = (rand(1, 2, n, 4) for _ in range(3))
    is_global = torch.zeros(1, n, dtype=torch.bool)
    is_global[0, [2, 50, 200]] = True
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 3
    keep = (near | is_global[0, :, None] | is_global[0]) & (number[:, None] == number)

    def packed(q, k, v):
        return regard.attend(
            q,
            k,
            v,
            pattern=Band(3, 3) | GlobalMask(),
            global_attention_mask=is_global,
            cu_seqlens=OFFSETS,
        )

    check(packed, lambda q, k, v: naive(q, k, v, keep), q, k, v)


def test_empty_sequences_are_left_out(rand):
    q = rand(1, 1, 7, 4)
    got = regard.attend(q, q, q, cu_seqlens=torch.tensor([0, 0, 3, 3, 7, 7]))
    want = regard.attend(q, q, q, pattern=Segments((3, 4)))
    torch.testing.assert_close(got, want)
    empty = rand(1, 1, 0, 4)
    assert regard.attend(empty, empty, empty, cu_seqlens=torch.tensor([0, 0])).shape == empty.shape
    mixer = regard.create("vanilla", dim=4, heads=1).double()
    assert mixer(rand(1, 0, 4), cu_seqlens=torch.tensor([0, 0])).shape == (1, 0, 4)


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        (torch.tensor([0.0, 8.0]), "int32 or int64"),
        ([0, 8], "int32 or int64"),
        (torch.tensor([1, 8]), "begin with 0"),
        (torch.tensor([0, 5]), "end with the number of tokens, 8, not 5"),
        (torch.tensor([0, 6, 4, 8]), "must not decrease, but 4 follows 6"),
        (torch.tensor([[0, 8]]), "int32 or int64 tensor of shape"),
    ],
)
def test_bad_offsets(rand, offsets, says):
    x, mixer = rand(1, 2, 8, 4), regard.create("vanilla", dim=8, heads=2).double()
    with pytest.raises(ValueError, match=says):
        regard.attend(x, x, x, cu_seqlens=offsets)
    with pytest.raises(ValueError, match=says):
        mixer(rand(1, 8, 8), cu_seqlens=offsets)


def test_packed_sequences_are_one_row_of_self_attention(rand):
    x, y, offsets = rand(2, 2, 8, 4), rand(1, 2, 8, 4), torch.tensor([0, 3, 8])
    mixer = regard.create("vanilla", dim=8, heads=2).double()
    with pytest.raises(ValueError, match="batch size 1"):
        regard.attend(x, x, x, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="self-attention with batch size 1"):
        regard.attend(y, y[:, :, :5], y[:, :, :5], cu_seqlens=offsets)
    with pytest.raises(ValueError, match="omit q_start"):
        regard.attend(y, y, y, q_start=2, cu_seqlens=offsets)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(n m\) = \(8, 8\)"):
        regard.attend(y, y, y, cu_seqlens=offsets, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="all sequences in one row"):
        mixer(rand(2, 8, 8), cu_seqlens=offsets)
    with pytest.raises(Unsupported, match="cu_seqlens with a context"):
        mixer(rand(1, 8, 8), rand(1, 8, 8), cu_seqlens=offsets)
    short = regard.create("linformer", dim=8, heads=2, length=4).double()
    with pytest.raises(ValueError, match="has 5 tokens but the mixer was built with length=4"):
        short(rand(1, 8, 8), cu_seqlens=offsets)
    assert short(rand(1, 8, 8), cu_seqlens=torch.tensor([0, 4, 8])).shape == (1, 8, 8)


def test_layers_of_softmax_attention_run_in_one_call(rand, monkeypatch):
    """Fails if softmax attention over packed sequences is a loop over them, or rotates by the
    position in the row."""
    calls = []
    prepare = softmax_backends.prepare
    monkeypatch.setattr(softmax_backends, "prepare", lambda *x: calls.append(1) or prepare(*x))
    attention = SoftmaxAttention(Band(20, 0) | Global(1), Gaussian(2, 5.0))
    mixer = MultiHead(8, 2, attention, kv_heads=1, causal=True, rotary=Rope()).double()
    x = rand(1, sum(LENGTHS), 8)
    got = mixer(x, cu_seqlens=OFFSETS)
    assert len(calls) == 1
    want = torch.cat([mixer(part) for part in x.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_tiles_of_packed_sequences_are_shared_between_layers(rand):
    """Fails if every layer of a model builds its tiles again, for one and the same batch."""
    from regard.layout import tiles

    mixers = [regard.create("vanilla", dim=8, heads=2).double() for _ in range(2)]
    x, built = rand(1, sum(LENGTHS), 8), tiles._build
    count = []
    try:
        tiles._build = lambda *a: count.append(1) or built(*a)
        for mixer in mixers:
            mixer(x, cu_seqlens=torch.tensor([0, 100, 111, sum(LENGTHS)]))
    finally:
        tiles._build = built
    assert len(count) <= 1


# ---------------------------------------------------------------------------- soft caps and sinks
PRIORS = {
    "cap": ({"cap": 0.7}, lambda: SoftCap(0.7)),
    "sinks": ({"sinks": True}, lambda: Sinks(3)),
    "both": ({"cap": 0.7, "sinks": True}, lambda: SoftCap(0.7) + Sinks(3)),
    "alibi": (
        {"cap": 0.7, "sinks": True, "alibi": True},
        lambda: Sinks(3) + ALiBi(3) + SoftCap(0.7),
    ),
    "alibi sinks": ({"sinks": True, "alibi": True}, lambda: ALiBi(3) + Sinks(3)),
}


def alibi_bias(n, m):
    gap = (torch.arange(n)[:, None] - torch.arange(m)).abs()
    return torch.stack([-gap * 0.5 ** (i + 1) for i in range(3)]).double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PRIORS)
def test_soft_caps_and_sinks_on_every_backend(rand, backend, name):
    """Fails if outputs or gradients, also those of the sinks, differ from the formula."""
    options, build = PRIORS[name]
    needs_prior = "cap" in options or "alibi" in options
    n, m = 150, 140
    q, k, v, sinks = rand(2, 3, n, 8), rand(2, 3, m, 8), rand(2, 3, m, 5), rand(3)
    mask = torch.arange(m) < torch.tensor([[m], [m - 33]])
    patterns = [Full(), Causal(), Band(20, 7) & ~Band(0, 0), PATTERNS["heads"]]
    for pattern in patterns[: 3 if needs_prior and backend == "sparse" else 4]:
        for own_mask, pairs in ((None, None), (mask, None), (None, pair_mask(n, m))):
            keep = seen_by(pattern, n, m)
            keep = keep if own_mask is None else keep & own_mask[:, None, None]
            keep = keep if pairs is None else keep & pairs
            prior = build().double()
            for part in prior.modules():
                if isinstance(part, ALiBi):
                    part.slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)

            def call(q, k, v, sinks, pattern=pattern, mask=own_mask, pairs=pairs, prior=prior):
                if options.get("sinks"):
                    part = prior if isinstance(prior, Sinks) else sinks_of(prior)
                    del part._parameters["logits"]
                    part.logits = sinks
                arguments = {"pattern": pattern, "prior": prior, "mask": mask, "attn_mask": pairs}
                out = regard.attend(q, k, v, scale=0.9, backend=backend, **arguments)
                return out + 0 * sinks.sum()

            def oracle(q, k, v, sinks, keep=keep):
                return 0 * sinks.sum() + naive(
                    q,
                    k,
                    v,
                    keep,
                    scale=0.9,
                    cap=options.get("cap"),
                    bias=alibi_bias(n, m) if options.get("alibi") else None,
                    sinks=sinks if options.get("sinks") else None,
                )

            if backend == "cpp" and needs_prior:
                with pytest.raises(Unsupported, match="does not support priors"):
                    call(q, k, v, sinks)
                return
            check(call, oracle, q, k, v, sinks)


def sinks_of(prior):
    (found,) = [part for part in prior if isinstance(part, Sinks)]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_with_grouped_query_heads_and_few_queries(rand, backend):
    """Fails if a decoding step, or key heads that several query heads share, get other sinks."""
    q, k, v, prior = rand(1, 4, 1, 8), rand(1, 2, 9, 8), rand(1, 2, 9, 8), Sinks(4, start=0.4)
    got = regard.attend(q, k, v, prior=prior.double(), q_start=8, backend=backend)
    keep = torch.ones(1, 9, dtype=torch.bool)
    want = naive(q, k, v, keep, sinks=torch.full((4,), 0.4, dtype=torch.float64))
    torch.testing.assert_close(got, want)
    capped = regard.attend(q, k, v, prior=SoftCap(0.3), backend="sdpa")
    torch.testing.assert_close(capped, naive(q, k, v, keep, cap=0.3))


@pytest.mark.parametrize("prior", ["cap", "both", "alibi"])
def test_soft_caps_and_sinks_stream(rand, prior):
    """Fails if decoding with a cache gives other outputs than the whole sequence."""
    build = PRIORS[prior][1]
    attention = SoftmaxAttention(Band(12, 0), build())
    mixer = MultiHead(12, 3, attention, causal=True, rotary=Rope()).double()
    for parameter in attention.prior.parameters():
        torch.nn.init.normal_(parameter)
    x = rand(2, 90, 12)
    whole, state, outs = mixer(x), None, []
    for chunk in x.split([1, 30, 1, 1, 57], 1):
        y, state = mixer.stream(chunk, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    regard.testing.check_mixer(
        lambda causal: MultiHead(12, 3, SoftmaxAttention(prior=build()), causal=causal)
    )


def test_soft_caps_and_sinks_take_a_context(rand):
    """Fails if a prior without positions forbids cross-attention."""
    mixer = MultiHead(12, 3, SoftmaxAttention(prior=SoftCap(5.0) + Sinks(3))).double()
    assert mixer.can.cross
    assert mixer(rand(1, 4, 12), rand(1, 6, 12)).shape == (1, 4, 12)


def test_persistent_memory_keeps_sinks_and_caps(rand):
    """Fails if learned keys make the attention forget the sinks or the cap of its prior."""
    from regard.attentions import PersistentMemoryAttention

    q, k, v = (rand(1, 3, 20, 4) for _ in range(3))
    prior = (SoftCap(0.5) + Sinks(3, start=0.3)).double()
    attention = PersistentMemoryAttention(SoftmaxAttention(prior=prior), 3, 4, 2).double()
    got, _ = attention(q, k, v)
    keys, values = attention.keys[None] * 2.0, attention.values[None] * 2.0**0.5
    scores = torch.cat((q @ keys.mT / 2, 0.5 * torch.tanh(q @ k.mT / 2 / 0.5)), -1).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + math.exp(0.3))
    torch.testing.assert_close(got, weights @ torch.cat((values, v), 2))


def test_sums_of_priors():
    total = ALiBi(4) + (SoftCap(2.0) + Sinks(4))
    assert isinstance(total, PriorSum) and len(list(total)) == 3 and total.heads == 4
    assert not total.relative and total.compares_positions
    assert (ALiBi(4) + Sinks(4)).relative and not (SoftCap(2.0) + Sinks(4)).compares_positions
    assert sorted(name for name, _ in total.named_parameters()) == ["parts.2.logits"]
    with pytest.raises(ValueError, match="different numbers of heads"):
        ALiBi(4) + Sinks(3)
    with pytest.raises(TypeError, match="a prior is added to a prior, not to float"):
        ALiBi(4) + 3.0
    with pytest.raises(ValueError, match="cap must be a finite number above 0"):
        SoftCap(0)
    with pytest.raises(ValueError, match="heads must be an integer"):
        Sinks(0)
    x = torch.zeros(1, 4, 5, 2)
    with pytest.raises(ValueError, match="the prior is for 3 heads, but q has 4"):
        regard.attend(x, x, x, prior=Sinks(3))


# ---------------------------------------------------------------------------------------- planning
def test_new_lengths_of_packed_sequences_need_no_layout(rand):
    """Fails if choosing a backend for new lengths builds a layout, which takes longer than the
    call, or if a layout tries all ways to merge its many runs."""
    from regard.backends.call import make_call

    merge_runs = importlib.import_module("regard.layout.merge_runs")
    pattern = Causal() & Segments(tuple(100 + 7 * i for i in range(40)))
    x = rand(1, 1, 1, 8).float().expand(1, 2, pattern.length, 8)
    sparse = softmax_backends.get("sparse")
    assert sparse.refuses(make_call(x, x, x, pattern=pattern)) is None
    if native.library() is not None:
        assert sparse.cost(make_call(x, x, x, pattern=pattern)) is None
    tried, joined = [], merge_runs._bounding_call
    try:
        merge_runs._bounding_call = lambda calls: tried.append(1) or joined(calls)
        build_layout(pattern, pattern.length, pattern.length, size=64)
    finally:
        merge_runs._bounding_call = joined
    assert len(tried) < 100


# ------------------------------------------------------------------------------------------- graphs
class AttendModule(torch.nn.Module):
    def __init__(self, pattern, prior):
        super().__init__()
        self.attention = SoftmaxAttention(pattern, prior)

    def forward(self, q, k, v, attn_mask):
        return self.attention(q, k, v, attn_mask=attn_mask)[0]


@pytest.mark.parametrize("pattern", [Full(), Band(30, 30)], ids=repr)
@pytest.mark.parametrize("prior", [None, "cap", "sinks"])
@pytest.mark.parametrize("n", [40, 210])
def test_compiled_and_exported_graphs(rand, pattern, prior, n):
    """Fails if a graph loses the pair mask, the cap or the sinks: where it is dense, where it is a
    custom operator, and where it breaks."""
    q, k, v = (rand(1, 3, n, 8) for _ in range(3))
    keep = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.5
    module = AttendModule(pattern, None if prior is None else PRIORS[prior][1]()).double()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            want = module(q, k, v, keep)
            torch._dynamo.reset()
            got = torch.compile(module, backend="eager")(q, k, v, keep)
            torch.testing.assert_close(got, want)
    with torch.no_grad():
        exported = torch.export.export(module, (q, k, v, keep)).module()
        torch.testing.assert_close(exported(q, k, v, keep), want.detach())


def test_compiled_mixers_take_packed_sequences(rand):
    """Fails if a compiled mixer mixes packed sequences."""
    mixer = regard.create("local", dim=8, heads=2, window=9).double()
    x, offsets = rand(1, 300, 8), torch.tensor([0, 100, 130, 300])
    torch._dynamo.reset()
    got = torch.compile(mixer, backend="eager")(x, cu_seqlens=offsets)
    torch.testing.assert_close(got, mixer(x, cu_seqlens=offsets))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("scale", "logit"), [(-1e-4, 5.0), (1e-4, -60.0), (0.3, 3.3)])
def test_sinks_at_any_scale(rand, backend, scale, logit):
    """The logit of a sink does not depend on the scale of the scores."""
    if backend == "cpp" and native.library() is None:
        pytest.skip(native.missing_reason())
    q, k, v = (rand(1, 4, 30, 16) for _ in range(3))
    sinks = Sinks(4, start=logit)
    want = naive(q, k, v, torch.ones(1, dtype=torch.bool), sinks=sinks.logits.double(), scale=scale)
    got = regard.attend(q, k, v, prior=sinks, scale=scale, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    half = [x.half() for x in (q, k, v)]
    if backend == "sdpa":
        got = regard.attend(*half, prior=sinks, scale=scale, backend=backend)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-3)


def test_pair_mask_of_a_mixer_without_heads(rand):
    """A mask for several heads is refused where there is one, and a wrong number everywhere."""
    x, mask = rand(1, 5, 16), torch.ones(1, 3, 5, 5, dtype=torch.bool)
    for name in ("show_attend", "synthesizer_dense", "vanilla"):
        options = {"length": 8} if name.startswith("synthesizer") else {}
        mixer = regard.create(name, dim=16, heads=4, dtype=torch.float64, **options)
        with pytest.raises(ValueError, match="attn_mask must have shape"):
            mixer(x, attn_mask=mask)


@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1, math.nan, True, "a"])
def test_wrong_dropout(rand, dropout):
    q = rand(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"dropout must be a number in \[0, 1\)"):
        regard.attend(q, q, q, dropout=dropout)


def test_masks_on_another_device(rand):
    """The message names the argument."""
    q = rand(1, 2, 5, 4)
    for name, shape in (("mask", (1, 5)), ("attn_mask", (5, 5))):
        given = {name: torch.ones(shape, dtype=torch.bool, device="meta")}
        with pytest.raises(ValueError, match=f"{name} is on meta, but q is on cpu"):
            regard.attend(q, q, q, **given)


def test_two_soft_caps():
    with pytest.raises(ValueError, match="one SoftCap"):
        SoftCap(5.0) + ALiBi(2) + SoftCap(3.0)


def test_soft_cap_without_a_visible_pair(rand):
    """The output is zero and has gradients, which are zero."""
    q = rand(1, 2, 30, 4).requires_grad_()
    y = regard.attend(q, q, q, pattern=~Band(30, 30), prior=SoftCap(5.0), backend="sparse")
    (grad,) = torch.autograd.grad(y.sum(), q)
    assert not y.any() and not grad.any()


def test_packed_sequences_are_not_exported(rand):
    mixer = regard.create("vanilla", dim=8, heads=2, dtype=torch.float64)
    arguments = {"cu_seqlens": torch.tensor([0, 3, 9])}
    with pytest.raises(Unsupported, match="cu_seqlens cannot be exported"):
        torch.export.export(mixer, (rand(1, 9, 8),), arguments)
