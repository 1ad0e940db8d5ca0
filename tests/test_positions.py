"""Every position scheme against a loop, chunk by chunk, and beyond its length."""

import math
from functools import partial

import pytest
import torch

import regard
from oracles import positions as loops
from regard import MultiHead, SoftmaxAttention, Unsupported
from regard.backends import sparse
from regard.backends.call import make_call
from regard.mixers import collaborate, with_position
from regard.pattern import Band, Full
from regard.position import (
    POSITIONAL_ENCODINGS,
    ComplexEmbedding,
    DistanceBias,
    FourierEmbedding,
    FourierEmbedding2D,
    LearnedEmbedding,
    LearnedEmbedding2D,
    NoPosition,
    Rope,
    Rope2D,
    ShawBias,
    SinusoidalEmbedding,
    SinusoidalEmbedding2D,
    T5Bias,
    TransformerXLBias,
    TUPEBias,
    create_positional_encoding,
)
from regard.position.bias import relative_position_bucket
from regard.prior import ALiBi

# --------------------------------------------------------------------------------- with the tokens
EMBEDS = {  # the scheme, and what it adds at a place
    "sinusoid": (lambda: SinusoidalEmbedding(6), lambda e: lambda p: loops.sinusoid(p, 6)),
    "sinusoid of an odd width": (
        lambda: SinusoidalEmbedding(5, base=50.0),
        lambda e: lambda p: loops.sinusoid(p, 5, 50.0),
    ),
    "sinusoid_2d": (
        lambda: SinusoidalEmbedding2D(8, 3),
        lambda e: lambda p: loops.sinusoid(p // 3, 4) + loops.sinusoid(p % 3, 4),
    ),
    "learned": (lambda: LearnedEmbedding(6, 14), lambda e: lambda p: e.table[p]),
    "learned_2d": (
        lambda: LearnedEmbedding2D(6, 5, 3),
        lambda e: lambda p: torch.cat((e.rows[p // 3], e.columns[p % 3])),
    ),
    "none": (lambda: NoPosition(4), lambda e: lambda p: [0.0] * 4),
}


def outputs_and_gradients(f, x, module):
    x = x.clone().requires_grad_()
    y = f(x)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    return [y, *torch.autograd.grad((y * weight).sum(), [x, *module.parameters()])]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", EMBEDS)
def test_embeddings_are_those_of_the_loop(name, at, rand):
    """Fails if a number of the embedding, or a gradient, is another."""
    make, vector = EMBEDS[name]
    embed = make().double()
    x = rand(2, 11, embed.dim)
    want = outputs_and_gradients(lambda t: loops.embedded(t, at, vector(embed)), x, embed)
    same(outputs_and_gradients(lambda t: embed(t, at), x, embed), want)


@pytest.mark.parametrize(
    ("embed", "sizes", "resolution"),
    [
        (FourierEmbedding(6, 13, bands=4), (13,), (13,)),
        (FourierEmbedding(6, 13, bands=1, resolution=20), (13,), (20,)),
        (FourierEmbedding2D(6, 4, 5, bands=3), (4, 5), (4, 5)),
        (FourierEmbedding2D(6, 4, 5, bands=3, resolution=(8, 6)), (4, 5), (8, 6)),
    ],
)
def test_fourier_features_are_those_of_the_loop(embed, sizes, resolution, rand):
    """Fails if a band, an axis or the projection is another."""
    embed = embed.double()
    x = rand(2, 9, 6)

    def loop(t):
        rows = []
        for p in range(2, 11):
            place = (p,) if len(sizes) == 1 else (p // sizes[1], p % sizes[1])
            rows.append(
                torch.tensor(
                    loops.fourier(place, sizes, resolution, embed.bands), dtype=torch.float64
                )
            )
        both = [[torch.cat((t[a, i], rows[i])) for i in range(9)] for a in range(2)]
        return torch.stack(
            [torch.stack([embed.out.weight @ r + embed.out.bias for r in each]) for each in both]
        )

    same(
        outputs_and_gradients(lambda t: embed(t, 2), x, embed),
        outputs_and_gradients(loop, x, embed),
    )


def test_complex_embeddings_are_amplitude_frequency_and_phase():
    """Fails if a word's wave is another, or the real and imaginary parts change places."""
    torch.manual_seed(0)
    embed = ComplexEmbedding(6, 7).double()
    with torch.no_grad():
        embed.phase.normal_()
        embed.frequency.normal_()
    words = torch.tensor([[3, 0, 3, 6], [1, 1, 5, 2]])
    got = embed(words, 5)
    for a in range(2):
        for i in range(4):
            j = words[a, i]
            want = loops.complex_word(embed.amplitude[j], embed.frequency[j], embed.phase[j], 5 + i)
            torch.testing.assert_close(got[a, i], torch.tensor(want, dtype=torch.float64))
    wave = embed.amplitude * torch.exp(
        1j * (embed.frequency * 2 + embed.phase)
    )  # gradients: by complex numbers of torch
    ours = embed(torch.arange(7)[None].expand(1, -1)[:, :1].expand(1, 1), 2)
    theirs = torch.cat((wave.real[0], wave.imag[0]))
    for mine, other in zip(
        *(
            torch.autograd.grad(y.square().sum() + y.sum(), list(embed.parameters()))
            for y in (ours, theirs)
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_complex_embeddings_start_as_waves_of_the_sinusoid():
    """Fails if, before training, the frequencies are not those of Vaswani et al."""
    embed = ComplexEmbedding(8, 3).double()
    with torch.no_grad():
        embed.amplitude.fill_(1)
    want = torch.tensor(loops.sinusoid(9, 8), dtype=torch.float64)
    torch.testing.assert_close(
        embed(torch.tensor([[1]]), 9)[0, 0],
        torch.cat((want[1::2], want[::2])),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in POSITIONAL_ENCODINGS
        if n
        in (
            "none",
            "sinusoid",
            "sinusoid_2d",
            "learned",
            "learned_2d",
            "fourier",
            "fourier_2d",
            "complex",
        )
    ],
)
def test_chunks_get_the_positions_of_the_whole(name, rand):
    """Fails if `at` is ignored, or off by one, in any embedding."""
    options = {
        "learned": {"length": 23},
        "sinusoid_2d": {"columns": 4},
        "learned_2d": {"rows": 6, "columns": 4},
        "fourier": {"length": 23},
        "fourier_2d": {"rows": 6, "columns": 4},
        "complex": {"words": 9},
    }
    torch.manual_seed(0)
    embed = create_positional_encoding(name, dim=8, **options.get(name, {})).double()
    x = torch.arange(46).view(2, 23) % 9 if name == "complex" else rand(2, 23, 8)
    at, parts = 0, []
    for chunk in x.split((1, 7, 1, 11, 3), 1):
        parts.append(embed(chunk, at))
        at += chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), embed(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "embed",
    [
        LearnedEmbedding(4, 10),
        LearnedEmbedding2D(4, 5, 2),
        FourierEmbedding(4, 10),
        FourierEmbedding2D(4, 2, 5),
    ],
)
def test_beyond_the_last_position_there_is_an_error(embed):
    """Fails if a position without an embedding is wrapped, clipped, or an index error."""
    embed(torch.zeros(1, 10, 4))
    for n, at in ((11, 0), (1, 10), (4, 7)):
        with pytest.raises(
            ValueError,
            match=f"reaches position {at + n - 1} but the embedding was built for positions 0 to 9",
        ):
            embed(torch.zeros(1, n, 4), at)


def test_the_sinusoid_goes_on_for_ever():
    """Fails if far positions lose their digits: angles are taken in float64."""
    got = SinusoidalEmbedding(4)(torch.zeros(1, 1, 4), 10_000_001)[0, 0]
    torch.testing.assert_close(got, torch.tensor(loops.sinusoid(10_000_001, 4)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: SinusoidalEmbedding2D(5, 3), "dim must be even.*not 5"),
        (lambda: LearnedEmbedding(4, 0), "length must be an integer >= 1"),
        (lambda: SinusoidalEmbedding(4)(torch.zeros(1, 2, 5)), r"x must have shape \(b, n, 4\)"),
        (
            lambda: SinusoidalEmbedding(4)(torch.zeros(1, 2, 4), -1),
            "start must be an integer >= 0",
        ),
        (lambda: ComplexEmbedding(4, 3)(torch.zeros(1, 2)), "words must be an int64 tensor"),
        (lambda: Rope(fraction=1.5), "at most 1"),
        (lambda: Rope(layout="thirds"), "layout must be one of 'halves', 'pairs'"),
        (lambda: Rope(base=0), "base must be"),
        (lambda: T5Bias(2, buckets=7), "buckets must be even.*not 7"),
        (lambda: T5Bias(2, max_distance=8), "max_distance must be an integer >= 9"),
        (lambda: TUPEBias(3, 8, 10), "dim=8 must be divisible by heads=3"),
        (lambda: ShawBias(4, clip=-1), "clip must be an integer >= 0"),
    ],
)
def test_what_is_wrong_is_named(build, says):
    with pytest.raises(ValueError, match=says):
        build()


# ------------------------------------------------------------------------------------------ turned
TURNS = {
    "halves": (Rope(), loops.rope_angles, 8),
    "pairs": (Rope(layout="pairs", base=100.0), partial(loops.rope_angles, base=100.0), 8),
    "half of the width": (Rope(fraction=0.5), loops.rope_angles, 4),
    "linear and ntk": (
        Rope(linear=3.0, ntk=2.0, layout="pairs"),
        partial(loops.rope_angles, linear=3.0, ntk=2.0),
        8,
    ),
    "2d": (
        Rope2D(3),
        lambda p, w: loops.rope_angles(p // 3, w // 2) + loops.rope_angles(p % 3, w // 2),
        8,
    ),
    "2d pairs": (
        Rope2D(3, layout="pairs"),
        lambda p, w: loops.rope_angles(p // 3, w // 2) + loops.rope_angles(p % 3, w // 2),
        8,
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_are_those_of_the_loop(name, rand):
    """Fails if an angle, a pair, or the rest that stays is another."""
    rotary, angles, width = TURNS[name]
    x, y = rand(2, 3, 7, 8), rand(2, 3, 5, 8)
    for got, given, at in zip(rotary(x, y, 4, 9), (x, y), (4, 9), strict=True):
        for i in range(given.shape[2]):
            want = loops.turned(given[1, 2, i], angles(at + i, width), rotary.layout)
            torch.testing.assert_close(got[1, 2, i], want)


@pytest.mark.parametrize("name", ["halves", "pairs", "half of the width", "linear and ntk"])
def test_products_of_turned_vectors_know_the_distance_alone(name, rand):
    """Fails if moving both by as much changes a product."""
    rotary = TURNS[name][0]
    q, k = rand(1, 1, 6, 8), rand(1, 1, 6, 8)
    (a, b), (c, d) = rotary(q, k, 0, 0), rotary(q, k, 1000, 1000)
    torch.testing.assert_close(a @ b.mT, c @ d.mT)
    assert not torch.allclose(a @ b.mT, q @ k.mT)


@pytest.mark.parametrize(
    ("rotary", "width"),
    [(Rope(), 5), (Rope(fraction=0.2), 4), (Rope2D(4), 6), (Rope(fraction=0.75), 4)],
)
def test_heads_that_cannot_be_turned_in_pairs_are_refused(rotary, width):
    """Fails if a number without a partner is turned, or silently left out."""
    with pytest.raises(Unsupported, match="must be a multiple of"):
        rotary(torch.zeros(1, 1, 2, width), torch.zeros(1, 1, 2, width))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_multi_head_turns_queries_and_keys(kv_heads, causal, rand):
    """Fails if values are turned, a head is forgotten, or a gradient is lost."""
    torch.manual_seed(0)
    mixer = MultiHead(
        16, 4, SoftmaxAttention(), kv_heads=kv_heads, causal=causal, rotary=Rope()
    ).double()
    mask = torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]])

    def score(q, k, h, i, j):
        return loops.plain(
            *(loops.turned(x, loops.rope_angles(at, 4), "halves") for x, at in ((q, i), (k, j)))
        )

    def loop(x):
        p, x = dict(mixer.named_parameters()), x.masked_fill(~mask[..., None], 0)
        return loops.attended(p, x, 4, score, causal=causal, mask=mask)

    x = rand(2, 9, 16)
    same(
        outputs_and_gradients(lambda t: mixer(t, mask=mask), x, mixer),
        outputs_and_gradients(loop, x, mixer),
    )


@pytest.mark.parametrize(
    "attention", [SoftmaxAttention(), SoftmaxAttention(Band(3, 0)), regard.LinearAttention()]
)
def test_a_stream_goes_on_turning(attention, rand):
    """Fails if a chunk starts again at position 0, or the cache holds keys that were turned
    twice."""
    torch.manual_seed(0)
    mixer = MultiHead(8, 2, attention, causal=True, rotary=Rope()).double()
    x = rand(2, 200, 8)
    state, parts = None, []
    for chunk in x.split((1, 7, 1, 90, 101), 1):
        y, state = mixer.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x))
    assert state.position == 200


def test_a_turning_mixer_refuses_another_sequence(rand):
    """Fails if positions of two sequences are compared."""
    mixer = MultiHead(8, 2, SoftmaxAttention(), rotary=Rope())
    with pytest.raises(Unsupported, match="within one sequence"):
        mixer(torch.zeros(1, 3, 8), torch.zeros(1, 4, 8))


def test_random_features_estimate_turned_attention(rand):
    """Fails if the Performer with turned queries and keys estimates anything but softmax
    attention with them."""
    torch.manual_seed(0)
    mixer = with_position(
        regard.create("performer", dim=8, heads=2, features=4096), "rope"
    ).double()
    exact = MultiHead(8, 2, SoftmaxAttention(), rotary=Rope()).double()
    exact.load_state_dict(
        {k: v for k, v in mixer.state_dict().items() if not k.startswith("inner")}
    )
    x = rand(1, 12, 8)
    error = (mixer(x) - exact(x)).abs().mean() / exact(x).abs().mean()
    assert error < 0.1


def test_collaborate_does_not_support_rotary():
    with pytest.raises(Unsupported, match="rotary depends on positions"):
        collaborate(MultiHead(8, 2, SoftmaxAttention(), rotary=Rope()), 4)


# ----------------------------------------------------------------------------------- in the scores
PRIORS = {  # the scheme for 2 heads of width 4, and the score of a pair by the loop
    "alibi": (lambda c: ALiBi(2), lambda p, c: loops.alibi(p, heads=2)),
    "distance": (
        lambda c: DistanceBias(2, max_distance=4),
        lambda p, c: loops.distance(p, max_distance=4),
    ),
    "t5": (
        lambda c: T5Bias(2, buckets=8, max_distance=9, causal=c),
        lambda p, c: loops.t5(p, buckets=8, max_distance=9, causal=c),
    ),
    "shaw": (lambda c: ShawBias(4, clip=3), lambda p, c: loops.shaw(p, clip=3)),
    "xl": (lambda c: TransformerXLBias(2, 4, 6), lambda p, c: loops.xl(p, dim=6)),
    "tupe": (lambda c: TUPEBias(2, 8, 300), lambda p, c: loops.tupe(p, heads=2)),
    "tupe-r": (
        lambda c: TUPEBias(2, 8, 300, buckets=8, max_distance=9, causal=c),
        lambda p, c: loops.tupe(p, heads=2, buckets=8, max_distance=9, causal=c),
    ),
    "tupe without a special token": (
        lambda c: TUPEBias(2, 8, 300, first=False),
        lambda p, c: loops.tupe(p, heads=2, first=False),
    ),
}


def large(module):
    """Learned numbers large enough to matter."""
    for name, p in module.named_parameters():
        if "prior" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PRIORS)
def test_scores_are_those_of_the_loop(name, causal, rand):
    """Fails if an addend, its scale, or its gradient is another."""
    torch.manual_seed(0)
    make, score = PRIORS[name]
    mixer = large(MultiHead(8, 2, SoftmaxAttention(prior=make(causal)), causal=causal).double())
    p = dict(mixer.named_parameters())
    mask = torch.arange(13).expand(2, 13) < torch.tensor([[13], [8]])

    def loop(x):
        return loops.attended(
            p, x.masked_fill(~mask[..., None], 0), 2, score(p, causal), causal=causal, mask=mask
        )

    x = rand(2, 13, 8)
    same(
        outputs_and_gradients(lambda t: mixer(t, mask=mask), x, mixer),
        outputs_and_gradients(loop, x, mixer),
    )


@pytest.mark.parametrize(
    "pattern", [Band(20, 3), Band(9, 9) | regard.Global(3), regard.Chunks(32, 1, 0)], ids=str
)
@pytest.mark.parametrize("name", PRIORS)
def test_every_executor_adds_the_same(name, pattern, rand):
    """Fails if the sparse executor, forward or backward, knows another position than the
    reference."""
    torch.manual_seed(0)
    prior = large(SoftmaxAttention(prior=PRIORS[name][0](False))).prior.double()
    q, k, v = rand(2, 2, 200, 4), rand(2, 2, 200, 4), rand(2, 2, 200, 4)
    weight, found = rand(2, 2, 200, 4), {}
    for backend in ("reference", "sdpa", "sparse"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = regard.attend(*leaves, pattern=pattern, prior=prior, backend=backend)
        found[backend] = [
            y,
            *torch.autograd.grad((y * weight).sum(), [*leaves, *prior.parameters()]),
        ]
    same(found["sdpa"], found["reference"])
    same(found["sparse"], found["reference"])


@pytest.mark.parametrize("name", PRIORS)
def test_priors_by_distance_run_on_the_fused_calls(name, rand):
    """Fails if a prior that repeats is gathered pair by pair, or one that does not is taken as
    if it did."""
    prior, x = PRIORS[name][0](False), rand(1, 2, 200, 4)
    call = make_call(
        x,
        x,
        x,
        pattern=Band(20, 3),
        prior=prior,
    )
    assert sparse._has_relative_prior(call, sparse._build_layouts(call)) == (
        name in ("alibi", "distance", "t5")
    )


@pytest.mark.parametrize("name", PRIORS)
def test_what_says_that_distance_is_all_is_right(name, rand):
    """Fails if a prior that says `relative` depends on anything else, or `reads` is not true."""
    prior = large(SoftmaxAttention(prior=PRIORS[name][0](False))).prior.double()
    at, q, k = torch.arange(9), rand(1, 2, 9, 4), rand(1, 2, 9, 4)
    here = prior(at[:, None], at[None], q, k)
    moved = prior(at[:, None] + 50, at[None] + 50, q, k)
    assert (
        torch.equal(here, moved)
        if prior.relative
        else name in ("shaw", "xl") or not torch.allclose(here, moved)
    )
    assert prior.uses_qk == (not torch.equal(here, prior(at[:, None], at[None], q + 1, k + 1)))


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("pattern", [Full(), Band(12, 0)], ids=str)
def test_priors_go_on_through_a_stream(name, pattern, rand):
    """Fails if a chunk starts again at position 0."""
    torch.manual_seed(0)
    mixer = large(
        MultiHead(8, 2, SoftmaxAttention(pattern, PRIORS[name][0](True)), causal=True).double()
    )
    x = rand(2, 150, 8)
    state, parts = None, []
    for chunk in x.split((1, 7, 1, 60, 81), 1):
        y, state = mixer.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x))


def test_buckets_at_their_borders():
    """Fails if a distance falls into a neighbouring bucket."""
    for buckets, max_distance, causal in (
        (32, 128, False),
        (32, 128, True),
        (8, 20, False),
        (6, 11, True),
        (4, 2, False),
    ):
        gaps = torch.arange(-300, 301)
        want = [loops.bucket(gap, buckets, max_distance, causal) for gap in gaps.tolist()]
        assert relative_position_bucket(gaps, buckets, max_distance, causal=causal).tolist() == want


def test_tupe_knows_so_many_positions_and_no_more(rand):
    """Fails if a position beyond the table is wrapped, or the mixer does not say its limit."""
    mixer = MultiHead(8, 2, SoftmaxAttention(prior=TUPEBias(2, 8, 10)), causal=True)
    assert mixer.length == 10 and not mixer.can.length
    with pytest.raises(ValueError, match="built with length=10"):
        mixer(torch.zeros(1, 11, 8))
    _, state = mixer.stream(torch.zeros(1, 7, 8))
    with pytest.raises(
        ValueError, match="the prior supports 10 positions, but the sequence has 11"
    ):
        mixer.stream(torch.zeros(1, 4, 8), state)


@pytest.mark.parametrize("prior", [ShawBias(4), TransformerXLBias(2, 4, 8)])
def test_what_reads_queries_does_not_want_them_turned(prior):
    """Fails if a prior is given queries that were turned for another scheme."""
    with pytest.raises(Unsupported, match="reads the queries and keys"):
        MultiHead(8, 2, SoftmaxAttention(prior=prior), rotary=Rope())


@pytest.mark.parametrize(
    "prior", [ALiBi(2), DistanceBias(2), T5Bias(2), ShawBias(4), TransformerXLBias(2, 4, 8)]
)
def test_far_beyond_all_distances_it_is_finite(prior):
    """Fails if a position of a long stream has no entry."""
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    y = regard.attend(x, x, x, prior=prior, q_start=1_000_000, k_positions=0)
    assert y.isfinite().all()


def test_none_is_given_a_position_among_no_keys():
    """Fails if XL looks for the range of distances of nothing."""
    q, k = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 4)
    assert regard.attend(q, k, k, prior=TransformerXLBias(2, 4, 8)).shape == (1, 2, 0, 4)
    assert (regard.attend(k, q, q, prior=TransformerXLBias(2, 4, 8)) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rope", "t5", "xl", "sinusoid"])
def test_compiled_equals_eager(scheme, rand):
    """Fails if the compiled mixer computes something else, or its gradient is another."""
    torch.manual_seed(0)
    mixer = with_position(regard.create("vanilla", dim=8, heads=2, causal=True), scheme)
    x = rand(2, 33, 8).float()
    want = outputs_and_gradients(mixer, x, mixer)
    got = outputs_and_gradients(torch.compile(mixer, backend="aot_eager"), x, mixer)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_alibi_has_two_sides():
    """Fails if keys after the query are not as far as those before it."""
    at = torch.arange(5)
    addend = ALiBi(4)(at[:, None], at[None], torch.zeros(1, 4, 5, 2), torch.zeros(1, 4, 5, 2))
    torch.testing.assert_close(addend, addend.mT)
    assert math.isclose(addend[0, 0, 3].item(), -3 * 2**-2)
