"""Schemes by name, and into every recipe: it works, with all promises, or says why not."""

import pytest
import torch
from torch import nn

import regard
from regard import MultiHead, SoftmaxAttention, Unsupported
from regard.mixers import with_position
from regard.position import (
    POSITIONAL_ENCODINGS,
    ComplexEmbedding,
    LearnedEmbedding,
    NoPosition,
    Rope,
    SinusoidalEmbedding,
    T5Bias,
    TransformerXLBias,
    TUPEBias,
    create_positional_encoding,
)
from regard.prior import ALiBi
from regard.registry import get_recipe
from regard.testing import CHECKS, SUPPORTED, check_mixer

INSIDE = ("rope", "t5", "xl")
TAKES = {  # recipes that must take each: a scheme that is suddenly refused somewhere shows here
    "rope": {
        "adaptive_span",
        "axial",
        "bigbird",
        "block_local",
        "clustered",
        "clustered_improved",
        "cosformer",
        "dilated",
        "disagreement",
        "efficient",
        "fixed_span",
        "gaussian_prior",
        "global_tokens",
        "grouped_query",
        "image_local_1d",
        "image_local_2d",
        "linear",
        "local",
        "low_rank",
        "multi_query",
        "neighbourhood",
        "nystrom",
        "parameter_free",
        "per_head",
        "performer",
        "prob_sparse",
        "random_blocks",
        "rfa",
        "sinks",
        "sparse_fixed",
        "sparse_strided",
        "swin",
        "talking_heads",
        "top_k",
        "vanilla",
    },
    "t5": {
        "axial",
        "bigbird",
        "block_local",
        "collaborative",
        "dilated",
        "fixed_span",
        "global_tokens",
        "grouped_query",
        "image_local_1d",
        "image_local_2d",
        "local",
        "low_rank",
        "multi_query",
        "neighbourhood",
        "parameter_free",
        "per_head",
        "random_blocks",
        "sinks",
        "sparse_fixed",
        "sparse_strided",
        "vanilla",
    },
    "xl": {
        "axial",
        "bigbird",
        "block_local",
        "dilated",
        "fixed_span",
        "global_tokens",
        "grouped_query",
        "image_local_1d",
        "image_local_2d",
        "local",
        "low_rank",
        "multi_query",
        "neighbourhood",
        "per_head",
        "random_blocks",
        "sinks",
        "sparse_fixed",
        "sparse_strided",
        "vanilla",
    },
}
QUICK = ("stream", "maps", "cross")  # of both forms; padding, which takes longest, of the first


def build(name, scheme, causal):
    torch.manual_seed(0)
    return with_position(get_recipe(name).example(8, causal=causal), scheme).double().eval()


def built_or_refused(name, scheme, causal):
    try:
        return build(name, scheme, causal), ""
    except Unsupported as refusal:
        return None, str(refusal)


@pytest.mark.parametrize("scheme", INSIDE)
@pytest.mark.parametrize("name", regard.list_recipes())
def test_each_recipe_takes_it_or_says_why(name, scheme):
    """Fails if a stream, a mask or a map is wrong with positions inside, or a refusal comes as
    another error.
    """
    for form, causal in enumerate(get_recipe(name).causal_options()):
        mixer, reason = built_or_refused(name, scheme, causal)
        if mixer is None:
            assert name not in TAKES[scheme] and len(reason.split()) > 5
            continue
        for check in QUICK if form else (*QUICK, "padding"):
            assert CHECKS[check](mixer, 20) == SUPPORTED or check in ("stream", "cross")
        assert CHECKS["stream"](mixer, 20) == SUPPORTED or not (causal and mixer.can.stream)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", INSIDE)
@pytest.mark.parametrize("name", regard.list_recipes())
def test_every_promise_holds_with_positions(name, scheme):
    """Fails if any promise that the mixer makes is broken by the positions inside."""
    if name in TAKES[scheme]:
        check_mixer(lambda causal: build(name, scheme, causal))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("reformer", "sinusoid"),
        ("fnet", "learned"),
        ("longformer", "sinusoid"),
        ("retnet", "learned"),
    ],
)
def test_every_mixer_takes_what_goes_in_with_the_tokens(name, scheme):
    """Fails if a mixer with positions before it breaks a promise."""
    options = {"learned": {"length": 30}}.get(scheme, {})
    check_mixer(
        lambda causal: with_position(get_recipe(name).example(8, causal=causal), scheme, **options),
        length=20,
    )


