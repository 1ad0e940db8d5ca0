"""Recipes by name: they exist, wrong names and arguments get a hint, and other packages can add
theirs.
"""

import warnings
from importlib import metadata

import pytest
import torch

import regard
from regard import Attention, Mixer, Unsupported, recipe, registry

NAMES = {
    "early": ["bahdanau", "draw_read", "draw_write", "graves_window", "show_attend"],
    "dense": ["parameter_free", "vanilla"],
    "sparse": [
        "axial",
        "axial_passes",
        "bigbird",
        "block_local",
        "bp_transformer",
        "dilated",
        "etc",
        "global_tokens",
        "image_local_1d",
        "image_local_2d",
        "local",
        "longformer",
        "neighbourhood",
        "per_head",
        "random_blocks",
        "sinks",
        "sparse_fixed",
        "sparse_strided",
        "star",
        "swin",
    ],
    "routed": ["reformer", "routing", "sinkhorn", "top_k"],
    "linear": [
        "cosformer",
        "delta_rule",
        "efficient",
        "gated_linear",
        "linear",
        "performer",
        "retnet",
        "rfa",
        "rfa_gated",
    ],
    "compressed": [
        "clustered",
        "clustered_improved",
        "funnel",
        "isab",
        "linformer",
        "low_rank",
        "low_rank_band",
        "luna",
        "memory_compressed",
        "nystrom",
        "perceiver",
        "pooling",
        "prob_sparse",
        "sab",
    ],
    "priors": [
        "adaptive_span",
        "average",
        "collaborative",
        "conditional_prior",
        "disagreement",
        "fixed_span",
        "gaussian_prior",
        "grouped_query",
        "hard_gaussian",
        "multi_query",
        "realformer",
        "talking_heads",
    ],
    "attention-free": [
        "aft",
        "amlp",
        "average_pool",
        "dynamic_conv",
        "fnet",
        "gmlp",
        "mlp_mixer",
        "synthesizer_dense",
        "synthesizer_factorised",
        "synthesizer_mixture",
        "synthesizer_random",
        "xcit",
    ],
    "hybrid": ["all_attention", "lite"],
}


@pytest.fixture
def fresh(monkeypatch):
    """The registry as it was, afterwards; entry points are looked for again."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    registry._load_recipes.cache_clear()
    yield
    registry._load_recipes.cache_clear()


class Entry:
    """Stands for an entry point of another package."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"other_package:{name}", load


def installed(monkeypatch, *entries):
    def entry_points(*, group):
        return entries if group == "regard.recipes" else ()

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    registry._load_recipes.cache_clear()


# ---------------------------------------------------------------------------------- what there is
@pytest.mark.parametrize("family", NAMES)
def test_every_family_has_its_recipes_in_alphabetical_order(family):
    """Fails if a recipe is missing, has another name or family, or the order changes."""
    assert regard.list_recipes(family=family) == NAMES[family]
    for name in NAMES[family]:
        found = registry.get_recipe(name)
        assert found.family == family and found.name == name


def test_every_recipe_says_where_it_comes_from():
    """Fails if a recipe has no paper, formula, summary or family."""
    for name in regard.list_recipes():
        found = registry.get_recipe(name)
        assert found.paper and found.formula and found.summary and found.family in registry.FAMILIES
        assert found.arxiv == "" or (len(found.arxiv) in (9, 10) and found.arxiv[4] == ".")
        assert (
            "dim" in found.parameters
            and "heads" in found.parameters
            and "causal" in found.parameters
        )
        assert isinstance(found.example(), Mixer)


def test_list_by_family():
    """Fails if a family is not found by its key and by its title, in any case."""
    sparse = regard.list_recipes(family="sparse")
    for spelling in ("Sparse", "sparse by position", "Sparse by position"):
        assert regard.list_recipes(family=spelling) == sparse
    names = [name for family in registry.FAMILIES for name in regard.list_recipes(family=family)]
    assert names == regard.list_recipes() and len(names) == 80
    with pytest.raises(ValueError, match=r"no family 'sparse by positon'.*'sparse by position'"):
        regard.list_recipes(family="sparse by positon")
    with pytest.raises(ValueError, match="no family 'Z'"):
        regard.list_recipes(family="Z")


