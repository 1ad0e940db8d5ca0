"""Mixers without attention: what the generic tests cannot see."""

import pytest
import torch

import regard
from oracles import ORACLES
from regard.mixers import ClassAttention
from regard.mixers.xcit import (
    CrossCovarianceAttention,
    LocalPatchInteraction,
    MaskedBatchNorm,
    MaskedInstanceNorm,
)
from regard.registry import get_recipe
from regard.testing import check_mixer

SYNTHESIZERS = [
    name for name in regard.list_recipes(family="attention-free") if name.startswith("synthesizer")
]
AFTS = (  # full, simple, local, conv
    {"length": 40, "rank": 3},
    {"length": None},
    {"length": 40, "rank": 3, "window": 4},
    {"length": None, "kernel": 5},
)


def make(name, *, dim=8, heads=2, seed=0, **arguments):
    torch.manual_seed(seed)
    return regard.create(name, dim=dim, heads=heads, **arguments).double()


def streamed(mixer, x, size):
    """The output chunk by chunk, and the last state."""
    state, parts = None, []
    for chunk in x.split(size, 1):
        y, state = mixer.stream(chunk, state)
        parts.append(y)
    return torch.cat(parts, 1), state


# ------------------------------------------------------------------------------------------- maps
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_the_map_of_a_synthesizer_is_true(name, causal, masked, rand):
    """Fails if the map times the values is not the output, or its rows do not sum to one."""
    mixer, x = make(name, length=20, causal=causal), rand(2, 17, 8)
    mask = {"mask": torch.arange(17).expand(2, 17) % 4 != 1} if masked else {}
    weights = mixer.attention_map(x, **mask)
    kept = x * mask["mask"][..., None] if masked else x
    y = weights @ mixer.v(kept).unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(mixer.out(y.transpose(1, 2).flatten(2)), mixer(x, **mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_other_maps_are_true(causal, masked, rand):
    """Fails if the map of a kernel, of AFT or of pooling, times its values, is not the output."""
    x, mask = rand(2, 17, 8), torch.arange(17).expand(2, 17) % 4 != 1
    more, kept = ({"mask": mask}, x * mask[..., None]) if masked else ({}, x)
    conv = make("dynamic_conv", kernel=4, causal=causal)
    z = torch.nn.functional.glu(conv.up(kept), -1).unflatten(-1, (2, 4)).transpose(1, 2)
    y = (conv.attention_map(x, **more) @ z).transpose(1, 2).flatten(2)
    torch.testing.assert_close(conv.out(y), conv(x, **more))
    for sizes in AFTS:
        aft = make("aft", heads=1, **sizes, causal=causal)
        y = (aft.attention_map(x, **more) @ aft.v(kept).mT[..., None])[..., 0].mT
        torch.testing.assert_close(y, aft(x, **more))
    for width in (None, 5):
        pool = make("average_pool", heads=1, width=width, causal=causal)
        torch.testing.assert_close(pool.attention_map(x, **more)[:, 0] @ kept, pool(x, **more))


# ----------------------------------------------------------------------------------- synthesizers
def test_synthesizers_have_the_parameters_of_the_paper():
    """Fails if a form learns more or less than table 1 says: besides biases, and beside the values
    and the output.
    """
    d, length = 8, 36

    def count(name, **arguments):
        parts = make(name, length=length, **arguments).parts
        return sum(p.numel() for name, p in parts.named_parameters() if "bias" not in name)

    assert count("synthesizer_dense") == d * d + d * length
    assert count("synthesizer_factorised", factors=(4, 9)) == d * d + d * (4 + 9)
    assert count("synthesizer_random") == 2 * length**2
    assert count("synthesizer_random", learned=False) == 0
    assert count("synthesizer_factorised", kind="random", rank=5) == 2 * 2 * length * 5


def test_a_fixed_table_is_saved_and_drawn_by_its_seed():
    """Fails if the table depends on anything but the seed, or is missing from what is saved."""
    tables = [
        make("synthesizer_random", length=9, learned=False, seed=seed).state_dict()
        for seed in (3, 3)
    ]
    torch.manual_seed(1)
    other = (
        regard.create("synthesizer_random", dim=8, heads=2, length=9, learned=False, seed=4)
        .double()
        .state_dict()
    )
    assert torch.equal(tables[0]["parts.0.table"], tables[1]["parts.0.table"])
    assert not torch.equal(tables[0]["parts.0.table"], other["parts.0.table"])


def test_the_factors_of_a_row(rand):
    """Fails if the two rows make no outer product, or the default factors are too small."""
    for length in (1, 2, 7, 16, 31, 32):
        assert make("synthesizer_factorised", length=length)(rand(1, length, 8)).shape == (
            1,
            length,
            8,
        )
    part = make("synthesizer_factorised", length=12, factors=(3, 4)).parts[0]
    x = rand(1, 12, 8)
    logits = part(x, part.keys(x), 0)[0, 0].unflatten(-1, (4, 3))  # c, r
    assert torch.linalg.matrix_rank(logits).tolist() == [1] * 12


def test_shares_of_a_mixture(rand):
    """Fails if a share that is all leaves something for the others."""
    both, alone = (
        make("synthesizer_mixture", length=12, parts=("random", "vanilla")),
        make("synthesizer_random", length=12),
    )
    alone.v, alone.out = both.v, both.out
    with torch.no_grad():
        both.shares.copy_(torch.tensor([1e4, 0.0]))
    x = rand(2, 12, 8)
    torch.testing.assert_close(both(x), alone(x))


def test_only_vanilla_is_vanilla(rand):
    """Fails if the dot-product part is not softmax attention, with no limit on the length."""
    mixer, plain, x = (
        make("synthesizer_mixture", length=4, parts=("vanilla",)),
        make("vanilla"),
        rand(2, 50, 8),
    )
    plain.q, plain.k, plain.v, plain.out = mixer.parts[0].q, mixer.parts[0].k, mixer.v, mixer.out
    assert mixer.length is None and mixer.can.length
    torch.testing.assert_close(mixer(x), plain(x))


# ------------------------------------------------------------------------------------- gated MLPs
@pytest.mark.parametrize("causal", [False, True])
def test_the_gate_is_open_at_first(causal, rand):
    """Fails if a fresh gMLP is not nearly the plain channel network, as the paper wants it."""
    mixer, x = make("gmlp", heads=1, length=20, causal=causal), rand(2, 20, 8)
    plain = mixer.down(torch.nn.functional.gelu(mixer.up(x)).chunk(2, -1)[0])
    torch.testing.assert_close(mixer(x), plain, rtol=0, atol=1e-3)
    assert not torch.equal(mixer(x), plain)


@pytest.mark.parametrize("name", ["gmlp", "amlp"])
def test_masked_tokens_add_nothing_to_a_gate_that_works(name, rand):
    """Fails if padding or holes reach the gate once its weights are far from zero, or a stream
    differs.
    """
    for causal in (False, True):
        mixer, x = make(name, heads=1, length=20, causal=causal), rand(2, 16, 8)
        torch.nn.init.normal_(mixer.weight)
        mask = (torch.arange(16) < 11).expand(2, 16)
        torch.testing.assert_close(mixer(x, mask=mask)[:, :11], mixer(x[:, :11]))
    y, state = streamed(mixer, x, 3)
    torch.testing.assert_close(y, mixer(x))
    assert state.values.shape == (2, 16, 24)


# ------------------------------------------------------------------------------------------- XCiT
def test_channels_attend_to_channels(rand):
    """Fails if the map of channels does not sum to one, or if the scale of tokens or padding
    changes it.
    """
    torch.manual_seed(0)
    xca, x = CrossCovarianceAttention(8, 2).double(), rand(2, 11, 8)
    for f in (xca.q, xca.k):
        torch.nn.init.zeros_(f.bias)
    weights = xca.channels(x)
    assert weights.shape == (2, 2, 4, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    torch.testing.assert_close(xca.channels(7 * x), weights)
    mask = (torch.arange(11) < 8).expand(2, 11)
    torch.testing.assert_close(xca.channels(x, mask), xca.channels(x[:, :8]))


def test_batch_norm_is_torchs_own(rand):
    """Fails if the paper's batch norm is another than torch's over the image, in training and after
    it.
    """
    torch.manual_seed(0)
    ours, theirs = MaskedBatchNorm(8).double(), torch.nn.BatchNorm2d(8).double()
    for training in (True, False):
        x = rand(3, 12, 8)
        ours.train(training)
        theirs.train(training)
        torch.testing.assert_close(ours(x, None), theirs(x.mT.unflatten(2, (3, 4))).flatten(2).mT)
    torch.testing.assert_close(ours.norm.running_var, theirs.running_var)


def test_batch_norm_leaves_padding_out(rand):
    """Fails if left-out tokens count in the mean of a batch."""
    torch.manual_seed(0)
    norm, x = MaskedBatchNorm(8).double(), rand(2, 9, 8)
    mask = (torch.arange(9) < 6).expand(2, 9)
    y = norm(x.masked_fill(~mask[..., None], 1e6), mask)
    torch.testing.assert_close(y[:, :6], norm(x[:, :6], None))
    assert not y[:, 6:].any()


def test_one_example_is_a_batch_of_one(rand):
    """Fails if the norm of an example is not batch norm of it alone."""
    batch, example, x = MaskedBatchNorm(8).double(), MaskedInstanceNorm(8).double(), rand(3, 9, 8)
    for one in x:
        torch.testing.assert_close(example(x, None)[0], batch(x[:1], None)[0])
        torch.testing.assert_close(example(one[None], None), batch(one[None], None))


def test_xcit_with_batch_norm_keeps_its_promises_after_training(rand):
    """Fails if, in eval mode, the paper's own norm breaks a promise; in training its examples touch
    each other.
    """

    def build(causal):
        return regard.create("xcit", dim=8, heads=2, width=5, norm="batch", causal=causal)

    result = check_mixer(lambda causal: build(causal).eval())
    assert result["batch_independence"] == result["padding"] == "supported"
    mixer, x = build(False).double().train(), rand(2, 15, 8)
    assert not torch.allclose(mixer(x)[1:], mixer(x[1:]))


def test_xcit_of_images_is_the_layer_of_the_paper(rand):
    """Fails if the parts are not put together as x + XCA(norm x), then + LPI(norm x)."""
    mixer, x = make("xcit", width=4), rand(2, 12, 8)
    y = x + mixer.covariance(mixer.before_covariance(x))
    image = mixer.before_patches(y).mT.unflatten(2, (3, 4))
    local = mixer.patches
    inner = torch.nn.functional.gelu(local.first(image))
    inner = torch.nn.functional.instance_norm(inner, weight=local.norm.weight, bias=local.norm.bias)
    torch.testing.assert_close(x + mixer(x), y + local.second(inner).flatten(2).mT)


def test_class_attention(rand):
    """Fails if the class token does not ask itself and all real patches."""
    torch.manual_seed(0)
    layer, token, tokens = ClassAttention(8, 2).double(), rand(2, 1, 8), rand(2, 6, 8)
    everything = torch.cat((token, tokens), 1)
    torch.testing.assert_close(layer(token, tokens), layer.attend(everything)[:, :1])
    mask = (torch.arange(6) < 4).expand(2, 6)
    torch.testing.assert_close(layer(token, tokens, mask=mask), layer(token, tokens[:, :4]))
    weights = layer.attention(token, tokens, mask=mask)
    assert weights.shape == (2, 2, 1, 7) and not weights[..., 5:].any()
    with pytest.raises(ValueError, match=r"b 1 d"):
        layer(tokens, tokens)


# ---------------------------------------------------------------------------------------------- AFT
FREE_OF_LENGTH = [
    {},
    {"kernel": 1},
    {"kernel": 4, "heads": 2},
    {"kernel": 7, "heads": 4},
    {"kernel": 100, "heads": 2},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 8, 13, 40, 150])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", FREE_OF_LENGTH)
def test_aft_simple_and_conv_against_their_oracle(form, causal, n, masked, rand):
    """Fails if a form that needs no length is another, or its chunks of 64 show."""
    form = {"heads": 1, **form}
    mixer, x = make("aft", length=None, causal=causal, **form), rand(2, n, 8).requires_grad_()
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.3 * rand(*p.shape)  # else the kernels are nearly nothing
    mask = {"mask": torch.arange(n).expand(2, n) % 3 != 1} if masked else {}
    want = ORACLES["aft"](
        dict(mixer.named_parameters()), x, causal=causal, length=None, **form, **mask
    )
    got, leaves = mixer(x, **mask), [x, *mixer.parameters()]
    real = mask["mask"][..., None] if masked else 1
    torch.testing.assert_close(got * real, want * real)
    pairs = zip(
        *(torch.autograd.grad((y * real).square().sum(), leaves) for y in (got, want)), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 64, 65, 500])
def test_aft_local_is_aft_full_with_zeros(window, causal, rand):
    """Fails if many chunks give something else than one table of biases that are zero beyond the
    window.
    """
    mixer, x = (
        make("aft", heads=1, length=300, rank=3, window=window, causal=causal),
        rand(2, 300, 8),
    )
    with torch.no_grad():
        for p in mixer.bias.parameters():
            p += rand(*p.shape)
    at = torch.arange(300)
    w = (mixer.bias.u @ mixer.bias.s.mT).masked_fill((at[:, None] - at).abs() >= window, 0)
    w = w.masked_fill(at[:, None] < at, -torch.inf) if causal else w
    weight = (mixer.k(x)[:, None] + w[..., None]).softmax(2)
    torch.testing.assert_close(
        mixer(x), mixer.q(x).sigmoid() * (weight * mixer.v(x)[:, None]).sum(2)
    )


@pytest.mark.parametrize("sizes", AFTS)
@pytest.mark.parametrize("causal", [False, True])
def test_exponents_that_would_overflow(sizes, causal, rand):
    """Fails if keys of a thousand give infinity, or if, far below zero, they vanish together."""
    mixer, x = make("aft", heads=1, **sizes, causal=causal), rand(2, 30, 8)
    for shift in (1e3, -1e3):
        plain, mixer.k = mixer.k, torch.nn.Sequential(mixer.k, _Shift(shift))
        y = mixer(x)
        mixer.k = plain
        torch.testing.assert_close(y, mixer(x))  # a constant in all keys changes nothing
    assert mixer.float()(100 * x.float()).isfinite().all()


class _Shift(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


def test_a_huge_key_of_the_future_does_not_drown_the_past(rand):
    """Fails if the largest exponent is looked for among all tokens: the past would round to
    nothing.
    """
    for sizes in AFTS:
        mixer, x = make("aft", heads=1, **sizes, causal=True), rand(1, 30, 8)
        other = x.clone()
        other[:, 20:] = 1e4 * rand(1, 10, 8)
        assert torch.equal(mixer(x)[:, :20], mixer(other)[:, :20])
        assert mixer(other).isfinite().all()


@pytest.mark.parametrize(
    ("form", "held"),
    [({}, 0), ({"length": 300, "rank": 3, "window": 9}, 8), ({"kernel": 5, "heads": 2}, 4)],
)
def test_the_state_of_aft_does_not_grow(form, held, rand):
    """Fails if anything is kept for each token beyond what a bias may still reach."""
    mixer, x = make("aft", causal=True, **{"heads": 1, "length": None, **form}), rand(2, 200, 8)
    for size in (1, 7, 90):
        y, state = streamed(mixer, x, size)
        torch.testing.assert_close(y, mixer(x))
        assert state.k.shape[2] == state.v.shape[2] == held and state.far.top.shape[2] == 1


def test_a_stream_of_aft_full_says_where_it_ends(rand):
    """Fails if more tokens are taken than there are biases."""
    full, x = make("aft", heads=1, length=60, rank=3, causal=True), rand(2, 60, 8)
    y, state = streamed(full, x, 7)
    torch.testing.assert_close(y, full(x))
    with pytest.raises(ValueError, match=r"61 tokens.*length=60"):
        full.stream(x[:, :1], state)


@pytest.mark.parametrize(
    "form", [{}, {"kernel": 3, "heads": 2}, {"length": 40, "rank": 3, "window": 4}]
)
def test_every_form_of_aft_keeps_its_promises(form):
    """Fails if a form that the small example does not show breaks one."""
    form = {"heads": 1, "length": None, **form}
    result = check_mixer(lambda causal: regard.create("aft", dim=8, causal=causal, **form))
    assert result["stream"] == result["maps"] == result["padding"] == "supported"
    assert result["length"] == ("supported" if form["length"] is None else "unsupported")


# ---------------------------------------------------------------------------- kernels and windows
def test_a_stream_of_kernels_keeps_what_they_reach(rand):
    """Fails if more than kernel − 1 tokens are kept, or fewer."""
    mixer, x = make("dynamic_conv", kernel=5, causal=True), rand(2, 40, 8)
    for size in (1, 3, 16):
        y, state = streamed(mixer, x, size)
        torch.testing.assert_close(y, mixer(x))
        assert state[0].shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("window", "width", "most"), [(4, None, 3), (3, None, 2), (3, 6, 12), (5, 6, 18), (1, 4, 4)]
)
def test_a_stream_of_windows_keeps_what_they_reach(window, width, most, rand):
    """Fails if rows above are forgotten, or those above them are not."""
    mixer, x = (
        make("average_pool", heads=1, window=window, width=width, causal=True),
        rand(2, 45, 8),
    )
    for size in (1, 4, 11):
        y, state = streamed(mixer, x, size)
        torch.testing.assert_close(y, mixer(x))
        assert state[0].shape[1] <= most and state[1] == 45


@pytest.mark.parametrize("arguments", [{"width": 5}, {"width": 30, "window": 5}, {"window": 7}])
def test_pools_of_other_shapes_keep_their_promises(arguments):
    """Fails if a grid, or a wider window, breaks a promise."""
    result = check_mixer(
        lambda causal: regard.create("average_pool", dim=8, causal=causal, **arguments)
    )
    assert result["stream"] == result["padding"] == result["maps"] == "supported"


def test_long_sums_in_low_precision(rand):
    """Fails if a window of a thousand is counted in bfloat16, where 257 does not exist."""
    mixer, x = make("average_pool", heads=1, window=1001), rand(1, 2000, 8) + 3
    got = mixer.bfloat16()(x.bfloat16()) + x.bfloat16()
    torch.testing.assert_close(got.double(), mixer.double()(x) + x, rtol=0.02, atol=0.02)


# ----------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("name", [*SYNTHESIZERS, "gmlp", "amlp", "aft"])
def test_a_stream_that_goes_on_too_long(name, rand):
    """Fails if the limit holds for each chunk, and not for all of them."""
    torch.manual_seed(0)
    mixer = get_recipe(name).example(causal=True).double()
    _, state = mixer.stream(rand(1, 30, 8))
    with pytest.raises(ValueError, match=r"33 tokens.*length=32"):
        mixer.stream(rand(1, 3, 8), state)
    with pytest.raises(ValueError, match=r"1 examples.*2"):
        mixer.stream(rand(2, 1, 8), state)


ABSURD = [
    ("synthesizer_dense", {"length": 0}, "length"),
    ("synthesizer_random", {"length": 8, "seed": -1}, "seed"),
    ("synthesizer_factorised", {"length": 8, "kind": "both"}, "kind must be .*'both'"),
    ("synthesizer_factorised", {"length": 8, "factors": (2, 3)}, "at least length=8"),
    ("synthesizer_factorised", {"length": 8, "factors": (0, 9)}, "factors"),
    ("synthesizer_factorised", {"length": 8, "factors": 8}, "factors"),
    ("synthesizer_factorised", {"length": 8, "kind": "random", "factors": (2, 4)}, "rank"),
    ("synthesizer_factorised", {"length": 8, "rank": 0}, "rank"),
    ("synthesizer_mixture", {"length": 8, "parts": ()}, "parts"),
    ("synthesizer_mixture", {"length": 8, "parts": "dense"}, "parts"),
    ("synthesizer_mixture", {"length": 8, "parts": ("dens",)}, "did you mean 'dense'"),
    ("gmlp", {"length": 0}, "length"),
    ("gmlp", {"length": 8, "hidden": 5}, "even"),
    ("amlp", {"length": 8, "attention": 0}, "attention"),
    ("xcit", {"width": 0}, "width"),
    ("xcit", {"width": 4, "norm": "layer"}, "norm must be one of .*'layer'"),
    ("dynamic_conv", {"kernel": 0}, "kernel"),
    ("aft", {"length": 8, "rank": 0}, "rank"),
    ("aft", {"length": 0}, "length"),
    ("aft", {"length": None, "rank": 3}, "rank and window are for"),
    ("aft", {"length": None, "window": 3}, "rank and window are for"),
    ("aft", {"length": 8, "window": 0}, "window"),
    ("aft", {"length": None, "kernel": 0}, "kernel"),
    ("aft", {"length": 8, "kernel": 3}, "requires length=None"),
    ("aft", {"length": None, "kernel": 3, "heads": 3}, "divisible by heads"),
    ("aft", {"length": None, "heads": 0}, "heads must be an integer >= 1, not 0"),
    ("average_pool", {"window": 4}, "odd"),
    ("average_pool", {"window": 0}, "window"),
    ("average_pool", {"width": 0}, "width"),
    ("average_pool", {"window": 4, "width": 5, "causal": True}, "odd"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), ABSURD)
def test_arguments_that_make_no_sense(name, arguments, words):
    """Fails if nonsense is built, or the message does not name it."""
    heads = (
        {}
        if "heads" in get_recipe(name).parameters
        and get_recipe(name).parameters["heads"].default == 1
        else {"heads": 2}
    )
    with pytest.raises((ValueError, TypeError), match=words):
        regard.create(name, dim=8, **{**heads, **arguments})


def test_local_patches_of_few_tokens(rand):
    """Fails if a grid that is wider than the sequence, or one token, is an error."""
    torch.manual_seed(0)
    for n in (1, 2, 7):
        assert LocalPatchInteraction(8, 50).double()(rand(2, n, 8)).isfinite().all()


# ------------------------------------------------------------------------------------------- cost
LINEAR = {
    "xcit": {"heads": 2, "width": 16},
    "dynamic_conv": {"heads": 2},
    "aft": {"length": None},
    "average_pool": {"width": 16},
    "draw_read": {"width": 16},
    "draw_write": {"width": 16},
}


def saved(name, n, causal):
    """How many numbers a call keeps for its backward pass, and the largest tensor of them."""
    sizes, mixer = [], regard.create(name, dim=8, causal=causal, **LINEAR[name])

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    x = torch.randn(1, n, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixer(x)
    return sum(sizes), max(sizes)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_kept_grows_with_the_length(name, causal):
    """Fails if something of n x n is made where the mechanism needs none; causal AFT keeps log n
    sums.
    """
    if causal and not get_recipe(name).can().causal:
        pytest.skip("it has no causal form")
    (small, _), (large, largest) = (saved(name, n, causal) for n in (1024, 2048))
    assert large < 2.4 * small and largest <= 2048 * 8 * 4


def test_parts_of_a_kind_are_drawn_apart():
    """Fails if two random parts of a mixture are the same table."""
    mixer = regard.create(
        "synthesizer_mixture", dim=16, heads=2, length=8, parts=("random", "random")
    )
    assert not torch.equal(mixer.parts[0].table, mixer.parts[1].table)