@pytest.mark.parametrize("name", regard.list_recipes())
def test_positions_before_a_mixer_take_no_promise_away(name):
    """Fails if something that a mixer can do is refused, or done, because of an embedding before
    it, other than rotary embeddings and queries whose positions have no influence.
    """
    mixer = get_recipe(name).example(8)
    without = {"rotary": "inside", "independent_queries": "embedded"}
    assert with_position(mixer, "sinusoid").can == mixer.can.without(**without)
    assert with_position(
        mixer, "learned", length=5
    ).can.unsupported.keys() == mixer.can.unsupported.keys() | {"length", *without}
    assert with_position(mixer, "learned", length=5).length == 5


@pytest.mark.parametrize("name", ["vanilla", "sab", "fnet"])
def test_order_matters_with_positions_and_not_without(name, rand):
    """Fails if the positions have no effect, or "none" has one."""
    x, order = rand(1, 9, 8), torch.tensor([3, 0, 1, 2, 8, 7, 4, 5, 6])
    sets = name != "fnet"  # whose transform knows the order by itself
    for scheme, blind in (("none", sets), ("sinusoid", False)):
        mixer = with_position(get_recipe(name).example(8).double(), scheme)
        assert torch.allclose(mixer(x[:, order]), mixer(x)[:, order]) == blind


@pytest.mark.parametrize("scheme", ["rope", "alibi", "t5", "xl", "shaw", "distance", "tupe"])
def test_positions_inside_break_the_symmetry_of_a_set(scheme, rand):
    """Fails if a scheme is put in and has no effect."""
    mixer = with_position(
        get_recipe("vanilla").example(8).double(),
        scheme,
        **({"length": 9} if scheme == "tupe" else {}),
    )
    x, order = rand(1, 9, 8), torch.tensor([3, 0, 1, 2, 8, 7, 4, 5, 6])
    assert not torch.allclose(mixer(x[:, order]), mixer(x)[:, order])


def test_the_mixer_that_was_given_stays_as_it_was(rand):
    """Fails if positions are put into the given mixer, or its weights are not those of the copy."""
    mixer, x = get_recipe("grouped_query").example(8).double(), rand(1, 9, 8)
    before = mixer(x)
    new = with_position(mixer, "rope")
    torch.testing.assert_close(mixer(x), before)
    assert not torch.allclose(new(x), before)
    assert new.name == mixer.name and new.kv_heads == mixer.kv_heads
    torch.testing.assert_close(with_position(mixer, "none")(x), before)
    with torch.no_grad():
        new.q.weight.zero_()
    torch.testing.assert_close(mixer(x), before)


def test_two_schemes_that_bear_each_other(rand):
    """Fails if turning loses the prior, or the prior the turn."""
    x = rand(1, 9, 8)
    plain = get_recipe("vanilla").example(8).double()
    both = with_position(with_position(plain, "rope"), "alibi")
    want = MultiHead(8, 2, SoftmaxAttention(prior=ALiBi(2)), rotary=Rope()).double()
    want.load_state_dict(both.state_dict())
    torch.testing.assert_close(both(x), want(x))
    torch.testing.assert_close(with_position(with_position(plain, "alibi"), "rope")(x), want(x))


@pytest.mark.parametrize(
    ("name", "scheme", "says"),
    [
        ("fnet", "rope", "fnet cannot use Rope: it is not a MultiHead"),
        ("linear", "t5", "only SoftmaxAttention takes a prior, not LinearAttention"),
        ("gaussian_prior", "alibi", "already has a prior: Gaussian"),
        ("reformer", "rope", "hashed by position instead of content"),
        ("routing", "rope", "routed by position instead of content"),
        ("linformer", "rope", "mixtures of several positions"),
        ("bahdanau", "rope", "not dot products"),
        ("collaborative", "rope", "5 of 5 channels"),
        ("vanilla", "complex", "replaces the token embedding"),
        ("hard_gaussian", "rope", "no queries and keys"),
        ("parameter_free", "xl", "scales its scores by 1"),
        ("parameter_free", "tupe", "scales its scores by 1"),
        ("vanilla", "rope_2d", None),
    ],
)
def test_refusals_give_the_reason(name, scheme, says):
    """Fails if a mixer takes what it cannot, or the reason is another."""
    mixer = get_recipe(name).example(8)
    mixer.name = name
    options = {"tupe": {"length": 9}, "complex": {"words": 3}, "rope_2d": {"columns": 3}}.get(
        scheme, {}
    )
    if says is None:
        with_position(mixer, scheme, **options)
        return
    with pytest.raises(Unsupported, match=says):
        with_position(mixer, scheme, **options)