def test_list_by_wildcard():
    """Fails if a pattern matches a part of a name, other cases, or nothing where it should."""
    assert regard.list_recipes("big*") == ["bigbird"] and regard.list_recipes("linear") == [
        "linear"
    ]
    assert regard.list_recipes("synthesizer_*") == [
        name for name in regard.list_recipes() if name.startswith("synthesizer_")
    ]
    assert regard.list_recipes("*sparse*") == ["sparse_fixed", "sparse_strided", "prob_sparse"]
    assert regard.list_recipes("big") == regard.list_recipes("BIG*") == []
    assert regard.list_recipes("*local*", family="sparse", can="causal") == [
        "block_local",
        "image_local_1d",
        "image_local_2d",
        "local",
    ]


def test_list_by_capability():
    """Fails if a capability does not select."""
    both = set(regard.list_recipes(can=["cross", "stream"]))
    cross, stream = (set(regard.list_recipes(can=name)) for name in ("cross", "stream"))
    assert both == cross & stream and {"bahdanau", "vanilla", "linear"} <= both
    assert regard.list_recipes(can="global_attention_mask") == ["longformer"]
    assert "fnet" not in regard.list_recipes(can="mask")
    assert "fnet" in regard.list_recipes(can="length")
    causal = set(regard.list_recipes(can="causal"))
    assert {"bigbird", "linear", "vanilla"} <= causal
    assert not {"linformer", "fnet", "mlp_mixer"} & causal
    with pytest.raises(ValueError, match=r"no capability 'casual'.*'causal'"):
        regard.list_recipes(can=["casual"])


# ----------------------------------------------------------------------------------------- create
def test_create():
    """Fails if the arguments do not arrive."""
    mixer = regard.create("local", dim=8, heads=2, window=5, causal=True)
    assert (mixer.dim, mixer.heads, mixer.causal, mixer.inner.pattern) == (
        8,
        2,
        True,
        regard.Band(5, 5),
    )
    assert regard.create("fnet", dim=8).dim == 8


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("bigbrid", "bigbird"), ("longfomer", "longformer"), ("Linear", "linear"), ("f_net", "fnet")],
)
def test_a_wrong_name_gets_the_nearest(wrong, right):
    """Fails if a misspelt name is not answered with the right one."""
    with pytest.raises(ValueError, match=f"no recipe '{wrong}': did you mean '{right}'"):
        regard.create(wrong, dim=8, heads=2)


def test_a_name_like_no_other_gets_all_of_them():
    """Fails if a name that resembles none is not answered with what there is."""
    with pytest.raises(ValueError, match=r"choose from .*bigbird.*vanilla"):
        regard.create("qqqq", dim=8, heads=2)
    with pytest.raises(ValueError, match="no recipe ''"):
        regard.create("")


def test_a_wrong_argument_gets_the_nearest():
    """Fails if a misspelt argument is swallowed, or not answered with the right one."""
    with pytest.raises(TypeError, match=r"local has no argument 'windw': did you mean 'window'"):
        regard.create("local", dim=8, heads=2, windw=3)
    with pytest.raises(TypeError, match=r"vanilla has no argument 'zzz': choose from .*kv_heads"):
        regard.create("vanilla", dim=8, heads=2, zzz=3)


def test_missing_arguments_are_named():
    """Fails if the message does not say what is missing."""
    with pytest.raises(
        TypeError, match="bigbird is missing required arguments: dim, heads, length"
    ):
        regard.create("bigbird")
    with pytest.raises(TypeError, match="linformer is missing required arguments: length"):
        regard.create("linformer", dim=8, heads=2)


# --------------------------------------------------------------------------------- other packages
def toy(dim, heads=1, *, causal=False):
    """A recipe of another package. It is Fourier by another name."""
    return regard.create("fnet", dim=dim, causal=causal)


def test_another_package_adds_a_recipe(fresh, monkeypatch):
    """Fails if an entry point is not loaded on the first look-up."""
    installed(
        monkeypatch,
        Entry(
            "toy", lambda: recipe("Somebody 2030", family="attention-free", formula="Re F F x")(toy)
        ),
    )
    assert "toy" in regard.list_recipes() and "toy" in regard.list_recipes(family="attention-free")
    assert regard.create("toy", dim=6).dim == 6
    assert registry.get_recipe("toy").summary == "A recipe of another package"
    regard.testing.check_mixer(lambda causal: regard.create("toy", dim=6, causal=causal))


