"""Family F: what the generic tests cannot see."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from oracles.sets import luna_past
from regard import MultiHead, Unsupported
from regard.attentions import (
    BlockCompressedAttention,
    ProbSparseAttention,
    block_compressed,
    prob_sparse,
    softmax,
)
from regard.attentions.nystrom import pseudo_inverse, segment_means
from regard.compression import MeanCompression
from regard.mixers import MAB, PMA
from regard.pattern import StridedKeyBand
from regard.query_prototypes import QueryClusters
from regard.registry import get_recipe
from regard.testing import check_mixer

FAMILY = regard.list_recipes(family="compressed")


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def build(name, **arguments):
    return regard.create(name, dim=8, heads=2, **arguments).double()


def like_vanilla(mixer, causal=False):
    """Plain attention with the projections of another MultiHead."""
    plain = build("vanilla", causal=causal)
    for part in ("q", "k", "v", "out"):
        getattr(plain, part).load_state_dict(getattr(mixer, part).state_dict())
    return plain


# ------------------------------------------------------------------------------------- all of them
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("masked", ["some", "all"])
def test_gradients_under_masks_are_finite(name, masked, rand):
    """Fails if leaving tokens out, or an example that has none, gives NaN on the way back."""
    mixer = get_recipe(name).example().double()
    mask = torch.arange(23)[None] < torch.tensor([[23], [4 if masked == "some" else 0]])
    x = rand(2, 23, 8).requires_grad_()
    mixer(x, mask=mask).sum().backward()
    for t in (x, *mixer.parameters()):
        assert t.grad is None or t.grad.isfinite().all()


@pytest.mark.parametrize("name", FAMILY)
def test_an_example_without_tokens_does_not_touch_another(name, rand):
    """Fails if the padding of one example changes how another is computed: fewer landmarks,
    clusters or samples."""
    mixer = get_recipe(name).example().double()
    x, mask = rand(3, 23, 8), torch.arange(23)[None] < torch.tensor([[23], [9], [0]])
    together = mixer(x, mask=mask)
    torch.testing.assert_close(together[0], mixer(x[:1])[0])
    torch.testing.assert_close(together[1, :9], mixer(x[1:2, :9])[0])


@pytest.mark.parametrize("name", FAMILY)
def test_no_generator_is_touched(name, rand):
    """Fails if a forward pass draws from the global generator, or two passes differ."""
    mixer, x = get_recipe(name).example().double(), rand(2, 23, 8)
    before = torch.get_rng_state()
    assert torch.equal(mixer(x), mixer(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FAMILY)
def test_autocast(name):
    """Fails if learned vectors of one type meet projections of another, in the whole or in a
    stream."""
    x = torch.randn(2, 23, 8)
    for causal in (False, True) if get_recipe(name).can().causal else (False,):
        mixer = get_recipe(name).example(causal=causal)
        want = mixer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, state = mixer(x), None
            for part in x.split([1, 7, 15], 1) if causal else ():
                _, state = mixer.stream(part, state)
        assert (got.float() - want).abs().mean() < 0.05 * want.abs().mean()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("linformer", "mixes all positions"),
        ("nystrom", "past and future tokens"),
        ("clustered", "many positions"),
        ("clustered_improved", "many positions"),
        ("prob_sparse", "including later ones"),
        ("funnel", "later tokens"),
        ("sab", "no order"),
        ("isab", "no order"),
        ("perceiver", "depends on all tokens"),
    ],
)
def test_there_is_no_causal_form_and_why(name, words):
    """Fails if a form that would see the future can be built, or is refused without its reason."""
    with pytest.raises(Unsupported, match=words):
        regard.create(name, dim=8, heads=2, **get_recipe(name).example_kwargs, causal=True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("linformer", {"length": 8, "rank": 9}, "rank must be between 1 and length=8, not 9"),
        ("linformer", {"length": 8, "share": "layer"}, "share must be"),
        ("low_rank", {"rank": 0}, "rank must be"),
        ("low_rank_band", {"window": -1}, "left must be"),
        ("nystrom", {"landmarks": 0}, "landmarks must be"),
        ("nystrom", {"iterations": 0}, "iterations must be"),
        ("nystrom", {"kernel": 4}, "kernel must be odd"),
        ("nystrom", {"kernel": 0}, "kernel must be"),
        ("memory_compressed", {"stride": 0}, "stride must be"),
        ("memory_compressed", {"layer": -1}, "layer must be"),
        ("memory_compressed", {"block": 0, "layer": 0}, "block must be"),
        ("pooling", {"kernel": 3, "stride": 4}, "kernel must be an integer >= 4"),
        ("pooling", {"kernel": 9, "reach": 7}, "reach must be an integer >= 8"),
        ("clustered", {"clusters": 0}, "clusters must be"),
        ("clustered", {"bits": 0}, "bits must be"),
        ("clustered_improved", {"top": 0}, "top must be"),
        ("prob_sparse", {"factor": 0}, "factor must be"),
        ("prob_sparse", {"seed": -1}, "seed must be"),
        ("funnel", {"stride": 0}, "stride must be"),
        ("isab", {"points": 0}, "points must be"),
        ("luna", {"packed": 0}, "packed must be"),
        ("perceiver", {"latents": 0}, "latents must be"),
        ("perceiver", {"depth": -1}, "depth must be"),
        ("luna", {"heads": 3}, "divisible"),
        ("clustered", {"heads": 3}, "divisible"),
    ],
)
def test_bad_arguments_are_named(name, arguments, words):
    """Fails if nonsense is accepted, or the message does not name it."""
    for causal in (False, True):
        if causal and not get_recipe(name).can().causal:
            continue
        with pytest.raises(ValueError, match=words):
            regard.create(name, **{"dim": 8, "heads": 2, **arguments}, causal=causal)


LINEAR = {
    "linformer": {"length": 2048, "rank": 32},
    "nystrom": {"landmarks": 32},
    "clustered": {"clusters": 20},
    "clustered_improved": {"clusters": 20, "top": 8},
    "isab": {},
    "luna": {"packed": 16},
    "perceiver": {"latents": 16},
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_work_grows_with_the_length(name, monkeypatch):
    """Fails if twice the tokens are more than about twice the products or the scores."""
    usual, scores = softmax.attend, []

    def counted(q, k, v, **more):
        scores.append(q.shape[2] * k.shape[2])
        return usual(q, k, v, **more)

    monkeypatch.setattr(softmax, "attend", counted)
    counts = []
    for n in (1024, 2048):
        scores.clear()
        mixer = regard.create(name, dim=16, heads=2, **LINEAR[name])
        with FlopCounterMode(display=False) as counter:
            mixer(torch.randn(1, n, 16))
        counts.append((counter.get_total_flops(), sum(scores)))
    (flops, asked), (more_flops, more_asked) = counts
    assert flops > 0 and more_flops <= 2.1 * flops and more_asked <= 2.1 * asked


# --------------------------------------------------------------------------------------- linformer
def test_layers_share_a_projection(rand):
    """Fails if sharing over layers copies, counts or trains the projection twice."""
    first = build("linformer", length=12, rank=3, share="kv")
    second = build("linformer", length=12, projection=first)
    assert second.inner.compression is first.inner.compression
    stack = nn.Sequential(first, second)
    assert sum(p.numel() for p in stack.parameters()) == 8 * 8 * 8 + 3 * 12
    stack(rand(2, 12, 8)).sum().backward()
    assert first.inner.compression.e.grad is not None


def test_a_shared_projection_cannot_be_chosen_again():
    """Fails if an argument beside a shared projection is ignored."""
    first = build("linformer", length=12, rank=3, share="none")
    build("linformer", length=12, rank=3, share="none", projection=first)
    for arguments, words in (
        ({"rank": 4}, "rank must be 3"),
        ({"share": "kv"}, "share must be 'none'"),
    ):
        with pytest.raises(ValueError, match=words):
            build("linformer", length=12, projection=first, **arguments)
    with pytest.raises(ValueError, match="length must be 12"):
        build("linformer", length=13, projection=first)
    with pytest.raises(ValueError, match="heads must be 2"):
        regard.create("linformer", dim=8, heads=4, length=12, projection=first)
    with pytest.raises(TypeError, match="another linformer"):
        build("linformer", length=12, projection=build("vanilla"))


# ---------------------------------------------------------------------------------------- low rank
def test_scores_have_a_low_rank(rand):
    """Fails if queries and keys are as wide as ever."""
    mixer = build("low_rank", rank=2)
    q, k, v = mixer.project(rand(1, 20, 8), None)
    assert q.shape[-1] == k.shape[-1] == 2 and v.shape[-1] == 4
    assert (torch.linalg.matrix_rank(q @ k.transpose(-1, -2)) == 2).all()


def test_both_views_are_one_map(rand):
    """Fails if the map of the sum is not what the values are multiplied by."""
    mixer, x = build("low_rank_band", rank=2, window=1), rand(2, 9, 8)
    a = mixer.attention_map(x)
    v = mixer.low.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(mixer.low.out((a @ v).transpose(1, 2).flatten(2)), mixer(x))
    torch.testing.assert_close(a.sum(-1), torch.full((2, 2, 9), 2.0, dtype=torch.float64))


# ----------------------------------------------------------------------------------------- nystrom
@pytest.mark.parametrize("n", [1, 5, 10])
def test_few_tokens_attend_exactly(n, rand):
    """Fails if no more tokens than landmarks are approximated, alone or beside a longer example."""
    mixer = build("nystrom", landmarks=10)
    plain, x = like_vanilla(mixer), rand(1, n, 8)
    torch.testing.assert_close(mixer(x), plain(x))
    longer, mask = rand(2, 30, 8), torch.ones(2, 30, dtype=torch.bool)
    at = torch.randperm(30)[:n].sort().values  # in the midst of holes
    longer[0, at], mask[0] = x[0], False
    mask[0, at] = True
    torch.testing.assert_close(mixer(longer, mask=mask)[0, at], plain(x)[0])


def test_more_landmarks_come_nearer(rand):
    """Fails if the approximation does not approach softmax attention, of tokens that resemble
    their neighbours."""
    x, errors = rand(1, 64, 8).cumsum(1) / 5, []
    for landmarks in (2, 8, 32, 63):
        torch.manual_seed(0)
        mixer = build("nystrom", landmarks=landmarks, iterations=40)
        errors.append((mixer(x) - like_vanilla(mixer)(x)).norm().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01 * errors[0]


@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (7, 4)])
def test_the_pseudo_inverse_converges(shape, rand):
    """Fails if the iteration goes elsewhere, or matrices of a batch touch each other."""
    a = rand(3, *shape).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(a, 60), torch.linalg.pinv(a), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pseudo_inverse(a, 3)[1], pseudo_inverse(a[1:2] * 1.0, 3)[0])


def test_segments_are_alike_in_size():
    """Fails if a length that the landmarks do not divide leaves tokens out, or a segment empty."""
    for n, s in itertools.product(range(1, 30), range(1, 12)):
        means, held = segment_means(torch.eye(n)[None, None], torch.ones(1, n, dtype=torch.bool), s)
        sizes = (means[0, 0] > 0).sum(1)
        assert held.all() and sizes.sum() == n and sizes.max() - sizes.min() <= 1
        torch.testing.assert_close(segment_means(torch.eye(n)[None, None], None, s)[0], means)


def test_the_convolution_needs_one_sequence(rand):
    """Fails if values of another sequence are added at places that mean nothing there."""
    with pytest.raises(Unsupported, match="positions of the queries"):
        build("nystrom", kernel=3)(rand(1, 5, 8), rand(1, 6, 8))


# ------------------------------------------------------------------------------------------ blocks
def test_spaced_blocks_are_sound():
    """Fails if a rectangle is called empty or full, and is not."""
    for step, first, left, right in itertools.product(
        (1, 3), (-1, 0, 2), (None, 0, 4), (None, 0, 3)
    ):
        pattern = StridedKeyBand(step, first, left, right)
        dense = pattern.dense(12, 6)
        for q0, k0 in itertools.product(range(0, 12, 2), range(0, 6)):
            for q1, k1 in itertools.product(range(q0, 12, 3), range(k0, 6)):
                some, every = pattern.block(*(torch.tensor(t) for t in (q0, q1, k0, k1)))
                part = dense[q0 : q1 + 1, k0 : k1 + 1]
                assert bool(some) >= bool(part.any()) and bool(every) <= bool(part.all())
    with pytest.raises(ValueError, match="first must be"):
        StridedKeyBand(2, -2)


def test_nothing_leaks_inside_a_stride(rand):
    """Fails if a query sees a block before its last token, whichever token of the block that is."""
    mixer, x = build("memory_compressed", causal=True), rand(1, 12, 8)
    nn.init.normal_(mixer.inner.null)
    y = mixer(x)
    for at in range(1, 12):
        other = x.clone()
        other[:, at:] = 5 * rand(1, 12 - at, 8)
        assert torch.equal(mixer(other)[:, :at], y[:, :at])
    first = mixer.out(
        mixer.inner.null[1].flatten()
    )  # before the first whole block there is the null value alone
    torch.testing.assert_close(y[0, :2], first.expand(2, -1))
    assert not torch.allclose(y[0, 2], first)


@pytest.mark.parametrize("name", ["memory_compressed", "pooling"])
def test_the_rest_of_a_stream_is_bounded(name, rand):
    """Fails if a stream keeps tokens that are in blocks already, or pooled keys beyond its
    reach."""
    mixer = build(name, causal=True, **get_recipe(name).example_kwargs)
    state = None
    for i, size in enumerate([1, 2, 5, 1, 1, 40, 7, 3, 30]):
        _, state = mixer.stream(rand(2, size, 8), state)
        past = state if name == "memory_compressed" else state[1]
        assert isinstance(past, block_compressed.BlockCompressedState), i
        assert past.rest_k.shape[2] < 3
        blocks = past.next_position // 3 + 1 if name == "memory_compressed" else 5
        assert past.k.shape[2] <= blocks
    with pytest.raises(ValueError, match="the state has 2 examples"):
        mixer.stream(rand(3, 1, 8), state)


def test_blocks_by_themselves(rand):
    """Fails if `BlockCompressedAttention` of means breaks a promise, maps included, or a null
    key stands beside a window."""
    result = check_mixer(
        lambda causal: MultiHead(
            8, 2, BlockCompressedAttention(MeanCompression(4, 3)), causal=causal
        )
    )
    assert {check for check, outcome in result.items() if outcome == "unsupported"} == {
        "attn_mask",
        "global_attention_mask",
    }
    with pytest.raises(ValueError, match="null and window cannot be combined"):
        BlockCompressedAttention(MeanCompression(4, 3), window=5, null=torch.zeros(2, 2, 1, 4))


def test_layers_alternate(rand):
    """Fails if even layers are not local, or odd ones not compressed."""
    assert repr(build("memory_compressed", layer=2, block=5).inner) == "SoftmaxAttention(Chunks(5))"
    local, other = build("memory_compressed", layer=0, block=5), build("block_local", block=5)
    other.load_state_dict(local.state_dict())
    x = rand(1, 13, 8)
    torch.testing.assert_close(local(x), other(x))


# ---------------------------------------------------------------------------------------- clusters
def test_a_cluster_for_each_token_is_exact(rand):
    """Fails if clusters of one query, more of them than tokens, do not answer as attention does."""
    mixer, x = build("clustered", clusters=40, bits=60), rand(2, 17, 8)
    torch.testing.assert_close(mixer(x), like_vanilla(mixer)(x))


@pytest.mark.parametrize("top", [17, 100])
def test_weighing_all_keys_anew_is_exact(top, rand):
    """Fails if the improved form does not become attention where every key is a top key."""
    mixer, x = build("clustered_improved", clusters=2, top=top), rand(2, 17, 8)
    torch.testing.assert_close(mixer(x), like_vanilla(mixer)(x))


def test_the_improved_form_is_nearer(rand):
    """Fails if weighing the top keys anew does not help."""
    torch.manual_seed(1)
    rough = build("clustered", clusters=4)
    better = build("clustered_improved", clusters=4, top=8)
    better.load_state_dict(
        {
            name.replace("query.planes", "clusters.planes"): t
            for name, t in rough.state_dict().items()
        }
    )
    x = 3 * rand(2, 40, 8)
    exact = like_vanilla(rough)(x)
    assert (better(x) - exact).norm() < (rough(x) - exact).norm()


def test_alike_queries_share_a_cluster(rand):
    """Fails if clusters are not by likeness, or depend on anything but the seed."""
    centres = rand(1, 1, 3, 6)
    q = centres.repeat_interleave(5, 2) * (1 + rand(1, 1, 15, 1).abs())
    found = QueryClusters(6, 3, seed=2).assign(q, None)[0, 0].view(3, 5)
    assert (found == found[:, :1]).all() and len(found[:, 0].unique()) == 3
    assert torch.equal(QueryClusters(6, 3, seed=2).planes, QueryClusters(6, 3, seed=2).planes)
    assert not torch.equal(QueryClusters(6, 3, seed=2).planes, QueryClusters(6, 3, seed=3).planes)


# ------------------------------------------------------------------------------------- prob-sparse
def test_all_queries_that_attend_are_attention(rand):
    """Fails if those that stand out do not attend exactly."""
    mixer, x = build("prob_sparse", factor=10), rand(2, 17, 8)
    torch.testing.assert_close(mixer(x), like_vanilla(mixer)(x))


def test_few_attend_and_the_others_take_the_mean(rand):
    """Fails if the number of queries that attend is another than factor ⌈ln r⌉ for r real ones."""
    mixer, x = build("prob_sparse", factor=2), rand(2, 50, 8)
    mask = torch.arange(50)[None] < torch.tensor([[50], [20]])
    a = mixer.attention_map(x, mask=mask)
    mean = mask.double() / mask.sum(1, keepdim=True)
    lazy = (a - mean[:, None, None]).abs().amax(-1) < 1e-12
    assert (~lazy[0]).sum(-1).tolist() == [8, 8]
    assert (~lazy[1, :, :20]).sum(-1).tolist() == [6, 6] and lazy[1, :, 20:].all()


def test_a_query_that_stands_out_is_found(rand):
    """Fails if the measure does not prefer queries with a sharp distribution."""
    q, k = 0.01 * rand(1, 1, 60, 4), rand(1, 1, 60, 4)
    q[0, 0, 33] *= 1000
    everyone = torch.ones(1, 60, dtype=torch.bool)
    assert ProbSparseAttention().measure(q, k, everyone)[0, 0].argmax() == 33
    other = ProbSparseAttention(seed=1).measure(q, k, everyone)
    assert not torch.equal(other, ProbSparseAttention().measure(q, k, everyone))


# ------------------------------------------------------------------------------------------ funnel
def test_a_stride_of_one_is_attention(rand):
    """Fails if nothing is pooled, and yet something else comes out."""
    mixer, x = build("funnel", stride=1), rand(2, 7, 8)
    torch.testing.assert_close(mixer(x), like_vanilla(mixer.attention)(x))


def test_pooled_goes_on_and_comes_back(rand):
    """Fails if a stack of shorter layers cannot be built: lengths 11, 6, 3, and up again, with
    padding all the way."""
    first, second = build("funnel", cls=True), build("funnel")
    x, mask = rand(2, 11, 8), torch.arange(11)[None] < torch.tensor([[11], [4]])
    short, held = first.shorten(x, mask)
    assert short.shape == (2, 6, 8) and held.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    torch.testing.assert_close(first.pool(x)[0][:, 0], x[:, 0])
    shorter, held = second.shorten(short, held)
    assert shorter.shape == (2, 3, 8) and held.tolist() == [[True] * 3, [True, True, False]]
    y = first.upsample(second.upsample(shorter, 6), 11, x)
    torch.testing.assert_close(y[:, 0], x[:, 0] + shorter[:, 0])
    torch.testing.assert_close(y[:, 3:5], x[:, 3:5] + shorter[:, 1:2])
    cut, _ = second.shorten(*first.shorten(x[1:, :4]))
    torch.testing.assert_close(shorter[1, :2], cut[0])


# -------------------------------------------------------------------------------------------- sets
@pytest.mark.parametrize("name", ["sab", "isab", "luna", "perceiver"])
@pytest.mark.parametrize("masked", [False, True])
def test_order_does_not_matter(name, masked, rand):
    """Fails if elements in another order do not give the same results in that order."""
    mixer, x = get_recipe(name).example().double(), rand(2, 13, 8)
    mask = torch.arange(13)[None] < torch.tensor([[13], [6]]) if masked else None
    order = torch.randperm(13)
    moved = mixer(x[:, order], mask=None if mask is None else mask[:, order])
    rows = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(moved[rows[:, order]], mixer(x, mask=mask)[:, order][rows[:, order]])


@pytest.mark.parametrize("norm", [False, True])
def test_pma_reads_a_set(norm, rand):
    """Fails if the pooled vectors depend on order, on what is left out, or get no gradient."""
    pma, z = PMA(8, 2, seeds=3, norm=norm).double(), rand(2, 11, 8)
    y = pma(z)
    assert y.shape == (2, 3, 8)
    torch.testing.assert_close(pma(z[:, torch.randperm(11)]), y)
    mask = torch.arange(11)[None].expand(2, 11) < 7
    poisoned = z.clone()
    poisoned[:, 7:] = torch.nan
    torch.testing.assert_close(pma(poisoned, mask), pma(z[:, :7]))
    assert pma(z, torch.zeros_like(mask)).isfinite().all()
    (y * rand(2, 3, 8)).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in pma.parameters())
    with pytest.raises(ValueError, match="mask must have shape"):
        pma(z, mask[:, :5])
    with pytest.raises(ValueError, match="seeds must be"):
        PMA(8, 2, seeds=0)


def test_pma_is_the_paper(rand):
    """Fails if PMA is not MAB(S, rFF(Z))."""
    pma, z = PMA(8, 2, seeds=3).double(), rand(2, 5, 8)
    block = MAB(8, 2).double()
    block.load_state_dict(pma.block.state_dict())
    ff = torch.relu(z @ pma.rff.weight.T + pma.rff.bias)
    torch.testing.assert_close(pma(z), block(torch.stack([pma.seeds] * 2), ff))


# --------------------------------------------------------------------------------- luna, perceiver
def test_luna_hands_its_packed_sequence_on(rand):
    """Fails if a stack cannot pass p from layer to layer, or the first update is not the mixer
    itself."""
    first, second = build("luna", packed=3), build("luna", packed=3)
    x, mask = rand(2, 9, 8), torch.arange(9)[None] < torch.tensor([[9], [5]])
    y, p = first.update(x, mask=mask)
    assert p.shape == (2, 3, 8)
    torch.testing.assert_close(y, first(x, mask=mask))
    z, _ = second.update(y, p, mask=mask)
    assert not torch.allclose(z, second(y, mask=mask))
    torch.testing.assert_close(z[1, :5], second.update(first(x[1:, :5]), p[1:])[0][0])
    with pytest.raises(ValueError, match="p must have width 8"):
        first.update(x, rand(2, 3, 7))


def test_luna_with_elu(rand):
    """Fails if the other activation of the paper is another, or is accepted where there is none."""
    mixer, x = build("luna", packed=3, activation="elu", causal=True), rand(2, 9, 8)
    want = luna_past(
        dict(mixer.named_parameters()), x, 2, None, lambda t: torch.where(t > 0, t + 1, t.exp())
    )
    torch.testing.assert_close(mixer(x), want)
    with pytest.raises(ValueError, match="is for causal=True only"):
        build("luna", activation="elu")
    with pytest.raises(ValueError, match="activation must be one of 'softplus', 'elu', not 'relu'"):
        build("luna", activation="relu", causal=True)


def test_luna_streams_with_a_fixed_state(rand):
    """Fails if the causal form keeps anything for each token."""
    mixer, state, sizes = build("luna", packed=3, causal=True), None, set()
    for size in (1, 70, 200):
        _, state = mixer.stream(rand(2, size, 8), state)
        sizes.add((state.scores.shape, state.values.shape))
    assert sizes == {((2, 2, 4, 3), (2, 2, 3, 4))} and state.tokens == 271
    with pytest.raises(ValueError, match="the state has 2 examples"):
        mixer.stream(rand(1, 1, 8), state)


def test_perceiver_shows_its_latents(rand):
    """Fails if the encoding is not what the tokens read."""
    mixer, x = build("perceiver", latents=5), rand(2, 9, 8)
    z = mixer.encode(x)
    assert z.shape == (2, 5, 8)
    torch.testing.assert_close(mixer.write(x, z), mixer(x))


def test_a_mask_over_memory_says_nothing_about_queries(rand):
    """Fails if a mask of the same length as x, but over another sequence, leaves queries out."""
    for name in ("nystrom", "clustered", "clustered_improved", "prob_sparse", "funnel"):
        mixer = get_recipe(name).example().double()
        x, compression, mask = rand(2, 23, 8), rand(2, 23, 8), torch.arange(23).expand(2, 23) < 20
        torch.testing.assert_close(mixer(x, compression, mask=mask), mixer(x, compression[:, :20]))
        assert isinstance(mixer, MultiHead) is (name != "funnel")


@pytest.mark.parametrize("dense", [0, 10**6])
def test_drawn_keys_are_scored_alike_in_both_ways(dense, monkeypatch, rand):
    """Fails if the scores of drawn keys depend on whether all keys are scored, or an example
    counts keys that it has not."""
    monkeypatch.setattr(prob_sparse, "MAX_KEYS_PER_SAMPLE", dense)
    q, k = rand(2, 3, 300, 4), rand(2, 3, 300, 4)
    keys = torch.arange(300) < torch.tensor([[300], [40]])
    measure, attention = ProbSparseAttention(factor=2), []
    for i, real in enumerate((300, 40)):
        draws = 2 * math.ceil(math.log(real))
        at = torch.stack([(prob_sparse._uniform(0, d, 300) * real).long() for d in range(draws)], 1)
        scores = torch.einsum("hne,hnue->hnu", q[i], k[i][:, at]) / 2
        attention.append(scores.amax(-1) - scores.mean(-1))
    torch.testing.assert_close(
        measure.measure(q, k, keys), torch.stack(attention), rtol=0, atol=1e-12
    )