def test_no_scheme_twice_and_no_prior_that_reads_what_was_turned():
    """Fails if queries are turned twice, or read after they were turned."""
    turned = with_position(get_recipe("vanilla").example(8), "rope")
    with pytest.raises(Unsupported, match="already has a rotary embedding"):
        with_position(turned, "rope")
    with pytest.raises(Unsupported, match="reads the queries and keys"):
        with_position(turned, "xl")
    with pytest.raises(Unsupported, match="reads the queries and keys"):
        with_position(with_position(get_recipe("vanilla").example(8), "shaw"), "rope")


def test_predicted_places_are_not_predicted_from_turned_queries():
    mixer = regard.create("gaussian_prior", dim=8, heads=2, sigma=None)
    with pytest.raises(Unsupported, match="predicts positions from the queries"):
        with_position(mixer, "rope")


# ---------------------------------------------------------------------------------------- by name
def test_schemes_are_made_by_name():
    """Fails if a scheme does not get the sizes that it needs."""
    more = {
        "learned": {"length": 9},
        "fourier": {"length": 9},
        "complex": {"words": 9},
        "tupe": {"length": 9},
    }
    more |= {"sinusoid_2d": {"columns": 3}, "rope_2d": {"columns": 3}}
    more |= {name: {"rows": 3, "columns": 3} for name in ("learned_2d", "fourier_2d")}
    for name, kind in POSITIONAL_ENCODINGS.items():
        assert (
            type(
                create_positional_encoding(name, dim=8, heads=2, causal=True, **more.get(name, {}))
            )
            is kind
        )
    assert (
        create_positional_encoding("t5", dim=8, heads=2, causal=True).causal
        and not create_positional_encoding("t5", heads=2).causal
    )
    assert create_positional_encoding("xl", dim=8, heads=2).u.shape == (
        2,
        4,
    ) and create_positional_encoding("xl", dim=8, heads=2, width=3).u.shape == (2, 3)
    assert isinstance(create_positional_encoding("none", dim=8), NoPosition) and isinstance(
        create_positional_encoding("rope"), Rope
    )


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: create_positional_encoding("sinsuoid", dim=8),
            ValueError,
            "did you mean 'sinusoid'",
        ),
        (lambda: create_positional_encoding("learned", dim=8), TypeError, "learned needs length"),
        (lambda: create_positional_encoding("xl", heads=2), TypeError, "xl needs width, dim"),
        (
            lambda: create_positional_encoding("rope", bases=2.0),
            TypeError,
            "rope takes no argument 'bases': did you mean 'base'",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), "ropes"),
            ValueError,
            "did you mean 'rope'",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), "rope", bass=3),
            TypeError,
            "did you mean 'base'",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), Rope(), base=3),
            TypeError,
            "not for a module: base",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), SinusoidalEmbedding(6)),
            ValueError,
            "width 6 but the mixer has dim=8",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), ALiBi(3)),
            ValueError,
            "for 3 heads, not 2",
        ),
        (
            lambda: with_position(get_recipe("vanilla").example(8), nn.Linear(2, 2)),
            Unsupported,
            "Linear replaces the token embedding",
        ),
    ],
)
def test_wrong_names_and_arguments(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_schemes_that_were_made_are_put_in_as_they_are(rand):
    """Fails if the given scheme is replaced by one with the usual numbers."""
    mixer = get_recipe("vanilla").example(8)
    assert with_position(mixer, Rope(base=7.0)).rotary.base == 7.0
    prior = T5Bias(2, buckets=6, max_distance=5)
    assert with_position(mixer, prior).inner.prior is prior
    assert with_position(mixer, TransformerXLBias(2, 4, 6)).inner.prior.dim == 6
    assert with_position(mixer, TUPEBias(2, 8, 12)).length == 12
    assert with_position(mixer, LearnedEmbedding(8, 12)).length == 12
    with pytest.raises(Unsupported, match="ComplexEmbedding replaces the token embedding"):
        with_position(mixer, ComplexEmbedding(8, 5))