def test_a_broken_package_takes_nobody_with_it(fresh, monkeypatch):
    """Fails if one import error hides all recipes, or is silent."""

    def broken():
        raise ImportError("no module named nonsense")

    installed(
        monkeypatch,
        Entry("bad", broken),
        Entry("toy", lambda: recipe("Somebody 2030", family="attention-free")(toy)),
    )
    with pytest.warns(
        UserWarning,
        match=r"Could not load recipe 'bad' from 'other_package:bad': no module named nonsense",
    ):
        names = regard.list_recipes()
    assert "toy" in names and "bigbird" in names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert regard.list_recipes() == names  # and it warns once


def test_no_second_recipe_of_a_name(fresh):
    """Fails if another package can replace a recipe unnoticed."""

    def vanilla(dim, heads, *, causal=False):
        """Not the vanilla you know."""

    regard.list_recipes()
    with pytest.raises(
        ValueError, match=r"'vanilla' is already registered by regard\.recipes\.vanilla"
    ):
        recipe("Somebody 2030")(vanilla)


def test_a_duplicate_by_entry_point_warns(fresh, monkeypatch):
    """Fails if a package that takes a name again breaks the others, or wins."""

    def vanilla(dim, heads, *, causal=False):
        """Not the vanilla you know."""

    installed(monkeypatch, Entry("vanilla", lambda: recipe("Somebody 2030")(vanilla)))
    with pytest.warns(UserWarning, match="'vanilla' is already registered"):
        assert regard.create("vanilla", dim=8, heads=2).heads == 2


def test_a_decorated_function_stays_a_function(fresh):
    """Fails if a recipe can only be reached by its name."""
    assert recipe("Somebody 2030", family="attention-free")(toy) is toy


def test_a_recipe_without_a_family_is_listed_last(fresh):
    """Fails if a recipe without a family breaks the order."""
    recipe("Somebody 2030")(toy)
    assert regard.list_recipes()[-1] == "toy" and registry.get_recipe("toy").family == ""


def test_the_documented_group_exists():
    """Fails if the name that other packages write into their metadata changes."""
    assert registry.ENTRY_POINT_GROUP == "regard.recipes"


# ------------------------------------------------------------------------------------- two stages
@pytest.mark.parametrize("name", regard.list_recipes())
def test_create_wraps_what_create_attention_returns(name):
    """Fails if the attention of a recipe is not the one inside the mixer, or if a token mixer does
    not refuse with the reason.
    """
    found = registry.get_recipe(name)
    if not found.is_attention:
        with pytest.raises(Unsupported, match=f"{name} has no attention over given queries"):
            regard.create_attention(name, heads=2, head_dim=4)
        return
    for causal in found.causal_options():
        torch.manual_seed(0)
        attention = regard.create_attention(
            name, heads=2, head_dim=4, causal=causal, **found.example_kwargs
        )
        torch.manual_seed(0)
        mixer = found.example(8, causal=causal)
        assert isinstance(attention, Attention) and type(attention) is type(mixer.inner)
        mixer, attention = mixer.double().eval(), attention.double().eval()
        x = torch.randn(2, 20, 8, dtype=torch.float64)
        q, k, v = mixer.project(x, None)
        ours = mixer.out(attention(q, k, v, causal=causal)[0].transpose(1, 2).flatten(2))
        torch.testing.assert_close(ours, mixer(x), rtol=0, atol=0)


def test_create_attention_checks_its_arguments():
    """Fails if sizes, names or causality of a bare attention are not checked."""
    with pytest.raises(TypeError, match="local is missing required arguments: heads, head_dim"):
        regard.create_attention("local")
    with pytest.raises(TypeError, match=r"local has no argument 'windw': did you mean 'window'"):
        regard.create_attention("local", heads=2, head_dim=4, windw=3)
    with pytest.raises(TypeError, match="local has no argument 'kv_heads'"):
        regard.create_attention("local", heads=2, head_dim=4, kv_heads=1)
    with pytest.raises(ValueError, match="head_dim must be an integer >= 1, not 0"):
        regard.create_attention("local", heads=2, head_dim=0)
    with pytest.raises(Unsupported, match=r"linformer does not support causal=True: .*length"):
        regard.create_attention("linformer", heads=2, head_dim=4, length=8, causal=True)
    drawn = regard.create_attention("random_blocks", heads=2, head_dim=4, length=64, block=4)
    causal = regard.create_attention(
        "random_blocks", heads=2, head_dim=4, length=64, block=4, causal=True
    )
    assert drawn.pattern != causal.pattern


def test_head_dim_need_not_divide_dim(rand):
    """Fails if heads * head_dim must be dim, or the formula changes with another width."""
    mixer = regard.create("vanilla", dim=6, heads=2, head_dim=5, kv_heads=1, bias=True).double()
    assert [tuple(w.weight.shape) for w in (mixer.q, mixer.k, mixer.v, mixer.out)] == [
        (10, 6),
        (5, 6),
        (5, 6),
        (6, 10),
    ]
    x = rand(2, 7, 6)
    q, k, v = mixer.q(x).view(2, 7, 2, 5), mixer.k(x), mixer.v(x)
    weights = torch.einsum("bnhe,bme->bhnm", q, k / 5**0.5).softmax(-1)
    expected = mixer.out(torch.einsum("bhnm,bme->bnhe", weights, v).flatten(2))
    torch.testing.assert_close(mixer(x), expected)
    assert "head_dim=5" in repr(mixer) and mixer.attention_map(x).shape == (2, 2, 7, 7)
    regard.testing.check_mixer(
        lambda causal: regard.create("local", dim=6, heads=2, head_dim=5, causal=causal)
    )
    with pytest.raises(Unsupported, match="fnet does not take head_dim: it is a token mixer"):
        regard.create("fnet", dim=6, head_dim=3)
    with pytest.raises(ValueError, match="project=False needs head_dim=3, not 5"):
        regard.MultiHead(6, 2, regard.SoftmaxAttention(), head_dim=5, project=False)


def test_the_first_parameters_of_a_recipe_are_checked(fresh):
    """Fails if a function that is neither form is registered, or takes an argument of `create`."""

    def sizeless(n, *, causal=False):
        """Neither form."""

    def biased(heads, head_dim, *, bias=2.0):
        """Uses the name of an argument of the projections."""

    with pytest.raises(TypeError, match=r"parameters of sizeless must start .*not \(n, causal\)"):
        recipe("Somebody 2030")(sizeless)
    with pytest.raises(TypeError, match="biased cannot have a parameter 'bias'"):
        recipe("Somebody 2030")(biased)


# ------------------------------------------------------------------------------ one loop for all
HEADLESS = {
    *("aft", "amlp", "average", "average_pool", "draw_read", "draw_write", "fnet", "gmlp"),
    *("graves_window", "mlp_mixer", "show_attend"),
}


@pytest.mark.parametrize("name", regard.list_recipes())
def test_every_recipe_takes_heads(name):
    """Fails if a mixer without heads raises, does not say that it has none, or changes with them;
    or if one with heads does not.
    """
    found = registry.get_recipe(name)
    required = {"length": 32, "width": 4}
    options = {k: v for k, v in required.items() if k in found.parameters}
    options |= {k: v for k, v in found.example_kwargs.items() if k != "dilation"}
    mixers = []
    for heads in (4, 2):
        torch.manual_seed(0)
        mixers.append(regard.create(name, dim=16, heads=heads, **options))
    can = mixers[0].can
    assert can.heads is (name not in HEADLESS) and (can.reason("heads") is None) == can.heads
    x = torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(0))
    same = torch.equal(*(mixer.eval()(x) for mixer in mixers))
    assert same is not can.heads


# --------------------------------------------------------------------- arguments of every recipe
def test_device_and_dtype():
    """Fails if parameters are not where they were asked for, differ by device, or a device or
    dtype that is not there is accepted.
    """
    torch.manual_seed(0)
    mixer = regard.create("performer", dim=8, heads=2, device="cpu", dtype="float64")
    torch.manual_seed(0)
    plain = regard.create("performer", dim=8, heads=2)
    assert all(t.dtype == torch.float64 for t in mixer.parameters())
    assert torch.equal(mixer.q.weight, plain.q.weight.double())
    attention = regard.create_attention("linformer", heads=2, head_dim=4, length=8, dtype="float64")
    assert attention.compression.e.dtype == torch.float64
    with pytest.raises(ValueError, match=r"(?s)'gpu'.*cuda"):
        regard.create("local", dim=8, heads=2, device="gpu")
    with pytest.raises(ValueError, match=r"dtype must be one of .*float32.*, not 'int64'"):
        regard.create("local", dim=8, heads=2, dtype=torch.int64)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"'cuda' is not available.*Available: cpu"):
            regard.create("fnet", dim=8, device="cuda")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_qk_norm(norm, rand):
    """Fails if queries and keys are not normalised by head, before the rotary embedding."""
    arguments = {"dim": 6, "heads": 2, "head_dim": 4, "kv_heads": 1, "causal": True}
    torch.manual_seed(0)
    mixer = regard.create("vanilla", qk_norm=norm, **arguments).double()
    for each in (mixer.q_norm, mixer.k_norm):
        torch.nn.init.uniform_(each.weight, 0.5, 2.0)
    mixer, x = regard.with_position(mixer, "rope"), rand(2, 5, 6)

    def normalised(t, weight, bias):
        if norm == "rms":
            return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        centred = t - t.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    q, k = mixer.q(x).view(2, 5, 2, 4).transpose(1, 2), mixer.k(x).view(2, 5, 1, 4).transpose(1, 2)
    q, k = (
        normalised(t, n.weight, getattr(n, "bias", None))
        for t, n in ((q, mixer.q_norm), (k, mixer.k_norm))
    )
    q, k = mixer.rotary(q, k, 0, 0)
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    y = (scores.softmax(-1) @ mixer.v(x)[:, None]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer(x), mixer.out(y))
    sizes = {"dim": 6, "heads": 2, "head_dim": 4, "kv_heads": 1}
    result = regard.testing.check_mixer(
        lambda causal: regard.create("local", **sizes, qk_norm=norm, causal=causal)
    )
    assert result["stream"] == "supported"
    assert regard.create("vanilla", dim=8, heads=2, qk_norm=True).q_norm.weight.shape == (4,)
    assert not hasattr(regard.create("reformer", dim=8, heads=2, qk_norm=norm), "k_norm")
    with pytest.raises(ValueError, match="qk_norm must be one of 'rms', 'layer', not 'batch'"):
        regard.create("vanilla", dim=8, heads=2, qk_norm="batch")
    with pytest.raises(Unsupported, match="retnet does not take qk_norm"):
        regard.create("retnet", dim=8, heads=2, qk_norm=True)


DROPOUT = [
    ("vanilla", {"kv_heads": 1}),
    ("local", {"window": 2, "causal": True}),
    ("swin", {"width": 4, "window": 2}),
    ("talking_heads", {}),
    ("disagreement", {}),
]


@pytest.mark.parametrize(("name", "options"), DROPOUT, ids=[name for name, _ in DROPOUT])
def test_attention_dropout(name, options, rand):
    """Fails if training does not drop weights with PyTorch's generator, keeps other weights than
    those divided by 1 - p, or if evaluation drops any.
    """
    p = 0.4
    mixer = regard.create(name, dim=8, heads=2, dropout=p, **options).double()
    x = rand(2, 9, 8).requires_grad_()
    whole = mixer.eval().attention_map(x)
    torch.testing.assert_close(mixer(x), mixer(x), rtol=0, atol=0)
    torch.manual_seed(3)
    dropped = mixer.train().weights(x, None, None)  # attention_map drops nothing
    torch.manual_seed(3)
    out = mixer(x)
    _, _, v = mixer.project(x, None)
    v = v.repeat_interleave(2 // v.shape[1], 1)
    by_hand = mixer.out((dropped @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, by_hand)  # the same draw, so it is linear in the values
    (a,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (b,) = torch.autograd.grad(by_hand.sum(), x)
    torch.testing.assert_close(a, b)
    is_kept, visible = dropped != 0, whole != 0
    torch.testing.assert_close(dropped[is_kept], whole[is_kept] / (1 - p))
    share = is_kept.sum() / visible.sum()
    assert not is_kept[~visible].any() and 0.4 < share < 0.8
    torch.manual_seed(4)
    assert not torch.equal(mixer(x), out)


def test_dropout_that_cannot_be():
    """Fails if a mechanism without dropout accepts it, or a probability is not one."""
    for name in regard.list_recipes():
        found = registry.get_recipe(name)
        if not found.is_attention or not found.example().can.dropout:
            options = {**found.example_kwargs, "dropout": 0.1}
            with pytest.raises(Unsupported, match="dropout"):
                regard.create(name, dim=8, heads=found.default_heads(2), **options)
    for wrong in (1.0, -0.1, float("nan"), "0.1", True):
        with pytest.raises((ValueError, TypeError), match="dropout must be"):
            regard.create("vanilla", dim=8, heads=2, dropout=wrong)
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(Unsupported, match="backend 'sparse' does not drop weights"):
        regard.attend(q, q, q, dropout=0.1, backend="sparse")
